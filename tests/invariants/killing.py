"""Kills training runs with SIGKILL and tells what is left of them. Used by the tests here and by `benchmarks/kill.py`.

Trainers are real processes, forked from a server that has imported torch and transformers once (and computed nothing),
so that a life costs what training costs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from forked import server
from posttrain.cli import main
from posttrain.runs.checkpoint import CheckpointStore, KeepBest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "tiny_search.yaml"
STEPS = 6
SMALL = (
    f"run.steps={STEPS}",
    "run.sinks=[]",
    "data.train=[{path: 'posttrain.envs.tiny_world:train_rows', options: {seed: 0}, limit: 32}]",  # soon tokenised
    "data.eval=[{path: 'posttrain.envs.tiny_world:eval_rows', options: {seed: 0}, limit: 4}]",
    "env.options.max_turns=1",
    "batch.prompts_per_step=2",
    "batch.samples_per_prompt=4",
    "batch.prompts_per_mini_batch=1",
    "limits.max_turn_tokens=4",
    "limits.max_observation_tokens=48",
    "limits.max_episode_tokens=128",
    "eval.max_tasks=3",
    "eval.every=2",
    "checkpoint.every=2",
    "checkpoint.keep_best=eval/reward",
    f"reward={{name: '{Path(__file__).resolve()}:noise', isolate: false}}",
)
GRPO = (
    *SMALL,
    "eval.temperature=0.7",
    "batch.epochs=1",
    "algorithm.measure_kl=false",
    "algorithm.dynamic_sampling={low: 0.45, high: 0.8, max_rounds: 2}",  # so that steps ask different numbers of tasks
)
PPO = (
    *SMALL,
    "batch.cpu_workers=1",
    "checkpoint.background=true",
    "algorithm={advantage: gae, std: null, length: null, aggregate: token_mean, kl_coef: 0.01, kl_in: reward}",
    "algorithm.kl_estimator=k1",
    "algorithm.kl_target=0.001",
    "algorithm.shaping={normalise: running}",
    "algorithm.lam=0.95",
    "critic={optimizer: {lr: 1.0e-4}, warmup_steps: 1}",
)
CONFIGS = {"grpo": GRPO, "ppo": PPO}
SECONDS = 120  # no trainer here needs as long


def noise(episode: Any, task: Any) -> float:
    """A reward that differs from episode to episode: every group has something to teach."""
    text = "".join(segment.text for segment in episode.segments)
    return zlib.crc32(text.encode()) % 1000 / 1000


# ---------------------------------------------------------------- moments


@dataclass(frozen=True)
class Moment:
    """When a trainer dies: `seconds` after it began, or right before the `count`-th event at `point`."""

    seconds: float | None = None
    point: str = ""
    count: int = 1

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s" if self.seconds is not None else f"{self.point} {self.count}"


NEVER = Moment(point="never")
POINTS: dict[str, Callable[[str, tuple[Any, ...]], bool]] = {
    "config is about to appear": lambda e, a: e == "os.rename" and str(a[1]).endswith("config.yaml"),
    "log is opened": lambda e, a: e == "open" and str(a[0]).endswith("log.txt"),
    "trajectories are about to appear": lambda e, a: e == "os.rename" and str(a[1]).endswith(".parquet"),
    "draft has weights only": lambda e, a: e == "open" and str(a[0]).endswith("state.json") and a[1] == "w",
    "draft lacks its manifest": lambda e, a: e == "open" and "/.draft-" in str(a[0]) and "manifest" in str(a[0]),
    "draft is about to be renamed": lambda e, a: e == "os.rename" and "/.draft-step" in str(a[0]),
    "renamed, not pruned": lambda e, a: e == "open" and str(a[0]).endswith("/checkpoints") and a[1] is None,
    "a checkpoint is about to be pruned": lambda e, a: e == "os.rename" and "/.trash-step" in str(a[1]),
    "half of a checkpoint is deleted": lambda e, a: e == "os.remove" and str(a[0]) == "model.safetensors",
    "metrics are rewound": lambda e, a: e == "os.truncate" and str(a[0]).endswith("metrics.jsonl"),
    "in an evaluation": lambda e, a: e == "invariants.evaluation",
    "in a rollout": lambda e, a: e == "invariants.rollout",
    "never": lambda e, a: False,
}


AT_EVERY_KIND = (
    Moment(point="config is about to appear"),
    Moment(point="log is opened"),
    Moment(point="in an evaluation", count=2),
    Moment(point="in a rollout", count=3),
    Moment(point="trajectories are about to appear", count=2),
    Moment(point="draft has weights only"),
    Moment(point="draft lacks its manifest"),
    Moment(point="draft is about to be renamed"),
    Moment(point="metrics are rewound"),
    Moment(point="in an evaluation", count=2),
    Moment(point="renamed, not pruned"),
    Moment(point="a checkpoint is about to be pruned"),
    Moment(point="half of a checkpoint is deleted"),
)
OFTEN = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=null")  # so that there is much to prune


def die_at(moment: Moment) -> None:
    """From now on this process kills itself at `moment` (if that is an event)."""
    seen, here = 0, POINTS[moment.point]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if here(event, arguments):
            seen += 1
            if seen == moment.count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def announce_samples(run: Any) -> None:
    """Raises an audit event at the start of every episode."""
    for collector, event in ((run.collector, "rollout"), (run.eval_collector, "evaluation")):
        make_env = collector.spec.make_env

        def made(task: Any, make_env: Any = make_env, event: str = event) -> Any:
            sys.audit(f"invariants.{event}")
            return make_env(task)

        object.__setattr__(collector.spec, "make_env", made)


# ---------------------------------------------------------------- trainers


def go_on(folder: str, overrides: Sequence[str], moment: Moment) -> None:
    """What a trainer's process does: resume the run in `folder`, or start it where there is none yet."""
    from posttrain.config import RLConfig, load_config
    from posttrain.loops import rl

    _say_to(f"{folder}.out")
    if moment.seconds is None:
        die_at(moment)
    if (Path(folder) / "config.yaml").is_file():
        run = rl.resume(Path(folder))
    else:
        run = rl.start(load_config(RLConfig, RECIPE, [*overrides, f"run.dir={folder}"]))
    announce_samples(run)
    try:
        rl.train(run)
    finally:
        run.close()


