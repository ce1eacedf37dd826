"""What must not matter, does not: splits, orders, holes, segments. With slow references, written as loops."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.algorithms import ADVANTAGES, AGGREGATES, CHOICES, KL_ESTIMATORS, LOSSES
from posttrain.algorithms.advantages import grpo, rloo
from posttrain.algorithms.credit import policy_rows, rewards_on_policy
from posttrain.algorithms.returns import gae, reinforce
from posttrain.packing import Batch, bins_of, pack, select
from posttrain.trajectory import Source, Trajectory

VOCABULARY = 7
QUICK = settings(max_examples=20, deadline=None, derandomize=True)


def trajectory(rng: random.Random, episode: int, group: int) -> Trajectory:
    """A few turns of policy and environment text with rewards anywhere; some end in an observation, some never act."""
    made = Trajectory(task_id=f"t{group}", group_id=f"g{group}", episode_id=f"e{episode}")
    made.add_context([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3))], Source.PROMPT)
    for _ in range(rng.randint(0, 3)):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 4))]
        made.add_sampled(ids, [-rng.uniform(0.1, 3.0) for _ in ids], 0)
        made.add_context([rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 3))], Source.ENV)
    made.rewards = [rng.choice([0.0, 0.0, 0.0, 1.0, -0.5]) for _ in made.token_ids]
    return made


@st.composite
def trajectories(draw) -> list[Trajectory]:
    """One to nine trajectories of up to six episodes in up to three groups."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    owners = [rng.randrange(6) for _ in range(draw(st.integers(1, 9)))]
    return [trajectory(rng, episode, episode % 3) for episode in owners]


