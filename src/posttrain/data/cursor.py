"""The endless order of tasks, and where in it a run stands.

The order is a function of (seed, epoch, task id) alone: each epoch sorts the ids by a hash. So a position is fully
described by the epoch and the ids consumed in it; no generator state and no step count is involved, and adding or
removing rows leaves the order of the others as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.data.config import CurriculumConfig
from posttrain.data.ids import content_digest, digest_of
from posttrain.data.problems import DataError
from posttrain.data.taskset import TaskSet
from posttrain.task import Task

STATE_FORMAT = 1
LANE_KEYS = ("name", "share", "drawn", "epoch", "consumed", "tasks", "digest")


class TaskStream:
    """Tasks without end: epoch after epoch, each task once per epoch.

    Without weights all sources form one pool. With weights each source is a lane of its own that cycles through its own
    permutations, and each draw is from the lane furthest behind its share: no lane is ever ahead of n x share by a
    whole draw, so that the mixture holds in every batch and not only on average.
    """

    def __init__(
        self, tasks: TaskSet, *, seed: int, shuffle: bool = True, curriculum: CurriculumConfig | None = None
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        self.curriculum = curriculum
        weights = [source.weight for source in tasks.sources if source.weight is not None]
        if weights and len(weights) != len(tasks.sources):
            raise DataError("give every source a weight or none")
        if weights:
            total = sum(weights)
            self._lanes = [
                _Lane(source.name, source.tasks, weight / total, self._order)
                for source, weight in zip(tasks.sources, weights, strict=True)
            ]
        else:
            self._lanes = [_Lane("", tuple(tasks), 1.0, self._order)]

    def next(self, count: int) -> list[Task]:
        """The next `count` tasks. They may span two epochs, and then one task can occur twice among them.

        Whoever forms groups or seeds from them must tell two draws of one task apart by their place in the list.
        """
        if count < 1:
            raise ValueError(f"count must be >= 1, got {count}")
        return [self._next_lane().draw() for _ in range(count)]

    def report(self, mean_scores: Mapping[str, float]) -> None:
        """How the tasks drawn for a step did, each once, by id. Without a curriculum nothing comes of it."""
        if self.curriculum is None:
            return
        for lane in self._lanes:
            for task_id in mean_scores.keys() & lane.tasks.keys():
                teaches = self.curriculum.teaches(mean_scores[task_id])
                lane.rest(task_id, 0 if teaches else self.curriculum.rest_epochs)

    @property
    def resting(self) -> int:
        """Tasks that will be passed over in the next epoch of their lane."""
        return sum(until > lane.epoch + 1 for lane in self._lanes for until in lane.resting.values())

    @property
    def drawn(self) -> int:
        """Tasks handed out since the start of the run (or since the weights changed)."""
        return sum(lane.drawn for lane in self._lanes)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes made over each lane; the single lane of an unweighted stream is called ''."""
        return {lane.name: lane.epoch + lane.progress for lane in self._lanes}

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON: per lane the epoch and the ids consumed in it, in order."""
        return {
            "format": STATE_FORMAT,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "lanes": [lane.state() for lane in self._lanes],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, changed: Literal["error", "continue"] = "error"
    ) -> list[str]:
        """Goes to a saved position; returns what differs between the data then and now, in words.

        With `changed="error"` any difference raises DataError and leaves the stream where it was. With "continue" the
        epoch goes on over the rows there are now: consumed rows are not repeated, new ones are still to come.
        """
        saved = _checked_state(state)
        differences = self._differences(state, saved)
        if differences and changed == "error":
            listed = "\n".join(f"  {difference}" for difference in differences)
            fix = "bring the data and settings back, or set data.changed: continue to go on with what is there now"
            raise DataError(f"the data differ from those of the checkpoint:\n{listed}\n{fix}")
        same_shares = [(lane.name, lane.share) for lane in self._lanes] == [(s["name"], s["share"]) for s in saved]
        by_name = {lane_state["name"]: lane_state for lane_state in saved}
        for lane in self._lanes:
            lane.restore(by_name.get(lane.name), keep_count=same_shares)
        return differences

    def _next_lane(self) -> _Lane:
        draws = self.drawn + 1
        return max(self._lanes, key=lambda lane: lane.share * draws - lane.drawn)

    def _order(self, tasks: Mapping[str, Task], epoch: int) -> list[str]:
        if not self.shuffle:
            return list(tasks)
        return sorted(tasks, key=lambda task_id: _sort_key(self.seed, epoch, task_id))

    def _differences(self, state: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> list[str]:
        differences = [
            f"{name} was {state[name]}, is {now}"
            for name, now in (("seed", self.seed), ("shuffle", self.shuffle))
            if state[name] != now
        ]
        lanes = {lane.name: lane for lane in self._lanes}
        for lane_state in saved:
            lane = lanes.pop(lane_state["name"], None)
            if lane is None:
                differences.append(f"{_label(lane_state['name'])} is gone ({lane_state['tasks']:,} tasks)")
            else:
                differences += lane.differences(lane_state)
        return differences + [f"{_label(name)} is new ({len(lane.tasks):,} tasks)" for name, lane in lanes.items()]


class _Lane:
    """One pool of tasks and the position in it. `_queue` holds the rest of the epoch, next task last."""

    def __init__(self, name: str, tasks: Sequence[Task], share: float, order: Any) -> None:
        self.name = name
        self.share = share
        self.tasks = {task.id: task for task in tasks}
        self.epoch = 0
        self.consumed: list[str] = []
        self.drawn = 0
        self._order = order
        self._digest = _digest_of(tasks)
        self.resting: dict[str, int] = {}  # task id -> the first epoch in which it is drawn again
        self._queue = order(self.tasks, 0)[::-1]

    @property
    def progress(self) -> float:
        """Share of the epoch that is over."""
        return len(self.consumed) / max(1, len(self.consumed) + len(self._queue))

    def rest(self, task_id: str, epochs: int) -> None:
        """Passes `task_id` over in the next `epochs` epochs (and in this one, if it began since the task was drawn); 0
        calls it back."""
        self.resting.pop(task_id, None)
        if epochs:
            self.resting[task_id] = self.epoch + 1 + epochs
            self._queue = [other for other in self._queue if other != task_id]

    def draw(self) -> Task:
        if not self._queue:
            self.epoch += 1
            self.consumed = []
            self._queue = self._awake()
        task_id = self._queue.pop()
        self.consumed.append(task_id)
        self.drawn += 1
        return self.tasks[task_id]

    def _awake(self) -> list[str]:
        """The tasks of an epoch that begins, next one last. When all rest, all are called back."""
        self.resting = {task_id: until for task_id, until in self.resting.items() if until > self.epoch}
        if len(self.resting) == len(self.tasks):
            self.resting = {}
        return [task_id for task_id in self._order(self.tasks, self.epoch)[::-1] if task_id not in self.resting]

    def state(self) -> dict[str, Any]:
        resting = {"resting": dict(self.resting)} if self.resting else {}
        return resting | {
            "name": self.name,
            "share": self.share,
            "drawn": self.drawn,
            "epoch": self.epoch,
            "consumed": list(self.consumed),
            "tasks": len(self.tasks),
            "digest": self._digest,
        }

    def restore(self, state: Mapping[str, Any] | None, *, keep_count: bool) -> None:
        """Takes the saved position over the tasks there are now; None starts at the beginning."""
        self.epoch = state["epoch"] if state else 0
        self.drawn = state["drawn"] if state and keep_count else 0
        self.consumed = [task_id for task_id in state["consumed"] if task_id in self.tasks] if state else []
        resting = state.get("resting", {}) if state else {}
        self.resting = {task_id: until for task_id, until in resting.items() if task_id in self.tasks}
        out = {*self.consumed, *self.resting}
        self._queue = [task_id for task_id in self._order(self.tasks, self.epoch)[::-1] if task_id not in out]

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        label = _label(self.name)
        found: list[str] = []
        if state["share"] != self.share:
            found.append(f"{label} had share {state['share']:.4g} of the draws, has {self.share:.4g}")
        if state["digest"] == self._digest:
            return found
        gone = [task_id for task_id in state["consumed"] if task_id not in self.tasks]
        text = f"{label} had {state['tasks']:,} tasks, has {len(self.tasks):,}"
        if state["tasks"] == len(self.tasks) and not gone:
            text += ", of other content"
        if gone:
            text += (
                f"; {len(gone):,} of the {len(state['consumed']):,} consumed in this epoch are gone, e.g. {gone[:3]}"
            )
        return [*found, text]


def _label(name: str) -> str:
    return f"source '{name}'" if name else "the pool of all sources"


def _sort_key(seed: int, epoch: int, task_id: str) -> tuple[str, str]:
    return digest_of(f"{seed}|{epoch}|{task_id}", 8), task_id


def _digest_of(tasks: Sequence[Task]) -> str:
    """A digest of ids, prompts and answers that does not depend on the order of rows."""
    lines = sorted(f"{task.id} {content_digest(task)}" for task in tasks)
    return digest_of("\n".join(lines), 16)


def _checked_state(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    if state.get("format") != STATE_FORMAT:
        raise DataError(f"this is no task position of format {STATE_FORMAT}: format is {state.get('format')!r}")
    lanes: list[dict[str, Any]] = state.get("lanes", [])
    missing = {"seed", "shuffle", "lanes"} - set(state)
    missing |= {key for lane in lanes for key in LANE_KEYS if key not in lane}
    if missing:
        raise DataError(f"the saved task position lacks {sorted(missing)}")
    for lane in lanes:
        if len(set(lane["consumed"])) != len(lane["consumed"]):
            raise DataError(f"the saved position of {_label(lane['name'])} lists a task as consumed twice")
    return lanes
