"""From a YAML file and `key=value` overrides to one frozen, checked config; and back.

Every problem is reported at once, each with file:line (or the override) and what to do. Nothing is ignored: an unknown
key is an error that names the nearest valid one. This file loads and saves; it knows no section of any config.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from posttrain.boundary.redaction import redacted, secret_in

KeyPath = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)


class ConfigError(ValueError):
    """The config cannot be used; `problems` holds one line for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class Section(BaseModel):
    """A part of a config: frozen, and without room for keys that nobody reads."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def key_error(key: str, message: str) -> PydanticCustomError:
    """For validators that compare several keys: reported at the line of `key` (dotted, from that model)."""
    return PydanticCustomError("cross_field", "{message}", {"message": message, "key": key})


def load_config(model: type[ModelT], path: Path | str, overrides: Sequence[str] = ()) -> ModelT:
    """Reads `path`, applies `overrides` ("a.b=value", values in YAML), resolves ${interpolations} and validates.

    A mapping in an override is merged into the one it meets; everything else replaces. `true` is no number. Raises
    ConfigError with every problem found.
    """
    source = _read(Path(path))
    try:
        config = source.parse()
        for override in overrides:
            _apply(config, override, source)
        return _validate(model, _resolved(config, source), source)
    except RecursionError:
        seen = "lists or mappings are nested too deeply, in the file or in what was set beside it"
        raise ConfigError([f"{path}: {seen}"]) from None


def parse_config(model: type[ModelT], data: Mapping[str, Any]) -> ModelT:
    """The same checks for values that come from code instead of a file."""
    source = _Source("config", "")
    return _validate(model, _resolved(OmegaConf.create(dict(data)), source), source)


def config_yaml(config: BaseModel) -> str:
    """The resolved config as YAML that loads back equal."""
    plain = _plain(config.model_dump())
    return OmegaConf.to_yaml(OmegaConf.create(plain), sort_keys=False)


def nearest(name: str, valid: Iterable[str], likeness: float = 0.6) -> str | None:
    """The name in `valid` most like `name` (an abbreviation counts as like it); None when nothing is."""
    names = sorted(valid)
    longer = [other for other in names if len(name) >= 2 and other.startswith(name)]
    found = difflib.get_close_matches(name, names, n=1, cutoff=likeness) or longer
    return found[0] if found else None


def unknown_name(what: str, name: str, valid: Iterable[str]) -> str:
    """The message for a name that is not in a list: the nearest one and the whole list."""
    names = sorted(valid)
    guess = nearest(name, names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    return f"unknown {what} {name!r}.{hint} Known: {', '.join(names)}."


# ---------------------------------------------------------------- reading: text, where each key stands, overrides


@dataclass(slots=True)
class _Source:
    """A YAML text and the place of each of its keys."""

    name: str
    text: str
    places: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])

    def place(self, path: KeyPath) -> str:
        """Where `path` was written: an override of something in it, itself, else the longest part of it that was."""
        inside = [where for place, where in self.places.items() if path and place[: len(path)] == path]
        if inside:
            overridden = [where for where in inside if where.startswith("override ")]
            return (overridden or [self.places.get(path, inside[0])])[0]
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name

    def error(self, path: KeyPath, message: str) -> ConfigError:
        return ConfigError([f"{self.place(path)}: {message}"])

    def parse(self) -> Any:
        root = self._nodes()
        if root is None:
            raise self.error((), "the file is empty; a config is a mapping of sections (`run:`, `model:`, ...)")
        if not isinstance(root, yaml.MappingNode):
            raise self.error(
                (), f"a config is a mapping of sections, but the file holds a {root.tag.rsplit(':', 1)[-1]}"
            )
        self._walk(root, ())
        return OmegaConf.create(self.text)

    def _nodes(self) -> yaml.Node | None:
        try:
            return yaml.compose(self.text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            line = f":{mark.line + 1}" if mark else ""
            raise ConfigError([f"{self.name}{line}: not valid YAML: {error.problem}"]) from error
        except yaml.YAMLError as error:
            raise ConfigError([f"{self.name}: not valid YAML: {error}"]) from error

    def _walk(self, node: yaml.Node, path: KeyPath) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                self.places[(*path, index)] = f"{self.name}:{child.start_mark.line + 1}"
                self._walk(child, (*path, index))
        if isinstance(node, yaml.MappingNode):
            for key, child in node.value:
                self._add_key(key, path)
                self._walk(child, (*path, str(key.value)))

    def _add_key(self, key: yaml.Node, path: KeyPath) -> None:
        here = (*path, str(key.value))
        place = f"{self.name}:{key.start_mark.line + 1}"
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            kind = key.tag.rsplit(":", 1)[-1]
            raise ConfigError([f"{place}: YAML reads the key {key.value} as {kind}; write it in quotes"])
        if here in self.places and key.value != "<<":
            first = self.places[here].rsplit(":", 1)[-1]
            raise ConfigError([f"{place}: {dotted(here)} is written twice (first on line {first}); keep one"])
        self.places[here] = place


def _read(path: Path) -> _Source:
    try:
        return _Source(str(path), path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError([f"{path}: is a link to {path.readlink()}, which is not there"]) from None
        near = nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")]) if path.parent.is_dir() else None
        hint = f" Did you mean {path.parent / near}?" if near else f" (looked from {str(Path.cwd())!r})"
        raise ConfigError([f"{path}: there is no such config file.{hint}"]) from None
    except IsADirectoryError:
        raise ConfigError([f"{path}: is a folder; a config is a YAML file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8 text: {error}"]) from error


def _apply(config: Any, override: str, source: _Source) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip() or not text.strip():
        raise ConfigError([f"override {override!r}: write key=value, like run.steps=100 (key=null for no value)"])
    path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key.strip()))
    source.places = {place: where for place, where in source.places.items() if place[: len(path)] != path}
    source.places[path] = f"override {override!r}"
    try:
        value = OmegaConf.from_dotlist([f"value={text}"])["value"]
        old = OmegaConf.select(config, key.strip(), throw_on_resolution_failure=False)
        OmegaConf.update(config, key.strip(), value, merge=OmegaConf.is_dict(old) and OmegaConf.is_dict(value))
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError, IndexError) as error:
        raise source.error(path, f"cannot be applied: {_first_line(error)}") from error


def _resolved(config: Any, source: _Source) -> dict[str, Any]:
    try:
        return typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "")
        path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))
        raise source.error(path, f"{key}: {_first_line(error)}") from error


def _plain(value: Any) -> Any:
    """What YAML can hold. Resolved text has no interpolation left, so a `${` in it is meant literally."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, str | Path):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", str(value))
    if isinstance(value, Mapping):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(child) for child in value)
    return [_plain(child) for child in value] if isinstance(value, list | tuple) else value


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def dotted(path: KeyPath) -> str:
    """("data", "files", 0) -> "data.files[0]"."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


# ---------------------------------------------------------------- validating: pydantic's errors, told for people


def _validate(model: type[ModelT], data: dict[str, Any], source: _Source) -> ModelT:
    _refuse_secrets(data, source)
    try:
        config = model.model_validate(data)
    except ValidationError as error:
        problems = [_problem(model, data, details, source) for details in error.errors(include_url=False)]
        raise ConfigError(list(dict.fromkeys(problems))) from None
    misread = {path: seen for path, value in _leaves(data, ()) if (seen := _misread(value, _value_at(config, path)))}
    if misread:
        raise ConfigError(
            [f"{source.place(path)}: {dotted(path)}: a number is needed, not {seen}" for path, seen in misread.items()]
        )
    return config


def _misread(value: Any, became: Any) -> str | None:
    """What stands in the place of a number, and would be taken for one."""
    if isinstance(value, bool) and type(became) in (int, float):
        return "a bool"
    return "NaN" if isinstance(became, float) and math.isnan(became) else None


def _refuse_secrets(data: Any, source: _Source) -> None:
    """What ${oc.env:KEY} brings in, or somebody pastes, would be stored with the run and printed by commands."""
    found = [
        (path, variable) for path, text in _leaves(data, ()) if isinstance(text, str) and (variable := secret_in(text))
    ]
    if found:
        advice = "it would be stored with the run; name the variable instead (key_env, token_env, pass_env)"
        raise ConfigError(
            [
                redacted(f"{source.place(path)}: {dotted(path)}: holds the value of {name}; {advice}")
                for path, name in found
            ]
        )


def _leaves(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """All that is neither a mapping nor a list, with its place."""
    if not isinstance(data, dict | list):
        yield path, data
        return
    for key, child in data.items() if isinstance(data, dict) else enumerate(data):
        yield from _leaves(child, (*path, key))


def _value_at(config: Any, path: KeyPath) -> Any:
    """None where a validator gave the data another shape."""
    for part in path:
        if isinstance(part, int) and isinstance(config, Sequence):
            config = config[part] if part < len(config) else None
        else:
            config = config.get(part) if isinstance(config, Mapping) else getattr(config, str(part), None)
    return config


def _problem(model: type[BaseModel], data: Any, details: ErrorDetails, source: _Source) -> str:
    path = _data_path(details, data)
    name = dotted(path)
    if details["type"] == "extra_forbidden":
        text = f"unknown key {name!r}.{_did_you_mean(model, path)}"
    elif details["type"] == "missing":
        text = (
            f"{name!r} is missing; add it under {dotted(path[:-1])!r}" if path[1:] else f"section {name!r} is missing"
        )
    elif details["type"] == "model_type":
        text = f"{name} is a section of keys{_seen(details)}; {_keys(model, path, details['input'])}"
    elif details["type"] in ("tuple_type", "list_type"):
        text = f"{name}: Input should be a list, as in [a, b]{_seen(details)}"
    else:
        message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        text = f"{name}: {message}{_seen(details)}" if name else message
    return f"{source.place(path)}: {text}"


def _keys(model: type[BaseModel], path: KeyPath, value: object) -> str:
    """How to write a section that was given one value."""
    keys = sorted({name for owner in _models_at(model, path) for name in owner.model_fields})
    if "name" in keys and isinstance(value, str):
        return f"did you mean {dotted((*path, 'name'))}={value}?"
    return f"it has {', '.join(keys)}"


def _seen(details: ErrorDetails) -> str:
    value = details.get("input")
    if details["type"] in ("cross_field", "value_error") or isinstance(value, dict | list):
        return ""
    quote = f"; quote it to make it text: '{json.dumps(value)}'" if details["type"] == "string_type" else ""
    return f" (got {json.dumps(value, default=str)}{quote if value is not None else ''})"


def _data_path(details: ErrorDetails, data: Any) -> KeyPath:
    """pydantic's location without the tags of unions and validators, which are no keys of the file."""
    path: list[str | int] = []
    for position, part in enumerate(details["loc"]):
        last = position == len(details["loc"]) - 1
        if _holds(data, part):
            path.append(part)
            data = data[part]
        elif last and details["type"] == "missing":
            path.append(part)
    key = details.get("ctx", {}).get("key") if details["type"] == "cross_field" else None
    return (*path, *str(key).split(".")) if key else tuple(path)


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(part, int):
        return isinstance(data, list) and part < len(data)
    return isinstance(data, dict) and part in data


