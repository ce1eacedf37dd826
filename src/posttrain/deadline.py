"""Deadlines for code that is not ours: enforced from outside, whatever the code does with its cancellation.

Synchronous code that never awaits blocks the event loop and cannot be stopped from here: run it in a worker process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Never, TypeVar

T = TypeVar("T")
GRACE_SECONDS = 1.0  # what cancelled code gets to end before it is left behind
PATIENCE_SECONDS = 0.01  # what calls that share a thread may take together before each has its own


class DeadlinePassed(Exception):
    """A limit in seconds was reached."""


class NoThread(RuntimeError):
    """The system gives this process no further thread: calls that hang keep theirs."""


def ends_in(seconds: float | None) -> float | None:
    """The moment `seconds` from now, by the event loop's clock; None = never."""
    return None if seconds is None else asyncio.get_running_loop().time() + seconds


async def within(call: Awaitable[T], ends: float | None) -> T:
    """Awaits foreign code in a task of its own, so that code which swallows its cancellation cannot hold us.

    Raises DeadlinePassed at `ends` (event-loop clock), what the call raises, and RuntimeError when it ends itself.
    """
    job = asyncio.ensure_future(_contained(call))
    if inspect.iscoroutine(call):
        job.add_done_callback(lambda _: call.close())  # cancelled before it began: no "never awaited" warning
    try:
        await asyncio.sleep(0)  # all that code which never waits needs; a wait with a timer takes as long as a task
        if not job.done():
            timeout = None if ends is None else max(0.0, ends - asyncio.get_running_loop().time())
            await asyncio.wait({job}, timeout=timeout)
    except asyncio.CancelledError:
        leave(job)
        raise
    if job.done():
        return job.result()
    leave(job)
    await asyncio.wait({job}, timeout=GRACE_SECONDS)
    raise DeadlinePassed


async def _contained(call: Awaitable[T]) -> T:
    """Code that exits, or that waits for what somebody has cancelled, ends itself: never the program around it."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from error
    except asyncio.CancelledError as error:
        job = asyncio.current_task()
        if job is None or job.cancelling():
            raise
        raise RuntimeError("what it waited for was cancelled") from error


def leave(job: asyncio.Future[Any]) -> None:
    """Cancels what is still running, and does not wait for it."""
    job.cancel()
    job.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen: no "never retrieved" warning


def timer(seconds: float, call: Callable[[], object]) -> threading.Timer:
    """Calls it from a thread once `seconds` are over, unless it is cancelled first; keeps no program alive. What is
    more than a thread can wait for, about 292 years, is that long."""
    started = threading.Timer(min(seconds, threading.TIMEOUT_MAX), call)
    started.daemon = True
    started.start()
    return started


async def in_thread(call: Callable[[], T]) -> T:
    """Runs `call` in a thread of its own that does not keep the program alive; cancelled, its result is dropped.

    The event loop's executor would do neither: a few hung calls fill it, and its threads are joined at the end.
    Raises NoThread, and what the call raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Callable[[], T]] = loop.create_future()

    def settle(outcome: Callable[[], T]) -> None:
        if not future.done():  # else the caller gave up
            future.set_result(outcome)

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            outcome = partial(_raise, error)
        else:
            outcome = partial(_identity, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    try:
        threading.Thread(target=work, daemon=True, name="posttrain-call").start()
    except RuntimeError as error:
        raise NoThread(f"{error}: calls that hang, or a limit on processes and threads, leave none") from error
    return (await future)()


async def in_threads(
    calls: Sequence[Callable[[], T]], seconds: float, *, patience: float = PATIENCE_SECONDS
) -> list[T | None]:
    """What each call returned, in their order; None for one that took longer than `seconds`. See `in_thread`.

    One thread makes them one after another, since starting a thread takes longer than most calls do. Those that it has
    not come to after `patience` seconds get threads of their own, so that calls which block do so at the same time;
    where the system gives fewer threads, those that there are go on one after another.
    Raises what a call raises, as soon as it does, and NoThread without a single thread. No call begins afterwards.
    """
    left, results = deque(enumerate(calls)), dict[int, T]()

    def work() -> None:
        while True:
            try:
                number, call = left.popleft()
            except IndexError:
                return
            results[number] = call()

    async def help_out() -> None:
        with contextlib.suppress(NoThread):
            await in_thread(work)

    jobs = [asyncio.ensure_future(in_thread(work))]
    try:
        ended, _ = await asyncio.wait(jobs, timeout=patience)
        if not ended:
            jobs += [asyncio.ensure_future(help_out()) for _ in range(len(left))]
            ended, _ = await asyncio.wait(jobs, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for job in ended:
            job.result()
    finally:
        left.clear()
        for job in jobs:
            leave(job)
    return [results.get(number) for number in range(len(calls))]


def _raise(error: BaseException) -> Never:
    raise error


def _identity(result: T) -> T:
    return result
