"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import LOSSES
from posttrain.algorithms.losses import log_ratio, policy_gradient, ppo_clip, ppo_dual_clip

from .layout import close

NAN = float("nan")


def surrogate(fn, ratios, advantages, mask=None, **options):
    """Loss and gradient in the log-probs, for given ratios at old log-prob -1."""
    logprobs = (torch.tensor(ratios).log() - 1.0).requires_grad_()
    old = torch.full_like(logprobs, -1.0)
    keep = torch.ones(len(ratios), dtype=torch.bool) if mask is None else torch.tensor(mask)
    index = torch.zeros(len(ratios), dtype=torch.long)
    loss = fn(logprobs, old, torch.tensor(advantages), keep, index, **options)
    loss.sum().backward()
    return loss.detach(), logprobs.grad


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
    for fn in (ppo_clip, ppo_dual_clip, policy_gradient):
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


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip"])
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
@pytest.mark.parametrize("fn", [ppo_clip, ppo_dual_clip])
def test_impossible_clips_are_refused(fn, sides):
    with pytest.raises(ValueError, match="clip_low"):
        surrogate(fn, [1.0], [1.0], **sides)


@pytest.mark.parametrize("clip_dual", [1.0, 0.5])
def test_a_dual_clip_that_would_bind_at_ratio_one_is_refused(clip_dual):
    with pytest.raises(ValueError, match="clip_dual must be above 1"):
        surrogate(ppo_dual_clip, [1.0], [1.0], clip_dual=clip_dual)
