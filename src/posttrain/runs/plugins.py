"""How a name in a config becomes a function: a row of a table, or the user's own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from posttrain.location import LocationError, is_location, locate
from posttrain.runs.config_file import ConfigError, unknown_name

RowT = TypeVar("RowT")


def resolve(table: Mapping[str, RowT], name: str, what: str = "name") -> RowT:
    """The row of a table, or the user's own object: "pkg.mod:fn" or "path/to/file.py:fn" (from the working folder).

    Raises ConfigError naming the nearest row or attribute.
    """
    if name in table:
        return table[name]
    if not is_location(name):
        raise ConfigError([unknown_name(what, name, table) + " Your own: 'package.module:name' or 'path.py:name'."])
    try:
        return locate(name)
    except LocationError as error:
        raise ConfigError([f"{what} {name!r}: {error}"]) from error


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
