"""Deadlines, retries, limits and counters around tools that need them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.task import EpisodeInvalid
from posttrain.tools import Tool, ToolError, ToolResult, ToolSpec
from posttrain.tools.guards import Concurrent, Counted, Cut, Deadline, RateLimited, Redacted, Retrying
from posttrain.trajectory import CallStatus

BUSY = ToolError(CallStatus.FAILED, "busy", transient=True)
BROKEN = ToolError(CallStatus.FAILED, "broken")


class Script:
    """A tool that does the given things in turn: raises, sleeps, or answers."""

    spec = ToolSpec(name="script", description="Follows a script.", parameters={"type": "object", "properties": {}})

    def __init__(self, *acts: Any, seconds: float = 0.0) -> None:
        self.acts, self.seconds = list(acts), seconds
        self.started: list[float] = []
        self.now = self.most = 0

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        self.started.append(time.monotonic())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
            act = self.acts.pop(0) if self.acts else "done"
            if isinstance(act, float):
                await asyncio.sleep(act)
            if isinstance(act, BaseException):
                raise act
            return act if isinstance(act, ToolResult) else ToolResult(text=act)
        finally:
            self.now -= 1

    async def close(self) -> None:
        self.acts = ["closed"]


def run(tool: Tool, **arguments: Any) -> ToolResult:
    return asyncio.run(tool.call(arguments))


def many(tool: Tool, count: int) -> list[ToolResult]:
    async def gather() -> list[ToolResult]:
        return await asyncio.gather(*(tool.call({}) for _ in range(count)))

    return asyncio.run(gather())


def test_p54_a_call_that_takes_too_long_is_a_time_out():
    with pytest.raises(ToolError, match=r"script took longer than 0\.05 s") as caught:
        run(Deadline(Script(seconds=60), 0.05))
    assert caught.value.status is CallStatus.TIMEOUT
    assert run(Deadline(Script("in time"), 5.0)).text == "in time"


def test_a_deadline_holds_against_a_tool_that_swallows_its_cancellation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("posttrain.deadline.GRACE_SECONDS", 0.05)

    class Stubborn(Script):
        async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
            for _ in range(8):
                try:
                    await asyncio.sleep(0.1)
                except asyncio.CancelledError:
                    continue
            return ToolResult(text="late")

    async def attempt() -> float:
        started = time.monotonic()
        with pytest.raises(ToolError):
            await Deadline(Stubborn(), 0.05).call({})
        return time.monotonic() - started

    assert asyncio.run(attempt()) < 0.5


def test_a_time_out_error_of_the_tool_itself_is_no_deadline():
    with pytest.raises(TimeoutError, match="own"):
        run(Deadline(Script(TimeoutError("own")), 5.0))


def test_transient_failures_are_tried_again_and_others_are_not():
    script = Script(BUSY, BUSY, "at last")
    tool = Retrying(script, retries=2, backoff_seconds=0.01)
    assert run(tool).text == "at last"
    assert tool.counters.retries == 2
    assert BUSY.attempts == 1, "an error that is raised again is not changed"
    with pytest.raises(ToolError, match="busy"):
        run(Retrying(Script(BUSY, BUSY, BUSY, "too late"), retries=2, backoff_seconds=0))
    script = Script(BROKEN, "never")
    with pytest.raises(ToolError, match="broken"):
        run(Retrying(script, retries=2))
    assert len(script.started) == 1


def tried(times: int) -> ToolError:
    return ToolError(CallStatus.FAILED, "busy", transient=True, attempts=times)


@pytest.mark.parametrize(
    ("failures", "retries", "calls", "attempts"),
    [
        ([tried(3)], 2, 1, 3),  # the server has used the whole budget
        ([tried(1)] * 3, 2, 3, 3),  # it retries nothing itself
        ([tried(2)] * 2, 3, 2, 4),
        ([tried(2)], 2, 1, 2),  # it would try twice again, and one is left
        ([tried(5)], 0, 1, 5),
    ],
)
def test_what_a_server_tried_itself_counts_as_tried(failures, retries, calls, attempts):
    script = Script(*failures, "never")
    tool = Retrying(script, retries=retries, backoff_seconds=0)
    with pytest.raises(ToolError) as caught:
        run(tool)
    assert (len(script.started), caught.value.attempts) == (calls, attempts)
    assert tool.counters.retries == attempts - 1


def test_attempts_behind_a_result_are_counted_and_so_are_those_that_a_deadline_ended():
    counted = Counted(Retrying(Script(tried(1), ToolResult(text="x", attempts=2)), retries=2, backoff_seconds=0))
    assert run(counted).attempts == 3
    slow = Retrying(Script(BUSY, BUSY, 60.0), retries=2, backoff_seconds=0)
    with pytest.raises(ToolError, match="took longer"):
        run(Deadline(slow, 0.2))
    assert slow.counters.retries == 2


def test_a_result_is_cut_to_its_limit_which_its_text_says():
    documents = [{"id": str(n), "text": "é" * 40} for n in range(10)]
    tool = Counted(Cut(Script(ToolResult(text="é" * 5000, data=documents), "short"), 500))
    cut = run(tool)
    assert cut.text.endswith("...(cut: this result has 10000 bytes, 500 are passed on)")
    assert 490 <= len(cut.text.encode()) <= 500
    assert cut.data == documents[: len(cut.data)]
    assert 0 < len(cut.data) < 10
    size = len(json.dumps(documents, ensure_ascii=False).encode())
    kept = len(json.dumps(cut.data, ensure_ascii=False).encode())
    assert kept <= 500
    assert cut.bytes_cut == 10000 - 2 * cut.text.count("é") + size - kept
    assert tool.counters.drain().bytes_cut == cut.bytes_cut
    assert (run(tool).text, tool.counters.bytes_cut) == ("short", 0)
    assert run(Cut(Script(ToolResult(text="x", data={"all": "y" * 600})), 500)).data is None


def test_back_off_doubles_with_jitter_and_heeds_retry_after():
    tool = Retrying(Script(), retries=9, backoff_seconds=1.0, max_backoff_seconds=10.0, seed=0)
    delays = [tool.delay(attempt, None) for attempt in range(6)]
    assert all(0.5 * min(10, 2**i) <= delay <= 1.5 * min(10, 2**i) for i, delay in enumerate(delays))
    assert delays != [2.0**i for i in range(6)]
    assert tool.delay(0, 40.0) == 40.0
    assert tool.delay(5, 0.1) >= 5.0


def test_retry_after_is_waited_for():
    script = Script(ToolError(CallStatus.FAILED, "busy", transient=True, retry_after=0.3), "ok")
    started = time.monotonic()
    run(Retrying(script, retries=1, backoff_seconds=0.01))
    assert time.monotonic() - started >= 0.3


@pytest.mark.alone
def test_a_rate_limit_holds_over_all_callers():
    script = Script()
    tool = RateLimited(script, per_second=50, burst=3)
    many(tool, 8)
    started = [moment - script.started[0] for moment in script.started]
    assert started[2] < 0.02 + 0.05, "a burst of three at once"
    for i in range(3, 8):
        assert started[i] >= (i - 2) / 50 - 0.005
    many(tool, 1)  # another event loop, the same bucket


def test_a_bucket_fills_again_but_not_beyond_its_size():
    tool = RateLimited(Script(), per_second=10, burst=2)
    assert [tool._reserve(100.0) for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])
    assert [tool._reserve(200.0) for _ in range(3)] == pytest.approx([0.0, 0.0, 0.1])


def test_calls_at_one_time_are_limited():
    script = Script(seconds=0.02)
    many(Concurrent(script, 3), 9)
    assert script.most == 3
    many(Concurrent(script, 3), 2)


def test_what_a_tool_cost_is_counted():
    paid = ToolResult(text="x", cost={"requests": 1, "usd": 0.25})
    stored = ToolResult(text="x", cost={"requests": 1}, cached=True)
    tool = Counted(Script(paid, paid, stored, BROKEN, ValueError("odd"), EpisodeInvalid("tool_down")))
    for _ in range(3):
        run(tool)
    for error in (ToolError, ToolError, EpisodeInvalid):
        with pytest.raises(error):
            run(tool)
    counters = tool.counters.drain()
    assert (counters.calls, counters.cached, counters.failed) == (6, 1, 3)
    assert counters.statuses == {"failed": 2, "invalid": 1}
    assert counters.cost == {"requests": 2, "usd": 0.5}
    assert tool.counters.drain().calls == 0


def test_whatever_a_tool_raises_becomes_a_failure_that_can_be_shown():
    with pytest.raises(ToolError, match="script failed with KeyError: 'x'") as caught:
        run(Counted(Script(KeyError("x"))))
    assert caught.value.status is CallStatus.FAILED


def test_guards_are_tools_and_close_what_is_inside():
    script = Script()
    tool = Counted(Concurrent(RateLimited(Retrying(Deadline(script, 1.0), retries=1), per_second=10), 1))
    assert isinstance(tool, Tool)
    assert tool.spec is script.spec
    asyncio.run(tool.close())
    assert script.acts == ["closed"]


SECRET = "s3cret-0123456789"


def test_no_secret_of_the_environment_is_in_a_result_or_an_error(monkeypatch: pytest.MonkeyPatch):
    """A function that returns its settings, a service that repeats the key which it was given."""
    monkeypatch.setenv("SERVICE_API_KEY", SECRET)
    documents = [{"id": 1, "url": f"https://host/?key={SECRET}"}, {SECRET: None}]
    result = run(Redacted(Script(ToolResult(text=f"with {SECRET}", data=documents, cost={"requests": 1}))))
    assert result.text == "with [SERVICE_API_KEY]"
    assert result.data == [{"id": 1, "url": "https://host/?key=[SERVICE_API_KEY]"}, {"[SERVICE_API_KEY]": None}]
    assert result.cost == {"requests": 1}
    clean = ToolResult(text="a", data=documents[:0])
    assert run(Redacted(Script(clean))) is clean
    with pytest.raises(ToolError) as refused:
        run(Redacted(Script(ToolError(CallStatus.FAILED, f"401 for {SECRET}", transient=True, retry_after=3.0))))
    assert (str(refused.value), refused.value.message) == ("401 for [SERVICE_API_KEY]",) * 2
    assert (refused.value.transient, refused.value.retry_after) == (True, 3.0)


@pytest.mark.alone
def test_who_is_asked_to_wait_beyond_the_deadline_gives_up_at_once():
    """Retry-After: 99999999999."""
    tool = Script(ToolError(CallStatus.FAILED, "later", transient=True, retry_after=1e23))
    started = time.monotonic()
    with pytest.raises(ToolError, match="later"):
        run(Retrying(tool, retries=3, backoff_seconds=0, patience=60.0))
    assert time.monotonic() - started < 1
    assert len(tool.started) == 1
