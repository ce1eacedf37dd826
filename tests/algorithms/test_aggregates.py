"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms import AGGREGATES
from posttrain.algorithms.aggregates import fixed_length, group_mean, sequence_mean, sequence_sum_mean, token_mean

from .layout import close

OPTIONS = {"fixed_length": {"length": 4}}


def options_for(name: str, episode: torch.Tensor) -> dict:
    """`group_mean` is told the groups: here every episode is one."""
    return {"group_index": episode} if name == "group_mean" else OPTIONS.get(name, {})


def lengths(*counts: int) -> torch.Tensor:
    """Episode index of sequences with these many tokens."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def test_p94_token_mean_and_sequence_mean_differ_as_named():
    episode = lengths(2, 8)
    mask, advantage = torch.ones(10, dtype=torch.bool), torch.tensor([1.0] * 2 + [-1.0] * 8)
    assert (advantage * token_mean(mask, episode)).sum().item() == pytest.approx(-0.6)
    assert (advantage * sequence_mean(mask, episode)).sum().item() == pytest.approx(0.0)
    assert (advantage * sequence_sum_mean(mask, episode)).sum().item() == pytest.approx(-3.0)
    assert (advantage * fixed_length(mask, episode, length=10)).sum().item() == pytest.approx(-0.3)


def test_weights_by_hand_with_holes():
    mask = torch.tensor([False, True, True, False, True, False, False])
    episode = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    third = 1 / 3
    close(token_mean(mask, episode), [0, third, third, 0, third, 0, 0])
    close(sequence_mean(mask, episode), [0, 0.25, 0.25, 0, 0.5, 0, 0])
    close(sequence_sum_mean(mask, episode), [0, 0.5, 0.5, 0, 0.5, 0, 0])
    close(fixed_length(mask, episode, length=4), [0, 0.125, 0.125, 0, 0.125, 0, 0])


def test_p96_masking_a_truncated_sample_shrinks_the_denominator():
    episode = lengths(10, 15, 5)
    mask = episode != 2
    assert token_mean(mask, episode).max().item() == pytest.approx(1 / 25)
    assert sequence_sum_mean(mask, episode).max().item() == pytest.approx(1 / 2)


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_p16_a_fully_masked_sample_leaves_the_other_as_if_alone(name):
    both = torch.tensor([True, True, False, False, False])
    episode = lengths(2, 3)
    got = AGGREGATES[name](both, episode, **options_for(name, episode))
    alone = AGGREGATES[name](both[:2], episode[:2], **options_for(name, episode[:2]))
    torch.testing.assert_close(got, torch.cat([alone, torch.zeros(3)]))


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_no_policy_token_gives_zero_weights(name):
    got = AGGREGATES[name](torch.zeros(3, dtype=torch.bool), lengths(1, 2), **options_for(name, lengths(1, 2)))
    assert got.tolist() == [0, 0, 0]
    empty = torch.zeros(0)
    assert len(AGGREGATES[name](empty.bool(), empty.long(), **options_for(name, empty.long()))) == 0


def test_segments_of_one_episode_are_one_sequence():
    mask = torch.ones(4, dtype=torch.bool)
    close(sequence_mean(mask, torch.tensor([5, 2, 2, 5])), [0.25] * 4)
    close(sequence_sum_mean(mask, torch.tensor([5, 2, 2, 5])), [0.5] * 4)


@pytest.mark.parametrize("name", sorted(AGGREGATES))
def test_weights_are_float32(name):
    got = AGGREGATES[name](torch.ones(3, dtype=torch.bool), lengths(1, 2), **options_for(name, lengths(1, 2)))
    assert got.dtype == torch.float32


def test_a_fixed_length_below_one_token_is_refused():
    with pytest.raises(ValueError, match="at least 1 token"):
        fixed_length(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long), length=0)


def test_group_mean_weighs_every_prompt_alike():
    mask = torch.tensor([True, True, False, True, True, False])
    episode, group = torch.tensor([0, 0, 1, 1, 2, 3]), torch.tensor([4, 4, 4, 4, 2, 9])
    close(group_mean(mask, episode, group_index=group), [1 / 6, 1 / 6, 0, 1 / 6, 1 / 2, 0])
