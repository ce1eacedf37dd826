"""Calls that block, each in a thread."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings

import pytest

from posttrain.deadline import MOST_IDLE, in_thread


def test_calls_one_after_another_share_threads_and_calls_at_once_do_not() -> None:
    async def main() -> None:
        seen = {await in_thread(threading.get_ident) for _ in range(50)}
        assert len(seen) < 50
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
        assert await in_thread(lambda: 1) == 1  # the thread outlived it

    asyncio.run(main())


def test_few_threads_stay() -> None:
    async def main(count: int) -> None:
        together = threading.Barrier(count)
        await asyncio.gather(*(in_thread(together.wait) for _ in range(count)))

    asyncio.run(main(2 * MOST_IDLE))
    ends = time.monotonic() + 30
    while (left := sum(t.name == "posttrain-call" for t in threading.enumerate())) > MOST_IDLE + 4:
        assert time.monotonic() < ends, f"{left} threads are left"
        time.sleep(0.01)
    assert left > 0


def test_a_fork_has_threads_of_its_own() -> None:
    asyncio.run(in_thread(lambda: None))  # leaves an idle one, which a child does not have
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads, which are what this is about
        child = os.fork()
    if child == 0:
        os.write(writer, b"%d" % asyncio.run(in_thread(lambda: 5)))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        assert answer.read() == b"5"
    assert os.waitpid(child, 0)[1] == 0