def live(folder: Path, overrides: Sequence[str], moment: Moment = NEVER) -> bool:
    """Lets a trainer work on `folder` until it ends or `moment` comes; True when it was killed."""
    process = server().Process(target=go_on, args=(str(folder), tuple(overrides), moment))
    process.start()
    process.join(moment.seconds if moment.seconds is not None else SECONDS)
    if moment.seconds is not None and process.exitcode is None:
        process.kill()
    return _was_killed(process, folder)


@dataclass
class Life:
    """A run that is killed at each of `moments` in turn, then left alone until it ends."""

    folder: Path
    kills: list[str] = field(default_factory=list)

    def lead(self, overrides: Sequence[str], moments: Sequence[Moment]) -> Life:
        for moment in moments:
            if not live(self.folder, overrides, moment):
                return self
            self.kills.append(f"{moment} ({phase(self.folder)})")
        live(self.folder, overrides)
        return self


def phase(folder: Path) -> str:
    """What a killed run was about, from what it left."""
    if not (folder / "config.yaml").is_file():
        return "before the run existed"
    if list((folder / "checkpoints").glob(".draft-*")):
        return "while a checkpoint was written"
    if list((folder / "checkpoints").glob(".trash-*")):
        return "while a checkpoint was deleted"
    rows = (folder / "metrics.jsonl").read_bytes().count(b"\n") if (folder / "metrics.jsonl").exists() else 0
    return "before the first row" if not rows else f"after row {rows}"


def random_lives(base: Path, overrides: Sequence[str], *, seed: str, kills: int, longest: float) -> list[Life]:
    """Lives one after another until `kills` kills hit a living process.

    One kill in four comes within the first half second, the others anywhere in a run of `longest` seconds.
    """
    chance = random.Random(seed)
    lives: list[Life] = []
    left = kills
    while left:
        life = Life(base / f"{len(lives)}")
        moments = [Moment(seconds=chance.uniform(0, 0.5 if chance.random() < 0.25 else longest)) for _ in range(left)]
        lives.append(life.lead(overrides, moments[:8]))
        left -= len(life.kills)
    return lives


