"""Golden numbers worked by hand, and what holds for any outcome."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.algorithms.estimators import clustered_mean, effective_samples, majority, pass_at_k, wilson


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (1, 1, 1, 1.0),
        (4, 0, 2, 0.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (5, 3, 3, 1.0),  # only two are wrong: any three hold a right one
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_pass_at_k(samples, right, k, expected):
    assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(right, k):
    judged = [True] * right + [False] * (6 - right)
    choices = list(itertools.combinations(judged, k))
    assert pass_at_k(6, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


def test_pass_at_k_keeps_its_digits_with_many_samples():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(samples, right, k):
    with pytest.raises(ValueError, match=f"k = {k}"):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize(
    ("predictions", "right", "expected"),
    [
        (["a", "a", "b"], [True, True, False], 1.0),
        (["a", "b", "b"], [True, False, False], 0.0),
        (["a", "b"], [True, False], 0.5),  # a tie: either is drawn
        (["a", "b", "c", None], [True, False, False, False], 1 / 3),
        ([None, None, "a"], [False, False, True], 1.0),  # no answer is no vote
        ([None, None], [False, False], 0.0),
        (["a", "a", "a", "b"], [True, False, False, True], 1 / 3),  # judged by more than the answer
    ],
)
def test_majority(predictions, right, expected):
    assert majority(predictions, right) == pytest.approx(expected, abs=1e-15)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=8), st.randoms())
def test_majority_does_not_depend_on_the_order_of_samples(samples, rng: random.Random):
    shuffled = rng.sample(samples, len(samples))
    assert majority(*map(list, zip(*samples, strict=True))) == majority(*map(list, zip(*shuffled, strict=True)))


def test_wilson_against_a_worked_example():
    """8 of 10: (0.8 + 3.8415/20) / 1.38415 = 0.71674, half width 1.95996 * sqrt(0.016 + 0.0096036) / 1.38415."""
    low, high = wilson(0.8, 10)
    assert low == pytest.approx(0.49016, abs=2e-5)
    assert high == pytest.approx(0.94332, abs=2e-5)


def test_all_right_is_not_certain():
    estimate = clustered_mean([[1.0]] * 100)
    assert estimate is not None
    assert (estimate.mean, estimate.high) == (1.0, 1.0)
    assert estimate.low == pytest.approx(1 / (1 + 1.959964**2 / 100), abs=1e-6)  # .963


def test_one_sample_per_task_is_the_binomial_interval():
    estimate = clustered_mean([[1.0]] * 8 + [[0.0]] * 2)
    assert estimate is not None
    assert (estimate.low, estimate.high) == pytest.approx(wilson(0.8, 10))
    assert estimate.tasks == 10


def test_samples_that_only_repeat_their_task_add_nothing():
    once = clustered_mean([[1.0], [0.0], [1.0], [1.0]])
    repeated = clustered_mean([[1.0] * 16, [0.0] * 16, [1.0] * 16, [1.0] * 16])
    assert once is not None
    assert repeated is not None
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high))


def test_effective_samples_lie_between_tasks_and_samples():
    assert effective_samples(0.5, 0.0, 10, 40) == 10
    assert effective_samples(0.5, 1e-9, 10, 40) == 40
    assert effective_samples(0.5, 0.25 / 20, 10, 40) == pytest.approx(20)


def test_tasks_without_a_score_leave_and_none_is_left():
    estimate = clustered_mean([[], [1.0], [0.0, 0.0]])
    assert estimate is not None
    assert estimate.mean == pytest.approx(1 / 3)
    assert estimate.tasks == 2
    assert clustered_mean([[], []]) is None


def test_values_outside_the_unit_interval_get_the_normal_interval():
    """Two tasks, means -1 and 3: mean 1, variance (2^2 + 2^2) / 4 = 2, times 2 / (2 - 1) = 4, half width 1.96 * 2."""
    estimate = clustered_mean([[-1.0], [3.0]])
    assert estimate is not None
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((1.0, 1 - 3.919928, 1 + 3.919928), abs=1e-6)
    alone = clustered_mean([[2.0, 4.0]])
    assert alone is not None
    assert (alone.mean, alone.low, alone.high) == (3.0, None, None)


@given(st.lists(st.lists(st.floats(0, 1), max_size=4), max_size=12))
def test_the_interval_holds_the_mean_and_stays_in_the_unit_interval(values):
    estimate = clustered_mean(values)
    if estimate is not None:
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 1 + 1e-12


def test_the_interval_covers_the_truth():
    """400 evaluations of 40 tasks x 4 samples, whose chance of success is drawn per task (mean .7)."""
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        chances = [rng.betavariate(1.4, 0.6) for _ in range(40)]
        found = clustered_mean([[float(rng.random() < chance) for _ in range(4)] for chance in chances])
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.7 <= found.high
    assert 0.92 <= covered / 400 <= 0.98
