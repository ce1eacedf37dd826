"""Answers a task set, every sample exactly once, with sampling settings of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from posttrain.config import EvalConfig
from posttrain.loops.collect import Collector, collect
from posttrain.loops.record import record_score
from posttrain.runs.metrics import Metrics
from posttrain.task import Invalid, Score, Task
from posttrain.trajectory import Source, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was asked and what came back."""

    tasks: tuple[Task, ...]
    trajectories: tuple[Trajectory, ...]

    def record(self, metrics: Metrics) -> None:
        sources = {task.id: task.source for task in self.tasks}
        last = {t.episode_id: t for t in self.trajectories}
        metrics.record("eval/scored", sum(isinstance(t.outcome, Score) for t in last.values()))
        metrics.record("eval/invalid", sum(isinstance(t.outcome, Invalid) for t in last.values()))
        for name, t in last.items():
            if isinstance(t.outcome, Score):
                record_score(metrics, "eval", name, t.outcome, sources[t.task_id])
            turns = [turn for turn in t.turns if turn.who is Source.POLICY]
            metrics.record("eval/turns", len(turns), id=name)
            calls = [call for turn in turns for call in turn.calls]
            metrics.record("eval/calls", len(calls), id=name)
            metrics.record("eval/searches", sum(call.name == "search" for call in calls), id=name)


async def evaluate(tasks: Iterable[Task], collector: Collector, config: EvalConfig) -> Evaluation:
    chosen = tuple(islice(tasks, config.max_tasks))
    trajectories = await collect(chosen, collector, group_size=config.samples_per_prompt, step=0)
    return Evaluation(tasks=chosen, trajectories=tuple(trajectories))