def by_command(folder: Path, overrides: Sequence[str], seconds: float | None = None) -> bool:
    """The same through `posttrain rl` and `posttrain resume`; kills the command after its run has lived `seconds`."""
    begun = (folder / "config.yaml").is_file()
    arguments = ["resume", folder] if begun else ["rl", RECIPE, *overrides, f"run.dir={folder}"]
    process = server().Process(target=_command, args=(f"{folder}.out", ["posttrain", *map(str, arguments)]))
    process.start()
    if seconds is not None:
        _wait_until(lambda: process.exitcode is not None or _locked_by(folder, process.pid))
        time.sleep(seconds)
        process.kill()
    return _was_killed(process, folder)


def _command(log: str, words: list[str]) -> None:
    """The command line, in a process that need not import anything any more."""
    _say_to(log)
    sys.argv = words
    main()


def _say_to(log: str) -> None:
    """From now on this process prints to the end of a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _was_killed(process: Any, folder: Path) -> bool:
    """Waits for the end; AssertionError with what it printed when that is of another kind."""
    process.join(SECONDS)
    if process.exitcode not in (0, -signal.SIGKILL):
        raise AssertionError(f"the trainer ended with {process.exitcode}:\n{Path(f'{folder}.out').read_text()}")
    return process.exitcode != 0


def _locked_by(folder: Path, process: int) -> bool:
    """Whether that process has made or opened the run: imports are over, and it is about to do something."""
    lock = folder / "lock"
    return lock.is_file() and f"process {process} " in lock.read_text()


def _wait_until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not true():
        if time.monotonic() > ends:
            raise AssertionError("nothing happened")
        time.sleep(0.01)


# ---------------------------------------------------------------- what is left


@dataclass(frozen=True)
class Remains:
    """Everything of a finished run that must not depend on whether it was interrupted."""

    metrics: bytes
    checkpoint: dict[str, bytes]  # file -> content: weights, optimizer, random states, consumed ids, tokenizer
    best: int | None  # step of the best checkpoint, if it is kept
    trajectories: list[dict[str, Any]]

    def differences(self, other: Remains) -> list[str]:
        found = [] if self.metrics == other.metrics else ["metrics.jsonl: " + _first_change(self, other)]
        for name in sorted(self.checkpoint.keys() | other.checkpoint.keys()):
            if self.checkpoint.get(name) != other.checkpoint.get(name):
                found.append(f"checkpoint: {name} differs")
        if self.best != other.best and None not in (self.best, other.best):
            found.append(f"the best checkpoint is that of step {self.best}, not {other.best}")
        if len(self.trajectories) != len(other.trajectories):
            return [*found, f"{len(self.trajectories)} trajectories, not {len(other.trajectories)}"]
        for mine, yours in zip(self.trajectories, other.trajectories, strict=True):
            found += [f"{mine['episode_id']}: {key}" for key in mine if repr(mine[key]) != repr(yours[key])]
        return found


def remains(folder: Path) -> Remains:
    store = CheckpointStore(folder / "checkpoints", keep_best=KeepBest("eval/reward"))
    latest, best = store.latest(), store.best()
    assert latest is not None
    files = {name: latest.path / name for name in latest.files}  # all but the manifest, which is made of these
    rows = [row for file in sorted((folder / "trajectories").glob("*")) for row in pq.read_table(file).to_pylist()]
    return Remains(
        metrics=(folder / "metrics.jsonl").read_bytes(),
        checkpoint={name: path.read_bytes() for name, path in files.items()},
        best=None if best is None else best.step,
        trajectories=[row | {"turns": _without_seconds(row["turns"])} for row in rows],
    )


def consumed(folder: Path) -> list[list[str]]:
    """The ids asked in each step, by the trajectories."""
    files = sorted((folder / "trajectories").glob("*.parquet"))
    return [pq.read_table(file, columns=["task_id"])["task_id"].to_pylist() for file in files]


def _without_seconds(turns: str) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(child) for key, child in value.items() if key != "seconds"}
        return [strip(child) for child in value] if isinstance(value, list) else value

    return strip(json.loads(turns))


def _first_change(mine: Remains, yours: Remains) -> str:
    pairs = zip(mine.metrics.splitlines(), yours.metrics.splitlines(), strict=False)
    for one, other in pairs:
        if one != other:
            a, b = json.loads(one), json.loads(other)
            changed = [f"{key} {a.get(key)} / {b.get(key)}" for key in a.keys() | b.keys() if a.get(key) != b.get(key)]
            return f"step {a['step']}: {', '.join(sorted(changed)[:4])}"
    return "the number of rows"
