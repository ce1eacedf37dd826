"""Prompts and ground truths in every shape that data sets of the field have."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.config import SourceConfig
from posttrain.data.fields import MISSING, answers_of, ends_in_reply, fill_template, lookup, messages_of, plain
from posttrain.data.problems import FieldError

PARIS = ({"role": "user", "content": "Capital of France?"},)


def object_array(*items: Any) -> np.ndarray:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def answers(value: Any, **options: Any) -> tuple[str, ...]:
    return answers_of({"gold": value}, ("gold",), SourceConfig(path="x.jsonl", **options))


@pytest.mark.parametrize(
    "value",
    [
        "Capital of France?",
        [{"role": "user", "content": "Capital of France?"}],
        object_array({"role": "user", "content": "Capital of France?"}),
        ({"role": "user", "content": "Capital of France?", "name": None},),
        json.dumps([{"role": "user", "content": "Capital of France?"}]),
        [{"role": "user", "content": [{"type": "text", "text": "Capital of "}, {"type": "text", "text": "France?"}]}],
    ],
    ids=["text", "list", "array", "null key", "json", "parts"],
)
def test_p110_prompt_of_every_shape_becomes_messages(value: Any) -> None:
    assert messages_of(value, "prompt") == PARIS


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (None, "is null"),
        (float("nan"), "is null"),
        (np.float32("nan"), "is null"),
        (MISSING, "is missing"),
        ("", "empty text"),
        ("  \n", "empty text"),
        ([], "no messages"),
        ("[]", None),  # text, not messages
        (7, "is int 7"),
        ({"role": "user", "content": "x"}, "is dict"),
        (["Capital of France?"], "message 0 has str"),
        ([{"from": "human", "value": "x"}], "message 0 has keys ['from', 'value']"),
        ([{"role": "User", "content": "x"}], "role 'User'"),
        ([{"role": ["user"], "content": "x"}], "role ['user']"),
        ([{"role": "user", "content": None}], "message 0 has content NoneType"),
        ([{"role": "user", "content": ""}], "only empty messages"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "message 0 has content list"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ends with an assistant message"),
        ("half \ud83d", "half a character at position 5"),
    ],
)
def test_p110_bad_prompts_are_refused_with_what_was_seen(value: Any, seen: str | None) -> None:
    if seen is None:
        assert messages_of(value, "prompt")[0]["content"] == value
        return
    with pytest.raises(FieldError) as caught:
        messages_of(value, "prompt")
    assert seen in caught.value.seen
    assert caught.value.column == "prompt"


def test_text_that_merely_looks_like_json_stays_text() -> None:
    for text in ("[1, 2] + [3] = ?", '["a", "b"]', '{"role": "user"}', "[broken"):
        assert messages_of(text, "prompt") == ({"role": "user", "content": text},)


def test_a_messages_column_loses_only_its_final_reply() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    reply = {"role": "assistant", "content": "d"}
    assert messages_of(turns, "messages") == tuple(turns)
    assert messages_of([*turns, reply], "messages") == tuple(turns)
    assert ends_in_reply([*turns, reply], "messages")
    assert not ends_in_reply(turns, "messages")
    assert not ends_in_reply([*turns, reply], "prompt")


def test_tool_calls_survive_without_the_null_keys_of_columnar_files() -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x", "expression": None}}}
    messages = messages_of(
        [
            {"role": "user", "content": "q", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_calls": None},
        ],
        "prompt",
    )
    assert messages[1]["content"] == ""
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"query": "x"}
    assert "tool_calls" not in messages[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("Paris", ("Paris",)),
        (["Paris"], ("Paris",)),
        ({"target": ["Paris", "Paname"]}, ("Paris", "Paname")),
        (object_array("Paris", "Paname"), ("Paris", "Paname")),
        (5, ("5",)),
        ([5], ("5",)),
        ({"target": object_array("Paris")}, ("Paris",)),
        ({"target": 98, "numbers": [44, 19, 35]}, ("98",)),
        (np.int64(5), ("5",)),
        (27.0, ("27",)),
        (0.5, ("0.5",)),
        ('["Paris"]', ('["Paris"]',)),  # text unless declared to be JSON
        ('{"query": "q", "rubrics": []}', ('{"query": "q", "rubrics": []}',)),
    ],
)
def test_p81_ground_truth_of_every_shape_becomes_text(value: Any, expected: tuple[str, ...]) -> None:
    assert answers(value) == expected


@pytest.mark.parametrize("value", [None, [], float("nan"), {"target": None}, {"target": []}, object_array()])
def test_p81_no_answer_is_refused(value: Any) -> None:
    with pytest.raises(FieldError, match="holds no answer") as caught:
        answers(value)
    assert caught.value.kind == "no ground truth"
    assert answers(value, ground_truth_required=False) == ()


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("", "an empty answer"),
        (["Paris", " "], "an empty answer"),
        (["Paris", None], "a null among its answers"),
        (True, "is True"),
        ([["Paris"]], "has list"),
        ({"answer": "Paris"}, "is dict"),
        ("\udc00", "half a character"),
    ],
)
def test_p81_bad_answers_are_refused_with_what_was_seen(value: Any, seen: str) -> None:
    with pytest.raises(FieldError) as caught:
        answers(value)
    assert seen in caught.value.seen
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"Paris"', ("Paris",)),
        ('["Paris"]', ("Paris",)),
        ('{"target": ["Paris"]}', ("Paris",)),
        ("5", ("5",)),
        ("[5]", ("5",)),
    ],
)
def test_p81_json_text_is_decoded_where_declared(text: str, expected: tuple[str, ...]) -> None:
    assert answers(text, ground_truth_format="json_answers") == expected
    with pytest.raises(FieldError, match="is no JSON"):
        answers("Paris", ground_truth_format="json_answers")


def test_opaque_ground_truth_is_kept_as_one_string() -> None:
    rubric = '{"query": "q", "rubrics": [{"description": "d", "weight": 1}]}'
    assert answers(rubric, ground_truth_format="opaque") == (rubric,)
    assert json.loads(answers(json.loads(rubric), ground_truth_format="opaque")[0]) == json.loads(rubric)


def test_answers_are_taken_from_several_columns_after_a_marker_and_for_booleans() -> None:
    source = SourceConfig(path="x", columns={"ground_truth": ["answer", "aliases"]})
    assert answers_of({"answer": "NYC", "aliases": ["New York"]}, ("answer", "aliases"), source) == ("NYC", "New York")
    assert answers_of({"answer": "NYC", "aliases": []}, ("answer", "aliases"), source) == ("NYC",)
    assert answers("2 #### 3 is 5\n#### 5 ", answer_after="####") == ("5",)
    assert answers([True, False], bool_answers=("yes", "no")) == ("yes", "no")
    with pytest.raises(FieldError, match="lacks '####'"):
        answers("5", answer_after="####")


def test_lookup_reaches_into_nested_values_and_json_text() -> None:
    row = {"a": {"b": {"c": 1}}, "a.b": 2, "j": '{"k": {"l": 3}}', "n": None}
    assert lookup(row, "a.b") == 2
    assert lookup({"a": {"b": 1}}, "a.b") == 1
    assert lookup(row, "j.k.l") == 3
    assert lookup(row, "n") is None
    assert lookup(row, "n.x") is MISSING
    assert lookup(row, "z") is MISSING


def test_plain_makes_json_types_and_drops_null_keys_but_not_list_items() -> None:
    value = {
        "array": np.array([1, 2]),
        "tools": {"search": {"create_kwargs": {"gt": "x", "none": None}}, "python": None},
        "list": [None, 1],
        "day": datetime.date(2024, 5, 1),
        "price": decimal.Decimal("1.50"),
        "nan": float("nan"),
    }
    made = plain(value)
    assert made == {
        "array": [1, 2],
        "tools": {"search": {"create_kwargs": {"gt": "x"}}},
        "list": [None, 1],
        "day": "2024-05-01",
        "price": "1.50",
    }
    assert json.loads(json.dumps(made)) == made


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
def test_any_value_is_read_or_refused_but_never_crashes(value: Any) -> None:
    for read in (lambda: messages_of(value, "prompt"), lambda: answers(value)):
        result, refusal = (), None
        try:
            result = read()
        except FieldError as error:
            refusal = error
        assert bool(result) != bool(refusal and refusal.seen and refusal.fix)
        assert all(item if isinstance(item, str) else item["role"] for item in result)


def test_template_reaches_columns_only() -> None:
    row = {"question": "Who {wrote} it?", "meta": {"n": 3}, "empty": " ", "none": None}
    assert fill_template("Q: {question} {{n={meta.n}}}", row) == "Q: Who {wrote} it? {n=3}"
    for column in ("empty", "none", "absent", "meta"):
        with pytest.raises(FieldError, match=column):
            fill_template(f"{{{column}}}", row)
