"""Golden numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms.credit import EpisodeReturns, episode_returns
from posttrain.algorithms.filtering import accepted
from posttrain.algorithms.shaping import (
    Change,
    Running,
    changed,
    clipped,
    normalised_by_batch,
    normalised_by_group,
    normalised_by_running,
    overlong,
    stop_properly,
)

from .layout import Packed, close, one_token_each, packed


def episodes_of(batch: Packed) -> EpisodeReturns:
    return episode_returns(batch.rewards, batch.episode_index, batch.group_index)


def apply(batch: Packed, change: Change) -> torch.Tensor:
    return changed(batch.rewards, batch.mask, batch.episode_index, change)


def test_a_change_scales_every_reward_and_shifts_at_the_last_policy_token():
    batch = packed([[1, 2, 0, 3], [4, 5]], masks=[[0, 1, 1, 0], [1, 1]])
    change = Change(torch.tensor([2.0, 0.5]).double(), torch.tensor([10.0, -1.0]).double())
    close(apply(batch, change), [2, 4, 10, 6, 2, 1.5])


def test_a_change_of_an_episode_without_policy_tokens_and_of_nothing():
    batch = packed([[1, 2], [4]], masks=[[0, 0], [1]])
    close(apply(batch, Change(torch.ones(2).double(), torch.tensor([10.0, 1.0]).double())), [1, 12, 5])
    nothing = one_token_each([])
    assert len(apply(nothing, Change(torch.zeros(0).double(), torch.zeros(0).double()))) == 0


def test_stop_properly_multiplies_or_replaces_the_reward_of_the_cut_episodes():
    batch = packed([[1, 2], [3, 0], [4]])
    cut = torch.tensor([False, False, True, True, False])
    close(apply(batch, stop_properly(episodes_of(batch), cut, factor=0.5)), [1, 2, 1.5, 0, 4])
    close(apply(batch, stop_properly(episodes_of(batch), cut, factor=0.0)), [1, 2, 0, 0, 4])
    close(apply(batch, stop_properly(episodes_of(batch), cut, value=-1.0)), [1, 2, 0, -1, 4])
    for wrong in ({}, {"factor": 1.0, "value": 1.0}):
        with pytest.raises(ValueError, match="either a factor or a value"):
            stop_properly(episodes_of(batch), cut, **wrong)


def test_overlong_grows_along_the_buffer_in_policy_tokens():
    lengths = [4, 6, 7, 8, 10, 12]
    batch = packed([[1.0] + [0.0] * n for n in lengths], masks=[[0] + [1] * n for n in lengths])
    change = overlong(episodes_of(batch), batch.mask, max_length=10, buffer=4)
    close(change.shift, [0, 0, -0.25, -0.5, -1, -1])
    assert change.scale.tolist() == [1] * 6
    close(overlong(episodes_of(batch), batch.mask, max_length=10, buffer=4, factor=2.0).shift, [0, 0, -0.5, -1, -2, -2])
    for wrong in (0, 11):
        with pytest.raises(ValueError, match="0 < buffer <= max_length"):
            overlong(episodes_of(batch), batch.mask, max_length=10, buffer=wrong)


def test_clipping_bounds_the_whole_episode():
    batch = packed([[3, 4], [-9, 1], [1, 1]])
    got = apply(batch, clipped(episodes_of(batch), low=-5.0, high=6.0))
    close(got, [3, 3, -9, 4, 1, 1])
    with pytest.raises(ValueError, match="low < high"):
        clipped(episodes_of(batch), low=1.0, high=1.0)


def test_normalisation_by_batch_and_by_group():
    batch = one_token_each([1, 3, 5, 5], groups=[0, 0, 1, 1])
    root = (11 / 3) ** 0.5  # mean 3.5, deviations -2.5 -.5 1.5 1.5, sample variance 11 / 3
    close(apply(batch, normalised_by_batch(episodes_of(batch))), [-2.5 / root, -0.5 / root, 1.5 / root, 1.5 / root])
    half = 0.5**0.5
    close(apply(batch, normalised_by_group(episodes_of(batch))), [-half, half, 0, 0])
    only_scaled = apply(batch, normalised_by_group(episodes_of(batch), centre=False))
    close(only_scaled, [half, 3 * half, 5, 5])
    close(apply(batch, normalised_by_batch(episodes_of(batch), eps=1e9)), [0, 0, 0, 0], 1e-6)


def test_normalisation_keeps_turn_rewards_in_proportion():
    batch = packed([[1, 3], [0, 0]])
    half = 0.5**0.5  # returns 4 and 0: std sqrt 8, mean 2
    close(apply(batch, normalised_by_batch(episodes_of(batch))), [half / 2, half / 2, 0, -half])


def test_equal_rewards_and_singletons_become_zero():
    batch = one_token_each([0.1, 0.1, 0.1, 7], groups=[0, 0, 0, 1])
    close(apply(batch, normalised_by_group(episodes_of(batch))), [0, 0, 0, 0], 1e-7)
    assert len(normalised_by_batch(episodes_of(one_token_each([]))).scale) == 0


def test_running_normalisation_remembers():
    first, second = one_token_each([1, 3]), one_token_each([5, 7, 9])
    change, seen = normalised_by_running(episodes_of(first), Running())
    close(apply(first, change), [-(0.5**0.5), 0.5**0.5])
    change, seen = normalised_by_running(episodes_of(second), seen)
    root = 10**0.5  # 1 3 5 7 9: mean 5, sample variance 10
    close(apply(second, change), [0, 2 / root, 4 / root])
    assert (seen.count, seen.mean, seen.squares) == (5, pytest.approx(5), pytest.approx(40))
    _, again = normalised_by_running(episodes_of(one_token_each([])), seen)
    assert again == seen
    change, _ = normalised_by_running(episodes_of(second), Running(2.0, 2.0, 2.0), centre=False)
    close(apply(second, change), [5 / root, 7 / root, 9 / root])


def test_running_normalisation_of_equal_rewards_only_centres():
    batch = one_token_each([0.3, 0.3])
    change, seen = normalised_by_running(episodes_of(batch), Running())
    close(apply(batch, change), [0, 0], 1e-7)
    assert change.scale.tolist() == [1, 1]
    assert seen.std == pytest.approx(0.0, abs=1e-9)
    assert Running(1.0, 4.0, 0.0).std == 0.0


@pytest.mark.parametrize(
    ("scores", "kept"), [([1, 0], True), ([1, 1], False), ([0, 0], False), ([], False), ([0.5, 0.5], True)]
)
def test_groups_are_accepted_strictly_inside_the_range(scores, kept):
    assert accepted(scores) is kept


def test_the_range_can_be_moved():
    assert accepted([0.2, 0.2], low=0.1, high=0.3)
    assert not accepted([0.1, 0.1], low=0.1, high=0.3)
    assert not accepted([0.3, 0.3], low=0.1, high=0.3)
