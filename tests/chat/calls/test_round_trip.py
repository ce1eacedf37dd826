"""What is rendered parses back to itself, in every syntax, for every call that the syntax can express."""

# ruff: noqa: E501 -- tables
from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.chat.calls import SYNTAXES, NotExpressible, Signatures, parse, parse_turn
from posttrain.trajectory import CallStatus

from .toolsets import Spec, spec

MARKS = [
    "</call_tool>", "<call_tool ", "</call>", "<think>", "</think>", "<tool_call>", "</tool_call>", "</parameter>",
    "</function>", "<parameter=", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<｜tool▁call▁end｜>", "```", "\nAction: x",
    "\nObservation", "null", "5", "true", '"', "'", "\\", "\n", " ", "]", "[", "&quot;", "&amp;", "<search>", "é", "\u2028",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.lists(st.sampled_from(MARKS), max_size=5).map("".join),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
PROPERTIES: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "query": ({"type": "string"}, TEXTS),
    "limit": ({"type": "integer"}, st.integers()),
    "share": ({"type": "number"}, st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
    "strict": ({"type": "boolean"}, st.booleans()),
    "year": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, st.none() | TEXTS),
    "id": ({"type": ["string", "integer"]}, st.integers() | TEXTS),
    "name": ({"type": "string"}, TEXTS),
    "tags": ({"type": "array", "items": {"type": "string"}}, st.lists(TEXTS, max_size=3)),
    "filter": ({"type": "object"}, st.dictionaries(TEXTS, VALUES, max_size=3)),
    "any": ({}, VALUES),
    "kind": ({"enum": ["a", 1, None]}, st.sampled_from(["a", 1, None])),
}  # fmt: skip
FIND = Spec(
    "find.all", "", {"properties": {key: schema for key, (schema, _) in PROPERTIES.items()}, "required": ["query"]}
)
TOOLS = Signatures([FIND, spec("search", "query", query={"type": "string"})])
ARGUMENTS = st.fixed_dictionaries(
    {"query": PROPERTIES["query"][1]},
    optional={key: values for key, (_, values) in PROPERTIES.items() if key != "query"},
)
CALLS = st.lists(
    st.tuples(st.just("find.all"), ARGUMENTS) | st.tuples(st.just("search"), st.fixed_dictionaries({"query": TEXTS})),
    min_size=1,
    max_size=3,
)


EVERYTHING = {  # whether a syntax can express every call
    "dr_tulu": True, "dr_tulu_unified": True, "hermes": True, "llama3_json": True, "llama_pythonic": True, "mistral": True,
    "mistral_v11": True, "deepseek_v3": True, "deepseek_v31": True, "react": True,
    "qwen3_coder": False,  # a value cannot hold the tags that would close it
    "search_r1": False,  # one text, without its own tags
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types: True is not 1, and 1 is not 1.0 unless the schema says number."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("name", SYNTAXES)
@settings(max_examples=100, deadline=None)
@given(calls=CALLS, before=st.sampled_from(["", "<think>hm</think>\n", "<think></think>"]))
def test_calls_parse_back_to_themselves(name, calls, before):
    try:
        text = SYNTAXES[name].render(calls, TOOLS)
    except NotExpressible:
        assert not EVERYTHING[name]
        return
    parsed = parse_turn(before + text, SYNTAXES[name], TOOLS)
    assert [found.status for found in parsed.attempts] == [CallStatus.OK] * len(calls), (text, parsed)
    assert [found.name for found in parsed.attempts] == [tool for tool, _ in calls]
    for found, (_, arguments) in zip(parsed.attempts, calls, strict=True):
        assert same(found.arguments, arguments), text
    assert parsed.content == ""


@settings(deadline=None)
@given(query=TEXTS.filter(lambda text: text.strip() and "search>" not in text and "answer>" not in text))
def test_search_r1_carries_any_text_without_its_own_tags(query):
    text = SYNTAXES["search_r1"].render([("search", {"query": query.strip()})], TOOLS)
    assert [found.arguments for found in parse(text, SYNTAXES["search_r1"], TOOLS)] == [{"query": query.strip()}]


def test_every_syntax_is_in_the_table_above():
    assert set(EVERYTHING) == set(SYNTAXES)


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, b"x", "\ud800"])
def test_what_json_cannot_carry_is_refused(name, value):
    with pytest.raises(NotExpressible):
        SYNTAXES[name].render([("search", {"query": value})], TOOLS)


@pytest.mark.parametrize(
    ("name", "tool", "arguments"),
    [
        ("search_r1", "find.all", {"query": "q"}),
        ("search_r1", "search", {"query": "a</search>"}),
        ("search_r1", "search", {"query": " a"}),
        ("search_r1", "search", {"query": "a", "limit": 1}),
        ("qwen3_coder", "search", {"query": "a</parameter></function>"}),
        ("qwen3_coder", "a>b", {}),
        ("llama_pythonic", "a b", {}),
        ("react", "a[b", {}),
        ("mistral_v11", "a[b", {}),
        ("deepseek_v3", "a\nb", {}),
        ("dr_tulu", "search", {"a b": "c"}),
        ("hermes", "", {}),
    ],
)
def test_what_a_syntax_cannot_say_is_refused(name, tool, arguments):
    with pytest.raises(NotExpressible):
        SYNTAXES[name].render([(tool, arguments)], TOOLS)


def test_names_that_are_no_identifiers_are_passed_in_a_dictionary():
    text = SYNTAXES["llama_pythonic"].render([("f", {"a": 1, "b-c": "x"})])
    assert text == '[f(a=1, **{"b-c": "x"})]'
    assert parse(text, SYNTAXES["llama_pythonic"])[0].arguments == {"a": 1, "b-c": "x"}
