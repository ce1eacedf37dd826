"""What a computation may cost on whatever machine the tests run on."""

from __future__ import annotations

import time

USUAL = 0.022  # processor seconds of `_work` on 2 quiet cores AMD EPYC
MARGIN = 4  # a neighbour, a cold cache or a slower clock cost up to 2; a wrong order of growth far more than 4


def allowed(usual: float) -> float:
    """A bound for what takes `usual` seconds on the usual machine: several times that, more where Python is slower."""
    return MARGIN * usual * max(1.0, min(_work() for _ in range(3)) / USUAL)


def _work() -> float:
    start = time.process_time()
    table: dict[str, int] = {}
    for i in range(100_000):
        key = str(i % 997)
        table[key] = table.get(key, 0) + i
    assert len(table) == 997
    return time.process_time() - start
