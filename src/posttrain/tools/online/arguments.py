"""Arguments of the online tools: one pydantic model per tool gives the schema for the policy and the checked values.

Calls written as tags carry text only, so "8" is a number where one is asked for, and an absent or empty option is its
default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from posttrain.tools.protocol import ToolError, ToolSpec
from posttrain.trajectory import CallStatus


class Arguments(BaseModel):
    """What a call may say; unknown names are errors that list the known ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


A = TypeVar("A", bound=Arguments)


def spec_of(name: str, description: str, model: type[Arguments]) -> ToolSpec:
    """The schema without titles and nulls, which only cost tokens."""
    schema = model.model_json_schema(by_alias=True)
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {key: _plain(value) for key, value in schema.get("properties", {}).items()},
        "required": schema.get("required", []),
    }
    return ToolSpec(name=name, description=description, parameters=parameters)


def parse(tool: str, model: type[A], arguments: Mapping[str, Any]) -> A:
    """Raises ToolError(BAD_ARGUMENTS) that says what is wrong and what is known."""
    given = {key: value for key, value in arguments.items() if value is not None and value != ""}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = {"extra_forbidden": "is unknown", "missing": "is missing"}.get(first["type"], f": {first['msg']}")
        known = ", ".join(model.model_fields)
        message = f"{tool}: {where} {said}; arguments are {known}".replace(" :", ":")
        raise ToolError(CallStatus.BAD_ARGUMENTS, message) from error


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in schema.get("anyOf", []) if kind.get("type") != "null"]
    merged = {**schema, **kinds[0]} if len(kinds) == 1 else dict(schema)
    if len(kinds) == 1:
        merged.pop("anyOf")
    dropped = {"title"} | ({"default"} if merged.get("default", ...) is None else set())
    return {key: value for key, value in merged.items() if key not in dropped}
