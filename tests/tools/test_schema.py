"""Type hints and docstrings -> what a policy reads; its arguments -> what a function gets."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from posttrain.tools import ToolDefinitionError, ToolError
from posttrain.tools.docstrings import parse_docstring
from posttrain.tools.schema import Signature
from posttrain.trajectory import CallStatus


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: int = 0


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


def everything(
    query: str,
    limit: Annotated[int, Field(ge=1, le=100, description="how many")] = 10,
    year: Optional[str] = None,  # noqa: UP045 -- the old spelling must work too
    kind: Literal["a", "b"] = "a",
    colour: Colour = Colour.RED,
    point: Point | None = None,
    tags: list[str] = [],  # noqa: B006
    weights: dict[str, float] | None = None,
    either: int | str = 1,
    title: str = "x",
) -> str:
    """Searches everything."""
    return query


def test_types_become_json_schema():
    schema = Signature(everything, "everything").parameters
    assert schema["required"] == ["query"]
    assert schema["additionalProperties"] is False
    assert schema["properties"] == {
        "query": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 10, "description": "how many"},
        "year": {"type": "string", "nullable": True, "default": None},
        "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
        "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}},
            "required": ["x"],
            "nullable": True,
            "default": None,
        },
        "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        "weights": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "nullable": True,
            "default": None,
        },
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 1},
        "title": {"type": "string", "default": "x"},
    }
    json.dumps(schema)


def test_a_type_that_holds_itself_keeps_its_definition():
    def grow(tree: Tree) -> None:
        """Grows."""

    schema = Signature(grow, "grow").parameters
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert schema["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}


def test_arguments_become_the_hinted_types_and_defaults_stay_with_the_function():
    bound = Signature(everything, "e").bind({"query": "q", "limit": "5", "point": {"x": 1}, "colour": "blue"})
    assert bound == {"query": "q", "limit": 5, "point": Point(x=1), "colour": Colour.BLUE}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "query is missing"),
        ({"query": 5}, "query: expected a valid string, got 5"),
        ({"query": "q", "limit": 0}, "limit: expected greater than or equal to 1, got 0"),
        ({"query": "q", "kind": "z"}, "kind: expected 'a' or 'b', got \"z\""),
        ({"query": "q", "limt": 3}, "there is no argument 'limt'. Did you mean 'limit'?"),
        ({"query": "q", "point": {"x": "far"}}, "point.x: expected a valid integer"),
        ({"query": "q", "tags": "a"}, 'tags: expected a valid list, got "a"'),
    ],
)
def test_wrong_arguments_say_what_was_seen_and_expected(arguments: dict[str, Any], words: str):
    with pytest.raises(ToolError) as caught:
        Signature(everything, "e").bind(arguments)
    assert caught.value.status is CallStatus.BAD_ARGUMENTS
    assert words in caught.value.message
    assert "e takes: query (string), limit (integer, optional)" in caught.value.message


def test_a_huge_wrong_argument_is_shown_in_part():
    with pytest.raises(ToolError) as caught:
        Signature(everything, "e").bind({"query": ["x" * 10_000] * 100} | {f"x{i}": 0 for i in range(50)})
    assert len(caught.value.message) < 2000


def test_what_cannot_be_offered_says_why():
    def unhinted(a) -> None: ...
    def many(*parts: str) -> None: ...
    def by_position(a: int, /) -> None: ...
    def hidden(_a: int) -> None: ...
    def odd(a: pytest.Item) -> None: ...
    def unknown(a: Nowhere) -> None: ...  # noqa: F821  # pyright: ignore

    for function, words in (
        (unhinted, "no type hint"),
        (many, "by name"),
        (by_position, "by name"),
        (hidden, "underscore"),
        (odd, "Item"),
        (unknown, "Nowhere"),
    ):
        with pytest.raises(ToolDefinitionError, match=words):
            Signature(function, "f")


GOOGLE = """Searches papers.

    Over all of them,
    in order.

    Args:
        query (str): what to look
            for: words
        limit: how many

        year (int, optional): not before

    Returns:
        limit: not a parameter
    """
NUMPY = """Searches papers.

    Over all of them,
    in order.

    Parameters
    ----------
    query : str
        what to look
        for: words
    limit, most : int, optional
        how many
    year
        not before

    Returns
    -------
    limit : int
        not a parameter
    """
SPHINX = """Searches papers.

    Over all of them,
    in order.

    :param query: what to look
        for: words
    :type query: str
    :param int limit: how many
    :param year: not before
    :returns: text
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_docstrings_of_three_styles(text: str):
    docstring = parse_docstring(text)
    assert docstring.description == "Searches papers.\nOver all of them, in order."
    assert {name: docstring.parameters[name] for name in ("query", "limit", "year")} == {
        "query": "what to look for: words",
        "limit": "how many",
        "year": "not before",
    }


@pytest.mark.parametrize("text", [None, "", "Args:", "Parameters\n----------", ":param x:", "Args:\n  *args: all"])
def test_odd_docstrings(text: str | None):
    assert parse_docstring(text).description == ""


def test_a_generator_is_no_tool():
    def lines(count: int):
        """Gives lines."""
        yield from range(count)

    async def later(count: int):
        """Gives lines."""
        yield count

    for function in (lines, later):
        with pytest.raises(ToolDefinitionError, match="is a generator, whose values nobody would read; return a list"):
            Signature(function, "lines")
