"""Work that training need not wait for: the writing of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Saver:
    """One piece of work at a time, on a thread of its own or (not `background`) at once."""

    def __init__(self, *, background: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "saver") if background else None
        self._pending: Future[None] | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Begins it, when what was begun before is done. Raises what that raised."""
        self.wait()
        if self._pool is None:
            work()
        else:
            self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """Until nothing is pending. Raises what the work raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
