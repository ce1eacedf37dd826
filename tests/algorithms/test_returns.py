"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms.returns import (
    gae,
    gae_returns,
    optimal_token_baseline,
    reinforce,
    reinforce_pp,
    remax,
    whitened,
)

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


def test_whitened_gae_has_mean_zero_and_sample_variance_one_over_policy_tokens():
    batch = packed([[0, 1, 0], [0, 3]], masks=[[1, 1, 0], [0, 1]])
    got = whitened(gae(*batch.args, values=torch.zeros(5), gamma=0.0), batch.mask)
    # advantages 0, 1, 3: mean 4/3, sample variance (16 + 1 + 25) / 9 / 2 = 7/3
    root = (7 / 3) ** 0.5
    close(got, [-4 / 3 / root, -1 / 3 / root, 0, 0, 5 / 3 / root], 1e-6)


def test_whitening_equal_advantages_gives_exactly_zero():
    for count in (0, 1, 3):
        assert torch.equal(whitened(torch.full((count,), 0.1), torch.ones(count).bool()), torch.zeros(count))


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


def test_discount_by_turn_leaves_tokens_of_a_turn_alike():
    batch = packed([[0, 0, 0, 0, 8]], masks=[[1, 1, 0, 1, 1]])
    close(reinforce(*batch.args, gamma=0.5), [1, 2, 0, 4, 8], 1e-6)
    close(reinforce(*batch.args, gamma=0.5, discount="turn"), [4, 4, 0, 8, 8], 1e-6)
    with pytest.raises(ValueError, match='expected "token" or "turn"'):
        reinforce(*batch.args, discount="episode")


def test_gae_discounted_by_turn():
    batch = packed([[0, 0, 0, 0, 8]], masks=[[1, 1, 0, 1, 1]])
    values = torch.tensor([1.0, 2.0, float("nan"), 3.0, 4.0])
    got = gae(*batch.args, values=values, gamma=0.5, lam=0.5, discount="turn")
    # deltas 2 - 1 = 1; .5 * 3 - 2 = -.5; 4 - 3 = 1; 8 - 4 = 4
    close(got, [1.75, 0.75, 0, 5, 4], 1e-6)
    returns = gae_returns(*batch.args, values=values, gamma=0.5, lam=0.5, discount="turn")
    close(returns, [2.75, 2.75, 0, 8, 8], 1e-6)


def test_reinforce_pp_whitens_returns_over_the_tokens_of_the_batch():
    batch = packed([[0, 0, 1]])
    # .25 .5 1: mean 7/12, deviations -4/12 -1/12 5/12, sample variance 42 / 144 / 2
    root = (42 / 288) ** 0.5
    close(reinforce_pp(*batch.args, gamma=0.5), [-4 / 12 / root, -1 / 12 / root, 5 / 12 / root], 1e-6)
    assert torch.equal(reinforce_pp(*one_token_each([0.1] * 3).args), torch.zeros(3))


def test_reinforce_pp_discounts_by_turn():
    batch = packed([[0, 0, 0, 0, 8]], masks=[[1, 1, 0, 1, 1]])
    root = (4 * 4 / 3) ** 0.5  # 4 4 8 8
    close(reinforce_pp(*batch.args, gamma=0.5, discount="turn"), [-2 / root, -2 / root, 0, 2 / root, 2 / root], 1e-6)


def test_p91_the_reset_at_tool_tokens_is_an_option():
    batch = packed([[0, 0, 1]], masks=[[1, 0, 1]])
    half = 0.5**0.5
    assert torch.equal(reinforce_pp(*batch.args), torch.zeros(3))  # the outcome reaches both turns alike
    close(reinforce_pp(*batch.args, stop_at_observations=True), [-half, 0, half], 1e-6)


def test_remax_is_the_distance_to_the_greedy_answer():
    batch = packed([[0, 1], [0, 0.5], [0, 0]], masks=[[1, 1], [0, 1], [1, 1]], groups=[0, 0, 1])
    greedy = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0])
    close(remax(*batch.args, greedy_returns=greedy), [0.5, 0.5, 0, 0, -1, -1], 1e-6)


def test_remax_counts_rewards_from_the_token_on():
    batch = packed([[1, 0, 2]])
    close(remax(*batch.args, greedy_returns=torch.full((3,), 1.0)), [2, 1, 1], 1e-6)


def test_remax_without_a_judged_greedy_answer_has_no_baseline_and_no_advantage():
    batch = packed([[0, 1], [1, 0]], groups=[0, 1])
    greedy = torch.tensor([float("nan")] * 2 + [0.0] * 2)
    close(remax(*batch.args, greedy_returns=greedy), [0, 0, 1, 0], 0)
    with pytest.raises(ValueError, match="greedy episode per prompt"):
        remax(*batch.args)


def test_remax_equal_up_to_rounding_is_exactly_zero():
    batch = packed([[0.1, 0.2], [1e4 + 5e-3, 0]], groups=[0, 1])
    greedy = torch.tensor([0.3, 0.3, 1e4, 1e4])
    assert remax(*batch.args, greedy_returns=greedy)[[0, 2]].tolist() == [0, 0]


def test_optimal_token_baseline_by_hand():
    batch = packed([[0, 9, 1], [0]], masks=[[1, 0, 1], [1]])
    batch.rewards = torch.tensor([0.0, 0.0, 1.0, 0.0])
    logprobs = torch.tensor([0.5, 9.0, 0.5, 0.75]).log()
    # token 1: weights .5 and .25, baseline (.5 * 1 + .25 * 0) / .75 = 2/3; token 2: the first episode is alone
    close(optimal_token_baseline(*batch.args, old_logprobs=logprobs), [1 / 3, 0, 0, -2 / 3], 1e-6)
    squares = torch.tensor([0.5, 9.0, 0.5, 0.625])  # weights 1 - 1 + .5 = .5 and 1 - 1.5 + .625 = .125: baseline .8
    got = optimal_token_baseline(*batch.args, old_logprobs=logprobs, sum_pi_squared=squares)
    close(got, [0.2, 0, 0, -0.8], 1e-6)


def test_optimal_token_baseline_sums_the_weights_along_the_episode():
    batch = packed([[0, 4], [0, 0]])
    logprobs = torch.tensor([0.5, 0.5, 0.75, 0.25]).log()
    # second tokens: weights .5 + .5 = 1 and .25 + .75 = 1, baseline 2; first: (.5 * 4) / .75 = 8/3
    close(optimal_token_baseline(*batch.args, old_logprobs=logprobs), [4 / 3, 2, -8 / 3, -2], 1e-6)


def test_optimal_token_baseline_keeps_groups_apart_and_equal_returns_silent():
    batch = packed([[0.3], [0.1, 0.2], [1], [0], [5]], groups=[3, 3, 1, 1, 2])
    logprobs = torch.full((6,), -1.0)
    close(optimal_token_baseline(*batch.args, old_logprobs=logprobs), [0, 0, 0, 0.5, -0.5, 0], 0)


def test_optimal_token_baseline_where_the_policy_was_certain():
    batch = packed([[1], [0]])
    assert torch.equal(optimal_token_baseline(*batch.args, old_logprobs=torch.zeros(2)), torch.zeros(2))
    with pytest.raises(ValueError, match="needs old_logprobs"):
        optimal_token_baseline(*batch.args)
