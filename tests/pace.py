"""How fast this machine is just now, for tests that bound what a computation may cost."""

from __future__ import annotations

import time

USUAL = 0.022  # processor seconds of `_work` on 2 quiet cores AMD EPYC


def slowness() -> float:
    """How many times longer than on the usual machine Python takes here and now; at least 1."""
    return max(1.0, min(_work() for _ in range(3)) / USUAL)


def _work() -> float:
    start = time.process_time()
    table: dict[str, int] = {}
    for i in range(100_000):
        key = str(i % 997)
        table[key] = table.get(key, 0) + i
    assert len(table) == 997
    return time.process_time() - start
