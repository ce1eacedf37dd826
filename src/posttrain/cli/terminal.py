"""How commands show results, progress and errors, and the arguments that many of them have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. run.seed=1", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON line instead of a table.")]


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, nothing elsewhere; call it with (done, all)."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(what, total=None)
        yield lambda done, count: bars.update(bar, completed=done, total=count)


def print_rich(shown: Any, end: str = "\n") -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width of its own
    console.print(shown, end=end, soft_wrap=not end)


def fail(error: Exception) -> NoReturn:
    """For errors of Python's own kinds whose text says all."""
    typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1)


def show_result(as_json: bool, record: dict[str, Any], text: str) -> None:
    typer.echo(json.dumps(record) if as_json else text)
