"""Golden numbers worked by hand. P-numbers are the field's bug reports."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms import ADVANTAGES
from posttrain.algorithms.advantages import dr_grpo, gpg, grpo, maxrl, opo, reinforce_pp_baseline, rloo
from posttrain.algorithms.groups import has_signal
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


def test_has_signal_marks_tokens_of_groups_that_differ():
    batch = packed([[0, 1], [0, 0], [0, 1], [0, 1], [7]], groups=[0, 0, 1, 1, 2])
    got = has_signal(batch.rewards, batch.episode_index, batch.group_index)
    assert got.tolist() == [True] * 4 + [False] * 5


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_keep_the_type_of_the_rewards_and_inputs_are_untouched(name):
    batch = packed([[0, 1], [0, 0]], masks=[[1, 0], [1, 1]])
    before = [x.clone() for x in batch.args]
    got = ADVANTAGES[name](*batch.args, values=torch.ones(4), **streams_for(name, batch))
    assert got.dtype == torch.float32
    assert got.shape == batch.rewards.shape
    assert all(torch.equal(a, b) for a, b in zip(before, batch.args, strict=True))
