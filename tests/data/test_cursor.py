"""The order of tasks: exact epochs, exact mixtures, exact continuation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import DataError, TaskSet, TaskSource, TaskStream
from posttrain.data.config import CurriculumConfig
from posttrain.task import Task


def pool(name: str, ids: Sequence[int] | int, weight: float | None = None) -> TaskSource:
    numbers = range(ids) if isinstance(ids, int) else ids
    tasks = tuple(Task(id=f"{name}/{i}", prompt=({"role": "user", "content": f"{name} {i}"},)) for i in numbers)
    return TaskSource(name=name, tasks=tasks, weight=weight)


def stream(*sources: TaskSource, seed: int = 0, shuffle: bool = True) -> TaskStream:
    return TaskStream(TaskSet(sources=sources), seed=seed, shuffle=shuffle)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


def through_json(state: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state, allow_nan=False))


def test_p114_kill_after_step_8_of_128_continues_at_24_of_epoch_2() -> None:
    whole = stream(pool("a", 1000))
    epochs = [ids(whole.next(1000)) for _ in range(3)]
    assert all(len(set(epoch)) == 1000 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3

    killed = stream(pool("a", 1000))
    for _ in range(8):
        killed.next(128)
    resumed = stream(pool("a", 1000))
    assert resumed.load_state_dict(through_json(killed.state_dict())) == []
    assert ids(resumed.next(976)) == epochs[1][24:]
    assert ids(resumed.next(1000)) == epochs[2]


def test_p115_kill_exactly_at_the_end_of_an_epoch_begins_the_next() -> None:
    killed = stream(pool("a", 64))
    first = ids(killed.next(64))
    assert killed.epochs == {"": 1.0}
    resumed = stream(pool("a", 64))
    resumed.load_state_dict(through_json(killed.state_dict()))
    second = ids(resumed.next(64))
    assert sorted(second) == sorted(first)
    assert second == ids(killed.next(64))
    assert resumed.epochs == {"": 2.0}


def test_a_batch_may_span_epochs_and_be_larger_than_the_data() -> None:
    drawn = ids(stream(pool("a", 3)).next(8))
    assert sorted(drawn[:3]) == sorted(drawn[3:6]) == ["a/0", "a/1", "a/2"]
    with pytest.raises(ValueError, match="count must be >= 1"):
        stream(pool("a", 3)).next(0)


sources_strategy = st.one_of(
    st.lists(st.integers(1, 12), min_size=1, max_size=3).map(
        lambda sizes: tuple(pool(f"s{i}", size) for i, size in enumerate(sizes))
    ),
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.01, 100)), min_size=1, max_size=4).map(
        lambda parts: tuple(pool(f"s{i}", size, weight) for i, (size, weight) in enumerate(parts))
    ),
)


@given(
    sources=sources_strategy,
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    counts=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_same_state_same_continuation(
    sources: tuple[TaskSource, ...], seed: int, shuffle: bool, counts: list[int], data: st.DataObject
) -> None:
    total = sum(counts)
    whole = ids(stream(*sources, seed=seed, shuffle=shuffle).next(total))
    saved_after = data.draw(st.integers(0, len(counts)))

    before = stream(*sources, seed=seed, shuffle=shuffle)
    pieces = [task_id for count in counts[:saved_after] for task_id in ids(before.next(count))]
    state = through_json(before.state_dict())
    before.next(5)  # what happens after the save does not reach into it

    after = stream(*sources, seed=seed, shuffle=shuffle)
    after.next(data.draw(st.integers(1, 30)))  # nor does what the restored stream did before
    assert after.load_state_dict(state) == []
    assert through_json(after.state_dict()) == state
    pieces += [task_id for count in counts[saved_after:] for task_id in ids(after.next(count))]
    assert pieces == whole


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), passes=st.integers(1, 4))
def test_every_epoch_holds_every_task_once(sizes: list[int], seed: int, passes: int) -> None:
    sources = [pool(f"s{i}", size) for i, size in enumerate(sizes)]
    drawn = ids(stream(*sources, seed=seed).next(passes * sum(sizes)))
    assert set(Counter(drawn).values()) == {passes}
    assert len(Counter(drawn)) == sum(sizes)


@given(
    weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    size=st.integers(1, 7),
    count=st.integers(1, 200),
)
@settings(deadline=None)
def test_mixture_shares_hold_at_every_draw(weights: list[float], size: int, count: int) -> None:
    mixed = stream(*(pool(f"s{i}", size, weight) for i, weight in enumerate(weights)))
    drawn = ids(mixed.next(count))
    for n in range(1, count + 1):
        counts = Counter(task_id.partition("/")[0] for task_id in drawn[:n])
        for i, weight in enumerate(weights):
            behind = n * weight / sum(weights) - counts[f"s{i}"]
            assert -1 < behind < len(weights)
    # and every lane goes through its own tasks before it repeats one
    for i in range(len(weights)):
        lane = [task_id for task_id in drawn if task_id.startswith(f"s{i}/")]
        for start in range(0, len(lane) - size + 1, size):
            assert len(set(lane[start : start + size])) == size


def test_a_small_source_repeats_while_a_large_one_is_still_in_its_first_pass() -> None:
    mixed = stream(pool("small", 5, 0.5), pool("large", 100, 0.5))
    drawn = Counter(ids(mixed.next(100)))
    assert all(drawn[f"small/{i}"] == 10 for i in range(5))
    assert max(count for task_id, count in drawn.items() if task_id.startswith("large")) == 1
    assert mixed.epochs == {"small": 10.0, "large": 0.5}


def test_order_depends_on_seed_and_not_on_rows_or_platform() -> None:
    assert ids(stream(pool("a", 50), seed=1).next(50)) != ids(stream(pool("a", 50), seed=2).next(50))
    assert ids(stream(pool("a", 50)).next(50)) == ids(stream(pool("a", range(49, -1, -1))).next(50))
    assert ids(stream(pool("a", 6)).next(8)) == ["a/0", "a/2", "a/3", "a/5", "a/4", "a/1", "a/3", "a/5"]
    assert ids(stream(pool("a", 4), shuffle=False).next(6)) == ["a/0", "a/1", "a/2", "a/3", "a/0", "a/1"]


def test_shuffling_is_even() -> None:
    """Over many seeds each task comes first about equally often (chi-square, 9 degrees of freedom, p = 1e-4)."""
    firsts = Counter(stream(pool("a", 10), seed=seed).next(1)[0].id for seed in range(2000))
    chi_square = sum((firsts[f"a/{i}"] - 200) ** 2 / 200 for i in range(10))
    assert chi_square < 33.7


def test_changed_rows_are_refused_with_what_changed_and_nothing_moves() -> None:
    saved = stream(pool("a", 10))
    consumed = ids(saved.next(4))
    state = through_json(saved.state_dict())
    gone = int(consumed[0].partition("/")[2])
    now = stream(pool("a", [i for i in range(13) if i != gone]))
    position = now.state_dict()
    with pytest.raises(DataError) as caught:
        now.load_state_dict(state)
    assert "the pool of all sources had 10 tasks, has 12" in str(caught.value)
    assert f"1 of the 4 consumed in this epoch are gone, e.g. ['{consumed[0]}']" in str(caught.value)
    assert "data.changed: continue" in str(caught.value)
    assert now.state_dict() == position


def test_continuing_over_changed_rows_repeats_nothing_and_skips_nothing() -> None:
    saved = stream(pool("a", 10))
    consumed = ids(saved.next(4))
    expected_rest = ids(stream(pool("a", 10)).next(10))[4:]
    state = through_json(saved.state_dict())
    removed = {int(consumed[0].partition("/")[2]), int(expected_rest[0].partition("/")[2])}
    now = stream(pool("a", [i for i in range(12) if i not in removed]))
    assert len(now.load_state_dict(state, changed="continue")) == 1
    rest = ids(now.next(10 - len(removed) + 2 - 3))
    assert [task_id for task_id in rest if task_id not in ("a/10", "a/11")] == expected_rest[1:]
    assert {"a/10", "a/11"} <= set(rest)
    assert now.epochs == {"": 1.0}
    assert len(set(ids(now.next(10)))) == 10


def test_edited_rows_are_noticed() -> None:
    state = stream(pool("a", 3)).state_dict()
    edited = TaskSource(
        name="a", tasks=(*pool("a", 2).tasks, Task(id="a/2", prompt=({"role": "user", "content": "else"},)))
    )
    with pytest.raises(DataError, match="had 3 tasks, has 3, of other content"):
        stream(edited).load_state_dict(state)


def test_changed_settings_and_sources_are_named() -> None:
    mixed = stream(pool("a", 5, 1), pool("b", 5, 1), seed=1)
    mixed.next(6)
    state = through_json(mixed.state_dict())
    other = stream(pool("a", 5, 3), pool("c", 4, 1), seed=2, shuffle=False)
    with pytest.raises(DataError) as caught:
        other.load_state_dict(state)
    for expected in (
        "seed was 1, is 2",
        "shuffle was True, is False",
        "source 'a' had share 0.5 of the draws, has 0.75",
        "source 'b' is gone (5 tasks)",
        "source 'c' is new (4 tasks)",
    ):
        assert expected in str(caught.value)
    other.load_state_dict(state, changed="continue")
    drawn = Counter(task_id[0] for task_id in ids(other.next(8)))
    assert drawn == {"a": 6, "c": 2}  # the new shares hold from here on, without catching up


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.update(format=99), "no task position of format 1"),
        (lambda state: state.pop("seed"), r"lacks \['seed'\]"),
        (lambda state: state["lanes"][0].pop("epoch"), r"lacks \['epoch'\]"),
        (lambda state: state["lanes"][0]["consumed"].append(state["lanes"][0]["consumed"][0]), "consumed twice"),
    ],
)
def test_a_spoilt_position_is_refused(spoil: Any, message: str) -> None:
    saved = stream(pool("a", 5))
    saved.next(2)
    state = through_json(saved.state_dict())
    spoil(state)
    with pytest.raises(DataError, match=message):
        stream(pool("a", 5)).load_state_dict(state)


def test_task_sets_are_never_empty_and_ids_unique() -> None:
    with pytest.raises(DataError, match="empty"):
        TaskSet(sources=())
    with pytest.raises(DataError, match=r"1 occur more than once, e\.g\. \['a/0'\]"):
        TaskSet(sources=(pool("a", 2), pool("a", 1)))
    with pytest.raises(DataError, match="every source a weight or none"):
        stream(pool("a", 2, 1.0), pool("b", 2))


def curriculum(size: int, rest_epochs: int = 2, seed: int = 0) -> TaskStream:
    rests = CurriculumConfig(low=0.1, high=0.9, rest_epochs=rest_epochs)
    return TaskStream(TaskSet(sources=(pool("a", size),)), seed=seed, curriculum=rests)


def test_tasks_that_teach_nothing_rest_and_come_back() -> None:
    tasks = curriculum(10)
    first = ids(tasks.next(10))
    tasks.report(dict.fromkeys(first, 0.5) | {first[0]: 1.0, first[1]: 0.1, first[2]: 0.0})
    assert tasks.resting == 3
    for _ in range(2):
        assert set(ids(tasks.next(7))) == set(first[3:])
    assert tasks.resting == 0
    assert set(ids(tasks.next(10))) == set(first)


def test_when_all_rest_all_are_called_back() -> None:
    tasks = curriculum(4)
    tasks.report(dict.fromkeys(ids(tasks.next(4)), 1.0))
    assert len(set(ids(tasks.next(4)))) == 4


def test_a_task_is_passed_over_at_once_when_its_group_came_in_after_the_epoch_had_ended() -> None:
    tasks = curriculum(4)
    drawn = ids(tasks.next(5))  # the fifth begins the second epoch
    tasks.report(dict.fromkeys(drawn, 0.0) | {drawn[4]: 0.5})
    assert ids(tasks.next(1)) == [drawn[4]], "nobody else is awake, and its own epoch is over"


@given(
    size=st.integers(1, 9),
    rounds=st.lists(st.tuples(st.integers(1, 6), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6))),
    stop=st.integers(0, 20),
)
def test_a_resumed_curriculum_goes_on_as_if_nothing_had_happened(
    size: int, rounds: list[tuple[int, list[float]]], stop: int
) -> None:
    whole, resumed = curriculum(size), curriculum(size)
    for number, (count, scores) in enumerate(rounds):
        drawn = ids(whole.next(count))
        whole.report(dict(zip(drawn, scores, strict=False)))
        if number >= stop:
            assert ids(resumed.next(count)) == drawn
            resumed.report(dict(zip(drawn, scores, strict=False)))
        if number + 1 == stop:
            assert resumed.load_state_dict(through_json(whole.state_dict())) == []
    assert stop > len(rounds) or resumed.state_dict() == whole.state_dict()


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="must be below high"):
        CurriculumConfig(low=0.5, high=0.5)
    with pytest.raises(ValueError, match="leave `curriculum` out"):
        CurriculumConfig(low=None, high=None)
    assert CurriculumConfig(low=None, high=0.9).teaches(0.0)
