"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import KL_ESTIMATORS
from posttrain.algorithms.kl import absolute, adapted_kl_coef, bounded, in_reward, k1, k2, k3, straight_through

from .layout import close

EVERY = torch.ones(1, dtype=torch.bool)
GOLDEN = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "abs": abs,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "abs": lambda d: math.copysign(1.0, d),
}


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
@pytest.mark.parametrize("d", [0.5, -0.5, 2.0, -3.0])
def test_value_and_gradient(name, d):
    logprobs = torch.tensor([d - 1.0], dtype=torch.float64, requires_grad=True)
    value = KL_ESTIMATORS[name](logprobs, torch.tensor([-1.0], dtype=torch.float64), EVERY)
    value.sum().backward()
    assert value.item() == pytest.approx(GOLDEN[name](d), rel=1e-9)
    assert logprobs.grad.item() == pytest.approx(SLOPES[name](d), rel=1e-9)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_p99_the_gradient_really_flows(name):
    def at(x: float) -> float:
        return KL_ESTIMATORS[name](torch.tensor([x], dtype=torch.float64), torch.zeros(1).double(), EVERY).item()

    logprobs = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS[name](logprobs, torch.zeros(1).double(), EVERY).sum().backward()
    finite_difference = (at(0.7 + 1e-6) - at(0.7 - 1e-6)) / 2e-6
    assert finite_difference != 0
    assert logprobs.grad.item() == pytest.approx(finite_difference, rel=1e-6)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
@pytest.mark.parametrize("d", [100.0, -100.0])
def test_p98_log_ratio_of_a_hundred_is_finite_in_value_and_gradient(name, d):
    logprobs = torch.tensor([d], requires_grad=True)
    value = KL_ESTIMATORS[name](logprobs, torch.zeros(1), EVERY)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprobs.grad).all()


def test_k3_clamps_the_inverse_ratio_at_e_to_the_twenty():
    value = k3(torch.tensor([-100.0]), torch.zeros(1), EVERY)
    assert value.item() == pytest.approx(math.exp(20) - 21, rel=1e-6)


def test_k3_far_above_the_reference_still_pushes_back():
    logprobs = torch.tensor([100.0], requires_grad=True)
    k3(logprobs, torch.zeros(1), EVERY).sum().backward()
    assert logprobs.grad.item() == pytest.approx(1.0)


def test_k3_keeps_its_digits_near_zero():
    got = k3(torch.tensor([1e-3]), torch.zeros(1), EVERY).item()
    assert got == pytest.approx(5e-7, rel=0.1)
    assert k3(torch.zeros(1), torch.zeros(1), EVERY).item() == 0


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_p17_masked_positions_are_zero_whatever_stands_there(name):
    logprobs = torch.tensor([float("nan"), -1.0, -1.0], requires_grad=True)
    ref = torch.tensor([-1.0, -2.0, float("nan")])
    value = KL_ESTIMATORS[name](logprobs, ref, torch.tensor([False, True, False]))
    value.sum().backward()
    assert value[0] == 0
    assert value[2] == 0
    assert value[1] > 0
    assert logprobs.grad[0] == 0
    assert logprobs.grad[2] == 0
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_the_reference_gets_no_gradient(name):
    ref = torch.zeros(1, requires_grad=True)
    KL_ESTIMATORS[name](torch.ones(1, requires_grad=True), ref, EVERY).sum().backward()
    assert ref.grad is None


def test_k1_and_k3_are_unbiased_under_the_policy():
    policy, ref = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    true = (policy * (policy / ref).log()).sum()
    every = torch.ones(3, dtype=torch.bool)
    for estimator in (k1, k3):
        torch.testing.assert_close((policy * estimator(policy.log(), ref.log(), every)).sum(), true)


def test_estimators_agree_on_sign_and_order():
    logprobs, ref, every = torch.tensor([-0.5, -2.0]), torch.tensor([-1.0, -1.0]), torch.ones(2, dtype=torch.bool)
    close(k1(logprobs, ref, every), [0.5, -1.0])
    close(absolute(logprobs, ref, every), [0.5, 1.0])
    close(k2(logprobs, ref, every), [0.125, 0.5])


def test_kl_in_reward_is_subtracted_at_policy_tokens_only():
    kl = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    got = in_reward(torch.tensor([0.0, 5.0, 1.0]), kl, mask, kl_coef=0.1)
    close(got, [-0.1, 5.0, 0.8])
    assert not got.requires_grad


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    logprobs = torch.tensor([2.0, float("nan")], requires_grad=True)
    ref, mask = torch.zeros(2), torch.tensor([True, False])
    mixed = straight_through(k3(logprobs, ref, mask), k2(logprobs, ref, mask))
    mixed.sum().backward()
    close(mixed.detach(), [math.exp(-2) + 1, 0])
    close(logprobs.grad, [2.0, 0])


def test_bounded_cuts_both_sides_and_their_gradients():
    kl = torch.tensor([12.0, -11.0, 3.0], requires_grad=True)
    bounded(kl, 10.0).sum().backward()
    close(bounded(kl, 10.0).detach(), [10, -10, 3])
    close(kl.grad, [0, 0, 1])
    with pytest.raises(ValueError, match="must be positive"):
        bounded(kl, 0.0)


@pytest.mark.parametrize(
    ("kl", "error"), [(5.5, 0.1), (66.0, 0.2), (5.0, 0.0), (4.5, -0.1), (0.0, -0.2), (float("nan"), 0.0)]
)
def test_the_adaptive_controller_follows_the_measured_kl_within_a_fifth(kl, error):
    for episodes, horizons in ((100, 1.0), (50, 0.5)):
        got = adapted_kl_coef(0.1, kl, target=5.0, horizon=100.0, episodes=episodes)
        assert got == pytest.approx(0.1 * (1 + error * horizons))


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"horizon": -1.0}])
def test_a_controller_without_a_target_is_refused(wrong):
    with pytest.raises(ValueError, match="must be positive"):
        adapted_kl_coef(0.1, 1.0, **({"target": 1.0, "horizon": 1.0, "episodes": 1} | wrong))
