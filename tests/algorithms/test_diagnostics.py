from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms.diagnostics import approx_kl, clip_fraction, effective_sample_size, mismatch

NAN = float("nan")
EVERY = torch.ones(4, dtype=torch.bool)


def test_clip_fraction_counts_tokens_whose_gradient_is_cut():
    old = torch.zeros(4)
    logprobs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    both_wrong_way = clip_fraction(logprobs, old, torch.tensor([1.0, -1.0, -1.0, 1.0]), EVERY)
    assert both_wrong_way == 0.5  # +, above and -, below are cut; -, above and +, below still learn
    assert clip_fraction(logprobs, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), EVERY) == 1.0
    assert clip_fraction(logprobs, old, torch.zeros(4), EVERY) == 0.0


def test_clip_fraction_uses_each_side_and_the_mask():
    logprobs, advantages = torch.tensor([1.25, 0.75, NAN, NAN]).log(), torch.tensor([1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([True, True, False, False])
    assert clip_fraction(logprobs, torch.zeros(4), advantages, mask, clip_low=0.2, clip_high=0.3) == 0.5
    assert clip_fraction(logprobs, torch.zeros(4), advantages, mask, clip_low=0.3, clip_high=0.2) == 0.5
    assert clip_fraction(logprobs, torch.zeros(4), advantages, mask, clip_low=0.3, clip_high=0.3) == 0.0


def test_approx_kl_is_k3_of_old_against_new():
    mask = torch.tensor([True, True, False, True])
    logprobs, old = torch.tensor([-1.0, -2.0, NAN, -1.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0])
    expected = (math.exp(-1.0) - 1 + 1.0) / 3
    assert approx_kl(logprobs, old, mask) == pytest.approx(expected)


def test_effective_sample_size_by_hand():
    weights = torch.tensor([3.0, 1.0, 1.0, 1.0])
    assert effective_sample_size(weights.log(), torch.zeros(4), EVERY) == pytest.approx(36 / (4 * 12))
    assert effective_sample_size(torch.zeros(4), torch.zeros(4), EVERY) == pytest.approx(1.0)
    one_owner = effective_sample_size(torch.tensor([800.0, 0.0, 0.0, 0.0]), torch.zeros(4), EVERY)
    assert one_owner == pytest.approx(0.25)  # and no overflow


def test_mismatch_by_hand():
    trainer, sampler = torch.tensor([-1.0, -2.0, NAN, -1.0]), torch.tensor([-1.0, -1.5, NAN, -1.0])
    got = mismatch(trainer, sampler, torch.tensor([True, True, False, True]))
    weight = math.exp(-0.5)
    assert got == {
        "mean_gap": pytest.approx(0.5 / 3),
        "max_gap": pytest.approx(0.5),
        "k1": pytest.approx(0.5 / 3),
        "k3": pytest.approx((weight - 1 + 0.5) / 3),
        "share_far": 0.0,
        "ess": pytest.approx((2 + weight) ** 2 / (3 * (2 + weight**2))),
    }


def test_mismatch_counts_tokens_beyond_a_factor():
    trainer = torch.tensor([-1.0, -1.0, -3.0, -1.5])
    assert mismatch(trainer, torch.full((4,), -1.9), EVERY)["share_far"] == 0.75
    assert mismatch(trainer, torch.full((4,), -1.9), EVERY, far=2.8)["share_far"] == 0.25


def test_mismatch_refuses_a_missing_logprob():
    with pytest.raises(ValueError, match="missing for 1 of 4"):
        mismatch(torch.zeros(4), torch.tensor([0.0, NAN, 0.0, 0.0]), EVERY)


def test_nothing_is_known_of_a_batch_without_policy_tokens():
    zeros, nothing = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
    assert clip_fraction(zeros, zeros, zeros, nothing) is None
    assert approx_kl(zeros, zeros, nothing) is None
    assert effective_sample_size(zeros, zeros, nothing) is None
    assert mismatch(zeros, zeros, nothing) == {}


def test_diagnostics_leave_no_graph_behind():
    logprobs = torch.zeros(4, requires_grad=True)
    assert isinstance(approx_kl(logprobs, torch.zeros(4), EVERY), float)
    assert isinstance(mismatch(logprobs, torch.zeros(4), EVERY)["k3"], float)
