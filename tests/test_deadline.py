"""Calls that block, each in a thread."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from posttrain.deadline import in_thread, in_threads

LONG = 60.0


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
