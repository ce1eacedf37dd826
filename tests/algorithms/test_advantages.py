"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms import ADVANTAGES
from posttrain.algorithms.advantages import (
    best_of_group,
    dr_grpo,
    gpg,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
)
from posttrain.algorithms.turns import turn_grpo

from .layout import close, one_token_each, packed, streams_for

GROUP_ESTIMATORS = [dr_grpo, gpg, grpo, maxrl, opo, rloo, turn_grpo, reinforce_pp_baseline]


def test_p85_grpo_sample_std_on_one_winner_of_four():
    close(grpo(*one_token_each([1, 0, 0, 0]).args, eps=0.0), [1.5, -0.5, -0.5, -0.5], 1e-6)


def test_p85_rloo_on_one_winner_of_four():
    close(rloo(*one_token_each([1, 0, 0, 0]).args), [1, -1 / 3, -1 / 3, -1 / 3], 1e-6)


def test_grpo_population_std():
    root3 = 3**0.5  # variance of [1,0,0,0] by n is 3/16, std sqrt(3)/4, winner .75 / that
    close(grpo(*one_token_each([1, 0, 0, 0]).args, std="population", eps=0.0), [root3, *[-root3 / 3] * 3], 1e-6)


def test_grpo_without_std_is_the_centred_return():
    close(grpo(*one_token_each([1, 0, 0, 0]).args, std="none"), [0.75, -0.25, -0.25, -0.25], 1e-6)


def test_grpo_eps_is_added_to_the_std():
    close(grpo(*one_token_each([1, 0, 0, 0]).args, eps=0.5), [0.75, -0.25, -0.25, -0.25], 1e-6)


def test_grpo_default_eps_is_one_millionth():
    got = grpo(*one_token_each([1, 0, 0, 0]).args).double()
    assert got[0] == pytest.approx(0.75 / (0.5 + 1e-6), rel=1e-7)


def test_p86_nearly_constant_group():
    close(grpo(*one_token_each([0, *[0.95] * 7]).args, eps=0.0), [-2.47487, *[0.353553] * 7], 1e-5)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
@pytest.mark.parametrize("value", [1.0, 0.0, 0.1, 0.95, 3.7, 1e6])
def test_p84_equal_rewards_give_exactly_zero(estimator, value):
    got = estimator(*one_token_each([value] * 7).args)
    assert torch.equal(got, torch.zeros(7))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_rewards_equal_up_to_rounding_give_exactly_zero(estimator):
    sums = packed([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.6, 0.0, 0.0]])
    assert torch.equal(estimator(*sums.args), torch.zeros(9))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_the_tolerance_grows_with_the_size_of_the_rewards(estimator):
    assert torch.equal(estimator(*one_token_each([1e4, 1e4 + 5e-3]).args), torch.zeros(2))
    assert (estimator(*one_token_each([0.0, 5e-3]).args) != 0).all()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_small_but_real_differences_are_kept(estimator):
    got = estimator(*one_token_each([0.0, 1e-3]).args)
    assert got[0] < 0 < got[1]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_p88_a_group_of_one_gives_zero(estimator):
    got = estimator(*one_token_each([5.0, 1.0, 0.0], groups=[0, 1, 1]).args)
    assert got[0] == 0
    assert (got[1:] != 0).all()


@pytest.mark.parametrize("estimator", sorted(set(GROUP_ESTIMATORS) - {reinforce_pp_baseline}, key=lambda f: f.__name__))
def test_groups_do_not_see_each_other(estimator):
    both = estimator(*one_token_each([1, 0, 0, 9, 3, 3], groups=[0, 0, 0, 1, 1, 1]).args)
    first = estimator(*one_token_each([1, 0, 0]).args)
    second = estimator(*one_token_each([9, 3, 3]).args)
    torch.testing.assert_close(both, torch.cat([first, second]))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_p63_interleaved_prompts_are_grouped_by_id(estimator):
    interleaved = estimator(*one_token_each([1, 9, 0, 3, 0, 3], groups=[7, 2, 7, 2, 7, 2]).args)
    sorted_ = estimator(*one_token_each([1, 0, 0, 9, 3, 3], groups=[7, 7, 7, 2, 2, 2]).args)
    torch.testing.assert_close(interleaved[[0, 2, 4, 1, 3, 5]], sorted_)


def test_every_policy_token_gets_its_episodes_advantage_and_others_zero():
    batch = packed([[0, 0, 0, 1], [0, 0]], masks=[[0, 1, 0, 1], [0, 1]])
    close(grpo(*batch.args, std="none"), [0, 0.5, 0, 0.5, 0, -0.5], 1e-6)


def test_an_episode_counts_once_however_many_segments_it_has():
    batch = packed([[0, 1], [0, 0], [0, 0], [0, 0]])
    batch.episode_index = torch.tensor([0, 0, 1, 1, 0, 0, 2, 2])  # the first and third lists are one episode
    close(grpo(*batch.args, std="none"), [2 / 3, 2 / 3, -1 / 3, -1 / 3, 2 / 3, 2 / 3, -1 / 3, -1 / 3], 1e-6)


