"""Golden numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import CORRECTIONS
from posttrain.algorithms.corrections import (
    icepop,
    masked_is,
    reject,
    staleness_weights,
    token_ratio,
    truncated_is,
    truncated_is_sequence,
)

from .layout import close

NAN = float("nan")
MASK = torch.tensor([True, True, False, True, True])
EPISODE = torch.tensor([0, 0, 0, 1, 1])


def case(*ratios: float) -> tuple[torch.Tensor, ...]:
    """pi / mu of four policy tokens in two episodes, NaN in the hole between."""
    log_ratio = torch.tensor([*ratios[:2], NAN, *ratios[2:]]).log()
    sampler = torch.tensor([-1.0, -2.0, NAN, -0.5, -3.0])
    return sampler + log_ratio, sampler, MASK, EPISODE


def test_truncated_is_cuts_tokens_above():
    close(truncated_is(*case(0.5, 3.0, 2.0, 1.0)), [0.5, 2.0, 0, 2.0, 1.0])
    close(truncated_is(*case(0.5, 3.0, 2.0, 1.0), is_high=4.0), [0.5, 3.0, 0, 2.0, 1.0])


def test_truncated_is_sequence_multiplies_over_the_episode():
    close(truncated_is_sequence(*case(0.5, 3.0, 2.0, 4.0)), [1.5, 1.5, 0, 2, 2])
    close(truncated_is_sequence(*case(0.5, 3.0, 2.0, 4.0), is_high=9.0), [1.5, 1.5, 0, 8, 8])


def test_icepop_leaves_out_what_is_too_far_on_either_side():
    close(icepop(*case(0.4, 0.6, 6.0, 4.0)), [0, 0.6, 0, 0, 4.0])
    close(icepop(*case(0.4, 0.6, 6.0, 4.0), is_low=0.1, is_high=9.0), [0.4, 0.6, 0, 6.0, 4.0])


def test_masked_is_keeps_or_drops_sequences_by_their_geometric_mean():
    close(masked_is(*case(2.0, 0.5, 2.0, 1.0)), [2.0, 0.5, 0, 0, 0])  # means 1 and sqrt 2
    close(masked_is(*case(0.9, 0.9, 1.005, 1.005)), [0, 0, 0, 1.005, 1.005])
    close(masked_is(*case(2.0, 0.5, 2.0, 1.0), is_high=1.5), [2.0, 0.5, 0, 2.0, 1.0])
    kept = masked_is(*case(math.e, math.exp(-1.0), 4.0, 0.1), is_low=0.5, is_high=1.5)
    close(kept, [math.e, math.exp(-1.0), 0, 4.0, 0.1])  # 1 and .63, though arithmetic means are 1.5 and 2


@pytest.mark.parametrize(
    ("statistic", "kept"),
    [
        ("token_k1", [1, 0, 0, 0, 1]),  # -log rho: -.69 .69 | .22 -.4; between -1 and .1
        ("token_k2", [0, 0, 0, 1, 1]),  # .24 .24 | .02 .08
        ("token_k3", [0, 0, 0, 1, 1]),  # rho - 1 - log rho: .31 .19 | .02 .09
        ("sequence_sum_k1", [1, 1, 0, 1, 1]),  # 0 | -.18
        ("sequence_sum_k3", [0, 0, 0, 0, 0]),  # .5 | .12
        ("sequence_mean_k3", [0, 0, 0, 1, 1]),  # .25 | .06
        ("sequence_mean_k2", [0, 0, 0, 1, 1]),  # .24 | .05
        ("sequence_max_k1", [0, 0, 0, 0, 0]),  # .69 | .22
        ("sequence_max_k3", [0, 0, 0, 1, 1]),  # .31 | .09
    ],
)
def test_rejection_by_each_statistic(statistic, kept):
    got = reject(*case(2.0, 0.5, 0.8, 1.5), statistic=statistic, reject_low=-1.0, reject_high=0.1)
    assert got.tolist() == kept


def test_rejection_default_is_a_mean_k3_of_a_hundredth():
    assert reject(*case(1.1, 1.1, 1.2, 1.2)).tolist() == [1, 1, 0, 0, 0]  # .0047 | .0177


def test_rejection_below():
    got = reject(*case(2.0, 2.0, 0.5, 0.5), statistic="sequence_mean_k1", reject_low=-0.5, reject_high=1.0)
    assert got.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("statistic", ["sequence_k3", "token_k4", "k3", "seq_mean_k3"])
def test_an_unknown_statistic_names_the_known_ones(statistic):
    with pytest.raises(ValueError, match="sequence_mean_k3, sequence_max_k1"):
        reject(*case(1, 1, 1, 1), statistic=statistic)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_every_correction_is_one_where_both_agree(name):
    close(CORRECTIONS[name](*case(1, 1, 1, 1)), [1, 1, 0, 1, 1])


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_missing_logprob_is_an_error(name):
    trainer, sampler, mask, episode = case(1, 1, 1, 1)
    sampler[3] = NAN
    with pytest.raises(ValueError, match="missing for 1 of 4 policy tokens"):
        CORRECTIONS[name](trainer, sampler, mask, episode)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_far_apart_policies_and_empty_masks_stay_finite(name):
    trainer, sampler, mask, episode = case(1, 1, 1, 1)
    trainer = trainer + torch.tensor([500.0, -500.0, NAN, 300.0, 300.0])
    got = CORRECTIONS[name](trainer.requires_grad_(), sampler, mask, episode)
    assert torch.isfinite(got).all()
    assert not got.requires_grad
    assert not CORRECTIONS[name](trainer, sampler, torch.zeros_like(mask), episode).any()
    nothing = torch.zeros(0)
    assert len(CORRECTIONS[name](nothing, nothing, nothing.bool(), nothing.long())) == 0


@pytest.mark.parametrize("fn", [icepop, masked_is])
def test_a_window_without_inside_is_refused(fn):
    with pytest.raises(ValueError, match="below the upper one"):
        fn(*case(1, 1, 1, 1), is_low=2.0, is_high=1.0)
    with pytest.raises(ValueError, match="below the upper one"):
        reject(*case(1, 1, 1, 1), reject_low=0.5, reject_high=0.5)


def test_token_ratio_is_bounded_on_both_sides():
    got = token_ratio(torch.tensor([90.0, -90.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert got.tolist() == [20.0, -20.0]


def test_staleness_weights_fall_with_every_step():
    versions = torch.tensor([5, 4, -1, 2, 7])
    close(staleness_weights(versions, 5, MASK, decay=0.5), [1, 0.5, 0, 0.125, 1])
    close(staleness_weights(versions, 5, MASK), [1, 1, 0, 1, 1])
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="decay"):
            staleness_weights(versions, 5, MASK, decay=wrong)
