"""Golden numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms.covariance_losses import clip_cov, clip_cov_choice, covariance, kl_cov, kl_cov_choice

from .layout import close, surrogate

NAN = float("nan")
OLD = torch.tensor([-1.0, -2.0, -3.0, -6.0, NAN])
ADVANTAGES = torch.tensor([3.0, 2.0, 0.0, -1.0, NAN])
MASK = torch.tensor([True, True, True, True, False])
INDEX = torch.zeros(5, dtype=torch.long)


def test_covariance_by_hand():
    # means -3 and 1: (2 * 2), (1 * 1), (0 * -1), (-3 * -2)
    close(covariance(OLD, ADVANTAGES, MASK), [4, 1, 0, 6, 0])
    assert torch.equal(covariance(OLD, ADVANTAGES, torch.zeros(5, dtype=torch.bool)), torch.zeros(5))


def test_clip_cov_chooses_the_largest_inside_the_window():
    assert clip_cov_choice(OLD, ADVANTAGES, MASK).tolist() == [True, False, False, False, False]  # 4; 6 is outside
    both = clip_cov_choice(OLD, ADVANTAGES, MASK, cov_share=0.5, cov_low=0.5, cov_high=7.0)
    assert both.tolist() == [True, False, False, True, False]
    assert not clip_cov_choice(OLD, ADVANTAGES, MASK, cov_low=7.0, cov_high=9.0).any()
    assert not clip_cov_choice(OLD, ADVANTAGES, MASK, cov_low=4.0, cov_high=6.0).any()  # the window is open


def test_kl_cov_chooses_the_largest():
    assert kl_cov_choice(OLD, ADVANTAGES, MASK).tolist() == [False, False, False, True, False]
    assert kl_cov_choice(OLD, ADVANTAGES, MASK, cov_share=0.5).tolist() == [True, False, False, True, False]
    assert not kl_cov_choice(OLD, ADVANTAGES, torch.zeros(5, dtype=torch.bool)).any()


def test_equal_covariances_come_together():
    old, advantages = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, -1.0])
    assert kl_cov_choice(old, advantages, torch.ones(3, dtype=torch.bool)).tolist() == [True, False, True]


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_outside_zero_and_one_is_refused(share):
    with pytest.raises(ValueError, match="share of the tokens"):
        kl_cov_choice(OLD, ADVANTAGES, MASK, cov_share=share)


def chosen(*flags: int) -> torch.Tensor:
    return torch.tensor(flags, dtype=torch.float32)  # as a stream of the batch brings it


def test_clip_cov_takes_the_gradient_of_chosen_tokens_and_clips_the_others():
    loss, grad = surrogate(clip_cov, [1.1, 1.1, 1.5], [2.0, 2.0, 2.0], chosen=chosen(1, 0, 0), clip_high=0.3)
    close(loss, [-2.2, -2.2, -2.6])
    close(grad, [0, -2.2, 0])
    loss, _ = surrogate(clip_cov, [0.1], [-1.0], chosen=chosen(0), clip_low=0.3)
    close(loss, [0.7])


def test_kl_cov_holds_chosen_tokens_near_the_frozen_policy():
    e = torch.tensor([0.5, -0.5, 0.5]).exp().tolist()
    loss, grad = surrogate(kl_cov, e, [1.0, 1.0, 1.0], chosen=chosen(1, 1, 0))
    close(loss, [-e[0] + 0.5, -e[1] + 0.5, -e[2]])
    close(grad, [-e[0] + 1, -e[1] - 1, -e[2]])
    loss, _ = surrogate(kl_cov, e, [1.0, 1.0, 1.0], chosen=chosen(1, 1, 0), cov_kl_coef=0.1)
    close(loss, [-e[0] + 0.05, -e[1] + 0.05, -e[2]])


@pytest.mark.parametrize("fn", [clip_cov, kl_cov])
def test_without_a_choice_the_loss_chooses_by_itself(fn):
    logprobs = torch.where(MASK, OLD + 0.1, NAN).requires_grad_()
    fn(logprobs, OLD, ADVANTAGES, MASK, INDEX).sum().backward()
    ratio = torch.tensor(0.1).exp().item()
    held = [0, ratio] if fn is clip_cov else [-3 * ratio, ratio + 1]  # 4 lies in the window, 6 is the largest
    close(logprobs.grad, [held[0], -2 * ratio, 0, held[1], 0])


def test_a_chosen_token_off_the_mask_changes_nothing():
    loss, _ = surrogate(kl_cov, [2.0, 2.0], [1.0, 1.0], [1, 0], chosen=chosen(0, 1))
    close(loss, [-2.0, 0])
