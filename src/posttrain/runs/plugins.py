"""How a name in a config becomes a function: a row of a table, or the user's own code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.location import LocationError, is_location, locate
from posttrain.runs.config_file import ConfigError, unknown_name

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
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


def check_positional(function: Any, given: Sequence[str], what: str) -> None:
    """Raises ConfigError unless it is a function that can be called with so many values by position."""
    if not callable(function):
        raise ConfigError([f"{what} is no function but a {type(function).__name__}"])
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return  # of C: nothing is known of it
    places = [parameter for parameter in parameters if parameter.kind in _BY_PLACE]
    free = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    if len(places) < len(given) and not free:
        asked = f"({', '.join(given)}) and options by name"
        raise ConfigError([f"{what} is called with {asked}; it takes {inspect.signature(function)}"])


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
