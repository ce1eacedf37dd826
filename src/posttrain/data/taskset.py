"""Validated tasks by source, with what was read, left out and dropped on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from posttrain.data.problems import DataError, Problem
from posttrain.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """A task whose prompt exceeds the limit; `tokens` counts the ids that would have been sent."""

    task_id: str
    where: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Rows of one source: read = filtered out + invalid + overlong + loaded. Past a `limit` nothing is read."""

    name: str
    files: tuple[str, ...]
    columns: Mapping[str, str]  # role -> the column used for it
    rows_read: int
    rows_filtered_out: int
    loaded: int
    invalid: tuple[Problem, ...] = ()
    overlong: tuple[Overlong, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        columns = ", ".join(f"{role}={column}" for role, column in self.columns.items())
        counts = f"{self.rows_read:,} rows read, {self.rows_filtered_out:,} filtered out"
        if self.invalid:
            counts += f", {len(self.invalid):,} invalid dropped"
        if self.overlong:
            counts += f", {len(self.overlong):,} over-long dropped"
        lines = [f"{self.name}: {self.loaded:,} tasks ({counts}; {columns})"]
        return lines + [f"  note: {note}" for note in self.notes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """The tasks of one configured source, in file order. `weight` is its share of the draws; None = by its size."""

    name: str
    tasks: tuple[Task, ...]
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """All tasks of one part of the data; never empty, ids unique."""

    sources: tuple[TaskSource, ...]
    origins: Mapping[str, str] = field(default_factory=dict[str, str])  # task id -> file and row, in words
    reports: tuple[SourceReport, ...] = ()

    def __post_init__(self) -> None:
        counts = Counter(task.id for task in self)
        if not counts:
            raise DataError("the data set is empty: it has no tasks")
        repeated = [task_id for task_id, count in counts.items() if count > 1]
        if repeated:
            raise DataError(f"task ids must be unique: {len(repeated):,} occur more than once, e.g. {repeated[:3]}")

    def __len__(self) -> int:
        return sum(len(source.tasks) for source in self.sources)

    def __iter__(self) -> Iterator[Task]:
        for source in self.sources:
            yield from source.tasks

    def report_lines(self) -> list[str]:
        """What was loaded and what was left out, for the plan and the log."""
        return [line for report in self.reports for line in report.lines()]