def test_a_reward_on_a_masked_token_still_counts_for_the_episode():
    batch = packed([[0, 1], [0, 0]], masks=[[1, 0], [1, 0]])
    close(grpo(*batch.args, std="none"), [0.5, 0, -0.5, 0], 1e-6)


def test_an_episode_without_policy_tokens_stays_in_the_baseline():
    batch = packed([[1], [0], [0]], masks=[[1], [1], [0]])
    close(grpo(*batch.args, std="none"), [2 / 3, -1 / 3, 0], 1e-6)


def test_unknown_std_names_the_choices():
    with pytest.raises(ValueError, match='expected "sample", "population" or "none"'):
        grpo(*one_token_each([1, 0]).args, std="None")


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(name, bad):
    batch = one_token_each([1.0, bad])
    with pytest.raises(ValueError, match="not finite"):
        ADVANTAGES[name](*batch.args, values=torch.zeros(2), **streams_for(name, batch))


def test_an_episode_in_two_groups_is_refused():
    batch = packed([[0, 0]])
    batch.group_index = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="one group"):
        grpo(*batch.args)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_empty_batch_and_an_empty_mask_give_zeros(name):
    nothing = one_token_each([])
    assert len(ADVANTAGES[name](*nothing.args, values=torch.zeros(0), **streams_for(name, nothing))) == 0
    masked = packed([[1.0, 0.0], [0.0]], masks=[[0, 0], [0]])
    got = ADVANTAGES[name](*masked.args, values=torch.ones(3), **streams_for(name, masked))
    assert torch.equal(got, torch.zeros(3))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_keep_the_type_of_the_rewards_and_inputs_are_untouched(name):
    batch = packed([[0, 1], [0, 0]], masks=[[1, 0], [1, 1]])
    before = [x.clone() for x in batch.args]
    got = ADVANTAGES[name](*batch.args, values=torch.ones(4), **streams_for(name, batch))
    assert got.dtype == torch.float32
    assert got.shape == batch.rewards.shape
    assert all(torch.equal(a, b) for a, b in zip(before, batch.args, strict=True))


def test_dr_grpo_is_the_centred_return():
    close(dr_grpo(*one_token_each([1, 0, 0, 0]).args), [0.75, -0.25, -0.25, -0.25], 1e-6)


@pytest.mark.parametrize("estimator", [dr_grpo, rloo, opo, grpo])
def test_p88_the_raw_return_of_a_singleton_is_an_option(estimator):
    got = estimator(*one_token_each([5.0, 1.0, 0.0], groups=[0, 1, 1]).args, singleton="raw")
    assert got[0].item() == pytest.approx(5.0, rel=2e-6)
    assert got[1] > 0 > got[2]
    with pytest.raises(ValueError, match='expected "zero" or "raw"'):
        estimator(*one_token_each([5.0]).args, singleton="keep")


def test_opo_weighs_the_baseline_by_length():
    batch = packed([[1], [2, 0], [0, 4]], masks=[[1], [1, 1], [0, 1]])
    # lengths 1, 2, 1: baseline (1 * 1 + 2 * 2 + 1 * 4) / 4 = 2.25
    close(opo(*batch.args), [-1.25, -0.25, -0.25, 0, 1.75], 1e-6)


def test_opo_of_a_group_in_which_nobody_wrote():
    batch = packed([[1], [0], [3], [1]], masks=[[0], [0], [1], [1]], groups=[0, 0, 1, 1])
    close(opo(*batch.args), [0, 0, 1, -1], 1e-6)


def test_gpg_makes_up_for_groups_without_signal():
    batch = one_token_each([1, 0, 0, 0, 1, 1], groups=[0, 0, 0, 0, 1, 1])
    close(gpg(*batch.args), [1.125, -0.375, -0.375, -0.375, 0, 0], 1e-6)  # alpha = 6 / 4
    close(gpg(*batch.args, alpha="nonzero_rewards"), [1.5, -0.5, -0.5, -0.5, 0, 0], 1e-6)  # alpha = 6 / 3
    close(gpg(*batch.args, std="sample", eps=0.0), [2.25, -0.75, -0.75, -0.75, 0, 0], 1e-6)


def test_gpg_of_a_batch_without_any_signal_is_zero():
    batch = one_token_each([0, 0, 0])
    assert torch.equal(gpg(*batch.args), torch.zeros(3))
    assert torch.equal(gpg(*batch.args, alpha="nonzero_rewards"), torch.zeros(3))
    two = one_token_each([1, 0, 0, 0, 1], groups=[0, 0, 0, 0, 1])
    close(gpg(*two.args, alpha="nonzero_rewards"), [1.875, -0.625, -0.625, -0.625, 0], 1e-6)  # alpha = 5 / 2
    with pytest.raises(ValueError, match="nonzero_rewards"):
        gpg(*batch.args, alpha="all")


