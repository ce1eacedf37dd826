"""Calls a reward function in worker processes that are killed when they pass their deadline.

Threads and signals cannot end `9**9**9**9`; a process can be ended. Everything here blocks: call it from a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from posttrain.boundary.pipes import receive, send
from posttrain.boundary.processes import kill_tree
from posttrain.boundary.workers import WorkerProcess
from posttrain.deadline import timer
from posttrain.rewards.functions import FunctionSpec, RewardError
from posttrain.task import Invalid, Outcome, Task
from posttrain.trajectory import Episode

STARTUP_SECONDS = 120.0  # to start Python and import the user's module


class WorkerDied(Exception):
    """`timed_out` when it was killed at its deadline; else it crashed with `returncode`."""

    def __init__(self, timed_out: bool, returncode: int | None) -> None:
        super().__init__("killed at the deadline" if timed_out else f"ended with exit code {returncode}")
        self.timed_out = timed_out
        self.returncode = returncode


class Worker:
    """One process that holds one function. Raises RewardError when the function cannot be loaded there."""

    def __init__(self, spec: FunctionSpec) -> None:
        self._worker = WorkerProcess("posttrain.rewards.worker")
        self.kill = self._worker.kill
        try:
            kind, detail = self._exchange(spec, STARTUP_SECONDS)
        except WorkerDied as error:
            raise RewardError(f"the worker process of reward {spec.location} {error} before it was ready") from error
        if kind == "error":
            self.kill()
            raise RewardError(f"reward {spec.location} cannot be loaded in its worker process:\n{detail}")

    def evaluate(self, episodes: Sequence[Episode], task: Task, seconds: float) -> list[Outcome]:
        """Raises WorkerDied (the worker is gone), or RewardError on a wrong count of values."""
        kind, content = self._exchange((list(episodes), task), seconds)
        if kind == "count":
            raise RewardError(content)
        if kind == "unpicklable":
            return [Invalid("reward_error", content)] * len(episodes)
        return content

    @property
    def is_alive(self) -> bool:
        return self._worker.is_alive

    def _exchange(self, message: Any, seconds: float) -> tuple[str, Any]:
        expired, process = threading.Event(), self._worker.process
        killer = timer(seconds, lambda: (expired.set(), kill_tree(process.pid, self._worker.token)))
        try:
            send(self._worker.requests, message)
            return receive(self._worker.replies)
        except (EOFError, BrokenPipeError):
            process.wait()
            self.kill()
            raise WorkerDied(expired.is_set(), process.returncode) from None
        finally:
            killer.cancel()
            killer.join()
            if expired.is_set():  # the answer may have come while it was being ended: no other call may meet that
                self.kill()


class WorkerPool:
    """At most `size` workers for one function, started when first needed and reused."""

    def __init__(self, spec: FunctionSpec, *, size: int) -> None:
        self.spec = spec
        self._room = threading.BoundedSemaphore(size)
        self._idle: list[Worker] = []  # append and pop are atomic

    def evaluate(self, episodes: Sequence[Episode], task: Task, seconds: float) -> list[Outcome]:
        """One outcome per episode; the deadline starts when a worker takes the call. Raises RewardError."""
        with self._room:
            worker = self._take()
            try:
                return worker.evaluate(episodes, task, seconds)
            except WorkerDied as error:
                return [_invalid(error, self.spec.location, seconds)] * len(episodes)
            finally:
                if worker.is_alive:
                    self._idle.append(worker)
                else:
                    worker.kill()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            worker.kill()
        return Worker(self.spec)


def _invalid(error: WorkerDied, location: str, seconds: float) -> Invalid:
    if error.timed_out:
        return Invalid("reward_timeout", f"reward {location} took longer than {seconds} s and was killed")
    return Invalid("reward_crashed", f"the process of reward {location} {error}")
