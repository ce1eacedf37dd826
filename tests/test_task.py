import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.task import Abstain, EpisodeInvalid, Invalid, Score, Task, as_outcome, detached
from posttrain.trajectory import CallStatus, ToolCall


@given(st.floats(min_value=-1e30, max_value=1e30))
def test_any_finite_number_is_a_score(value: float) -> None:
    assert as_outcome(value) == Score(value)


@pytest.mark.parametrize(
    "value",
    [True, 1, 1.0, np.float32(1), np.bool_(True), np.array(1.0), np.array([1.0]), torch.tensor(1), torch.tensor([1.0])],
)
def test_p77_bools_and_numpy_and_torch_scalars_are_scores(value: object) -> None:
    outcome = as_outcome(value)
    assert outcome == Score(1.0)
    assert isinstance(outcome, Score)
    assert type(outcome.value) is float


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), 1e31, -(10**400)]
)
def test_p77_not_a_number_is_invalid_not_zero(value: object) -> None:
    outcome = as_outcome(value)
    assert isinstance(outcome, Invalid)
    assert outcome.reason == "non_finite_reward"


def test_p77_none_abstains() -> None:
    assert isinstance(as_outcome(None), Abstain)


@pytest.mark.parametrize("value", [Score(0.5, {"em": 0.5}, "x"), Invalid("timeout"), Abstain("no opinion")])
def test_outcomes_pass_unchanged(value: object) -> None:
    assert as_outcome(value) is value


@pytest.mark.parametrize("value", ["1.0", [1.0], {"score": 1.0}, object()])
def test_other_types_are_a_type_error_that_names_them(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        as_outcome(value)


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), torch.zeros(3)])
def test_more_than_one_number_is_refused(value: object) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        as_outcome(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e31])
def test_a_score_must_be_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Score(value)


def test_episode_invalid_keeps_reason_and_detail() -> None:
    failure = EpisodeInvalid("tool_down", "port 8000")
    assert (failure.reason, failure.detail, str(failure)) == ("tool_down", "port 8000", "tool_down: port 8000")
    assert str(EpisodeInvalid("timeout")) == "timeout"


def test_a_task_cannot_be_changed_and_needs_only_id_and_prompt() -> None:
    task = Task(id="a", prompt=({"role": "user", "content": "q"},))
    assert task.ground_truth == ()
    assert task.extra == {}
    with pytest.raises(AttributeError):
        task.id = "b"  # type: ignore[misc]


def test_rewards_of_turns_are_finite_numbers_and_none_is_nothing_earned() -> None:
    assert Score(1.0, turns=[0.5, None, np.float32(2)]).turns == (0.5, 0.0, 2.0)  # type: ignore[list-item]
    assert Score(1.0).turns is None
    with pytest.raises(ValueError, match="finite"):
        Score(1.0, turns=[math.nan])


def test_a_score_holds_plain_numbers_whatever_library_they_came_from() -> None:
    parts = {"em": np.float32(0.5), "n": np.int64(3), "ok": True, "t": torch.tensor(2.0), "unknown": None}
    score = Score(np.float32(0.5), parts)  # type: ignore[arg-type]
    assert json.dumps([score.value, dict(score.components)]) == '[0.5, {"em": 0.5, "n": 3.0, "ok": 1.0, "t": 2.0}]'


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"value": "1.0"}, "got str: '1.0'"),
        ({"components": {"em": "yes"}}, "Score.components .* {'em': 'yes'}"),
        ({"components": {1: 1.0}}, "Score.components"),
        ({"components": None}, "Score.components .* NoneType"),
        ({"prediction": 42}, "Score.prediction is a text or None, got int: 42"),
    ],
)
def test_a_score_of_other_things_is_refused_where_it_is_made(given: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        Score(**{"value": 1.0} | given)


@pytest.mark.parametrize("kind", [Invalid, Abstain, EpisodeInvalid])
@pytest.mark.parametrize("reason", [7, None, " "])
def test_a_reason_is_a_text_that_can_be_counted(kind: Callable[[Any], object], reason: object) -> None:
    with pytest.raises(TypeError, match=f"the reason of {kind.__name__} is a short text"):
        kind(reason)


def test_what_failed_becomes_text_that_a_file_takes() -> None:
    assert Invalid("down", ValueError("caf\udce9")).detail == "caf\\udce9"  # type: ignore[arg-type]
    assert EpisodeInvalid("down", OSError("é")).detail == "é"  # type: ignore[arg-type]
    assert Score(1.0, prediction="\udce9").prediction == "\\udce9"


def test_a_call_says_what_is_wrong_with_it() -> None:
    assert ToolCall(name="s", arguments={}, status="ok").status is CallStatus.OK  # type: ignore[arg-type]
    for wrong in ({"status": "fine"}, {"name": None}, {"arguments": None}, {"seconds": None}, {"detail": None}):
        with pytest.raises((TypeError, ValueError), match=f"ToolCall.{next(iter(wrong))}"):
            ToolCall(**{"name": "s", "arguments": {}, "status": CallStatus.OK} | wrong)


def test_own_copies_share_no_container_with_the_task_and_everything_else() -> None:
    client = object()
    row = {"notes": [["a"], {"b": [1]}], "seen": {1}, "pair": ([2], "x"), "client": client}
    asked = Task(id="t", prompt=({"role": "user", "content": [{"type": "text", "text": "?"}]},), extra=row)
    own = asked.own()
    assert own == asked
    own.prompt[0]["content"][0]["text"] = "changed"
    own.extra["notes"][1]["b"].append(2)  # type: ignore[index]
    own.extra["seen"].add(2)
    own.extra["pair"][0].append(3)
    assert asked.prompt[0]["content"] == [{"type": "text", "text": "?"}]
    assert asked.extra == {"notes": [["a"], {"b": [1]}], "seen": {1}, "pair": ([2], "x"), "client": client}
    assert own.extra["client"] is client


def test_long_texts_are_not_copied() -> None:
    text = "long " * 6000
    assert detached([{"content": text}])[0]["content"] is text
