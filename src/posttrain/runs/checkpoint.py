"""Checkpoints that are either whole or absent, whatever the moment of the kill. Standard library only, no pickle.

`checkpoints/step-N/` holds what the caller wrote, `state.json` (counters, RNG, data cursor) and `manifest.json` (step,
metric, size and SHA-256 of every file). It is written under a name that nobody reads and renamed when all of it is on
the disk; it is deleted by a rename first. Which one is the latest is told by the manifests, not by names or times.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.boundary.foreign_json import read_json
from posttrain.runs.durable import remove_tree, sweep, sync_file, sync_tree

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged or cannot be written; says which file and what to do."""


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Besides the last ones, the checkpoint with the best value of `metric` is kept; the earliest one among equals."""

    metric: str
    mode: Literal["max", "min"] = "max"

    def score(self, value: float) -> float:
        return value if self.mode == "max" else -value


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint. `metric` is the value of the KeepBest metric at its step, None = not measured."""

    path: Path
    step: int
    metric: float | None
    files: dict[str, tuple[int, str]]  # relative path -> (bytes, SHA-256)

    def verify(self) -> None:
        """Raises CheckpointError naming the first file that is missing, surplus or not as it was written."""
        found = {name for name in _names(self.path) if name != MANIFEST}
        if surplus := sorted(found - self.files.keys()):
            raise CheckpointError(f"{self.path / surplus[0]} is not in the manifest; move it out of the checkpoint")
        for name, (size, digest) in self.files.items():
            path = self.path / name
            if name not in found:
                raise _broken(path, "is missing")
            if path.stat().st_size != size:
                raise _broken(path, f"has {path.stat().st_size} bytes; {size} were written")
            if _sha256(path) != digest:
                raise _broken(path, "differs from what was written (checksum)")

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / STATE).read_text(encoding="utf-8"))


class CheckpointStore:
    """The folder of checkpoints of one run; only one process may write to it (the run's lock sees to that).

    keep: how many of the last are kept. Opening removes what a killed process left half-written or half-deleted.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_best: KeepBest | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be >= 1, got {keep}: the last checkpoint is what a run resumes from")
        self.folder = folder
        self.keep = keep
        self.keep_best = keep_best
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, (".draft-", ".trash-"))

    def commit(
        self, step: int, write: Callable[[Path], None], state: dict[str, Any], metric: float | None = None
    ) -> Checkpoint:
        """Writes the checkpoint of `step` (steps done so far), then deletes those that need not be kept.

        write: fills the folder it is given. state: JSON values only. Raises CheckpointError when there is a checkpoint
        of this or of a later step.
        """
        draft = self.begin(step)
        write(draft)
        return self.finish(draft, step, state, metric)

    def begin(self, step: int) -> Path:
        """The first half of `commit`, for a checkpoint that takes its time: an empty folder to fill."""
        self._check_newest(step)
        draft = self.folder / f".draft-step-{step}"
        draft.mkdir()
        return draft

    def finish(self, draft: Path, step: int, state: dict[str, Any], metric: float | None = None) -> Checkpoint:
        """The second half of `commit`."""
        _write_json(draft / STATE, state)
        files = {name: [(draft / name).stat().st_size, _sha256(draft / name)] for name in _names(draft)}
        known = metric if metric is not None and math.isfinite(metric) else None
        _write_json(draft / MANIFEST, {"format": FORMAT, "step": step, "metric": known, "files": files})
        sync_tree(draft)
        final = self.folder / f"step-{step}"
        os.rename(draft, final)
        sync_file(self.folder)
        self._prune()
        return _load(final)

    def all(self) -> list[Checkpoint]:
        """By step, unverified."""
        return checkpoints_in(self.folder)

    def latest(self) -> Checkpoint | None:
        """The checkpoint of the highest step, verified; None when there is none.

        A damaged one is an error, not passed over in silence: the caller may delete it to resume from the one before.
        """
        return self._verified(self.all()[-1:])

    def best(self) -> Checkpoint | None:
        """The checkpoint that `keep_best` asks for, verified; None when its metric was never measured."""
        found = best_of(self.all(), self.keep_best)
        return self._verified([] if found is None else [found])

    def _check_newest(self, step: int) -> None:
        existing = self.all()
        if existing and existing[-1].step >= step:
            raise CheckpointError(
                f"{existing[-1].path} exists, so step {step} cannot be written after it; "
                "resume the run from its latest checkpoint or discard the later ones"
            )

    def _verified(self, found: list[Checkpoint]) -> Checkpoint | None:
        for checkpoint in found:
            checkpoint.verify()
        return found[0] if found else None

    def _prune(self) -> None:
        checkpoints = self.all()
        best = best_of(checkpoints, self.keep_best)
        kept = {checkpoint.step for checkpoint in checkpoints[-self.keep :] + ([] if best is None else [best])}
        for checkpoint in checkpoints:
            if checkpoint.step not in kept:
                remove_tree(checkpoint.path)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """Those in `folder`, by step, unverified. Only reads, so that it may be asked while the run goes on."""
    found: list[Checkpoint] = []
    for path in folder.iterdir():
        if not path.is_dir() or path.name.startswith("."):
            continue
        try:
            found.append(_load(path))
        except CheckpointError:
            if path.exists():  # else the run has deleted it meanwhile
                raise
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def best_of(checkpoints: list[Checkpoint], keep_best: KeepBest | None) -> Checkpoint | None:
    """The checkpoint with the best metric; None when none was measured, or `keep_best` is None."""
    measured = [(c.metric, -c.step, c) for c in checkpoints if c.metric is not None]
    if keep_best is None or not measured:
        return None
    return max(measured, key=lambda entry: (keep_best.score(entry[0]), entry[1]))[2]


def _load(path: Path) -> Checkpoint:
    manifest = path / MANIFEST
    try:
        record = read_json(manifest.read_bytes())
        files = {name: (int(size), str(digest)) for name, (size, digest) in record["files"].items()}
        checkpoint = Checkpoint(path, int(record["step"]), record["metric"], files)
    except FileNotFoundError:
        raise _broken(manifest, "is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _broken(manifest, f"cannot be read ({type(error).__name__}: {error})") from error
    if record.get("format") != FORMAT:
        raise CheckpointError(f"{manifest} has format {record.get('format')!r}; this version reads format {FORMAT}")
    return checkpoint


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {what}. The checkpoint is damaged: restore the file, or delete the folder to use the one before it"
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Exact: floats come back bit by bit. Raises TypeError for what JSON lacks, ValueError for NaN and infinities."""
    path.write_text(json.dumps(value, allow_nan=False, indent=1), encoding="utf-8")
