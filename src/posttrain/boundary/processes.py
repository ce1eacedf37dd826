"""Ending a worker process with everything that it started, also what has left its process group or its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

TOKEN = "POSTTRAIN_WORKER"  # environment variable that marks a worker and, by inheritance, its children
_PROC = Path("/proc")
_ROUNDS = 50  # a process that forks while we look is found in a further round


def kill_tree(pid: int, token: str) -> None:
    """Kills the process group of `pid`, its descendants, and (Linux) every process whose environment holds `token`.

    On Linux all of them are stopped first, so that none can start another one behind our back. The caller may belong
    to the group: it is then the last to go.
    """
    if not hasattr(os, "killpg"):
        _send(pid, signal.SIGTERM)
        return
    marked: set[int] = set()
    for _ in range(_ROUNDS):
        found = _family(pid, token) - marked - {os.getpid()}
        if not found:
            break
        for member in found:
            _send(member, signal.SIGSTOP)
        marked |= found
    for member in marked - {pid}:
        _send(member, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def living(token: str) -> set[int]:
    """Processes, zombies aside, whose environment holds the token; empty where there is no /proc."""
    return _family(0, token)


def wait_gone(token: str, seconds: float) -> bool:
    """Whether no process with the token is left, waiting for it."""
    ends = time.monotonic() + seconds
    while living(token):
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def _family(pid: int, token: str) -> set[int]:
    if not _PROC.is_dir():
        return set()
    mark = f"{TOKEN}={token}".encode()
    parents, family = {}, set()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            state, parent = _state(entry)
            if state == "Z":
                continue
            parents[int(entry.name)] = parent
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                family.add(int(entry.name))
    return family | _descendants(pid, parents)


def _state(entry: Path) -> tuple[str, int]:
    """State letter and parent; the command's name before them may hold anything, brackets too."""
    fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _descendants(pid: int, parents: dict[int, int]) -> set[int]:
    family = {pid} & parents.keys()
    while True:
        more = {child for child, parent in parents.items() if parent in family} - family
        if not more:
            return family
        family |= more


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