def test_reinforce_pp_baseline_divides_by_the_std_of_the_batch():
    batch = packed([[0, 1], [0], [3], [3]], groups=[0, 0, 1, 1])
    # centred .5 .5 -.5 0 0: mean .1, sample variance (2 * .16 + .36 + 2 * .01) / 4 = .175
    root = 0.175**0.5
    close(reinforce_pp_baseline(*batch.args), [0.4 / root, 0.4 / root, -0.6 / root, 0, 0], 1e-6)
    shifted = reinforce_pp_baseline(*batch.args, shift_silent=True)
    close(shifted, [0.4 / root, 0.4 / root, -0.6 / root, -0.1 / root, -0.1 / root], 1e-6)


def test_reinforce_pp_baseline_of_a_singleton_is_zero():
    batch = packed([[9], [0, 1], [0]], groups=[0, 1, 1])  # centred 0 .5 .5 -.5: mean 1/8
    assert reinforce_pp_baseline(*batch.args)[0] == 0


def test_reinforce_pp_baseline_with_raw_singletons():
    batch = one_token_each([2, 0, 1], groups=[0, 1, 1])
    # 2, -.5, .5: mean 2/3, deviations 4/3, -7/6, -1/6, sample variance (64 + 49 + 1) / 36 / 2
    root = (114 / 72) ** 0.5
    got = reinforce_pp_baseline(*batch.args, singleton="raw")
    close(got, [4 / 3 / root, -7 / 6 / root, -1 / 6 / root], 1e-6)


def test_maxrl_divides_by_the_mean():
    close(maxrl(*one_token_each([1, 0, 0, 0]).args), [3, -1, -1, -1], 1e-6)
    close(maxrl(*one_token_each([0, 0, 1, 1], groups=[0, 0, 1, 1]).args), [0, 0, 0, 0], 0)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match=r"rewards >= 0, got a return of -0.5"):
        maxrl(*one_token_each([1, -0.5]).args)


def test_best_of_group_is_the_lead_over_the_second():
    close(best_of_group(*one_token_each([3, 5, 1]).args, std="none"), [0, 2, 0], 1e-6)
    close(best_of_group(*one_token_each([3, 5, 1]).args, eps=0.0), [0, 1, 0], 1e-6)
    close(best_of_group(*one_token_each([3, 5, 1]).args, eps=2.0), [0, 0.5, 0], 1e-6)
    two = best_of_group(*one_token_each([3, 9, 5, 1, 1, 8], groups=[4, 2, 4, 4, 2, 7]).args, std="none")
    close(two, [0, 8, 2, 0, 0, 0], 1e-6)


def test_best_of_group_where_the_first_place_is_shared_or_uncontested():
    assert torch.equal(best_of_group(*one_token_each([5, 5, 1]).args), torch.zeros(3))
    assert torch.equal(best_of_group(*one_token_each([5]).args), torch.zeros(1))
    assert torch.equal(best_of_group(*one_token_each([1e4, 1e4 + 5e-3, 0.0]).args), torch.zeros(3))


def test_pass_at_k_by_hand():
    # 2 of 4 fail, k 2: R = 1 - 1/6, s = sqrt(5)/6; others fail in 1 of 3 pairs
    root = 5**0.5 / 6
    close(pass_at_k(*one_token_each([1, 0, 0, 1]).args, k=2), [x / 6 / root for x in (1, -1, -1, 1)], 1e-5)
    # 3 of 4 fail: R = 1/2 = s; others fail in 2 of 3
    close(pass_at_k(*one_token_each([0, 1, 0, 0]).args, k=2), [-1 / 3, 1, -1 / 3, -1 / 3], 1e-5)


def test_pass_at_one_is_grpo_with_the_population_std():
    batch = one_token_each([1, 0, 0, 0, 1])
    torch.testing.assert_close(pass_at_k(*batch.args, k=1), grpo(*batch.args, std="population", eps=0.0))


def test_pass_at_k_is_silent_where_every_subset_passes_or_none():
    assert torch.equal(pass_at_k(*one_token_each([1, 0, 1, 1]).args, k=2), torch.zeros(4))
    assert torch.equal(pass_at_k(*one_token_each([0, 0, 0]).args, k=2), torch.zeros(3))
    assert torch.equal(pass_at_k(*one_token_each([0, 1]).args, k=9), torch.zeros(2))  # no group of more than k
    with pytest.raises(ValueError, match="at least 1"):
        pass_at_k(*one_token_each([0, 1]).args, k=0)


def test_pass_at_k_default_is_four_and_a_pass_is_above_one_half():
    # 5 of 6 fail: R = 1 - C(5,4) / C(6,4) = 2/3, s = sqrt(2) / 3; others fail in C(4,3) / C(5,3)
    batch = one_token_each([0.6, 0.5, 0, 0, 0, 0])
    root = 2**0.5 / 3
    close(pass_at_k(*batch.args), [1 / 3 / root, *[(1 / 3 - 4 / 10) / root] * 5], 1e-5)
    everyone = pass_at_k(*batch.args, pass_above=0.4)
    close(everyone, pass_at_k(*one_token_each([1, 1, 0, 0, 0, 0]).args).tolist(), 1e-6)
