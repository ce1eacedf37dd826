"""Worker processes for one function: started when first needed, used again, killed with all their children.

Threads and signals cannot end `while True: pass` in C code; a process can be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from posttrain.boundary.pipes import receive, send
from posttrain.boundary.workers import WorkerProcess
from posttrain.deadline import in_thread
from posttrain.tools.protocol import ToolError, ToolResult
from posttrain.tools.schema import ToolDefinitionError
from posttrain.tools.worker import WorkerJob
from posttrain.trajectory import CallStatus

_CRASHES = {
    "SIGKILL": "it was killed, perhaps because the machine had no memory left",
    "SIGSEGV": "a segmentation fault",
}


class WorkerDied(Exception):
    """The process is gone; `returncode` is that of subprocess.Popen."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(_reason(returncode))
        self.returncode = returncode


class Worker:
    """One process. Starting it and talking to it block."""

    def __init__(self, job: WorkerJob) -> None:
        self._worker = WorkerProcess("posttrain.tools.worker")
        self.kill = self._worker.kill
        self._load(job)

    @property
    def token(self) -> str:
        return self._worker.token

    @property
    def is_alive(self) -> bool:
        return self._worker.is_alive

    def exchange(self, message: Any) -> Any:
        """The worker's answer. Raises WorkerDied, also when another thread kills it meanwhile."""
        try:
            send(self._worker.requests, message)
            return receive(self._worker.replies)
        except (EOFError, OSError, ValueError):
            process = self._worker.process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            self.kill()
            raise WorkerDied(process.returncode) from None

    def _load(self, job: WorkerJob) -> None:
        try:
            problem = self.exchange(job)
        except WorkerDied as error:
            raise ToolDefinitionError(f"tool {job.name}: its process ended before it was ready: {error}") from error
        if problem is not None:
            self.kill()
            raise ToolDefinitionError(f"tool {job.name} ({job.location}) cannot be loaded in its process:\n{problem}")


class WorkerPool:
    """At most `size` workers. Usable from several event loops, one after the other."""

    def __init__(self, job: WorkerJob, *, size: int) -> None:
        self.job = job
        self._size = size
        self._room: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ToolError. When cancelled, the worker is killed with all its children before this returns."""
        room = self._room.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._size))
        async with room:
            return await self._ask(await self._worker(), arguments)

    async def _ask(self, worker: Worker, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            reply = await in_thread(lambda: worker.exchange(dict(arguments)))
        except WorkerDied as error:
            raise ToolError(CallStatus.FAILED, f"the process of {self.job.name} ended: {error}") from error
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(in_thread(worker.kill)))
            if not self._closed:
                self.warm()
            raise
        self._give_back(worker)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def warm(self) -> None:
        """Starts a worker in the background, so that the first call need not wait for it."""
        threading.Thread(target=self._start_one, daemon=True, name="posttrain-tool-start").start()

    def _start_one(self) -> None:
        with contextlib.suppress(ToolDefinitionError):  # the next call meets it again, and says so
            self._give_back(Worker(self.job))

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().kill()

    async def _worker(self) -> Worker:
        """One that starts for a call which is given up meanwhile waits for the next: slow imports are done once."""
        given_up = threading.Event()

        def take() -> Worker:
            worker = self._take()
            if given_up.is_set():
                self._give_back(worker)
            return worker

        try:
            return await in_thread(take)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _take(self) -> Worker:
        """Blocks while a worker starts."""
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                worker.kill()
        return Worker(self.job)

    def _give_back(self, worker: Worker) -> None:
        if self._closed or not worker.is_alive:
            worker.kill()
        else:
            self._idle.append(worker)


def _reason(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"{name}: {_CRASHES[name]}" if name in _CRASHES else name
