"""What is put around a tool: a deadline, retries, a rate limit, a limit on calls at one time, counters.

Each guard is a Tool around a Tool, so they can be combined; `posttrain.tools.config` does it in this order, outermost
first: Counted, Cached, Concurrent, Deadline (the whole call), Retrying, RateLimited, Deadline (one attempt), Cut,
Redacted.
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


class Cut(Guard):
    """Cuts text and data of a result to `most` bytes each (UTF-8; data as JSON); the text says what is missing."""

    def __init__(self, tool: Tool, most: int) -> None:
        super().__init__(tool)
        self.most = most

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        result = await self.tool.call(arguments)
        text, text_cut = self._text(result.text)
        data, data_cut = self._data(result.data)
        cut = text_cut + data_cut
        return replace(result, text=text, data=data, bytes_cut=result.bytes_cut + cut) if cut else result

    def _text(self, text: str) -> tuple[str, int]:
        """(text, bytes cut); with the note, it has `most` bytes or fewer, if these are enough for the note."""
        if 4 * len(text) <= self.most:  # no character has more than four bytes
            return text, 0
        encoded = text.encode("utf-8", "replace")
        if len(encoded) <= self.most:
            return text, 0
        note = f"\n...(cut: this result has {len(encoded)} bytes, {self.most} are passed on)"
        kept = encoded[: max(0, self.most - len(note))].decode("utf-8", "ignore")
        return kept + note, len(encoded) - len(kept.encode())

    def _data(self, data: Any) -> tuple[Any, int]:
        """(data, bytes cut): of a list as many items as fit, of anything else all or nothing."""
        if data is None or (size := _json_bytes(data)) <= self.most:
            return data, 0
        kept: list[Any] = []
        left = self.most - 2  # its brackets
        for item in data if isinstance(data, list) else ():
            left -= _json_bytes(item) + 2
            if left < 0:
                break
            kept.append(item)
        return kept or None, size - (_json_bytes(kept) if kept else 0)


def _json_bytes(data: Any) -> int:
    return len(json.dumps(data, ensure_ascii=False, default=repr).encode("utf-8", "replace"))


class Retrying(Guard):
    """Calls again after a transient failure, so that a call is tried at most `retries` + 1 times, whoever tries: what a
    server has tried before it gave up (`ToolError.attempts`) counts, and is expected of it the next time.

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
        counters: Counters | None = None,
    ) -> None:
        super().__init__(tool)
        self.patience = patience
        self.retries, self.backoff_seconds, self.max_backoff_seconds = retries, backoff_seconds, max_backoff_seconds
        self.counters = Counters() if counters is None else counters
        self._random = random.Random(seed)

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        begun = made = 0  # attempts begun here, and made in all
        try:
            while True:
                begun += 1
                try:
                    result = await self.tool.call(arguments)
                    made += result.attempts
                    return replace(result, attempts=made)
                except ToolError as error:
                    made += error.attempts
                    if self._is_final(error, made):
                        raise error.after(made) from error
                    wait = self.delay(begun - 1, error.retry_after)
                await asyncio.sleep(wait)
        finally:
            self.counters.retries += max(begun, made) - 1

    def _is_final(self, error: ToolError, made: int) -> bool:
        too_late = (error.retry_after or 0.0) > self.patience
        return not error.transient or too_late or made + error.attempts > self.retries + 1

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
    retries: int = 0  # attempts beyond the first of a call, here and by whoever serves the tool
    bytes_cut: int = 0  # of results that were too long

    def drain(self) -> Counters:
        taken = replace(self)
        self.calls, self.cached, self.seconds, self.retries, self.bytes_cut = 0, 0, 0.0, 0, 0
        self.statuses, self.cost = Counter(), Counter()
        return taken

    @property
    def failed(self) -> int:
        return sum(self.statuses.values())


class Counted(Guard):
    """Counts calls, and turns what a tool should not raise into ToolError(FAILED)."""

    def __init__(self, tool: Tool, counters: Counters | None = None) -> None:
        super().__init__(tool)
        self.counters = Counters() if counters is None else counters

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
        self.counters.bytes_cut += result.bytes_cut
        for unit, amount in ({} if result.cached else result.cost).items():
            self.counters.cost[unit] += amount  # type: ignore[assignment]
        return result
