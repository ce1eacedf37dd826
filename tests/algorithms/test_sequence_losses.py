"""Golden numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms.sequence_losses import gmpo, gspo, sequence_means

from .layout import close, surrogate

E = math.exp


def test_gspo_has_one_ratio_per_sequence_and_each_tokens_own_gradient():
    ratios, index = [E(0.2), E(-0.1), E(0.04)], [0, 0, 1]  # sequences e^.05 and e^.04
    loss, grad = surrogate(gspo, ratios, [2.0, 1.0, -3.0], index=index, clip_low=0.1, clip_high=0.1)
    close(loss, [-2 * E(0.05), -E(0.05), 3 * E(0.04)])
    close(grad, [-2 * E(0.05), -E(0.05), 3 * E(0.04)])


def test_gspo_clips_the_sequence_on_both_sides():
    ratios = [E(0.2), E(-0.1), E(-0.2), E(0.1)]  # e^.05 = 1.051, e^-.05 = .951
    index = [0, 0, 1, 1]
    loss, grad = surrogate(gspo, ratios, [2.0, 2.0, -2.0, -2.0], index=index, clip_low=0.03, clip_high=0.04)
    close(loss, [-2.08, -2.08, 1.94, 1.94])
    close(grad, [0, 0, 0, 0])
    _, grad = surrogate(gspo, ratios, [-2.0, -2.0, 2.0, 2.0], index=index, clip_low=0.03, clip_high=0.04)
    close(grad, [2 * E(0.05), 2 * E(0.05), -2 * E(-0.05), -2 * E(-0.05)])


def test_gspo_defaults_are_the_papers():
    loss, _ = surrogate(gspo, [1.1, 0.9], [1.0, -1.0], index=[0, 1])
    close(loss, [-1.0004, 0.9997], 1e-6)


def test_gmpo_clips_log_ratios_where_the_advantage_would_profit():
    loss, grad = surrogate(gmpo, [E(0.6), E(-0.2)], [1.0, 1.0])  # .4 and -.2: mean .1
    close(loss, [-E(0.1)] * 2)
    close(grad, [0, -E(0.1)])
    loss, grad = surrogate(gmpo, [E(0.6), E(-0.2)], [-1.0, -1.0])  # nothing clipped: mean .2
    close(loss, [E(0.2)] * 2)
    close(grad, [E(0.2)] * 2)
    loss, grad = surrogate(gmpo, [E(0.2), E(-0.8)], [-1.0, -1.0])  # .2 and -.4: mean -.1
    close(loss, [E(-0.1)] * 2)
    close(grad, [E(-0.1), 0])
    loss, _ = surrogate(gmpo, [E(0.2), E(-0.8)], [1.0, 1.0])
    close(loss, [-E(-0.3)] * 2)


def test_gmpo_takes_each_side_of_its_clip():
    loss, _ = surrogate(gmpo, [E(2.0), E(-2.0)], [1.0, -1.0], index=[0, 1], clip_low=0.5, clip_high=0.3)
    close(loss, [-E(0.3), E(-0.5)])


@pytest.mark.parametrize("fn", [gspo, gmpo])
def test_holes_and_other_sequences_do_not_count(fn):
    ratios = [E(0.02), E(3.0), E(0.04), E(-0.5)]
    loss, grad = surrogate(fn, ratios, [1.0] * 4, [1, 0, 1, 1], index=[7, 7, 7, 2], clip_low=0.1, clip_high=0.1)
    close(loss[:3], [-E(0.03), 0, -E(0.03)])
    close(grad[:3], [-E(0.03), 0, -E(0.03)])


@pytest.mark.parametrize("fn", [gspo, gmpo])
def test_at_ratio_one_the_gradient_is_minus_the_advantage(fn):
    _, grad = surrogate(fn, [1.0, 1.0, 1.0], [3.0, 3.0, -0.5], index=[0, 0, 1])
    close(grad, [-3.0, -3.0, 0.5])


@pytest.mark.parametrize("fn", [gspo, gmpo])
def test_impossible_clips_are_refused(fn):
    with pytest.raises(ValueError, match="clip_low"):
        surrogate(fn, [1.0], [1.0], clip_low=1.5)


def test_sequence_means_of_an_empty_sequence_are_zero():
    mask = torch.tensor([True, True, False, False])
    got = sequence_means(torch.tensor([1.0, 3.0, 9.0, 9.0]), mask, torch.tensor([0, 0, 0, 1]))
    close(got, [2, 2, 0, 0])
