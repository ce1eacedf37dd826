"""One row -> one task, by the columns of its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.config import SourceConfig, template_columns
from posttrain.data.fields import (
    MISSING,
    USUAL_COLUMNS,
    answers_of,
    columns_text,
    encodable,
    fill_template,
    is_null,
    lookup,
    messages_of,
    plain,
)
from posttrain.data.problems import DataError, FieldError, show
from posttrain.data.rows import Row
from posttrain.task import Message, Task

SNIFFED_ROWS = 100  # the usual columns are looked for in this many rows
CheckAnswer = Callable[[str], str | None]  # why an accepted answer cannot be scored against; None = it can


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMaker:
    """Makes tasks of one source. `left_out` collects, in words, answers that no reward could score."""

    name: str
    config: SourceConfig
    columns: Mapping[str, tuple[str, ...]]  # role -> columns
    check: CheckAnswer | None = None
    left_out: list[str] = field(default_factory=list[str])

    def make(self, row: Row) -> Task:
        """A task whose id is still the bare value of the id column ('' without one). Raises FieldError."""
        values, columns, config = row.values, self.columns, self.config
        return Task(
            id=_name_text(values, columns.get("id"), ""),
            prompt=_prompt(values, columns["prompt"][0], config),
            ground_truth=self._answers(row),
            source=_name_text(values, columns.get("source"), self.name),
            env=_name_text(values, columns.get("env"), "") or config.env,
            reward=_name_text(values, columns.get("reward"), "") or config.reward,
            extra=_extra(values, columns["prompt"][0], config),
        )

    def _answers(self, row: Row) -> tuple[str, ...]:
        """The answers that can be scored. One that cannot is left out beside others; alone, it spoils the row."""
        columns = self.columns.get("ground_truth", ())
        answers = answers_of(row.values, columns, self.config)
        if self.check is None or self.config.ground_truth_format == "opaque":
            return answers
        reasons = {answer: self.check(answer) for answer in answers}
        bad = [f"{show(answer)}: {reason}" for answer, reason in reasons.items() if reason is not None]
        if bad and len(bad) == len(reasons):
            fix = "correct or remove that answer: any prediction, or none, would match it"
            raise FieldError(columns[0], "unscorable ground truth", ", ".join(bad), fix)
        self.left_out.extend(f"{row.where}, {reason}" for reason in bad)
        return tuple(answer for answer in answers if reasons[answer] is None)


def find_columns(rows: Sequence[Mapping[str, Any]], config: SourceConfig, name: str) -> dict[str, tuple[str, ...]]:
    """Role -> columns: those named in the config, else the first usual one that some row has."""

    def present(column: str, among: Sequence[Mapping[str, Any]] = rows) -> bool:
        return any(lookup(row, column) is not MISSING for row in among)

    columns: dict[str, tuple[str, ...]] = {}
    for role in type(config.columns).model_fields:
        named = getattr(config.columns, role)
        if named is not None:
            columns[role] = (named,) if isinstance(named, str) else named
        else:
            sniffed = rows[:SNIFFED_ROWS]
            columns[role] = tuple(column for column in USUAL_COLUMNS.get(role, ()) if present(column, sniffed))[:1]
    if config.prompt_template is not None:
        columns["prompt"] = template_columns(config.prompt_template)
    missing = [column for found in columns.values() for column in found if not present(column)]
    if missing:
        raise DataError(f"source '{name}': no row has column {missing}; the first has {columns_text(rows[0])}")
    needed = ["prompt", "ground_truth"] if config.ground_truth_required else ["prompt"]
    for role in needed:
        if not columns[role]:
            raise DataError(f"source '{name}': {_no_column(role)}; rows have {columns_text(rows[0])}")
    return {role: found for role, found in columns.items() if found}


def _no_column(role: str) -> str:
    usual = ", ".join(USUAL_COLUMNS[role])
    fix = f"name it under `columns: {{{role}: ...}}`"
    if role == "ground_truth":
        fix += ", or set ground_truth_required: false when the env scores by itself"
    return f"no column for the {role} (looked for {usual}); {fix}"


def _extra(row: Mapping[str, Any], prompt_column: str, config: SourceConfig) -> dict[str, Any]:
    """The row for env, reward and log; without a column of prompt messages, which `Task.prompt` would only repeat."""
    repeats = config.prompt_template is None and not isinstance(row.get(prompt_column), str)
    return plain({column: value for column, value in row.items() if not (repeats and column == prompt_column)})


def _prompt(row: Mapping[str, Any], column: str, config: SourceConfig) -> tuple[Message, ...]:
    if config.prompt_template is not None:
        messages: tuple[Message, ...] = ({"role": "user", "content": fill_template(config.prompt_template, row)},)
    else:
        messages = messages_of(lookup(row, column), column)
    if config.system_prompt is None:
        return messages
    if messages[0]["role"] in ("system", "developer"):
        seen = "already begins with a system message"
        raise FieldError(column, "bad prompt", seen, "remove system_prompt, or the message")
    return ({"role": "system", "content": config.system_prompt}, *messages)


def _name_text(row: Mapping[str, Any], columns: tuple[str, ...] | None, default: str) -> str:
    """A column that holds a name (id, source, env, reward) as text; several names are joined by commas."""
    if not columns:
        return default
    value = lookup(row, columns[0])
    if value is MISSING or is_null(value):
        return default
    value = plain(value)
    names = [_as_whole(item) for item in (value if isinstance(value, list) else [value])]
    if not all(isinstance(item, str | int) for item in names):
        raise FieldError(columns[0], "bad name", f"is {show(value)}", "a name is text or a whole number")
    return encodable(",".join(str(item) for item in names), columns[0], "bad name")


def _as_whole(value: Any) -> Any:
    """7.0 -> 7: a column of whole numbers with a gap in it is one of floats to pandas."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
