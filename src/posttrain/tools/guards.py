"""What is put around a tool: a deadline, retries, a rate limit, a limit on calls at one time, counters.

Each guard is a Tool around a Tool, so they can be combined; `posttrain.tools.config` does it in this order, outermost
first: Counted, Cached, Concurrent, Deadline (the whole call), Retrying, RateLimited, Deadline (one attempt), Redacted.
Guards are shared by all episodes of a run, and may be used from several event loops, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.boundary.redaction import redacted
from posttrain.deadline import DeadlinePassed, ends_in, within
from posttrain.task import EpisodeInvalid
from posttrain.tools.invoke import as_error
from posttrain.tools.protocol import Tool, ToolError, ToolResult, ToolSpec
from posttrain.trajectory import CallStatus


class Guard:
    """A tool around a tool; passes everything on."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool

    @property
    def spec(self) -> ToolSpec:
        return self.tool.spec

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        return await self.tool.call(arguments)

    async def close(self) -> None:
        await self.tool.close()


class Described(Guard):
    """A tool under another name, or with another description."""

    def __init__(self, tool: Tool, name: str, description: str | None = None) -> None:
        super().__init__(tool)
        self._spec = replace(tool.spec, name=name, description=description or tool.spec.description)

    @property
    def spec(self) -> ToolSpec:
        return self._spec


class Redacted(Guard):
    """No secret of the environment leaves the tool, in a result or in an error: both are stored and learnt from."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            result = await self.tool.call(arguments)
        except ToolError as error:
            error.message = redacted(error.message)
            error.args = (error.message,)
            raise
        text = redacted(result.text)
        data = result.data if result.data is None else _redacted_data(result.data)
        return result if text == result.text and data is result.data else replace(result, text=text, data=data)


def _redacted_data(data: Any) -> Any:
    """The same object where it holds no secret."""
    text = json.dumps(data, ensure_ascii=False, default=repr)
    clean = redacted(text)
    return data if clean == text else json.loads(clean)


class Deadline(Guard):
    """Ends a call after `seconds`, whatever the tool does with its cancellation. Raises ToolError(TIMEOUT)."""

    def __init__(self, tool: Tool, seconds: float, *, transient: bool = False) -> None:
        super().__init__(tool)
        self.seconds = seconds
        self._transient = transient

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            return await within(self.tool.call(arguments), ends_in(self.seconds))
        except DeadlinePassed:
            message = f"{self.spec.name} took longer than {self.seconds:g} s and was stopped"
            raise ToolError(CallStatus.TIMEOUT, message, transient=self._transient) from None


class Retrying(Guard):
    """Calls again after a transient failure, at most `retries` times.

    Waits backoff_seconds * 2^attempt, at most max_backoff_seconds, times a random factor in [0.5, 1.5]; or as long as
    the failure asked for (Retry-After), if that is longer. Asked for more than `patience` seconds, it gives up at once.
    """

    def __init__(
        self,
        tool: Tool,
        *,
        retries: int,
        backoff_seconds: float = 0.5,
        max_backoff_seconds: float = 30.0,
        patience: float = 3600.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(tool)
        self.patience = patience
        self.retries, self.backoff_seconds, self.max_backoff_seconds = retries, backoff_seconds, max_backoff_seconds
        self.retried = 0
        self._random = random.Random(seed)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        for attempt in range(self.retries):
            try:
                return await self.tool.call(arguments)
            except ToolError as error:
                if not error.transient or (error.retry_after or 0.0) > self.patience:
                    raise
                self.retried += 1
                await asyncio.sleep(self.delay(attempt, error.retry_after))
        return await self.tool.call(arguments)

    def delay(self, attempt: int, retry_after: float | None) -> float:
        backoff = min(self.max_backoff_seconds, self.backoff_seconds * 2.0**attempt)
        return max(backoff * self._random.uniform(0.5, 1.5), retry_after or 0.0)


class RateLimited(Guard):
    """At most `per_second` calls on average and `burst` at once (a token bucket); the others wait for their turn."""

    def __init__(self, tool: Tool, per_second: float, *, burst: int = 1) -> None:
        super().__init__(tool)
        self.per_second, self.burst = per_second, burst
        self._lock = threading.Lock()
        self._full_at = 0.0  # by the monotonic clock: when the bucket will be full again

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        wait = self._reserve(time.monotonic())
        if wait > 0:
            await asyncio.sleep(wait)
        return await self.tool.call(arguments)

    def _reserve(self, now: float) -> float:
        """Takes a token and says how long until it is there. A caller that gives up has used it none the less."""
        with self._lock:
            self._full_at = max(self._full_at, now) + 1 / self.per_second
            return max(0.0, self._full_at - now - self.burst / self.per_second)


class Concurrent(Guard):
    """At most `calls` at one time; the others wait, in order."""

    def __init__(self, tool: Tool, calls: int) -> None:
        super().__init__(tool)
        self.calls = calls
        self._room: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._room.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.calls)):
            return await self.tool.call(arguments)


@dataclass(slots=True)
class Counters:
    """Totals of one tool; `drain` returns them and starts anew."""

    calls: int = 0
    cached: int = 0
    statuses: Counter[str] = field(default_factory=Counter[str])  # failures by status; "invalid" = ended the episode
    seconds: float = 0.0
    cost: Counter[str] = field(default_factory=Counter[str])  # by unit, as the results say

    def drain(self) -> Counters:
        taken = Counters(self.calls, self.cached, self.statuses, self.seconds, self.cost)
        self.calls, self.cached, self.seconds = 0, 0, 0.0
        self.statuses, self.cost = Counter(), Counter()
        return taken

    @property
    def failed(self) -> int:
        return sum(self.statuses.values())


class Counted(Guard):
    """Counts calls, and turns what a tool should not raise into ToolError(FAILED)."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        self.counters = Counters()

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        started = time.perf_counter()
        self.counters.calls += 1
        try:
            result = await self.tool.call(arguments)
        except ToolError as error:
            self.counters.statuses[error.status.value] += 1
            raise
        except EpisodeInvalid:
            self.counters.statuses["invalid"] += 1
            raise
        except Exception as error:
            self.counters.statuses[CallStatus.FAILED.value] += 1
            raise as_error(self.spec.name, error) from error
        finally:
            self.counters.seconds += time.perf_counter() - started
        self.counters.cached += result.cached
        for unit, amount in ({} if result.cached else result.cost).items():
            self.counters.cost[unit] += amount  # type: ignore[assignment]
        return result
