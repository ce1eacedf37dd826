"""Calls that block, each in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from posttrain.deadline import NoThread, in_thread, in_threads, timer

LONG = 60.0
TOO_LARGE = 1 << 47  # bytes of a thread's stack: more than there are addresses


@pytest.mark.parametrize("seconds", [1e10, 1e300, float("inf")])
def test_a_timer_of_more_than_a_thread_can_wait_for_waits(seconds: float) -> None:
    rung = threading.Event()
    waiting = timer(seconds, rung.set)
    waiting.join(0.2)
    assert waiting.is_alive(), "it did not fail"
    waiting.cancel()
    waiting.join(LONG)
    assert not waiting.is_alive()
    assert not rung.is_set()


def test_a_timer_calls() -> None:
    rung = threading.Event()
    timer(0.01, rung.set)
    assert rung.wait(LONG)


def test_calls_at_once_do_not_wait_for_each_other() -> None:
    async def main() -> None:
        together = threading.Barrier(5)
        assert sorted(await asyncio.gather(*(in_thread(together.wait) for _ in range(5)))) == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_a_call_that_hangs_keeps_nobody_waiting() -> None:
    done = threading.Event()

    async def main() -> int:
        hung = asyncio.ensure_future(in_thread(done.wait))
        await asyncio.sleep(0)
        hung.cancel()
        return await in_thread(lambda: 7)

    assert asyncio.run(main()) == 7
    done.set()


def test_an_error_is_the_callers() -> None:
    def fails() -> None:
        raise KeyError("no such page")

    async def main() -> None:
        with pytest.raises(KeyError, match="no such page"):
            await in_thread(fails)

    asyncio.run(main())


def test_calls_that_nobody_has_to_wait_for_share_one_thread_in_their_order() -> None:
    order: list[int] = []

    def call(number: int) -> int:
        order.append(number)
        return threading.get_ident()

    threads = asyncio.run(in_threads([partial(call, number) for number in range(50)], LONG, patience=LONG))
    assert order == list(range(50))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("patience", [0.0, 0.01])
def test_calls_that_block_do_so_at_the_same_time(patience: float) -> None:
    together = threading.Barrier(5)
    found = asyncio.run(in_threads([together.wait] * 5, LONG, patience=patience))
    assert sorted(place for place in found if place is not None) == [0, 1, 2, 3, 4]


def test_one_that_hangs_ends_at_its_deadline_alone() -> None:
    done = threading.Event()
    calls = [lambda: 1, lambda: done.wait(LONG), lambda: 3]
    assert asyncio.run(in_threads(calls, 0.3)) == [1, None, 3]
    done.set()


def test_what_one_of_several_raises_is_the_callers() -> None:
    def fails() -> None:
        raise KeyError("no such page")

    with pytest.raises(KeyError, match="no such page"):
        asyncio.run(in_threads([lambda: None, fails], LONG))


def test_an_error_does_not_wait_for_calls_that_hang() -> None:
    done = threading.Event()

    def fails() -> None:
        raise KeyError("no such page")

    async def main() -> None:
        with pytest.raises(KeyError, match="no such page"):
            await asyncio.wait_for(in_threads([lambda: done.wait(LONG), fails], LONG), LONG / 2)

    asyncio.run(main())
    done.set()


def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    done, begun = threading.Event(), list[int]()

    async def main() -> None:
        calls = [lambda: done.wait(LONG), *[partial(begun.append, number) for number in range(3)]]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_threads(calls, LONG, patience=LONG), 0.05)

    asyncio.run(main())
    done.set()
    for thread in threading.enumerate():
        if thread.name == "posttrain-call":
            thread.join(LONG)
    assert not begun


@pytest.fixture
def no_further_thread() -> Iterator[Callable[[], None]]:
    """Call it, and the system gives none."""

    def refuse() -> None:
        threading.stack_size(TOO_LARGE)

    usual = threading.stack_size()
    yield refuse
    threading.stack_size(usual)


def test_without_further_threads_those_that_there_are_make_all_calls(no_further_thread: Callable[[], None]) -> None:
    go_on = threading.Event()

    def first() -> int:
        no_further_thread()
        go_on.wait(LONG)
        return 1

    async def main() -> list[int | None]:
        asyncio.get_running_loop().call_later(0.1, go_on.set)  # after others have been asked for
        return await in_threads([first, lambda: 2, lambda: 3], LONG)

    assert asyncio.run(main()) == [1, 2, 3]


def test_without_any_thread_callers_are_told(no_further_thread: Callable[[], None]) -> None:
    no_further_thread()
    with pytest.raises(NoThread, match="calls that hang"):
        asyncio.run(in_threads([lambda: 1, lambda: 2], LONG))


def test_whoever_is_cancelled_does_not_wait_for_threads() -> None:
    done = threading.Event()

    async def main() -> None:
        calls = asyncio.ensure_future(in_threads([done.wait] * 3, LONG))
        await asyncio.sleep(0.05)
        calls.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls

    asyncio.run(main())
    done.set()
