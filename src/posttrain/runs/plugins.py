"""How a name in a config becomes a function: a row of a table, or the user's own code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from posttrain.runs.config_file import ConfigError, unknown_name

RowT = TypeVar("RowT")


def resolve(table: Mapping[str, RowT], name: str, what: str = "name") -> RowT:
    """The row of a table, or the user's own object: "pkg.mod:fn" or "path/to/file.py:fn" (from the working folder).

    Raises ConfigError naming the nearest row, module or attribute.
    """
    if name in table:
        return table[name]
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise ConfigError([unknown_name(what, name, table) + " Your own: 'package.module:name' or 'path.py:name'."])
    module = _load_file(Path(place), what) if place.endswith(".py") else _import(place, what)
    if not hasattr(module, attribute):
        public = [entry for entry in vars(module) if not entry.startswith("_")]
        raise ConfigError([f"{place} has no {attribute!r}: " + unknown_name(what, attribute, public)])
    return getattr(module, attribute)


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the module is there, but something that it imports is not
        raise ConfigError([f"{what} {name!r}: there is no module {error.name!r} on the import path"]) from None


def _load_file(path: Path, what: str) -> ModuleType:
    """Executes the file once per process under a name of its own; its functions can be pickled within the process."""
    if not path.is_file():
        raise ConfigError([f"{what}: there is no file {str(path)!r} (looked from {str(Path.cwd())!r})"])
    name = f"posttrain_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"Python cannot load {path}"
    assert spec.loader is not None, f"Python cannot load {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def options_for(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those `options` that are keyword parameters of `function`; all of them when it takes **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(options)
    names = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
    return {name: value for name, value in options.items() if name in names}


def check_options(function: Callable[..., Any], options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """`options` as they are, or ConfigError naming the parameter nearest to the first one that `function` lacks."""
    accepted = options_for(function, options)
    for name in options:
        if name not in accepted:
            raise ConfigError([unknown_name(f"option of {what}", name, inspect.signature(function).parameters)])
    return accepted
