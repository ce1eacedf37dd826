"""`posttrain eval`: a target -> its evaluation, as a table, as JSON and as files.

The folder of an evaluation holds config.yaml (resolved), results.json, table.txt and trajectories/*.parquet.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from posttrain.algorithms.estimators import Estimate
from posttrain.config import ConfigError, EvalConfig, config_yaml
from posttrain.loops.build import (
    Stage,
    check_search,
    eval_params,
    load_part,
    load_renderer,
    make_collector,
    make_stage,
)
from posttrain.loops.collect import Collector, check_invalid_share
from posttrain.loops.evaluate import Evaluation, evaluate
from posttrain.loops.samplers import close_sampler, ready_sampler
from posttrain.loops.summary import Summary, shown_ks
from posttrain.loops.target import Target
from posttrain.runs.durable import write_atomic
from posttrain.runs.rng import seed_everything
from posttrain.runs.trajectories import write_trajectories
from posttrain.task import Task

Watch = Callable[[int, int], None]  # told (tasks done, tasks in all)
WIDTH = 160  # of the table in table.txt


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRun:
    """An evaluation and how it was made."""

    target: Target
    evaluation: Evaluation
    texts: tuple[str, ...]  # decoded, one per trajectory

    def as_dict(self) -> dict[str, Any]:
        """JSON values: the settings, all numbers, and the same numbers per source."""
        settings, evaluation = self.target.config.eval, self.evaluation
        return {
            "model": self.target.config.model.named,
            "step": self.target.step if self.target.run is not None else None,
            "seed": self.target.config.run.seed,
            "samples_per_prompt": settings.samples_per_prompt,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
            "right_from": settings.right_from,
            **evaluation.total.as_dict(),
            "sources": [source.as_dict() for source in evaluation.sources],
        }

    def check(self) -> None:
        """Raises TooManyInvalid past `run.max_invalid_share`: the numbers are then of a biased rest."""
        check_invalid_share(self.evaluation.trajectories, self.target.config.run.max_invalid_share)

    def write(self, folder: Path) -> None:
        """Fills `folder`; an earlier evaluation in it is replaced."""
        (folder / "trajectories").mkdir(parents=True, exist_ok=True)
        write_trajectories(folder / "trajectories", self.target.step, self.evaluation.trajectories, self.texts)
        write_atomic(folder / "config.yaml", config_yaml(self.target.config))
        write_atomic(folder / "results.json", json.dumps(self.as_dict(), indent=1) + "\n")
        table = io.StringIO()
        Console(width=WIDTH, file=table).print(report(self))
        write_atomic(folder / "table.txt", table.getvalue())


def evaluate_target(target: Target, watch: Watch | None = None) -> EvalRun:
    """Answers `data.eval` of the target's config with its model. All rows are read before the model loads.

    Raises ConfigError without evaluation data, and each room's own error for what is wrong in it.
    """
    config = target.config
    if not config.data.eval:
        raise ConfigError(["there is nothing to evaluate on: set data.eval, e.g. data.eval=path/to/file.jsonl"])
    renderer = load_renderer(config)
    tasks = load_part(config, "eval", renderer)
    stage = make_stage(config, renderer, [*tasks])
    try:
        check_search(stage)
        seed_everything(config.run.seed)
        sampler = ready_sampler(config, stage.tokenizer, target.load_policy)
        try:
            collector = make_collector(config, stage, sampler, eval_params(config))
            if watch is not None:
                count = min(len(tasks), config.eval.max_tasks or len(tasks))
                collector = replace(collector, on_group=_counting(watch, count))
            evaluation = asyncio.run(_answer(tasks, collector, stage, config.eval))
        finally:
            close_sampler(sampler)
    finally:
        stage.close()
    texts = tuple(renderer.decode(trajectory.token_ids) for trajectory in evaluation.trajectories)
    return EvalRun(target=target, evaluation=evaluation, texts=texts)


async def _answer(tasks: Iterable[Task], collector: Collector, stage: Stage, settings: EvalConfig) -> Evaluation:
    try:
        return await evaluate(tasks, collector, settings)
    finally:
        await stage.release()


def _counting(watch: Watch, count: int) -> Callable[[], None]:
    done = itertools.count(1)
    return lambda: watch(next(done), count)


def default_folder(target: Target) -> Path:
    """A folder that is not there yet: in the run that the model is of, else under runs/."""
    if target.run is not None:
        first = target.run / "evaluations" / f"step-{target.step}"
    else:
        name = Path(target.config.model.named).name
        first = Path("runs") / "evaluations" / f"{target.config.run.name}-{name}"
    numbered = (first.with_name(f"{first.name}.{number}") for number in range(2, 1 << 30))
    return first if not first.exists() else next(path for path in numbered if not path.exists())


def report(run: EvalRun) -> Group:
    """The table by source, the parts of the reward, and what the numbers mean."""
    evaluation, settings = run.evaluation, run.target.config.eval
    total, sources = evaluation.total, evaluation.sources
    lines: list[Table | Text] = [_table([*sources, total] if len(sources) > 1 else sources, evaluation)]
    if total.invalid:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in total.invalid.items())
        lines.append(Text(f"invalid, and in no mean: {reasons}", style="red"))
    parts = [f"{name} {_number(e.mean)}" for name, e in total.components.items()]
    if parts:
        lines.append(Text(f"parts of the reward: {', '.join(parts)}"))
    lines.append(
        Text(
            f"{total.tasks} tasks x {settings.samples_per_prompt} at temperature {settings.temperature:g}, means over "
            "scored episodes, [95 % interval over tasks]",
            style="dim",
        )
    )
    return Group(*lines)


def _table(rows: Sequence[Summary], evaluation: Evaluation) -> Table:
    table = Table(title=None)
    table.add_column("source")
    for name in ("tasks", "scored", "invalid", "abstained", "reward"):
        table.add_column(name, justify="right")
    ks = shown_ks(evaluation.samples) if evaluation.samples > 1 else []
    for k in ks:
        table.add_column(f"pass@{k}", justify="right")
    if ks:
        table.add_column(f"maj@{evaluation.samples}", justify="right")
    table.add_column("searches", justify="right")
    table.add_column("turns", justify="right")
    for row in rows:
        if row is rows[-1] and len(rows) > 1:
            table.add_section()
        counts = [row.tasks, row.scored, sum(row.invalid.values()), row.abstained]
        estimates = [row.reward, *(row.pass_at.get(k) for k in ks), *([row.maj_at] if ks else [])]
        shown = [*map(str, counts), *map(_estimate, estimates), f"{row.searches:.2f}", f"{row.turns:.2f}"]
        table.add_row(Text(row.name), *shown)
    return table


def _estimate(estimate: Estimate | None) -> Text:
    if estimate is None:
        return Text("-")
    shown = Text(_number(estimate.mean))
    if estimate.low is not None and estimate.high is not None:
        shown.append(f"\n[{_number(estimate.low)}, {_number(estimate.high)}]", style="dim")
    return shown


def _number(value: float) -> str:
    return f"{value:.3f}"
