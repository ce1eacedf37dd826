"""Texts <-> JSON values, where a syntax writes arguments as texts (XML attributes, parameters, `search[...]`).

What a text means depends on the types that the schema allows for it:

* only strings: the text as it is;
* strings and other types: the text, unless it is the JSON of a value of one of the other types; a string that would be
  mistaken for one is written as a JSON string;
* no strings: `5` and `+5` are integers, and so is `5.0` where only integers are due; `true`/`True` booleans,
  `null`/`None` null; arrays and objects are JSON or, failing that, Python literals. A text that fits nothing stays a
  text, which the schema then refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from posttrain.chat.calls import json_text
from posttrain.chat.calls.python_text import PythonProblem, literal

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
STRING_ONLY = frozenset({"string"})
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}(?:\.0{1,20})?")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,4})?")
_WORDS: dict[str, tuple[str, Any]] = {
    "true": ("boolean", True),
    "false": ("boolean", False),
    "null": ("null", None),
    "none": ("null", None),
}
_REFERENCES = 8  # references followed one after another


def json_types(schema: Any, root: Mapping[str, Any], followed: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; all where it does not say. `root` resolves local references."""
    if not isinstance(schema, Mapping):
        return TYPES
    if isinstance(target := schema.get("$ref"), str) and followed < _REFERENCES:
        return json_types(resolve(target, root), root, followed + 1)
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(kind)
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list) and choices and followed < _REFERENCES:
            return frozenset().union(*(json_types(choice, root, followed + 1) for choice in choices))
    if isinstance(parts := schema.get("allOf"), list) and followed < _REFERENCES:
        return TYPES.intersection(*(json_types(part, root, followed + 1) for part in parts))
    if isinstance(values := schema.get("enum"), list):
        return frozenset(kind_of(value) for value in values)
    return frozenset({kind_of(schema["const"])}) if "const" in schema else TYPES


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of `root` that a local JSON pointer names; ValueError when there is none."""
    if not reference.startswith("#"):
        raise ValueError(f"the reference {reference!r} leaves the schema; only '#/...' is followed")
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise ValueError(f"the reference {reference!r} names nothing in the schema")
    return found


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    for kind, python in (("boolean", bool), ("integer", int), ("number", float), ("string", str)):
        if isinstance(value, python):
            return kind
    return "array" if isinstance(value, list | tuple) else "object"


def decode(text: str, types: frozenset[str]) -> Any:
    """The value that a text means where a value of one of `types` is due."""
    if types == STRING_ONLY:
        return text
    if "string" in types:
        return _decode_beside_strings(text, types)
    stripped = text.strip()
    word = _WORDS.get(stripped.lower()) if len(stripped) < 6 else None
    if word and word[0] in types:
        return word[1]
    if types & {"integer", "number"} and _INTEGER.fullmatch(stripped):
        whole, point, _ = stripped.partition(".")
        return float(stripped) if point and "number" in types else int(whole)
    if "number" in types and _NUMBER.fullmatch(stripped):
        return float(stripped)
    return _container(stripped, types, text)


def _container(stripped: str, types: frozenset[str], text: str) -> Any:
    if stripped[:1] not in ("[", "{", "("):
        return text
    try:
        value = json_text.loads(stripped)
    except ValueError:
        try:
            value = literal(stripped)
        except PythonProblem:
            return text
    return value if kind_of(value) in types else text


def _decode_beside_strings(text: str, types: frozenset[str]) -> Any:
    try:
        value = json_text.loads(text)
    except ValueError:
        return text
    if isinstance(value, str):  # quoted only because it would be read as something else
        return value if _decode_beside_strings(value, types) != value else text
    kind = kind_of(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    return value if fits and not json_text.flaw(value) else text


def encode(value: Any, types: frozenset[str]) -> str:
    """The text that `decode` reads as this value."""
    if not isinstance(value, str):
        return json_text.dumps(value)
    if "string" in types and types != STRING_ONLY and _decode_beside_strings(value, types) != value:
        return json_text.dumps(value)
    return value


def whole_numbers(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value with 5.0 as 5 where the schema asks for an integer: JSON has one kind of number, Python two."""
    if isinstance(value, float):
        types = json_types(schema, root)
        return int(value) if value.is_integer() and "integer" in types and "number" not in types else value
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, dict):
        properties = schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        return {key: whole_numbers(item, known.get(key), root) for key, item in value.items()}
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [whole_numbers(item, schema["items"], root) for item in value]
    return value
