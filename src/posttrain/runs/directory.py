"""`runs/NAME/`: everything a run leaves behind, and the lock that makes one process its writer.

config.yaml (resolved), plan.txt, log.txt, metrics.jsonl (reproducible numbers only: an interrupted and resumed run ends
with the same bytes), timing.jsonl (seconds, tokens per second), trajectories/, checkpoints/.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from posttrain.runs.durable import JsonLog, sweep, sync_file, write_atomic

_held_locks: set[int] = set()  # descriptors; the lock goes with the last process that holds one


def _forget_locks() -> None:
    """A forked worker that outlives a killed run must not keep its lock."""
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


class RunError(RuntimeError):
    """The run directory cannot be used as asked; says what to do."""


class RunDirectory:
    """An open, locked run directory. Use `create` or `resume`, then `close` (or `with`)."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.trajectories.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)
        sweep(path, (".config.yaml.", ".plan.txt."))
        sweep(self.trajectories, (".",))
        self.metrics = JsonLog(path / "metrics.jsonl")
        self.timing = JsonLog(path / "timing.jsonl")

    @classmethod
    def create(cls, path: Path, config: str, plan: str) -> Self:
        """A new run. Raises RunError when `path` holds a run already, or anything else."""
        lock = _lock(path, make=True)
        try:
            _require_empty(path)
            run = cls(path, lock)
            write_atomic(path / "plan.txt", plan)
            write_atomic(path / "config.yaml", config)  # last: a folder with a config is a run
        except BaseException:
            _unlock(lock)
            raise
        return run

    @classmethod
    def resume(cls, path: Path) -> Self:
        """An existing run. Raises RunError when there is none at `path` or another process is writing it."""
        cls.config_in(path)
        return cls(path, _lock(path))

    @staticmethod
    def config_in(path: Path) -> Path:
        """The config of the run at `path`. Raises RunError when there is none."""
        if not (path / "config.yaml").is_file():
            what = "is no run directory (it has no config.yaml)" if path.exists() else "does not exist"
            raise RunError(f"{path} {what}; give the folder that the run was started with{_runs_near(path)}")
        return path / "config.yaml"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    def rewind(self, step: int) -> None:
        """Removes every row and file of later steps, so that the run goes on from the checkpoint of `step`."""
        self.metrics.rewind(step)
        self.timing.rewind(step)
        for file in self.trajectories.glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def sync(self) -> None:
        """Flushes everything written so far to the disk; called before a checkpoint is committed."""
        self.metrics.sync()
        self.timing.sync()
        sync_file(self.trajectories)  # the folder: its files were synced one by one

    def log_handler(self) -> logging.Handler:
        """Appends to log.txt; add it to the `posttrain` logger and close it after the run."""
        handler = logging.FileHandler(self.path / "log.txt", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        return handler

    def abandon(self) -> None:
        """Closes a new run that could not begin, and leaves its folder as one in which a run can be started."""
        for name in ("config.yaml", "plan.txt", "log.txt"):
            (self.path / name).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        self.metrics.close()
        self.timing.close()
        _unlock(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path, *, make: bool = False) -> int:
    """The kernel gives the lock back when the process dies, however it dies. make: the folder, if it is missing."""
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(f"the run directory {path} cannot be written: {error.strerror or error}; set run.dir") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise RunError(f"{path} is being written by another process ({holder}); wait for it or end it") from None
    os.ftruncate(descriptor, 0)
    _held_locks.add(descriptor)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _unlock(descriptor: int) -> None:
    if descriptor in _held_locks:
        _held_locks.discard(descriptor)
        os.close(descriptor)


def _require_empty(path: Path) -> None:
    found = sorted(entry.name for entry in path.iterdir() if entry.name != "lock")
    if (path / "config.yaml").exists():
        raise RunError(
            f"{path} already holds a run. Go on with it: `posttrain resume {path}`. "
            "Start another beside it: set run.name, or run.dir where that is set. Start over: delete the folder"
        )
    unfinished = {"plan.txt", "metrics.jsonl", "timing.jsonl", "trajectories", "checkpoints"}  # killed while starting
    unfinished |= {"tensorboard", "wandb", "wandb_id"}  # one sink was open when another did not start
    foreign = [name for name in found if name not in unfinished and not name.startswith(".")]
    if foreign:
        raise RunError(f"{path} is not empty (it holds {foreign[0]!r}); set run.name or run.dir to a new folder")


def _runs_near(path: Path) -> str:
    within = next((folder for folder in path.parents if (folder / "config.yaml").is_file()), None)
    if within is not None:  # a checkpoint
        return f": {within}"
    parent = path.parent
    names = sorted(file.parent.name for file in parent.glob("*/config.yaml")) if parent.is_dir() else []
    return f". Runs in {parent}: {', '.join(names[:10])}" if names else ""
