"""Where metric rows are shown, besides metrics.jsonl and timing.jsonl, which every run has."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import yaml

from posttrain.runs.config_file import ConfigError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.durable import write_atomic
from posttrain.runs.metrics import split_timing
from posttrain.runs.plugins import resolve

CONSOLE_KEYS = (
    "reward/mean",
    "eval/reward",
    "group/no_signal",
    "rollout/calls",
    "rollout/policy_tokens",
    "rollout/invalid",
    "train/approx_kl",
    "train/entropy",
    "train/grad_norm",
    "gap/max",
    "time/step",
)


class Sink(Protocol):
    """A place to which the metric rows of a run are written.

    Its factory is told `first_step`: in a resumed run, rows from that step on replace those written before.
    """

    def write(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonSink:
    """metrics.jsonl and timing.jsonl of the run directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def write(self, step: int, row: Mapping[str, float]) -> None:
        metrics, timing = split_timing(row)
        for log, part in ((self._run.metrics, metrics), (self._run.timing, timing)):
            if part:
                log.append({"step": step, **part})

    def close(self) -> None:
        self._run.sync()


class ConsoleSink:
    """One line per row with the numbers that tell whether learning is healthy."""

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        from rich.console import Console

        self._console = Console(highlight=True)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        shown = [f"{key} {_short(row[key])}" for key in CONSOLE_KEYS if key in row]
        self._console.print(f"[bold]step {step:>4}[/]  " + "  ".join(shown), soft_wrap=True)

    def close(self) -> None:
        pass


class TensorBoardSink:
    """`tensorboard --logdir RUN/tensorboard`; extra `viewer`."""

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, when `wandb` is installed; its own environment variables apply (WANDB_MODE=offline).

    A resumed run goes on in the same W&B run. W&B ignores rows of a step below the last one that it has, which are
    those that a resumed run does again: so steps of its own count rows, and the x axis is the metric `step`.
    """

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        config = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
        try:
            self._run: Any = wandb.init(
                dir=str(run.path),
                name=os.environ.get("WANDB_NAME", run.path.name),
                id=wandb_id(run),
                resume="allow",
                config=config,
                allow_val_change=True,  # run.steps of a resumed run, say
            )
        except wandb.errors.Error as error:
            fix = "`wandb login`, or WANDB_MODE=offline, or leave wandb out of run.sinks"
            raise ConfigError(
                [f"run.sinks names wandb, which does not start: {str(error).rstrip('.')}; {fix}"]
            ) from error
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({"step": step} | {key: value for key, value in row.items() if math.isfinite(value)})

    def close(self) -> None:
        self._run.finish()


def wandb_id(run: RunDirectory) -> str:
    """Kept in the run directory. Not its name: another run of that name, elsewhere or later, is another run in W&B."""
    file = run.path / "wandb_id"
    if not file.exists():
        write_atomic(file, os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
    return file.read_text(encoding="utf-8").strip()


SINKS: dict[str, Callable[[RunDirectory, int], Sink]] = {
    "console": ConsoleSink,
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}
PACKAGES = {"tensorboard": "pip install 'posttrain[viewer]'", "wandb": "pip install wandb"}  # that a sink imports


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError for a sink whose package is not installed; to be called before a model loads."""
    for name in names:
        if name in PACKAGES and find_spec(name) is None:
            raise ConfigError([f"run.sinks names {name}, which is not installed: {PACKAGES[name]}, or leave it out"])


class Sinks:
    """The JSON files and the chosen sinks, written one after another.

    names: of SINKS, or "pkg.mod:fn" or "path.py:fn" for a function of (run directory, first step) that makes a `Sink`.
    """

    def __init__(self, run: RunDirectory, names: tuple[str, ...], first_step: int = 0) -> None:
        self._sinks: list[Sink] = [JsonSink(run)]
        try:
            for name in names:
                self._sinks.append(resolve(SINKS, name, "sink")(run, first_step))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _short(value: float) -> str:
    return f"{value:.4g}"
