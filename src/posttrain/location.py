"""The user's own code by its location: "package.module:name" or "path/to/file.py:name". Standard library only."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

LOCATION = re.compile(r"^(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*$")


class LocationError(ValueError):
    """There is nothing at a location; says what was looked for, where, and what is there instead."""


def is_location(text: str) -> bool:
    """Whether `text` has the form of a location; it need not exist."""
    return LOCATION.match(text) is not None


def locate(location: str) -> Any:
    """The object at a location. A file is executed once per process; its relative path starts at the working folder.

    Raises LocationError; what the module itself raises when it is imported passes through.
    """
    place, _, name = location.rpartition(":")
    if not is_location(location):
        raise LocationError(f"{location!r} is no location; write 'package.module:name' or 'path/to/file.py:name'")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    if not hasattr(module, name):
        public = [entry for entry in vars(module) if not entry.startswith("_")]
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LocationError(f"{place} has no {name!r}{hint}")
    return getattr(module, name)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module is there, but something that it imports is not
        raise LocationError(f"there is no module {error.name!r} on the import path (looked for {name!r})") from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LocationError(f"there is no file {str(path)!r} (looked from {str(Path.cwd())!r})")
    name = f"posttrain_user_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LocationError(f"Python cannot load {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
