"""Rollouts that run ahead of training, on a copy of the weights: the generating half of the asynchronous loop.

Rolling out step s
  consumes      the tasks of step s, in the stream's order: the mixture holds, slow tasks are not replaced by fast ones
  waits for     the weights of step s - 1 - max_staleness to be published
  unblocked by  `start_all`, which follows every publication
  produces      the step's trajectories, once all its groups are complete

Training on step s (`rl.train_step`)
  consumes      these trajectories
  waits for     them, in the order of the steps
  unblocked by  the last group of the step
  produces      new weights; they are published while a sampler runs no forward, and unfinished turns go on under them

So at most 1 + max_staleness steps are rolled out at a time. Step s is trained with the weights of step s - 1, so every
token of it was sampled by weights that are at most max_staleness steps older than these. With max_staleness = 0 the
result is that of the synchronous loop.
Rollouts run on an event loop in a thread of their own. The training thread also publishes the weights. A restarted
sampler process needs them again: the training thread gives them while it waits in `take`, and at no other time (see
`Background.soon`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.data import TaskStream
from posttrain.loops.background import Background
from posttrain.loops.fill import Filled
from posttrain.runs.trajectories import read_trajectories, step_file, write_trajectories
from posttrain.task import Task
from posttrain.trajectory import Trajectory

Draw = Callable[[int], list[Task]]
FOLDER = "ahead"  # of a checkpoint: the trajectories of steps that are complete and not yet trained on


class TooStale(RuntimeError):
    """Tokens are older than max_staleness allows. The schedule rules that out, so this is a bug of the program."""


@dataclass(slots=True)
class _Making:
    """A step that is being rolled out, or is complete and waits to be trained on. drawn: its tasks so far."""

    future: Future[Filled]
    drawn: list[Task] = field(default_factory=list[Task])

    @property
    def complete(self) -> bool:
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


@dataclass(slots=True, kw_only=True)
class Ahead:
    """See the module's docstring. Steps are numbered from 1."""

    max_staleness: int
    steps: int  # of the run
    stream: TaskStream
    roll_out: Callable[[int, Draw], Awaitable[Filled]]
    _making: dict[int, _Making] = field(default_factory=dict[int, _Making])
    _returned: deque[Task] = field(default_factory=deque[Task])  # drawn for steps that a kill has interrupted
    _version_after: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def idle(self) -> bool:
        return all(step.future.done() for step in self._making.values())

    def start_all(self, runner: Background, *, done: int, version: int) -> None:
        """Starts every step that may start now that the weights of step `done`, of that version, are published."""
        self._version_after[done] = version
        for step in range(done + 1, min(done + 1 + self.max_staleness, self.steps) + 1):
            if step not in self._making:
                making = self._making[step] = _Making(Future())
                making.future = runner.start(self._filled(step, making))

    def take(self, step: int, runner: Background) -> Filled:
        """Waits for the trajectories of `step` and returns them.

        Raises what rolling out raised, and TooStale when a token is older than max_staleness allows.
        """
        filled = runner.wait(self._making[step].future)
        del self._making[step]
        oldest_allowed = self._version_after.get(max(0, step - 1 - self.max_staleness), 0)
        oldest = min(versions_of(filled.trajectories), default=oldest_allowed)
        if oldest < oldest_allowed:
            raise TooStale(f"step {step} holds tokens of version {oldest}, allowed is {oldest_allowed} and later")
        self._version_after = {s: v for s, v in self._version_after.items() if s >= step - 1 - self.max_staleness}
        return filled

    async def state(self, texts_of: Callable[[Trajectory], str]) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """What a checkpoint needs, and a function that writes the complete steps into its folder.

        Runs on the event loop of the rollouts, so that no task is drawn meanwhile. texts_of: decodes a trajectory.
        """
        complete = {step: making.future.result() for step, making in self._making.items() if making.complete}
        unfinished = [making.drawn for step, making in sorted(self._making.items()) if step not in complete]
        state = {
            "returned": [task.id for drawn in (*unfinished, self._returned) for task in drawn],
            "complete": {str(step): {"rounds": f.rounds, "missing": f.missing} for step, f in complete.items()},
            "versions": {str(step): version for step, version in self._version_after.items()},
        }

        def write(folder: Path) -> None:
            for step, filled in complete.items():
                (folder / FOLDER).mkdir(exist_ok=True)
                trajectories = filled.trajectories
                write_trajectories(folder / FOLDER, step, trajectories, [texts_of(t) for t in trajectories])

        return state, write

    def restore(self, state: Mapping[str, Any], folder: Path, tasks: Mapping[str, Task]) -> None:
        """Complete steps come back as they were; the tasks of the others are the first to be drawn."""
        self._returned.extend(tasks[task_id] for task_id in state["returned"])
        self._version_after = {int(step): version for step, version in state["versions"].items()}
        for step, counts in state["complete"].items():
            making = self._making[int(step)] = _Making(Future())
            trajectories = read_trajectories(step_file(folder / FOLDER, int(step)))
            making.future.set_result(Filled(trajectories=trajectories, **counts))

    async def _filled(self, step: int, making: _Making) -> Filled:
        def draw(count: int) -> list[Task]:
            tasks = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
            tasks += self.stream.next(count - len(tasks)) if count > len(tasks) else []
            making.drawn += tasks
            return tasks

        return await self.roll_out(step, draw)


def versions_of(trajectories: Iterable[Trajectory]) -> Iterable[int]:
    """The policy version of every sampled token."""
    return (version for t in trajectories for version in t.policy_versions if version >= 0)
