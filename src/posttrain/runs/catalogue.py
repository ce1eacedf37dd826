"""All rows of the algorithm tables, as their docstrings tell them: an equation, a source, the options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.algorithms import ADVANTAGES, AGGREGATES, CORRECTIONS, KL_ESTIMATORS, LOSSES

TABLES: dict[str, Mapping[str, Callable[..., Any]]] = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "aggregate": AGGREGATES,
    "kl_estimator": KL_ESTIMATORS,
    "correction": CORRECTIONS,
}
# Authors, year, title and where to find it: up to the first comma, colon or stop behind the year's title.
SOURCE = re.compile(r"^(?P<source>.+?\b\d{4},? .+?(?:\([^)]+\)|(?=[:,.;])))", re.DOTALL)
FROM_THE_LOOP = {"values", "greedy_returns", "outcome_rewards", "old_logprobs", "sum_pi_squared"}
FROM_THE_LOOP |= {"group_index", "chosen"}


@dataclass(frozen=True, slots=True)
class Row:
    """One function of a table. `key` is the config key that chooses it."""

    key: str
    name: str
    equation: str
    source: str
    about: str  # what its docstring says behind the source
    options: dict[str, Any]  # with their defaults

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, "name": self.name, "equation": self.equation, "source": self.source} | {
            "options": self.options
        }


def rows() -> list[Row]:
    return [_row(key, name, function) for key, table in TABLES.items() for name, function in table.items()]


def _row(key: str, name: str, function: Callable[..., Any]) -> Row:
    equation, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
    text = " ".join(rest.split())
    found = SOURCE.match(text)
    source = found["source"] if found else ""
    about = text[len(source) :].lstrip(",:;. ")
    parameters = inspect.signature(function).parameters.values()
    options = {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind is p.KEYWORD_ONLY and p.name not in FROM_THE_LOOP
    }
    return Row(key, name, " ".join(equation.split()), source, about[:1].upper() + about[1:], options)


def as_text(found: list[Row]) -> str:
    """For a terminal: a block per table."""
    lines: list[str] = []
    for key in TABLES:
        lines += ["", f"{key}:"]
        for row in [row for row in found if row.key == key]:
            lines += [f"  {row.name:<24} {row.equation}", f"  {'':<24} {row.source}"]
    return "\n".join(lines[1:])


def as_markdown(found: list[Row]) -> str:
    """For the documentation: a section per row."""
    parts: list[str] = []
    for key in TABLES:
        parts.append(f"## `{key}`\n")
        for row in [row for row in found if row.key == key]:
            options = ", ".join(f"`{name}` {_shown(value)}" for name, value in row.options.items()) or "none"
            parts.append(f"### {row.name}\n\n    {row.equation}\n\n{row.source}. {row.about}\n\nOptions: {options}.\n")
    return "\n".join(parts)


def _shown(value: Any) -> str:
    return "(required)" if value is None else str(value)
