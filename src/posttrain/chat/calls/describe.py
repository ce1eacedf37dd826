"""Tools in a prompt: what each does and takes, with a call as an example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.chat.calls.json_text import dumps
from posttrain.chat.calls.signature import Signature
from posttrain.chat.calls.values import json_types, resolve

_DEPTH = 4  # of nested objects in an example


def describe(signature: Signature, example: str) -> str:
    """Name, description, parameters, a call."""
    lines = [f"### {signature.name}", signature.description.strip()]
    if signature.properties:
        lines.append("Parameters:")
        lines += [_parameter(name, part, name in signature.required) for name, part in signature.properties.items()]
    else:
        lines.append("It takes no parameters.")
    if example:
        lines += ["A call:", example]
    return "\n".join(line for line in lines if line)


def _parameter(name: str, schema: Any, required: bool) -> str:
    schema = schema if isinstance(schema, Mapping) else {}
    known = {key: value for key, value in schema.items() if key not in ("description", "title", "default", "type")}
    kind = schema.get("type", "any")
    facts = [kind if isinstance(kind, str) else " or ".join(kind), "required" if required else "optional"]
    facts += [f"default {dumps(schema['default'])}"] if "default" in schema else []
    facts += [f"{key} {dumps(value)}" for key, value in known.items()]
    description = " ".join(str(schema.get("description", "")).split())
    return f"- {name} ({', '.join(facts)}){': ' + description if description else ''}"


def example_arguments(signature: Signature) -> dict[str, Any]:
    """Arguments that show what is asked for: the required ones, or the main one."""
    names = [name for name in signature.properties if name in signature.required]
    if not names and signature.main is not None:
        names = [signature.main]
    return {name: _example(name, signature.properties[name], signature.schema, 0) for name in names}


def _example(name: str, schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """A value of the right type, within enums, bounds and lengths; patterns and formats are not looked at."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return f"your {name}"
    if isinstance(target := schema.get("$ref"), str):
        return _example(name, resolve(target, root), root, depth + 1)
    for key in ("enum", "examples"):
        if isinstance(schema.get(key), list) and schema[key]:
            return schema[key][0]
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return _example(name, schema[key][0], root, depth + 1)
    types = json_types(schema, root)
    if "string" in types:
        text = f"your {name}"[: schema.get("maxLength", 100)]
        return text.ljust(schema.get("minLength", 0), "…")
    if types & {"integer", "number"}:
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        return min(low, schema.get("maximum", low))
    if "array" in types:
        return [_example(name, schema.get("items", {}), root, depth + 1)] * max(1, schema.get("minItems", 1))
    if "object" in types:
        properties = schema.get("properties", {})
        names = [key for key in properties if key in schema.get("required", ())]
        return {key: _example(key, properties[key], root, depth + 1) for key in names}
    return True if "boolean" in types else None
