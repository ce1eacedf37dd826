"""Simulated against measured schedules: runs of `benchmarks/ahead.py --keep FOLDER`, and what `runs/schedule.py` says.

    python benchmarks/ahead.py --bounds null 0 1 2 --keep FOLDER
    python benchmarks/schedule.py FOLDER [--cores 2]

Two simulations of every run. "own" takes the turns of the run's own episodes with the seconds that they took, and the
seconds of its own updates: what is tested is who waits for whom. "predicted" knows the synchronous run (null) alone:
its tokens, tool seconds and updates, and the speed of its sampler, and says what running ahead would give on `--cores`
cores that samplers and trainer share. Prints a table, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.config import RLConfig, load_config
from posttrain.runs.schedule import Episode, Machine, Outcome, Turn, Work, simulate
from posttrain.runs.trajectories import read_trajectories, step_file
from posttrain.trajectory import Source, Trajectory

WARM_UP = 2  # steps


class Measured:
    """A run directory: its episodes, and where its seconds went."""

    def __init__(self, folder: Path) -> None:
        self.config = load_config(RLConfig, folder / "config.yaml")
        self.bound = self.config.sampling.max_staleness
        rows = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
        gaps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.rows = {row["step"]: row for row in rows if row["step"] > 0}
        self.gaps = {row["step"]: row for row in gaps if row["step"] > 0}
        self.episodes = {
            step: _episodes(read_trajectories(step_file(folder / "trajectories", step))) for step in self.rows
        }

    @property
    def later(self) -> list[int]:
        return [step for step in sorted(self.rows) if step > WARM_UP]

    @property
    def step_seconds(self) -> float:
        return float(np.mean([_own(self.rows[step]) for step in self.later]))

    @property
    def waiting(self) -> float:
        return float(np.mean([self.rows[step]["time/rollout"] for step in self.later]))

    @property
    def staleness(self) -> float:
        """In training steps."""
        updates = self.config.batch.optimizer_steps_per_step
        return float(np.mean([self.gaps[step]["gap/staleness"] for step in self.later])) / updates

    def train_seconds(self, step: int) -> float:
        """All of a step but the waiting: forwards, updates, and what is written."""
        return _own(self.rows[step]) - self.rows[step]["time/rollout"]


def _own(row: dict[str, float]) -> float:
    """Seconds of a step without an evaluation in it."""
    return row["time/step"] - row.get("time/eval", 0.0)


def _episodes(trajectories: Iterable[Trajectory]) -> list[list[tuple[int, float, float]]]:
    """(tokens, seconds of sampling, seconds of tools behind) of every policy turn of every episode."""
    episodes: dict[str, list[tuple[int, float, float]]] = {}
    for trajectory in trajectories:
        turns = episodes.setdefault(trajectory.episode_id, [])
        for turn in trajectory.turns:
            if turn.who is Source.POLICY:
                turns.append((turn.end - turn.start, turn.seconds, sum(call.seconds for call in turn.calls)))
    return list(episodes.values())


def replayed(run: Measured) -> Outcome:
    """With the seconds of its own turns: a token is a second, and nobody disturbs anybody."""
    works = [
        Work(
            [tuple(Turn(seconds, tools) for _, seconds, tools in e) for e in run.episodes[step]],
            run.train_seconds(step),
        )
        for step in sorted(run.rows)
    ]
    return simulate(works, Machine(step_seconds=1.0, slots=10**9), run.bound or 0, warm_up=WARM_UP)


def predicted(base: Measured, machine: Machine, bound: int) -> Outcome:
    """Of the synchronous run's episodes, running ahead by `bound`."""
    works = [Work([_by_tokens(e) for e in base.episodes[step]], base.train_seconds(step)) for step in sorted(base.rows)]
    return simulate(works, machine, bound, warm_up=WARM_UP)


def _by_tokens(turns: Sequence[tuple[int, float, float]]) -> Episode:
    return tuple(Turn(tokens, tools) for tokens, _, tools in turns)


def machine_of(base: Measured, samplers: int, cores: float) -> Machine:
    """The speed of the sampler in the synchronous run: seconds of a decode step, least squares over all turns.

    Episodes of a step begin together, so that their turns' seconds say how many were decoded at any time.
    """
    steps, sizes, weights = [], [], []
    for step in base.later:
        spans = [span for turns in base.episodes[step] for span in _spans(turns)]
        starts = np.array([start for start, _, _ in spans])
        ends = np.array([end for _, end, _ in spans])
        for start, end, tokens in spans:
            if tokens < 2 or end <= start:
                continue
            overlap = np.clip(np.minimum(ends, end) - np.maximum(starts, start), 0, None).sum() / (end - start)
            steps.append((end - start) / tokens)
            sizes.append(overlap / samplers)
            weights.append(tokens)
    root = np.sqrt(np.array(weights, dtype=float))
    design = np.stack([np.ones(len(sizes)), np.array(sizes)], axis=1)
    (fixed, each), *_ = np.linalg.lstsq(design * root[:, None], np.array(steps) * root, rcond=None)
    return Machine(
        samplers=samplers,
        slots=256 // samplers,
        step_seconds=max(float(fixed), 1e-5),
        sequence_seconds=max(float(each), 0.0),
        cores=cores,
        trainer_threads=min(cores, base.config.batch.cpu_workers),
    )


def _spans(turns: Sequence[tuple[int, float, float]]) -> list[tuple[float, float, int]]:
    """(start, end, tokens) of sampling, from the start of the step."""
    now, spans = 0.0, []
    for tokens, seconds, tools in turns:
        spans.append((now, now + seconds, tokens))
        now += seconds + tools
    return spans


def compared(run: Measured, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "max_staleness": run.bound,
        "measured_step": round(run.step_seconds, 3),
        "measured_waiting": round(run.waiting, 3),
        "measured_staleness": round(run.staleness, 3),
    }
    for name, outcome in outcomes.items():
        row |= {
            f"{name}_step": round(outcome.mean_step, 3),
            f"{name}_error": round(outcome.mean_step / run.step_seconds - 1, 3),
            f"{name}_trainer_idle": round(outcome.trainer_idle, 3),
            f"{name}_samplers_idle": round(outcome.samplers_idle, 3),
            f"{name}_staleness": round(outcome.staleness, 3),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of `benchmarks/ahead.py --keep`")
    parser.add_argument("--cores", type=float, default=2.0)
    parser.add_argument("--samplers", type=int, default=2, help="engines side by side")
    given = parser.parse_args()
    runs = [Measured(folder) for folder in sorted(given.folder.iterdir()) if (folder / "timing.jsonl").is_file()]
    base = next(run for run in runs if run.bound is None)
    machine = machine_of(base, given.samplers, given.cores)
    rows = []
    for run in sorted(runs, key=lambda run: -1 if run.bound is None else run.bound):
        rows.append(compared(run, {"own": replayed(run), "predicted": predicted(base, machine, run.bound or 0)}))
        print(rows[-1], flush=True)
    speed = {"step_ms": 1e3 * machine.step_seconds, "sequence_ms": 1e3 * machine.sequence_seconds}
    print(json.dumps({"sampler": speed, "rows": rows}))


if __name__ == "__main__":
    main()