def policy_logprobs(table: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A bigram policy: log-prob of each token after the one before it. The first of a segment is never in the mask."""
    every = table.log_softmax(-1)[batch.token_ids.roll(1), batch.token_ids]
    return torch.where(batch.loss_mask, every, 0.0)


def advantages_of(name: str, batch: Batch, **options) -> torch.Tensor:
    values = torch.linspace(-1, 1, 50)[(batch.token_ids * 5 + batch.positions) % 50]
    options |= {
        "remax": {"greedy_returns": torch.full_like(batch.rewards, 0.3)},
        "mt_grpo": {"outcome_rewards": torch.where(batch.positions % 2 == 0, batch.rewards, 0.0)},
        "optimal_token_baseline": {"old_logprobs": batch.rollout_logprobs},
    }.get(name, {})
    rewards = batch.rewards.abs() if name == "maxrl" else batch.rewards
    return ADVANTAGES[name](rewards, batch.loss_mask, batch.episode_index, batch.group_index, values=values, **options)


def gradient(loss: str, batch: Batch, parts: list[list[int]]) -> torch.Tensor:
    """Of one optimizer step, accumulated over the given split of the batch's segments."""
    table = torch.linspace(-1, 1, VOCABULARY**2).reshape(VOCABULARY, VOCABULARY).requires_grad_()
    for part in parts:
        micro = select(batch, part)
        chosen = {"chosen": micro.streams["chosen"]} if loss in CHOICES else {}
        per_token = LOSSES[loss](
            policy_logprobs(table, micro),
            micro.rollout_logprobs,
            micro.advantages,
            micro.loss_mask,
            micro.segment_ids,
            **chosen,
        )
        kl = KL_ESTIMATORS["k3"](policy_logprobs(table, micro), torch.full_like(per_token, -1.0), micro.loss_mask)
        ((per_token + 0.1 * kl) * micro.weights).sum().backward()
    assert table.grad is not None
    return table.grad


def weights_of(aggregate: str, batch: Batch) -> torch.Tensor:
    options = {"group_mean": {"group_index": batch.group_index}, "fixed_length": {"length": 6}}.get(aggregate, {})
    return AGGREGATES[aggregate](batch.loss_mask, batch.episode_index, **options)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(
    made=trajectories(),
    aggregate=st.sampled_from(sorted(AGGREGATES)),
    seed=st.integers(0, 2**32),
    budget=st.integers(20, 60),
)
@QUICK
def test_p95_the_gradient_does_not_depend_on_the_split_into_micro_batches(loss, made, aggregate, seed, budget):
    batch = pack(made)
    batch.advantages = advantages_of("grpo", batch)
    batch.weights = weights_of(aggregate, batch)
    if loss in CHOICES:
        options = {"cov_share": 0.2, "cov_low": 0.1} if loss == "clip_cov" else {"cov_share": 0.2}
        batch.streams["chosen"] = CHOICES[loss](batch.rollout_logprobs, batch.advantages, batch.loss_mask, **options)
    segments = list(range(len(made)))
    whole = gradient(loss, batch, [segments])
    shuffled = random.Random(seed).sample(segments, len(segments))
    by_two = [segments[i : i + 2] for i in range(0, len(segments), 2)]
    for parts in ([[s] for s in shuffled], by_two, [shuffled], bins_of(batch.lengths, budget)):
        torch.testing.assert_close(gradient(loss, batch, parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(made=trajectories(), seed=st.integers(0, 2**32))
@QUICK
def test_p63_the_order_of_arrival_does_not_matter(name, made, seed):
    # segments of one episode keep their order, episodes and groups may interleave in any way
    by_episode: dict[str, list[int]] = {}
    for position, one in enumerate(made):
        by_episode.setdefault(one.episode_id, []).append(position)
    owners = [one.episode_id for one in made]
    random.Random(seed).shuffle(owners)
    queues = {episode: iter(positions) for episode, positions in by_episode.items()}
    order = [next(queues[episode]) for episode in owners]

    batch, arrived = pack(made), pack([made[position] for position in order])
    expected = torch.cat([advantages_of(name, batch).split(batch.lengths)[position] for position in order])
    torch.testing.assert_close(advantages_of(name, arrived), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("aggregate", sorted(AGGREGATES))
@given(made=trajectories())
@QUICK
def test_weights_do_not_depend_on_the_order_of_segments(aggregate, made):
    batch, backwards = pack(made), pack(made[::-1])
    weights = weights_of(aggregate, batch).split(batch.lengths)
    again = weights_of(aggregate, backwards).split(backwards.lengths)
    torch.testing.assert_close(torch.cat(weights), torch.cat(again[::-1]))


@given(made=trajectories())
@QUICK
def test_weights_sum_to_what_their_name_says(made):
    batch = pack(made)
    mask, episode = batch.loss_mask, batch.episode_index
    counts = [int(mask[episode == e].sum()) for e in episode.unique() if mask[episode == e].any()]
    some = float(bool(counts))
    total = {
        "token_mean": some,
        "group_mean": some,
        "sequence_mean": some,
        "sequence_sum_mean": sum(counts) / max(len(counts), 1),
        "fixed_length": sum(counts) / max(len(counts), 1) / 6,
    }
    for name in AGGREGATES:
        weights = weights_of(name, batch)
        assert weights.sum().item() == pytest.approx(total[name], rel=1e-5)
        assert bool((weights[~mask] == 0).all())


@pytest.mark.parametrize("name", ["gae", "reinforce"])
@given(made=trajectories(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
@QUICK
def test_credit_equals_a_loop_over_each_episodes_policy_tokens(name, made, gamma, lam):
    batch = pack(made)
    options = {"gamma": gamma, "lam": lam} if name == "gae" else {"gamma": gamma}
    got = advantages_of(name, batch, **options)
    values = torch.linspace(-1, 1, 50)[(batch.token_ids * 5 + batch.positions) % 50].tolist()
    expected = [0.0] * len(got)
    for episode in batch.episode_index.unique().tolist():
        positions = [t for t in range(len(got)) if batch.episode_index[t] == episode]
        own = [t for t in positions if batch.loss_mask[t]]
        earned = dict.fromkeys(own, 0.0)
        for t in positions:
            if own:
                earned[max((o for o in own if o <= t), default=own[0])] += float(batch.rewards[t])
        carry = 0.0
        for i in reversed(range(len(own))):
            if name == "gae":
                following = values[own[i + 1]] if i + 1 < len(own) else 0.0
                carry = earned[own[i]] + gamma * following - values[own[i]] + gamma * lam * carry
            else:
                carry = earned[own[i]] + gamma * carry
            expected[own[i]] = carry
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@given(made=trajectories())
@QUICK
def test_moving_rewards_keeps_the_sum_of_every_episode(made):
    batch = pack(made)
    moved = rewards_on_policy(batch.rewards, batch.loss_mask, batch.episode_index)
    for episode in batch.episode_index.unique():
        mine = batch.episode_index == episode
        assert moved[mine].sum().item() == pytest.approx(batch.rewards[mine].sum().item())
        if batch.loss_mask[mine].any():
            assert moved[mine & ~batch.loss_mask].abs().sum() == 0


@given(made=trajectories())
@QUICK
def test_policy_rows_are_a_partition_of_the_policy_tokens(made):
    batch = pack(made)
    rows = policy_rows(batch.loss_mask, batch.episode_index)
    assert sorted(rows.index[rows.valid].tolist()) == batch.loss_mask.nonzero().squeeze(1).tolist()
    for index, valid in zip(rows.index, rows.valid, strict=True):
        assert len(batch.episode_index[index[valid]].unique()) == 1
        assert index[valid].tolist() == sorted(index[valid].tolist())


returns = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


def single_tokens(values: list[float]) -> tuple[torch.Tensor, ...]:
    index = torch.arange(len(values))
    return torch.tensor(values), torch.ones(len(values), dtype=torch.bool), index, torch.zeros_like(index)


@given(values=returns)
@QUICK
def test_group_advantages_are_finite_sum_to_zero_and_keep_the_order(values):
    for name in ("grpo", "rloo"):
        got = ADVANTAGES[name](*single_tokens(values)).double()
        assert torch.isfinite(got).all()
        assert abs(got.sum().item()) <= 1e-5 * max(1.0, got.abs().max().item()) * len(values)
        order = torch.tensor(values).argsort()
        assert (got[order].diff() >= 0).all()


@given(values=returns)
@QUICK
def test_rloo_is_the_distance_to_the_mean_of_the_others(values):
    got = rloo(*single_tokens(values)).tolist()
    if len(values) == 1 or max(values) - min(values) <= 1e-6 * max(1.0, *map(abs, values)):
        assert got == [0.0] * len(values)
        return
    total = math.fsum(values)
    assert got == pytest.approx([r - (total - r) / (len(values) - 1) for r in values], rel=1e-4, abs=1e-4)


@given(
    values=st.lists(st.integers(-5, 5), min_size=2, max_size=10), shift=st.integers(-50, 50), scale=st.integers(1, 9)
)
@QUICK
def test_grpo_ignores_shift_and_scale_of_the_rewards(values, shift, scale):
    plain = grpo(*single_tokens([float(v) for v in values]), eps=0.0)
    moved = grpo(*single_tokens([float(scale * v + shift) for v in values]), eps=0.0)
    torch.testing.assert_close(plain, moved, rtol=1e-5, atol=1e-6)
    if len(set(values)) > 1:
        assert plain.double().var().item() == pytest.approx(1.0, rel=1e-5)


@given(made=trajectories())
@QUICK
def test_gae_with_both_parameters_one_is_the_return_minus_the_value(made):
    batch = pack(made)
    values = torch.linspace(-1, 1, 50)[(batch.token_ids * 5 + batch.positions) % 50]
    arguments = (batch.rewards, batch.loss_mask, batch.episode_index, batch.group_index)
    difference = reinforce(*arguments) - torch.where(batch.loss_mask, values, 0.0)
    torch.testing.assert_close(gae(*arguments, values=values), difference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(made=trajectories())
@QUICK
def test_nothing_but_the_mask_decides_where_advantages_lie(name, made):
    batch = pack(made)
    got = advantages_of(name, batch)
    assert torch.isfinite(got).all()
    assert (got[~batch.loss_mask] == 0).all()
