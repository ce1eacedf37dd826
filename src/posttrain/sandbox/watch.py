"""What the kernel does not limit as a whole: wall time, the memory of all processes together, output, files."""

from __future__ import annotations

import contextlib
import os
import time

from posttrain.sandbox.confine import NAMESPACES, Plan
from posttrain.sandbox.scratch import holds_more_than

_PAGE = os.sysconf("SC_PAGE_SIZE")
_EVERY_SECONDS = 0.05  # memory and disk; reading them costs about 0.1 ms


class Watch:
    """Says which limit a run has passed, if any."""

    def __init__(self, plan: Plan, init: int, started: float) -> None:
        self.plan = plan
        self._init = init
        self._ends = started + plan.wall_seconds
        self._next = started + _EVERY_SECONDS

    def passed(self, output_bytes: int) -> str | None:
        """`wall`, `output`, `memory`, `disk` or None."""
        now = time.monotonic()
        if now >= self._ends:
            return "wall"
        if output_bytes > self.plan.output_bytes:
            return "output"
        if now < self._next:
            return None
        self._next = now + _EVERY_SECONDS
        if _memory(_family(self._init)) > self.plan.memory_bytes:
            return "memory"
        if self.plan.isolation != NAMESPACES and holds_more_than(self.plan.disk_bytes, self.plan.place):
            return "disk"  # else the folder is a file system of that size
        return None


def _family(pid: int) -> list[int]:
    """The process and its descendants, from the children that the kernel lists; just the process where it does not."""
    found, new = [], [pid]
    while new:
        found += new
        new = [child for parent in new for child in _children(parent)]
    return found


def _children(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def _memory(pids: list[int]) -> int:
    """Bytes in memory, pages that processes share counted for each."""
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as file:
                pages += int(file.read().split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return pages * _PAGE
