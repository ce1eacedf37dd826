"""The command line. Each command reads its arguments, calls one function and prints; everything heavy is imported
when a command runs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads stall beside a busy neighbour

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. run.seed=1", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON line instead of a table.")]


def main() -> None:
    """Errors of our own kinds are messages for people, so they are printed without a traceback."""
    try:
        app()
    except Exception as error:
        if not type(error).__module__.startswith("posttrain."):
            raise
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(1)


@app.command()
def plan(config: Path, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the batch arithmetic of a run: what would be executed. Reads the data, loads no model."""
    from posttrain.loops import rl

    planned = rl.plan_only(_rl_config(config, overrides))
    _show(as_json, planned.as_dict(), planned.render())


@app.command()
def rl(
    config: Path,
    overrides: Overrides = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two small steps: does everything work?")] = False,
    as_json: AsJson = False,
) -> None:
    """Train by reinforcement learning."""
    from posttrain.loops import rl as loop

    run = loop.start(_rl_config(config, overrides, smoke=smoke), on_plan=lambda p: typer.echo(p.render(), err=as_json))
    _train(run, as_json)


@app.command()
def resume(run_dir: Path, as_json: AsJson = False) -> None:
    """Go on with a run from its latest checkpoint, exactly as if it had never stopped."""
    from posttrain.loops import rl as loop

    run = loop.resume(run_dir, on_plan=lambda p: typer.echo(p.render(), err=as_json))
    if run.step:
        typer.echo(f"resuming after step {run.step} of {run.config.run.steps}", err=as_json)
    _train(run, as_json)


def _train(run: Any, as_json: bool) -> None:
    from posttrain.loops import rl as loop

    try:
        loop.train(run)
        summary = {"run": str(run.directory.path), "step": run.step, **run.measured}
    finally:
        run.close()
    _show(as_json, summary, "\n".join(f"{key:<28} {value}" for key, value in summary.items()))


def _rl_config(path: Path, overrides: list[str] | None, *, smoke: bool = False) -> Any:
    from posttrain.config import RLConfig, load_config

    config = load_config(RLConfig, path, overrides or ())
    if not smoke:
        return config
    small = [f"{key}={json.dumps(value)}" for key, value in config.smoke.items()]
    folder = Path("runs") / f"{config.run.name}-smoke" / time.strftime("%Y%m%d-%H%M%S")
    return load_config(RLConfig, path, [f"run.dir={folder}", *small, *(overrides or ())])


def _show(as_json: bool, record: dict[str, Any], text: str) -> None:
    typer.echo(json.dumps(record) if as_json else text)


if __name__ == "__main__":
    main()
