"""Golden numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms.turns import mt_grpo, turn_gae, turn_gae_returns, turn_grpo

from .layout import close, packed

MASKS = [[1, 0, 1, 1], [1, 0, 1, 0]]


def test_turn_grpo_compares_turns_of_the_same_number():
    batch = packed([[1, 0, 0, 0], [0, 0, 0, 2]], masks=MASKS)  # the last reward lies on an observation
    # returns to go: 1 and 2 for first turns, 0 and 2 for second ones
    close(turn_grpo(*batch.args, std="none"), [-0.5, 0, -1, -1, 0.5, 0, 1, 0], 1e-6)
    half = 0.5**0.5
    close(turn_grpo(*batch.args, eps=0.0), [-half, 0, -half, -half, half, 0, half, 0], 1e-6)


def test_turn_grpo_discounts_by_turn():
    batch = packed([[1, 0, 0, 0], [0, 0, 0, 2]], masks=MASKS)
    close(turn_grpo(*batch.args, std="none", gamma=0.5), [0, 0, -1, -1, 0, 0, 1, 0], 1e-6)
    close(turn_grpo(*batch.args, std="none", gamma=0.0), [0.5, 0, -1, -1, -0.5, 0, 1, 0], 1e-6)


def test_a_turn_that_only_one_episode_reached_gets_zero():
    batch = packed([[0, 0, 3], [1]], masks=[[1, 0, 1], [1]])
    close(turn_grpo(*batch.args, std="none"), [1, 0, 0, -1], 1e-6)


def test_turn_grpo_keeps_groups_apart():
    batch = packed([[0, 0, 3], [0, 0, 1], [7], [5]], masks=[[1, 0, 1]] * 2 + [[1]] * 2, groups=[5, 5, 2, 2])
    close(turn_grpo(*batch.args, std="none"), [1, 0, 1, -1, 0, -1, 1, -1], 1e-6)


def test_turn_grpo_with_an_outcome_and_as_many_turns_is_grpo():
    batch = packed([[0, 0, 1], [0, 0, 0], [0, 0, 0]], masks=[[1, 0, 1]] * 3)
    close(turn_grpo(*batch.args, std="none"), [2 / 3, 0, 2 / 3, -1 / 3, 0, -1 / 3, -1 / 3, 0, -1 / 3], 1e-6)


def test_the_segments_of_an_episode_are_turns_of_one_episode():
    batch = packed([[0, 1], [0, 5], [0, 0], [0, 3]], masks=[[0, 1]] * 4)
    batch.episode_index = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    close(turn_grpo(*batch.args, std="none", gamma=0.0), [0, -2, 0, 2, 0, -1.5, 0, 1.5], 1e-6)


def test_mt_grpo_adds_outcome_and_own_reward_of_the_turn():
    batch = packed([[1, 0, 0, 0], [0, 0, 2, 0]], masks=MASKS)
    outcome = torch.tensor([0.0, 0, 0, 0, 0, 0, 2, 0])
    got = mt_grpo(*batch.args, outcome_rewards=outcome, turn_weight=2.0, std="none")
    # outcomes 0 and 2: -1 and 1; own rewards of first turns 1 and 0: .5 and -.5, of second ones none
    close(got, [0, 0, -1, -1, 0, 0, 1, 0], 1e-6)
    close(mt_grpo(*batch.args, outcome_rewards=outcome, std="none"), [-0.5, 0, -1, -1, 0.5, 0, 1, 0], 1e-6)
    half = 0.5**0.5
    close(mt_grpo(*batch.args, outcome_rewards=outcome), [0, 0, -half, -half, 0, 0, half, 0], 1e-6)
    later = packed([[0, 0, 3], [0, 0, 1]], masks=[[1, 0, 1]] * 2)  # the second turns' own: the first ones saw none
    close(mt_grpo(*later.args, outcome_rewards=torch.zeros(6), std="none"), [0, 0, 1, 0, 0, -1], 1e-6)
    with pytest.raises(ValueError, match="turn_reward_coef"):
        mt_grpo(*batch.args)


def test_turn_gae_by_hand():
    batch = packed([[0, 1, 0, 0, 8]], masks=[[1, 1, 0, 1, 1]])
    values = torch.tensor([1.0, 9.0, float("nan"), 3.0, 9.0])  # only the value before a turn is read
    # delta 1 + .5 * 3 - 1 = 1.5 and 8 - 3 = 5
    close(turn_gae(*batch.args, values=values, gamma=0.5, lam=0.5), [2.75, 2.75, 0, 5, 5], 1e-6)
    close(turn_gae_returns(*batch.args, values=values, gamma=0.5, lam=0.5), [3.75, 3.75, 0, 8, 8], 1e-6)


def test_turn_gae_of_ragged_episodes_does_not_leak():
    batch = packed([[0, 0, 4], [2]], masks=[[1, 0, 1], [1]])
    close(turn_gae(*batch.args, values=torch.ones(4), gamma=0.5), [1, 0, 3, 1], 1e-6)
    close(turn_gae_returns(*batch.args, values=torch.ones(4), gamma=0.5), [2, 0, 4, 2], 1e-6)


def test_turn_gae_needs_values():
    with pytest.raises(ValueError, match="turn_grpo"):
        turn_gae(*packed([[1]]).args)
