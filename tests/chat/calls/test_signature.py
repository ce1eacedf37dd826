"""Schemas: what a tool takes, what is said of what it does not take, and how texts become values."""

# ruff: noqa: E501 -- a table
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.chat.calls import Signatures
from posttrain.chat.calls.signature import Signature, json_schema
from posttrain.chat.calls.values import TYPES, decode, encode, json_types, resolve

from .toolsets import SEARCH, Spec, spec

PROPERTIES = {
    "query": {"type": "string", "minLength": 2},
    "limit": {"type": "integer", "maximum": 9},
    "kind": {"enum": ["a", "b"]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    "word": {"type": "string", "pattern": "^a"},
}
FIND = Signature(Spec("find", "", {"type": "object", "properties": PROPERTIES, "required": ["query"]}))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"query": "qq", "limit": 3, "kind": "a", "tags": [], "where": {"x": 1, "more": 2}, "word": "ab"}, ""),
        ({}, "the call lacks 'query'"),
        ({"query": "q"}, "argument 'query' breaks minLength: 2, got 'q'"),
        ({"query": 5}, "argument 'query' must be string, got 5"),
        ({"query": "qq", "limit": 3.5}, "argument 'limit' must be integer, got 3.5"),
        ({"query": "qq", "limit": True}, "argument 'limit' must be integer, got True"),
        ({"query": "qq", "limit": 10}, "argument 'limit' breaks maximum: 9, got 10"),
        ({"query": "qq", "kind": "c"}, "argument 'kind' must be one of 'a', 'b', got 'c'"),
        ({"query": "qq", "tags": ["x", 1]}, "argument 'tags[1]' must be string, got 1"),
        ({"query": "qq", "where": {}}, "argument 'where' lacks 'x'"),
        ({"query": "qq", "limt": 3}, "the call has no parameter 'limt'; there are 'query', 'limit'"),
        ({"query": "qq", "word": "b"}, "argument 'word' breaks pattern"),
    ],
)
def test_complaints_name_the_argument_the_rule_and_the_value(arguments, says):
    complaint = FIND.complaints(arguments)
    assert complaint.startswith(says)
    assert bool(complaint) == bool(says)


def test_a_complaint_is_short_whatever_it_quotes():
    assert len(FIND.complaints({"query": "qq", "tags": "x" * 10**6, "limit": "y" * 10**6, "kind": ["z"] * 10**5})) < 500


def test_names_of_types_from_the_wild_are_understood():
    schema = json_schema(
        {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "tuple", "items": {"type": "any"}}}}
    )
    assert schema["properties"] == {"a": {"type": "number"}, "b": {"type": "array", "items": {}}}
    assert schema["type"] == "object"


def test_whether_unknown_arguments_are_refused():
    assert json_schema({"properties": {"a": {}}})["additionalProperties"] is False
    assert json_schema({"properties": {"a": {}}, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in json_schema({"type": "object"})
    assert Signature(Spec("f", "", {})).complaints({"anything": 1}) == ""


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"type": "string"}, "an object, not 'string'"),
        ({"properties": {"a": {"type": "text"}}}, "no JSON schema"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}, "leaves the schema"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "names nothing"),
        ({"properties": {"a": {"pattern": "("}}}, "not a 'regex'"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_tools_name(parameters, says):
    with pytest.raises(ValueError, match=r"tool 'f': ") as error:
        Signatures([Spec("f", "", parameters)])
    assert says in str(error.value)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are called 'search'"):
        Signatures([SEARCH, SEARCH])


def test_recursive_schemas_are_followed():
    tree = {"type": "object", "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}}}
    signature = Signature(Spec("f", "", {"properties": {"tree": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}))
    assert signature.types("tree") == {"object"}
    assert signature.complaints({"tree": {"left": {"left": {"value": 1}}}}) == ""
    assert "'tree.left.left.value' must be integer" in signature.complaints(
        {"tree": {"left": {"left": {"value": "x"}}}}
    )


def test_the_main_parameter_is_the_first_required_one():
    assert Signature(spec("f", "b", a={}, b={}, c={})).main == "b"
    assert Signature(spec("f", a={}, b={})).main == "a"
    assert Signature(spec("f")).main is None


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"string"}, "5"),
        ("5", {"integer"}, 5),
        (" +5 ", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("five", {"integer"}, "five"),
        ("5", {"number"}, 5),
        ("-.5e1", {"number"}, -5.0),
        ("nan", {"number"}, "nan"),
        ("True", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("None", {"integer", "null"}, None),
        ('["a", 1]', {"array"}, ["a", 1]),
        ("['a', 'b']", {"array"}, ["a", "b"]),
        ("a, b", {"array"}, "a, b"),
        ('{"a": null}', {"object"}, {"a": None}),
        ("{'a': True}", {"object"}, {"a": True}),
        ("[1]", {"object"}, "[1]"),
        ("null", {"string", "null"}, None),
        ("None", {"string", "null"}, "None"),
        ('"null"', {"string", "null"}, "null"),
        ("nothing", {"string", "null"}, "nothing"),
        ("5", {"string", "integer"}, 5),
        ('"5"', {"string", "integer"}, "5"),
        ('"five"', {"string", "integer"}, '"five"'),
        ("[" * 10**5, {"array", "string"}, "[" * 10**5),
        ("1" * 10**5, {"integer"}, "1" * 10**5),
    ],
)
def test_what_a_text_means_depends_on_the_types_that_are_due(text, types, value):
    found = decode(text, frozenset(types))
    assert found == value
    assert type(found) is type(value)


VALUES = {
    "string": st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["5", "null", '"5"', '"\\"5\\""', "[]"]),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=3),
    "object": st.dictionaries(st.text("ab\"'", max_size=3), st.integers() | st.none(), max_size=3),
}  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sets(st.sampled_from(sorted(TYPES)), min_size=1))
def test_every_value_survives_being_written_as_a_text(data, types):
    value = data.draw(VALUES[data.draw(st.sampled_from(sorted(types)))])
    back = decode(encode(value, frozenset(types)), frozenset(types))
    assert json.dumps(back) == json.dumps(value)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, TYPES),
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "array"}, {"$ref": "#/a~1b"}]}, {"array", "boolean"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]}, TYPES),
        ({"const": 5}, {"integer"}),
    ],
)
def test_types_of_a_schema(schema, types):
    assert json_types(schema, {"a/b": {"type": "boolean"}}) == types


def test_references_are_json_pointers():
    assert resolve("#/a/1/b~0c", {"a": [0, {"b~c": 5}]}) == 5
    assert resolve("#", {"a": 1}) == {"a": 1}


def test_5_0_is_5_where_an_integer_is_due():
    tools = Signatures(
        [spec("f", a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}}, c={"type": "number"})]
    )
    from .toolsets import one

    found = one('<tool_call>{"name": "f", "arguments": {"a": 5.0, "b": [1.0], "c": 2.0}}</tool_call>', "hermes", tools)
    assert json.dumps(found.arguments) == '{"a": 5, "b": [1], "c": 2.0}'
