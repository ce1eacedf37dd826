"""What `posttrain demo` does and shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.demo.clock import process_seconds
from posttrain.demo.display import Display
from posttrain.demo.plot import PlotError, plot_run
from posttrain.demo.report import report_of, side_by_side
from posttrain.demo.train import run_demo
from posttrain.runs.plan import Plan


def demo(seed: int, out: Path, overrides: Sequence[str], console: Console) -> dict[str, Any]:
    """Trains, shows everything on `console`, leaves run/, curves.png and report.json in `out`; returns the report."""
    with ExitStack() as stack:
        shown: list[Display] = []

        def on_plan(plan: Plan) -> None:
            shown.append(stack.enter_context(Display(console, plan.steps)))

        trained = run_demo(seed, out, overrides, on_plan=on_plan, on_row=lambda step, row: shown[0](step, row))
    report = report_of(trained, process_seconds())
    console.print()
    console.print(report.table())
    for text in side_by_side(trained, trained.run.parts.renderer):
        console.print(text, soft_wrap=True)
    record = report.as_dict() | {"out": str(out)}
    (out / "report.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    show_end(out, console)
    return record


def show_end(out: Path, console: Console) -> None:
    """Draws the curves and says where everything is, or why there is no plot."""
    try:
        plot_run(out / "run", out / "curves.png")
        plot = f"plot: {out / 'curves.png'}"
    except PlotError as error:
        plot = str(error)
    run = f"run: {out / 'run'} (metrics, trajectories, checkpoints)"
    console.print(f"\n{plot}\n{run}", highlight=False, markup=False, soft_wrap=True)
