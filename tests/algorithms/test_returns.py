"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms.returns import gae, gae_returns, reinforce

from .layout import close, one_token_each, packed


def test_gae_by_hand():
    # deltas with gamma .5: 0 + .5*2 - 1 = 0;  0 + .5*3 - 2 = -.5;  4 - 3 = 1;  gamma * lam = .25
    batch = packed([[0, 0, 4]])
    got = gae(*batch.args, values=torch.tensor([1.0, 2.0, 3.0]), gamma=0.5, lam=0.5)
    close(got, [0 + 0.25 * (-0.5 + 0.25), -0.5 + 0.25, 1.0], 1e-6)


def test_gae_takes_no_time_step_over_tool_tokens():
    tool = packed([[0, 9, 9, 0, 4]], masks=[[1, 0, 0, 1, 1]])
    tool.rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 4.0])
    values = torch.tensor([1.0, 77.0, float("nan"), 2.0, 3.0])  # what the critic says at tool tokens is not read
    got = gae(*tool.args, values=values, gamma=0.5, lam=0.5)
    close(got, [-0.0625, 0, 0, -0.25, 1.0], 1e-6)


def test_gae_does_not_leak_between_episodes():
    batch = packed([[0, 1], [0, 5]])
    got = gae(*batch.args, values=torch.zeros(4), gamma=0.5, lam=1.0)
    close(got, [0.5, 1, 2.5, 5], 1e-6)


def test_gae_joins_the_segments_of_an_episode():
    batch = packed([[0], [0, 8], [4]])
    batch.episode_index = torch.tensor([3, 1, 1, 3])
    got = gae(*batch.args, values=torch.zeros(4), gamma=0.5)
    close(got, [2, 4, 8, 4], 1e-6)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_p92_reward_on_a_masked_last_token_goes_to_the_last_policy_token(gamma):
    batch = packed([[0, 0, 1]], masks=[[1, 1, 0]])
    got = gae(*batch.args, values=torch.zeros(3), gamma=gamma)
    close(got, [gamma, 1, 0], 1e-6)


def test_a_reward_on_an_observation_goes_to_the_action_before_it():
    batch = packed([[0, 2, 0, 1]], masks=[[1, 0, 1, 0]])
    close(reinforce(*batch.args, gamma=0.0), [2, 0, 1, 0], 1e-6)


def test_a_reward_before_the_first_action_goes_to_that_action():
    batch = packed([[0, 0], [3, 0, 0]], masks=[[1, 1], [0, 1, 1]])
    close(reinforce(*batch.args, gamma=0.0), [0, 0, 0, 3, 0], 1e-6)


def test_gae_needs_values():
    with pytest.raises(ValueError, match="critic"):
        gae(*one_token_each([1.0]).args)


def test_gae_whitened_has_mean_zero_and_sample_variance_one_over_policy_tokens():
    batch = packed([[0, 1, 0], [0, 3]], masks=[[1, 1, 0], [0, 1]])
    got = gae(*batch.args, values=torch.zeros(5), gamma=0.0, whiten=True)
    # advantages 0, 1, 3: mean 4/3, sample variance (16 + 1 + 25) / 9 / 2 = 7/3
    root = (7 / 3) ** 0.5
    close(got, [-4 / 3 / root, -1 / 3 / root, 0, 0, 5 / 3 / root], 1e-6)


def test_gae_whitening_equal_advantages_gives_exactly_zero():
    assert torch.equal(gae(*one_token_each([0.1] * 3).args, values=torch.zeros(3), whiten=True), torch.zeros(3))
    assert torch.equal(gae(*one_token_each([0.1]).args, values=torch.zeros(1), whiten=True), torch.zeros(1))


def test_gae_returns_are_advantages_plus_values():
    batch = packed([[0, 9, 4]], masks=[[1, 0, 1]])
    batch.rewards = torch.tensor([0.0, 0.0, 4.0])
    got = gae_returns(*batch.args, values=torch.tensor([1.0, float("nan"), 3.0]), gamma=0.5, lam=0.5)
    # delta: 0 + .5*3 - 1 = .5; 4 - 3 = 1; advantages .5 + .25 = .75 and 1
    close(got, [1.75, 0, 4], 1e-6)


def test_gae_returns_with_lambda_one_are_the_discounted_rewards():
    batch = packed([[0, 0, 8]])
    got = gae_returns(*batch.args, values=torch.tensor([5.0, -2.0, 1.0]), gamma=0.5, lam=1.0)
    close(got, [2, 4, 8], 1e-5)


def test_p91_returns_flow_over_tool_tokens():
    batch = packed([[0, 0, 1]], masks=[[1, 0, 1]])
    close(reinforce(*batch.args, gamma=0.5), [0.5, 0, 1], 1e-6)


def test_no_estimator_passes_a_gradient_to_the_critic():
    values = torch.ones(2, requires_grad=True)
    assert not gae(*packed([[0, 1]]).args, values=values).requires_grad
    assert not gae_returns(*packed([[0, 1]]).args, values=values).requires_grad
