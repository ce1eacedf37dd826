from __future__ import annotations

import pytest
import torch

from posttrain.algorithms.values import explained_variance, value_loss

from .layout import close


def test_value_loss_by_hand():
    # within the clip: (1.1 - 2)^2 / 2 = .405
    # beyond: V 3 from V_old 1 is clipped to 1.2; R 2: max((3-2)^2, (1.2-2)^2) / 2 = .5
    # beyond, on the good side: V 2 exact, clipped 1.2: max(0, .64) / 2 = .32
    values = torch.tensor([1.1, 3.0, 2.0], requires_grad=True)
    every = torch.ones(3, dtype=torch.bool)
    loss = value_loss(values, torch.ones(3), torch.full((3,), 2.0), every, clip=0.2)
    close(loss.detach(), [0.405, 0.5, 0.32])
    loss.sum().backward()
    close(values.grad, [-0.9, 1.0, 0.0])


def test_value_loss_default_clip_is_a_fifth():
    every = torch.ones(1, dtype=torch.bool)
    close(value_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([2.0]), every), [0.32])


def test_value_loss_clips_below_too():
    every = torch.ones(1, dtype=torch.bool)
    close(value_loss(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]), every), [0.32])


def test_value_loss_without_clip():
    every = torch.ones(1, dtype=torch.bool)
    close(value_loss(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), every, clip=None), [4.5])


def test_p17_nan_at_masked_positions_does_not_reach_the_critic():
    nan = float("nan")
    values = torch.tensor([nan, 1.0], requires_grad=True)
    loss = value_loss(values, torch.tensor([nan, 1.0]), torch.tensor([nan, 3.0]), torch.tensor([False, True]))
    loss.sum().backward()
    close(loss.detach(), [0.0, 2.0])
    close(values.grad, [0.0, -2.0])


def test_value_loss_gives_no_gradient_to_old_values_and_returns():
    values, old, returns = (torch.tensor([x], requires_grad=True) for x in (3.0, 1.0, 0.0))
    value_loss(values, old, returns, torch.ones(1, dtype=torch.bool)).sum().backward()
    assert old.grad is None
    assert returns.grad is None


@pytest.mark.parametrize("clip", [0.0, -1.0])
def test_a_value_clip_that_is_not_positive_is_refused(clip):
    one = torch.ones(1)
    with pytest.raises(ValueError, match="None switches it off"):
        value_loss(one, one, one, one.bool(), clip=clip)


def test_explained_variance_by_hand():
    returns, every = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool)
    assert explained_variance(returns, returns, every) == pytest.approx(1.0)
    assert explained_variance(torch.full((3,), 9.0), returns, every) == pytest.approx(0.0)
    assert explained_variance(returns / 2, returns, every) == pytest.approx(0.75)
    assert explained_variance(-returns, returns, every) == pytest.approx(-3.0)


def test_explained_variance_reads_policy_tokens_only():
    values, returns = torch.tensor([1.0, 99.0, 2.0]), torch.tensor([1.0, -5.0, 2.0])
    assert explained_variance(values, returns, torch.tensor([True, False, True])) == pytest.approx(1.0)


def test_explained_variance_is_unknown_when_returns_do_not_vary():
    every = torch.ones(2, dtype=torch.bool)
    assert explained_variance(torch.tensor([0.0, 1.0]), torch.tensor([0.1, 0.1]), every) is None
    assert explained_variance(torch.zeros(2), torch.ones(2), torch.tensor([True, False])) is None
