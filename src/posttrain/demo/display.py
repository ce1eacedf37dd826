"""The demo while it runs: a progress bar and a table of the latest steps; plain lines where there is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# heading -> metric and its format (z: no -0.000). EM is that of the evaluation, measured every few steps.
COLUMNS = {
    "reward": ("reward/mean", ".3f"),
    "EM": ("eval/reward", ".3f"),
    "searches": ("rollout/searches", ".2f"),
    "KL": ("ref/kl", "z.3f"),
}
ROWS_SHOWN = 12


class Display:
    """Call it with every row of metrics."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._started = time.perf_counter()
        self._rows: list[tuple[str, ...]] = []
        self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._task = self._bar.add_task("training", total=steps)
        self._live = Live(self._picture(), console=console, refresh_per_second=4) if console.is_terminal else None

    def __call__(self, step: int, row: Mapping[str, float]) -> None:
        cells = (str(step), *cells_of(row), f"{time.perf_counter() - self._started:.1f}")
        self._rows.append(cells)
        self._bar.update(self._task, completed=step)
        if self._live is not None:
            self._live.update(self._picture())
            return
        named = zip(("step", *COLUMNS, "seconds"), cells, strict=True)
        self._console.print("  ".join(f"{name} {cell:>5}" for name, cell in named), highlight=False, soft_wrap=True)

    def _picture(self) -> Group:
        table = Table(box=None, header_style="bold")
        for name in ("step", *COLUMNS, "seconds"):
            table.add_column(name, justify="right", min_width=8)
        for cells in self._rows[-ROWS_SHOWN:]:
            table.add_row(*cells)
        return Group(table, self._bar)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def cells_of(row: Mapping[str, float]) -> tuple[str, ...]:
    """One cell per column; a dash where the step has no such number."""
    values = [(row.get(key, math.nan), form) for key, form in COLUMNS.values()]
    return tuple("-" if math.isnan(value) else format(value, form) for value, form in values)
