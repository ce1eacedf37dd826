"""What is wrong with data, told once and completely: where, which column, what was seen, what to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

SHOWN_PER_KIND = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One row that cannot be used. `where` names file and row; `kind` is a short key that problems are counted by."""

    where: str
    column: str
    kind: str
    seen: str
    fix: str

    def __str__(self) -> str:
        column = f", column '{self.column}'" if self.column else ""
        return f"{self.where}{column}: {self.seen}; {self.fix}"


class DataError(ValueError):
    """Data or its configuration cannot be used. `problems` holds every bad row when rows are to blame."""

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class FieldError(ValueError):
    """One value of one row is unusable; the loader adds file and row and goes on with the next row."""

    def __init__(self, column: str, kind: str, seen: str, fix: str) -> None:
        super().__init__(f"column '{column}': {seen}; {fix}")
        self.column = column
        self.kind = kind
        self.seen = seen
        self.fix = fix

    def at(self, where: str) -> Problem:
        return Problem(where=where, column=self.column, kind=self.kind, seen=self.seen, fix=self.fix)


def summarize(problems: Sequence[Problem]) -> str:
    """The counts by kind, then the first few problems of each kind."""
    counts = Counter(problem.kind for problem in problems)
    shown: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        if len(shown[problem.kind]) < SHOWN_PER_KIND:
            shown[problem.kind].append(f"  {problem}")
    lines: list[str] = []
    for kind, count in counts.most_common():
        more = f" (first {SHOWN_PER_KIND} shown)" if count > SHOWN_PER_KIND else ""
        lines += [f"{kind}: {count:,}{more}", *shown[kind]]
    return "\n".join(lines)


def show(value: object, width: int = 80) -> str:
    """A value as people see it in an error: type and shortened repr."""
    try:
        text = repr(value)
    except RecursionError:
        text = "nested too deeply"
    return f"{type(value).__name__} {text if len(text) <= width else text[: width - 1] + '…'}"
