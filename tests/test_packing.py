import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from posttrain.packing import Batch, bins_of, micro_batches, pack, select
from posttrain.trajectory import Source, Trajectory

shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=9)


def trajectories(plan: list[tuple[int, int, int]]) -> list[Trajectory]:
    """One per (prompt tokens, sampled tokens, env tokens); two neighbours form a group; token ids are unique."""
    made: list[Trajectory] = []
    token = iter(range(10**6))
    for n, (prompt, sampled, env) in enumerate(plan):
        trajectory = Trajectory(task_id=f"t{n // 2}", group_id=f"g{n // 2}", episode_id=f"e{n}")
        trajectory.add_context([next(token) for _ in range(prompt)], Source.PROMPT)
        trajectory.add_sampled([next(token) for _ in range(sampled)], [-float(n + 1)] * sampled, n)
        trajectory.add_context([next(token) for _ in range(env)], Source.ENV)
        trajectory.rewards = [float(i) for i in range(len(trajectory))]
        trajectory.streams = {"ref_logprobs": list(trajectory.rollout_logprobs)}
        made.append(trajectory)
    return made


def token_tensors(batch: Batch) -> dict[str, Tensor]:
    named = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {k: v for k, v in named.items() if isinstance(v, Tensor)} | dict(batch.streams)


def by_token(batch: Batch) -> dict[int, tuple[float, ...]]:
    """What is known of each token (ids are unique), without numbering that may change."""
    names = ["positions", "loss_mask", "rollout_logprobs", "policy_versions", "rewards"]
    columns = [torch.nan_to_num(getattr(batch, name).double(), nan=99.0).tolist() for name in names]
    return dict(zip(batch.token_ids.tolist(), zip(*columns, strict=True), strict=True))


@given(shapes)
def test_packing_keeps_every_token_with_its_own_data(plan: list[tuple[int, int, int]]) -> None:
    parts = trajectories(plan)
    batch = pack(parts)
    assert batch.token_ids.tolist() == [i for part in parts for i in part.token_ids]
    assert batch.loss_mask.tolist() == [bit for part in parts for bit in part.loss_mask]
    assert batch.positions.tolist() == [i for part in parts for i in range(len(part))]
    assert batch.lengths == [len(part) for part in parts]
    assert all(len(tensor) == len(batch) for tensor in token_tensors(batch).values())
    assert torch.equal(batch.rollout_logprobs.isnan(), ~batch.loss_mask)
    assert not batch.loss_mask[batch.positions == 0].any()
    groups = [index for n, part in enumerate(parts) for index in [n // 2] * len(part)]
    assert batch.group_index.tolist() == groups


@given(shapes, st.randoms(use_true_random=False))
def test_order_of_packing_changes_nothing_about_a_token(plan: list[tuple[int, int, int]], random) -> None:
    parts = trajectories(plan)
    shuffled = random.sample(parts, len(parts))
    assert by_token(pack(parts)) == by_token(pack(shuffled))


@given(shapes, st.integers(0, 30))
def test_micro_batches_take_every_segment_exactly_once(plan: list[tuple[int, int, int]], slack: int) -> None:
    batch = pack(trajectories(plan))
    budget = max(batch.lengths) + slack
    parts = micro_batches(batch, budget)
    assert all(len(part) <= budget for part in parts)
    assert sorted(i for part in parts for i in part.token_ids.tolist()) == batch.token_ids.tolist()
    merged: dict[int, tuple[float, ...]] = {}
    for part in parts:
        assert part.segment_ids.tolist() == [s for s, length in enumerate(part.lengths) for _ in range(length)]
        merged |= by_token(part)
    assert merged == by_token(batch)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 60))
def test_bins_are_a_partition_within_the_budget_and_not_wasteful(lengths: list[int], budget: int) -> None:
    bins = bins_of(lengths, budget)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(lengths)))
    loads = sorted(sum(lengths[i] for i in bin_) for bin_ in bins)
    assert loads[-1] <= budget
    assert len(bins) <= 2 * sum(lengths) / budget + 2