def _did_you_mean(model: type[BaseModel], path: KeyPath) -> str:
    """The nearest key of the same section, else one of that name elsewhere, else all keys of the section."""
    siblings = {name for owner in _models_at(model, path[:-1]) for name in owner.model_fields}
    if near := nearest(str(path[-1]), siblings):
        return f" Did you mean {dotted((*path[:-1], near))!r}?"
    everywhere = {name.rsplit(".", 1)[-1]: name for name in reversed(key_names(model))}  # the first of a name wins
    if near := nearest(str(path[-1]), everywhere, likeness=0.8):
        return f" Did you mean {everywhere[near]!r}?"
    return f" Known here: {', '.join(sorted(siblings))}."


def _models_at(model: type[BaseModel], path: KeyPath) -> set[type[BaseModel]]:
    models, named = {model}, False  # named: the next part is a name that the file gives, as in `envs`
    for part in path:
        if isinstance(part, str) and not named:
            fields = [owner.model_fields[part].annotation for owner in models if part in owner.model_fields]
            models = {inner for annotation in fields for inner in _models_in(annotation)}
            named = any(typing.get_origin(annotation) is dict for annotation in fields)
        elif isinstance(part, str):
            named = False
    return models


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def key_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a config model, sections before their keys."""
    names: list[str] = []
    for name, info in model.model_fields.items():
        names.append(prefix + name)
        for inner in _models_in(info.annotation):
            names.extend(key_names(inner, f"{prefix}{name}."))
    return list(dict.fromkeys(names))
