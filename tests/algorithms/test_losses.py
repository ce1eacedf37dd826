"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import LOSSES
from posttrain.algorithms.losses import (
    cispo,
    entropy_bonus,
    gpg,
    log_ratio,
    policy_gradient,
    ppo_clip,
    ppo_dual_clip,
    sapo,
)

from .layout import close, surrogate

NAN = float("nan")


def test_ppo_clip_on_every_side_of_both_clips():
    ratios = [1.0, 1.5, 0.5, 1.5, 0.5, 1.1, 0.9]
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, 2.0, -2.0]
    loss, grad = surrogate(ppo_clip, ratios, advantages, clip_low=0.2, clip_high=0.3)
    close(loss, [-2.0, -2.6, -1.0, 3.0, 1.6, -2.2, 1.8])
    close(grad, [-2.0, 0.0, -1.0, 3.0, 0.0, -2.2, 1.8])


def test_ppo_clip_defaults_are_a_fifth_on_both_sides():
    loss, _ = surrogate(ppo_clip, [2.0, 0.1], [1.0, -1.0])
    close(loss, [-1.2, 0.8])


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    for fn in (ppo_clip, ppo_dual_clip, policy_gradient, gpg, cispo, sapo):
        _, grad = surrogate(fn, [1.0, 1.0], [3.0, -0.5])
        close(grad, [-3.0, 0.5])


def test_dual_clip_bounds_only_negative_advantages():
    loss, grad = surrogate(ppo_dual_clip, [5.0, 2.0, 5.0, 0.5], [-2.0, -2.0, 2.0, -2.0], clip_dual=3.0)
    close(loss, [6.0, 4.0, -2.4, 1.6])
    close(grad, [0.0, 4.0, 0.0, 0.0])


def test_dual_clip_default_is_three():
    loss, _ = surrogate(ppo_dual_clip, [5.0], [-1.0])
    close(loss, [3.0])


def test_dual_clip_passes_both_sides_on():
    loss, _ = surrogate(ppo_dual_clip, [2.0, 0.1], [1.0, -1.0], clip_low=0.4, clip_high=0.3)
    close(loss, [-1.3, 0.6])


def test_reinforce_is_minus_advantage_times_logprob():
    loss, grad = surrogate(policy_gradient, [math.e, 1.0], [2.0, 3.0])
    close(loss, [0.0, 3.0])
    close(grad, [-2.0, -3.0])


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("poison", [NAN, float("inf"), -float("inf"), 1e38])
def test_p17_whatever_stands_at_a_masked_position_reaches_neither_loss_nor_gradient(name, poison):
    logprobs = torch.tensor([poison, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0, poison])
    advantages = torch.tensor([poison, 1.0, poison])
    mask = torch.tensor([False, True, False])
    loss = LOSSES[name](logprobs, old, advantages, mask, torch.zeros(3, dtype=torch.long))
    loss.sum().backward()
    assert loss[0] == 0
    assert loss[2] == 0
    assert torch.isfinite(loss).all()
    close(logprobs.grad, [0.0, -1.0, 0.0])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_p16_an_empty_mask_gives_zero_with_a_graph(name):
    logprobs = torch.tensor([-1.0, NAN], requires_grad=True)
    nothing = torch.tensor([False, False])
    loss = LOSSES[name](logprobs, torch.zeros(2), torch.ones(2), nothing, torch.zeros(2, dtype=torch.long))
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert logprobs.grad.tolist() == [0, 0]


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [100.0, -100.0, 1000.0])
def test_p98_large_log_ratios_stay_finite(name, advantage, gap):
    logprobs = torch.tensor([gap], requires_grad=True)
    ones, index = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    loss = LOSSES[name](logprobs, torch.zeros(1), torch.tensor([advantage]), ones, index)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


