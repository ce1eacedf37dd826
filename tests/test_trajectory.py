import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.trajectory import Episode, Segment, Source, StopReason, Trajectory, TrajectoryError, Turn, check_logprob

CONTEXT_SOURCES = [source for source in Source if source is not Source.POLICY]
ids = st.lists(st.integers(0, 50_000), max_size=8)
logprob = st.floats(-50.0, 0.0)
context_write = st.tuples(st.just("context"), ids, st.sampled_from(CONTEXT_SOURCES))
sampled_write = st.tuples(st.just("sampled"), st.lists(st.tuples(st.integers(0, 50_000), logprob)), st.integers(0, 99))
writes = st.lists(st.one_of(context_write, sampled_write), max_size=12)


def empty() -> Trajectory:
    return Trajectory(task_id="t", group_id="g", episode_id="g/0")


def written(plan: list[Any]) -> Trajectory:
    trajectory = empty()
    for kind, content, last in plan:
        if kind == "context":
            trajectory.add_context(content, last)
        else:
            trajectory.add_sampled([i for i, _ in content], [p for _, p in content], last)
    return trajectory


@given(writes)
def test_p02_p11_whatever_is_written_stays_aligned_and_trains_what_was_sampled(plan: list[Any]) -> None:
    trajectory = written(plan)
    trajectory.check()
    sampled = [pair for kind, content, _ in plan if kind == "sampled" for pair in content]
    policy = [i for i, source in enumerate(trajectory.source) if source is Source.POLICY]
    assert len(trajectory.loss_mask) == len(trajectory)
    assert [(trajectory.token_ids[i], trajectory.rollout_logprobs[i]) for i in policy] == sampled
    assert trajectory.policy_token_count == sum(trajectory.loss_mask) == len(sampled)
    others = [i for i in range(len(trajectory)) if i not in set(policy)]
    assert all(trajectory.rollout_logprobs[i] is None for i in others)
    assert all(trajectory.policy_versions[i] == -1 for i in others)


@given(writes, st.integers(0, 10**6), st.sampled_from(["source", "rollout_logprobs", "policy_versions"]))
def test_construction_refuses_lists_that_do_not_align(plan: list[Any], at: int, name: str) -> None:
    good = written(plan)
    fields = {key: list(getattr(good, key)) for key in ("token_ids", "source", "rollout_logprobs", "policy_versions")}
    fields[name].insert(at % (len(fields[name]) + 1), None)
    with pytest.raises(TrajectoryError, match=name):
        Trajectory(task_id="t", group_id="g", episode_id="e", **fields)


@given(st.sampled_from([None, math.nan, 0.5, math.inf]), st.integers(0, 3))
def test_a_missing_or_impossible_logprob_is_an_error_and_writes_nothing(bad: float | None, at: int) -> None:
    trajectory = empty()
    logprobs: list[Any] = [-1.0, -1.0, -1.0]
    logprobs.insert(at, bad)
    with pytest.raises(TrajectoryError, match="log-prob"):
        trajectory.add_sampled([1, 2, 3, 4], logprobs, 0)
    assert len(trajectory) == 0


def test_rounding_just_above_zero_is_accepted() -> None:
    check_logprob(1e-6, 0)
    check_logprob(0.0, 0)


@pytest.mark.parametrize(("logprobs", "versions"), [([-1.0], 0), ([-1.0, -1.0], [0]), ([-1.0, -1.0, -1.0], 0)])
def test_sampled_lists_must_align(logprobs: list[float], versions: int | list[int]) -> None:
    with pytest.raises(TrajectoryError, match="align"):
        empty().add_sampled([5, 6], logprobs, versions)


def test_a_negative_version_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="versions"):
        empty().add_sampled([5], [-1.0], -1)


def test_p69_each_token_keeps_its_own_version() -> None:
    trajectory = empty()
    trajectory.add_sampled([5, 6, 7], [-1.0] * 3, [3, 3, 4])
    assert trajectory.policy_versions == [3, 3, 4]


def test_policy_tokens_cannot_enter_as_context() -> None:
    with pytest.raises(TrajectoryError, match="add_sampled"):
        empty().add_context([1], Source.POLICY)


@pytest.mark.parametrize("close", [{"rewards": [0.0]}, {"streams": {"values": [0.0]}}])
def test_nothing_is_written_once_rewards_or_streams_are_attached(close: dict[str, Any]) -> None:
    trajectory = empty()
    trajectory.add_context([1], Source.PROMPT)
    for name, value in close.items():
        setattr(trajectory, name, value)
    with pytest.raises(TrajectoryError, match="closed"):
        trajectory.add_context([2], Source.ENV)
    with pytest.raises(TrajectoryError, match="closed"):
        trajectory.add_sampled([2], [-1.0], 0)
    assert len(trajectory) == 1


@pytest.mark.parametrize("broken", [{"rewards": [0.0, 0.0]}, {"streams": {"values": []}}])
def test_check_names_the_list_that_does_not_align(broken: dict[str, Any]) -> None:
    trajectory = empty()
    trajectory.add_context([1], Source.PROMPT)
    for name, value in broken.items():
        setattr(trajectory, name, value)
    with pytest.raises(TrajectoryError, match=next(iter(broken))):
        trajectory.check()


@pytest.mark.parametrize(
    ("source", "logprob", "version", "said"),
    [
        (Source.POLICY, None, 0, "missing"),
        (Source.POLICY, -1.0, -1, "version"),
        (Source.ENV, -1.0, -1, "log-prob"),
        (Source.ENV, None, 2, "version"),
    ],
)
def test_provenance_must_be_consistent(source: Source, logprob: float | None, version: int, said: str) -> None:
    with pytest.raises(TrajectoryError, match=said):
        Trajectory(
            task_id="t", group_id="g", episode_id="e", token_ids=[1], source=[source],
            rollout_logprobs=[logprob], policy_versions=[version],
        )  # fmt: skip


@pytest.mark.parametrize(("start", "end"), [(-1, 0), (0, 2), (1, 0)])
def test_turns_must_lie_inside(start: int, end: int) -> None:
    trajectory = empty()
    trajectory.add_context([1], Source.PROMPT)
    trajectory.turns.append(Turn(who=Source.ENV, start=start, end=end))
    with pytest.raises(TrajectoryError, match="turn"):
        trajectory.check()


def test_episode_shows_the_policys_turns_and_the_last_one() -> None:
    segments = (Segment(Source.PROMPT, "q"), Segment(Source.POLICY, "a"), Segment(Source.ENV, "o"))
    episode = Episode(task_id="t", episode_id="e", segments=(*segments, Segment(Source.POLICY, "b")))
    assert episode.policy_texts == ("a", "b")
    assert episode.final_text == "b"
    assert Episode(task_id="t", episode_id="e", segments=segments[:1]).final_text == ""


def test_stop_reasons_have_stable_names() -> None:
    assert [str(reason) for reason in StopReason][:4] == ["stop_id", "stop_string", "length", "abort"]
