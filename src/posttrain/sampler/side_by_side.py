"""Engines that step at the same time, each on a thread, while the event loop goes on.

Torch lets go of the interpreter inside its kernels, so two engines with half the batch each keep two cores busy.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from posttrain.sampler.engine import Engine
from posttrain.sampler.requests import Request
from posttrain.trainer.parallel import threads


class SideBySide:
    """Steps engines and keeps everyone else's hands off them meanwhile. With one worker there are no threads at all."""

    def __init__(self, workers: int) -> None:
        self._pool = threads(workers, "sampler") if workers > 1 else None
        self._running: list[Future[list[Request]]] = []
        self._later: list[Callable[[], None]] = []

    def between(self, action: Callable[[], None]) -> None:
        """Does `action` now, or after the step that is running."""
        if self._running:
            self._later.append(action)
        else:
            action()

    async def step(self, engines: Sequence[Engine]) -> list[Request]:
        """One step of every engine with work; the finished requests in the order of the engines."""
        working = [engine for engine in engines if engine.has_work]
        if self._pool is None or len(working) == 1:
            return [request for engine in working for request in engine.step()]
        self._running = [self._pool.submit(engine.step) for engine in working]
        try:
            await asyncio.gather(*map(asyncio.wrap_future, self._running), return_exceptions=True)
        finally:  # also when the loop is being shut down: a thread must not outlive the step
            done = self.wait()
        return [request for future in done for request in future.result()]

    def wait(self) -> list[Future[list[Request]]]:
        """Blocks until no thread works on an engine, then does what was put off."""
        done, later = self._running, self._later
        concurrent.futures.wait(done)
        self._running, self._later = [], []
        for action in later:
            action()
        return done