def test_bins_are_evenly_filled_and_as_many_as_asked_for() -> None:
    assert bins_of([4, 3, 3, 2], 100, at_least=2) == [[0, 3], [1, 2]]
    assert bins_of([4, 3], 100, at_least=5) == [[0], [1]]
    assert bins_of([4, 3, 3, 2], 7) == [[0, 3], [1, 2]]


def test_select_keeps_whole_segments_in_the_given_order() -> None:
    parts = trajectories([(2, 2, 0), (1, 3, 1), (3, 1, 0)])
    batch = pack(parts)
    batch.advantages = torch.arange(len(batch)).float()
    taken = select(batch, [2, 0])
    assert taken.token_ids.tolist() == parts[2].token_ids + parts[0].token_ids
    assert taken.segment_ids.tolist() == [0] * 4 + [1] * 4
    assert taken.episode_index.tolist() == [2] * 4 + [0] * 4
    assert taken.advantages is not None
    assert taken.advantages.tolist() == [9.0, 10.0, 11.0, 12.0, 0.0, 1.0, 2.0, 3.0]
    assert taken.weights is None


def test_what_stays_whole_is_not_copied() -> None:
    batch = pack(trajectories([(2, 2, 0), (1, 3, 1), (2, 1, 1)]))
    whole = select(batch, [0, 1, 2])
    assert by_token(whole) == by_token(batch)
    assert whole.token_ids.data_ptr() == batch.token_ids.data_ptr()
    assert select(batch, [0, 2]).token_ids.data_ptr() != batch.token_ids.data_ptr()


def test_no_rewards_are_rewards_of_0() -> None:
    first, second = trajectories([(2, 2, 0), (1, 3, 1)])
    first.rewards = None
    assert pack([first, second]).rewards.tolist() == [0.0] * 4 + [0.0, 1.0, 2.0, 3.0, 4.0]


def test_segments_of_one_episode_share_its_index() -> None:
    parts = trajectories([(1, 1, 0), (1, 1, 0), (1, 1, 0)])
    parts[1].episode_id = parts[0].episode_id
    assert pack(parts).episode_index.tolist() == [0, 0, 0, 0, 1, 1]


def test_p63_groups_are_by_id_not_by_position() -> None:
    parts = trajectories([(1, 1, 0)] * 4)
    a0, a1, b0, b1 = parts
    assert pack([a0, b0, a1, b1]).group_index.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_p15_p17_a_missing_logprob_is_nan_outside_the_mask_only() -> None:
    batch = pack(trajectories([(2, 2, 1)]))
    assert [math.isnan(p) for p in batch.rollout_logprobs.tolist()] == [True, True, False, False, True]


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        pack([])
    with pytest.raises(ValueError, match="without tokens"):
        pack([Trajectory(task_id="t", group_id="g", episode_id="e")])


def test_a_sampled_first_token_is_refused() -> None:
    bare = Trajectory(task_id="t", group_id="g", episode_id="e")
    bare.add_sampled([1], [-1.0], 0)
    with pytest.raises(ValueError, match="first token"):
        pack([bare])


def test_a_segment_over_the_budget_is_refused_with_the_number_to_set() -> None:
    with pytest.raises(ValueError, match="at least 9"):
        micro_batches(pack(trajectories([(4, 5, 0), (1, 1, 0)])), 8)


def test_streams_must_be_on_all_trajectories_or_on_none() -> None:
    parts = trajectories([(1, 1, 0), (1, 1, 0)])
    parts[1].streams = {}
    with pytest.raises(ValueError, match="streams"):
        pack(parts)


def test_a_copy_of_a_batch_can_be_written_into() -> None:
    batch = pack(trajectories([(2, 2, 1)]))
    before = batch.rewards.clone()
    select(batch, [0]).to("cpu", copy=True).rewards.add_(1.0)
    assert torch.equal(batch.rewards, before)
