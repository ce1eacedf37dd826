"""An event loop on a thread of its own, for what goes on while the caller computes. `run` is `asyncio.Runner`'s."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import torch

T = TypeVar("T")


class Background:
    """Use it as a context; at the end everything that still runs is cancelled and waited for.

    Who waits in it can be asked to do something meanwhile: see `soon`.
    """

    _loop: asyncio.AbstractEventLoop
    _over: asyncio.Event
    _thread: threading.Thread

    def __init__(self) -> None:
        self._calls = SimpleQueue[Callable[[], object]]()

    def __enter__(self) -> Self:
        ready = threading.Event()
        threads = torch.get_num_threads()  # a new thread would start with one per core

        async def live() -> None:
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await self._over.wait()

        def work() -> None:
            torch.set_num_threads(threads)
            asyncio.run(live())

        self._thread = threading.Thread(target=work, name="posttrain-rollout", daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Goes on in the background; cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, work: Callable[[], object]) -> None:
        """Hands `work` to the thread that waits in `wait` or `run`; it runs there now, or when that thread next waits.

        Any thread may call this.
        """
        self._calls.put(work)

    def wait(self, future: Future[T]) -> T:
        """Its result, or its error."""
        future.add_done_callback(lambda _: self._calls.put(_nothing))
        while not future.done():
            self._calls.get()()
        return future.result()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it. Interrupted, the work is cancelled, too."""
        future = self.start(work)
        try:
            return self.wait(future)
        except BaseException:
            future.cancel()
            raise


def _nothing() -> None:
    """Wakes up who waits."""