def test_log_ratio_is_clamped_at_twenty_from_above_only():
    got = log_ratio(torch.tensor([25.0, 19.0, -30.0]), torch.zeros(3), torch.ones(3, dtype=torch.bool))
    assert got.tolist() == [20.0, 19.0, -30.0]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_old_logprobs_and_advantages_get_no_gradient(name):
    logprobs, old, advantages = (torch.zeros(2, requires_grad=True) for _ in range(3))
    mask, index = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    LOSSES[name](logprobs, old, advantages + 1.0, mask, index).sum().backward()
    assert old.grad is None
    assert advantages.grad is None
    assert logprobs.grad is not None


@pytest.mark.parametrize("sides", [{"clip_low": -0.1}, {"clip_low": 1.5}, {"clip_high": -0.1}])
@pytest.mark.parametrize("fn", [ppo_clip, ppo_dual_clip, cispo])
def test_impossible_clips_are_refused(fn, sides):
    with pytest.raises(ValueError, match="clip_low"):
        surrogate(fn, [1.0], [1.0], **sides)


@pytest.mark.parametrize("clip_dual", [1.0, 0.5])
def test_a_dual_clip_that_would_bind_at_ratio_one_is_refused(clip_dual):
    with pytest.raises(ValueError, match="clip_dual must be above 1"):
        surrogate(ppo_dual_clip, [1.0], [1.0], clip_dual=clip_dual)


def test_cispo_clips_the_weight_but_never_the_gradient():
    loss, grad = surrogate(cispo, [1.0, 2.0, 0.1], [1.0, 1.0, -1.0])
    close(loss, [1.0, -1.2 * (math.log(2) - 1), 0.1 * (math.log(0.1) - 1)])
    close(grad, [-1.0, -1.2, 0.1])


def test_cispo_with_a_lower_bound():
    _, grad = surrogate(cispo, [0.1, 0.9, 3.0], [-1.0, -1.0, 2.0], clip_low=0.2, clip_high=0.5)
    close(grad, [0.8, 0.9, -3.0])


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_sapo_closes_its_gate_smoothly_and_sooner_for_negative_advantages():
    loss, grad = surrogate(sapo, [1.0, 2.0, 2.0, 0.5], [1.0, 3.0, -1.0, -1.0])
    close(loss, [-2.0, -3 * 4 * sigmoid(1.0), 4 / 1.05 * sigmoid(1.05), 4 / 1.05 * sigmoid(-0.525)])
    slope = [sigmoid(x) * sigmoid(-x) for x in (0.0, 1.0, 1.05, -0.525)]
    close(grad, [-1.0, -3 * 4 * slope[1] * 2, 4 * slope[2] * 2, 4 * slope[3] * 0.5])


def test_sapo_takes_each_temperature_for_its_sign():
    loss, _ = surrogate(sapo, [2.0, 2.0], [1.0, -1.0], tau_positive=2.0, tau_negative=4.0)
    close(loss, [-2 * sigmoid(2.0), sigmoid(4.0)])


@pytest.mark.parametrize("taus", [{"tau_positive": 0.0}, {"tau_negative": -1.0}])
def test_sapo_refuses_temperatures_that_are_not_positive(taus):
    with pytest.raises(ValueError, match="must be positive"):
        surrogate(sapo, [1.0], [1.0], **taus)


def test_gpg_is_the_plain_policy_gradient():
    loss, grad = surrogate(gpg, [math.e, 1.0], [2.0, 3.0])
    close(loss, [0.0, 3.0])
    close(grad, [-2.0, -3.0])


def test_the_entropy_bonus_lowers_the_loss_where_entropy_is_high_and_passes_a_gradient():
    entropy = torch.tensor([2.0, NAN, 1.0], requires_grad=True)
    got = entropy_bonus(torch.ones(3), entropy, torch.tensor([True, False, True]), entropy_coef=0.1)
    close(got.detach(), [0.8, 1.0, 0.9])
    got.sum().backward()
    close(entropy.grad, [-0.1, 0.0, -0.1])
