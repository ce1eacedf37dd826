"""A Python signature -> the JSON schema that a policy reads, and a check of the arguments that it writes."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, ValidationError, create_model
from pydantic.fields import FieldInfo

from posttrain.location import did_you_mean
from posttrain.tools.docstrings import Docstring, parse_docstring
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

SHOWN_CHARACTERS = 100  # of a wrong argument, in the message about it
SHOWN_ERRORS = 5


class ToolDefinitionError(ValueError):
    """A function or class that cannot be offered as a tool, and what to change."""


class Signature:
    """The parameters of a function as a model of its arguments.

    `description` is the docstring's, `parameters` the JSON schema: local references resolved, titles left out,
    `Optional[X]` as X with "nullable", because many chat templates read the `type` of every parameter.
    given: parameters that the config fills and the policy does not see.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, given: Collection[str] = ()) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ToolDefinitionError(f"tool {name} is a generator, whose values nobody would read; return a list")
        self.name = name
        docstring = parse_docstring(inspect.getdoc(function))
        self.description = docstring.description
        try:
            self._model = create_model(
                name, __config__=ConfigDict(extra="forbid"), **_fields(function, name, docstring, given)
            )
            self.parameters = plain_schema(self._model.model_json_schema())
        except PydanticUserError as error:
            raise ToolDefinitionError(f"tool {name}: a type hint has no JSON schema: {error.message}") from error

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the hinted types, defaults left to the function.

        Raises ToolError(BAD_ARGUMENTS), which says for each wrong argument what was expected and what was seen.
        """
        try:
            model = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            raise ToolError(CallStatus.BAD_ARGUMENTS, self._explain(error)) from None
        return {field: getattr(model, field) for field in model.model_fields_set}

    def _explain(self, error: ValidationError) -> str:
        found = error.errors(include_url=False)
        problems = [self._problem(entry) for entry in found[:SHOWN_ERRORS]]
        more = f"; and {len(found) - SHOWN_ERRORS} more" if len(found) > SHOWN_ERRORS else ""
        return f"{'; '.join(problems)}{more}. {self.name} takes: {self._usage()}"

    def _problem(self, entry: Any) -> str:
        place = ".".join(str(part) for part in entry["loc"])
        if entry["type"] == "missing":
            return f"{place} is missing"
        if entry["type"] == "extra_forbidden":
            return f"there is no argument {place!r}.{did_you_mean(place, self.parameters['properties'])}".rstrip(".")
        message = entry["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        return f"{place}: expected {message}, got {shown(entry['input'])}"

    def _usage(self) -> str:
        required = self.parameters.get("required", [])
        parts = [
            f"{name} ({_type_of(schema)}{'' if name in required else ', optional'})"
            for name, schema in self.parameters["properties"].items()
        ]
        return ", ".join(parts) or "no arguments"


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _type_of(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(shown(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_type_of(schema.get('items', {}))}"
    if "anyOf" in schema:
        return " or ".join(_type_of(option) for option in schema["anyOf"])
    return str(schema.get("type", "any"))


def _fields(function: Callable[..., Any], name: str, docstring: Docstring, given: Collection[str]) -> dict[str, Any]:
    """Parameter -> (type, FieldInfo with default and description), for pydantic."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {name}: a type hint cannot be resolved ({error})") from error
    fields = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in given:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(
                f"tool {name}: parameter {parameter} is not named in a call; a policy gives every argument by name"
            )
        if parameter.name not in hints:
            raise ToolDefinitionError(
                f"tool {name}: parameter {parameter.name} has no type hint; the policy is told its type, "
                f"so write for example `{parameter.name}: str`"
            )
        if parameter.name.startswith("_"):
            raise ToolDefinitionError(f"tool {name}: the name {parameter.name} must not begin with an underscore")
        default = ... if parameter.default is parameter.empty else parameter.default
        info = FieldInfo.from_annotated_attribute(hints[parameter.name], default)
        if info.description is None:
            info.description = docstring.parameters.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], info)
    return fields


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A pydantic schema as a policy should read it. References that contain themselves stay, with their `$defs`."""
    definitions = schema.get("$defs", {})
    recursive = {name for name in definitions if _refers_to(name, definitions[name], definitions, set())}
    plain = _plain({key: value for key, value in schema.items() if key != "$defs"}, definitions, recursive)
    plain.pop("description", None)
    if recursive:
        plain["$defs"] = {name: _plain(definitions[name], definitions, recursive) for name in sorted(recursive)}
    return {"type": "object", "properties": {}} | plain


def _plain(node: Any, definitions: Mapping[str, Any], recursive: set[str]) -> Any:
    if isinstance(node, list):
        return [_plain(entry, definitions, recursive) for entry in node]
    if not isinstance(node, dict):
        return node
    reference = _reference(node)
    if reference is not None and reference not in recursive:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return _plain({**definitions[reference], **beside}, definitions, recursive)
    plain = {
        key: _entry(key, value, definitions, recursive) for key, value in node.items() if not _is_title(key, value)
    }
    return _without_null(plain)


def _entry(key: str, value: Any, definitions: Mapping[str, Any], recursive: set[str]) -> Any:
    if key == "properties":  # its keys are names of parameters: one may be called `title`
        return {name: _plain(schema, definitions, recursive) for name, schema in value.items()}
    return value if key in ("default", "enum", "const", "examples") else _plain(value, definitions, recursive)


def _is_title(key: str, value: Any) -> bool:
    return key == "title" and isinstance(value, str)


def _without_null(node: dict[str, Any]) -> dict[str, Any]:
    options = node.get("anyOf", [])
    others = [option for option in options if option != {"type": "null"}]
    if len(others) == len(options):
        return node
    rest = {key: value for key, value in node.items() if key != "anyOf"}
    return {**(others[0] if len(others) == 1 else {"anyOf": others}), "nullable": True, **rest}


def _reference(node: Any) -> str | None:
    target = node.get("$ref", "") if isinstance(node, dict) else ""
    return target.removeprefix("#/$defs/") if target.startswith("#/$defs/") else None


def _refers_to(name: str, node: Any, definitions: Mapping[str, Any], seen: set[str]) -> bool:
    if isinstance(node, list):
        return any(_refers_to(name, entry, definitions, seen) for entry in node)
    if not isinstance(node, dict):
        return False
    reference = _reference(node)
    if reference == name:
        return True
    if reference is not None and reference not in seen:
        return _refers_to(name, definitions[reference], definitions, seen | {reference})
    return any(_refers_to(name, value, definitions, seen) for value in node.values())
