"""What a tool takes: its JSON schema, checked once, then asked about every call.

Stricter than JSON schema in one point: an argument that `properties` does not name is refused, unless the schema says
otherwise (`additionalProperties`, `patternProperties`), because a function would refuse it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry

from posttrain.chat.calls import json_text
from posttrain.chat.calls.attempt import CUT, Attempt, Found, Spec, shown
from posttrain.chat.calls.values import STRING_ONLY, TYPES, decode, json_types, resolve, whole_numbers
from posttrain.trajectory import CallStatus, StopReason

# Names of types that schemas in the wild use instead of JSON schema's.
_TYPE_NAMES = {
    "dict": "object", "float": "number", "double": "number", "int": "integer", "long": "integer", "str": "string",
    "bool": "boolean", "list": "array", "tuple": "array", "none": "null", "any": None,
}  # fmt: skip
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties")
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "additionalProperties", "patternProperties", "unevaluatedProperties")
_DETAIL = 400  # characters of a complaint
_NAMES = 40  # names listed in one


def json_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """`parameters` as a JSON schema of an object: types by the names of JSON schema, unknown arguments refused.

    ValueError when it is none, or leaves itself by a reference.
    """
    schema = _renamed(dict(parameters or {}))
    if schema.setdefault("type", "object") != "object":
        raise ValueError(f"the parameters of a tool are an object, not {schema['type']!r}")
    if not isinstance(schema.get("required", []), list):
        del schema["required"]
    if "properties" in schema and not any(key in schema for key in _COMBINING):
        schema["additionalProperties"] = False
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        place = "/".join(map(str, error.absolute_path))
        raise ValueError(f"the parameters are no JSON schema: {error.message} (at {place or 'the top'})") from None
    _check_references(schema, schema)
    return schema


@lru_cache(maxsize=1024)
def _schema_of(text: str) -> dict[str, Any]:
    """Checking a schema takes milliseconds, and every episode may ask for the same ones."""
    return json_schema(json_text.loads(text))


def _renamed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    kind = made.get("type")
    if isinstance(kind, str) and kind.lower() in _TYPE_NAMES:
        made["type"] = _TYPE_NAMES[kind.lower()]
        if made["type"] is None:
            del made["type"]
    for key in _SCHEMAS_BY_NAME:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _renamed(part) for name, part in made[key].items()}
    for key in ("items", "additionalProperties", "not"):
        if isinstance(made.get(key), Mapping):
            made[key] = _renamed(made[key])
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(made.get(key), list):
            made[key] = [_renamed(part) for part in made[key]]
    return made


def _check_references(part: Any, root: Mapping[str, Any]) -> None:
    if isinstance(part, Mapping):
        if isinstance(target := part.get("$ref"), str):
            resolve(target, root)
        if isinstance(pattern := part.get("pattern"), str):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None
        for item in part.values():
            _check_references(item, root)
    elif isinstance(part, list):
        for item in part:
            _check_references(item, root)


class Signature:
    """One tool. `main` is the parameter that an unnamed text goes to: the first required one, else the first."""

    def __init__(self, spec: Spec) -> None:
        self.name = spec.name
        self.description = spec.description
        try:
            self.schema = _schema_of(json_text.dumps(dict(spec.parameters or {})))
        except ValueError as error:
            raise ValueError(f"tool {spec.name!r}: {error}") from None
        self.properties: Mapping[str, Any] = self.schema.get("properties", {})
        self.required = frozenset(self.schema.get("required", ()))
        self.main = next((name for name in self.properties if name in self.required), next(iter(self.properties), None))
        self._types = {name: json_types(part, self.schema) for name, part in self.properties.items()}
        self._validator = Draft202012Validator(self.schema, registry=Registry())  # a registry that fetches nothing

    def types(self, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter takes."""
        return self._types.get(parameter, TYPES)

    def complaints(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with them, '' when they are valid."""
        errors = islice(self._validator.iter_errors(arguments), 3)
        return "; ".join(line for error in errors for line in self._lines(error))[:_DETAIL]

    def _lines(self, error: ValidationError) -> Iterator[str]:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)[1:]
        where = f"argument {shown(place)}" if place else "the call"
        wanted: Any = error.validator_value
        given: Any = error.instance
        if error.validator == "required":
            missing = [name for name in wanted if name not in given]
            yield f"{where} lacks {', '.join(map(shown, missing[:_NAMES]))}"
        elif error.validator == "additionalProperties" and wanted is False:
            known = error.schema.get("properties", {}) if isinstance(error.schema, Mapping) else {}
            unknown = [name for name in given if name not in known]
            yield f"{where} has no parameter {', '.join(map(shown, unknown[:3]))}; there are {listed(known)}"
        elif error.validator == "type":
            kinds = " or ".join([wanted] if isinstance(wanted, str) else wanted)
            yield f"{where} must be {kinds}, got {shown(given)}"
        elif error.validator == "enum":
            values = ", ".join(map(shown, wanted[:_NAMES]))
            yield f"{where} must be one of {values}, got {shown(given)}"
        else:
            yield f"{where} breaks {error.validator}: {shown(wanted)}, got {shown(given)}"

    def arguments_of(self, found: Found) -> tuple[dict[str, Any], CallStatus, str]:
        """(arguments as values, OK | EMPTY | BAD_ARGUMENTS, what is wrong)."""
        arguments: dict[str, Any] = dict(found.arguments or {})
        if found.textual:
            arguments = {
                name: decode(text, self.types(name)) if isinstance(text, str) else text
                for name, text in arguments.items()
            }
        problem = self._place_positional(found.positional, arguments)
        if found.body is not None and not problem:
            problem = self._place_body(found.body, arguments)
            if not found.body and self.main in self.required and self.main not in arguments:
                return arguments, CallStatus.EMPTY, f"the call is empty: {self.name} needs {self.main!r}"
        if problem := problem or json_text.flaw(arguments) or self.complaints(arguments):
            return arguments, CallStatus.BAD_ARGUMENTS, problem
        return whole_numbers(arguments, self.schema, self.schema), CallStatus.OK, ""

    def _place_body(self, body: str, arguments: dict[str, Any]) -> str:
        if not body:
            return ""
        if self.main is None:
            return f"{self.name} takes no text, got {shown(body)}"
        if self.main in arguments:
            return f"{self.main!r} is given twice: by name and as the text of the call"
        arguments[self.main] = decode(body, self.types(self.main))
        return ""

    def _place_positional(self, positional: tuple[Any, ...], arguments: dict[str, Any]) -> str:
        names = list(self.properties)
        if len(positional) > len(names):
            return f"{self.name} takes {len(names)} arguments, got {len(positional)} without a name"
        for name, value in zip(names, positional, strict=False):
            if name in arguments:
                return f"the argument {name!r} is given twice"
            arguments[name] = value
        return ""


class Signatures:
    """The tools of an episode, made once from their specs. ValueError for two of one name or a schema that is none."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        self._by_name: dict[str, Signature] = {}
        for spec in specs:
            if spec.name in self._by_name:
                raise ValueError(f"two tools are called {spec.name!r}")
            self._by_name[spec.name] = Signature(spec)
        folded = [name.lower() for name in self._by_name]
        self._folded = {name.lower(): name for name in self._by_name if folded.count(name.lower()) == 1}

    def __iter__(self) -> Iterator[Signature]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str, *, any_case: bool = False) -> Signature | None:
        """The tool of that name. any_case: also when only the case of letters differs and no other could be meant."""
        found = self._by_name.get(name)
        if found is None and any_case and len(name) < 256:
            found = self._by_name.get(self._folded.get(name.lower(), ""))
        return found

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """The types of a parameter; only texts for a tool that is not known."""
        signature = self._by_name.get(tool)
        return signature.types(parameter) if signature else STRING_ONLY

    def main(self, tool: str) -> str | None:
        """The parameter that an unnamed text goes to; None when the tool takes nothing or is not known."""
        signature = self._by_name.get(tool)
        return signature.main if signature else None


