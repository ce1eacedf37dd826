"""The user's own code by its location: "package.module:name" or "path/to/file.py:name".

The only loader of such code, in worker processes too. Standard library only.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

AnyPath = TypeVar("AnyPath", str, Path)
LOCATION = re.compile(r"^(?:[A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*$")


class LocationError(ValueError):
    """Nothing can be had from a location; says what was looked for, where, and what is there instead."""


def is_location(text: str) -> bool:
    """Whether `text` has the form of a location; it need not exist."""
    return LOCATION.match(text) is not None


def locate(location: str) -> Any:
    """The object at a location. A file is executed once per process; its relative path starts at the working folder.

    Raises LocationError, also when the module is there but fails to import: then with what it raised, and where.
    """
    place, _, name = location.rpartition(":")
    if not is_location(location):
        raise LocationError(f"{location!r} is no location; write 'package.module:name' or 'path/to/file.py:name'")
    module = _load_file(at_home(Path(place))) if place.endswith(".py") else _import(place)
    if not hasattr(module, name):
        public = [entry for entry in vars(module) if not entry.startswith("_")]
        raise LocationError(f"{place} has no {name!r}.{did_you_mean(name, public)}")
    return getattr(module, name)


def at_home(path: AnyPath) -> AnyPath:
    """`~/runs` -> the folder of that name at home; nothing but a shell reads the tilde otherwise."""
    return type(path)(os.path.expanduser(path))


def rows_from(location: str, options: Mapping[str, Any]) -> Iterator[Any]:
    """What the function at a location returns or yields, one by one.

    Raises LocationError: nothing is there, it takes other arguments, it fails (with what it raised, and where), or
    what it returns cannot be gone through.
    """
    function = locate(location)
    called = f"{location}({', '.join(options)})"
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise LocationError(f"{called} cannot be called so: {error}") from error
    except ValueError:
        pass  # a builtin without a signature: the call tells
    try:
        rows = function(**options)
        if isinstance(rows, Iterable):
            yield from rows
            return
    except (Exception, SystemExit) as error:
        raise LocationError(f"{called} failed: {_raised(error)}") from error
    if inspect.iscoroutine(rows):
        rows.close()
    raise LocationError(f"{called} returned {rows!r:.80}; expected rows: a list, or a generator")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ " Did you mean ...?" with the name most like `name`, or ""."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _import(name: str) -> ModuleType:
    try:
        return _imported(name, lambda: importlib.import_module(name))
    except LocationError as error:
        cause = error.__cause__
        absent = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if absent is None or not f"{name}.".startswith(f"{absent}."):
            raise  # the module is there, but something that it imports is not
        raise LocationError(f"there is no module {absent!r} on the import path (looked for {name!r})") from None


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
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    loader = spec.loader
    try:
        return _imported(str(path), lambda: loader.exec_module(module) or module)
    except BaseException:
        del sys.modules[name]
        raise


def _imported(place: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise LocationError(f"{place} cannot be imported: {_raised(error)}") from error


def _raised(error: BaseException) -> str:
    """What was raised, and the last line of a file on the way there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = f", raised at {frames[-1].filename}:{frames[-1].lineno}"
    at = "" if isinstance(error, SyntaxError) else where  # a syntax error names its own line
    return f"{type(error).__name__}: {error}{at}"
