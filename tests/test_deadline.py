"""Calls that block, each in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from posttrain.deadline import in_thread


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