def listed(names: Iterable[str]) -> str:
    """Names in a sentence."""
    names = list(names)
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return (", ".join(map(shown, names[:_NAMES])) or "none") + more


def judge(
    found: Found, signatures: Signatures | None, stop_reason: StopReason | None, *, any_case: bool = False
) -> Attempt:
    """What becomes of a call: its outcome, with arguments as values. Without signatures nothing is looked up.

    any_case: tools are found in any case of letters.
    """
    name, arguments, status, detail = found.name, found.arguments, CallStatus.OK, ""
    signature = signatures.get(name, any_case=any_case) if signatures else None
    unfinished = found.unfinished or (found.if_not_cut and stop_reason in CUT)
    if found.problem and not unfinished:
        status, detail = found.status, found.problem
    elif unfinished:
        status = CallStatus.TRUNCATED if stop_reason in CUT else CallStatus.MALFORMED
        cut = "the text was cut inside the call" if stop_reason in CUT else "the call is not closed"
        detail = f"{cut}: {found.problem}" if found.problem else cut
    elif signature:
        name = signature.name
        arguments, status, detail = signature.arguments_of(found)
    elif signatures is not None:
        status = CallStatus.UNKNOWN_TOOL
        detail = f"there is no tool {shown(name)}; there are {listed(tool.name for tool in signatures)}"
        arguments = _unchecked(found)
    else:
        arguments = _unchecked(found)
        detail = json_text.flaw(arguments)
        if detail or found.positional:
            status, detail = CallStatus.MALFORMED, detail or "arguments need names"
        elif not arguments and found.body == "":
            status, detail = CallStatus.EMPTY, "the call is empty"
    return Attempt(
        name=name, arguments=arguments, status=status, detail=detail[:_DETAIL], start=found.start, end=found.end
    )


def _unchecked(found: Found) -> dict[str, Any]:
    return {**(found.arguments or {}), **({"query": found.body} if found.body else {})}
