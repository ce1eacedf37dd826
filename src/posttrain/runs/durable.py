"""Writing files so that a kill leaves the old content or the new, never a mixture. Standard library only."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

_FULL = (errno.EROFS, errno.ENOSPC, errno.EDQUOT)
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR)  # also of ports and processes: then no file is named


def sync_file(path: Path) -> None:
    """The file's bytes are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Every file and folder below `folder`, and itself, is on the disk."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync_file(Path(parent, name))
        sync_file(Path(parent))  # a folder's list of names is synced like a file


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replaces `path` in one step."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    sync_file(draft)
    os.replace(draft, path)
    sync_file(path.parent)


def remove_tree(folder: Path) -> None:
    """Deletes a folder; killed half-way, what is left has a name that nobody reads (and `sweep` removes)."""
    trash = folder.with_name(f".trash-{folder.name}")
    shutil.rmtree(trash, ignore_errors=True)
    os.rename(folder, trash)
    sync_file(folder.parent)
    shutil.rmtree(trash)


def sweep(folder: Path, prefixes: tuple[str, ...]) -> None:
    """Removes what a killed process left behind: entries whose names start with one of `prefixes`."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(prefixes):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


class LogError(ValueError):
    """A log holds something else than its rows."""


class JsonLog:
    """A file of JSON lines, each a mapping with an integer "step", never decreasing.

    A row is one write: a kill leaves whole rows and at most one torn last line, which the next opening cuts off.
    Numbers that JSON lacks (NaN, infinities) are stored as null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._truncate(None)
        self._file = path.open("ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        line = json.dumps(_finite(row), allow_nan=False, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def rewind(self, step: int) -> None:
        """Drops the rows of later steps."""
        self._truncate(step)

    def close(self) -> None:
        self._file.close()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.path)

    def _truncate(self, step: int | None) -> None:
        size = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                row = _row(line)
                if row is None and lines.readline():
                    raise LogError(f"{self.path}:{number} is not a row of this log; mend or delete the line")
                if row is None or (step is not None and row["step"] > step):
                    break
                size += len(line)
        if size < self.path.stat().st_size:
            os.truncate(self.path, size)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a JsonLog, also while it is being written."""
    with path.open("rb") as lines:
        rows = [_row(line) for line in lines]
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """None for a torn line: without a newline at its end, or not a mapping with a step."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return value


def disk_problem(error: BaseException) -> str | None:
    """What to do about a disk that is full or may not be written to, or a name that no file can have, which are
    nobody's bugs; None = another error."""
    if not isinstance(error, OSError):
        return None
    if error.errno in _NO_NAME:
        return f"{error}; choose another name"
    if error.errno not in _FULL and (error.errno not in _CLOSED or error.filename is None):
        return None
    return f"{error}; choose another place, or mend its permissions or the room on its disk"
