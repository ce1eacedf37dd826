"""Engines on threads, each at its own pace, while the event loop goes on.

Torch lets go of the interpreter inside its kernels, so two engines with half the batch each keep two cores busy. An
engine that is put to work makes forwards until one of its own requests is done. It never waits for another engine: a
barrier after every forward would make the slower one set the pace.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from posttrain.sampler.engine import Engine
from posttrain.sampler.requests import Request


class Track:
    """One engine and its thread. While it rests the caller's thread may touch it, while it runs only a pool thread.

    `start`, `take`, `do` and `stop` are for one thread, the caller's.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._burst: Future[list[Request]] | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        """From `start` to `take`, also when the work is done and nobody has taken it yet."""
        return self._burst is not None

    @property
    def done(self) -> bool:
        return self._burst is not None and self._burst.done()

    def do(self, action: Callable[[], None]) -> None:
        """Does `action` to the engine now, or, while it runs, before its next forward."""
        if self.running:
            self._inbox.append(action)
        else:
            action()

    def start(self, pool: Executor, then: Callable[[], None]) -> None:
        """Puts the engine to work; `then` is called on its thread when there is something to take."""
        self._stop.clear()
        self._burst = pool.submit(self._work)
        self._burst.add_done_callback(lambda _: then())

    def take(self) -> list[Request]:
        """What `start` led to, once it is done: the finished requests, or the engine's error."""
        assert self._burst is not None
        burst, self._burst = self._burst, None
        self._read_inbox()
        return burst.result()

    def stop(self) -> None:
        """Blocks until no thread works on the engine; it may be in the middle of its requests."""
        self._stop.set()
        if self._burst is not None:
            wait([self._burst])
            self._burst = None
        self._read_inbox()

    def _work(self) -> list[Request]:
        """Forwards until a request is done."""
        while True:
            self._read_inbox()
            if self._stop.is_set() or not self.engine.has_work:
                return []
            finished = self.engine.step()
            if finished:
                return finished

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
