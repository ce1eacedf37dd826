"""vLLM in processes beside a rank, which take turns with it: needs a vllm that runs here (`scripts/test_vllm`).

On a CPU it frees nothing; the order of things is that of a GPU.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from pathlib import Path

import pytest

from cluster.apart import Apart, apart
from cluster.test_apart import asked, same, shifted
from posttrain.cluster.pool import State
from posttrain.sampler.protocol import Sampled
from posttrain.sampler.requests import SamplerError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of vllm's imports
]
VLLM = {"engine": "vllm", "options": {"kv_cache_memory_bytes": 1 << 27}}


def states(run: Apart) -> list[State]:
    return [member.state for member in run.pool.members()]


def versions(answers: list[Sampled]) -> set[int]:
    return {version for one in answers for version in one.versions}


def test_answers_are_the_same_after_a_sleep_and_none_are_given_meanwhile(tmp_path: Path) -> None:
    async def work(run: Apart) -> None:
        await run.publisher.publish()
        first = await asked(run.sampler)
        for level, kept in ((1, 0), (2, -1)):
            run.sampler.sleep(level)
            assert states(run) == [State.ASLEEP]
            assert run.sampler.version == kept
            with pytest.raises(SamplerError, match="asleep: wake them, or publish"):
                await asked(run.sampler)
            if level == 1:
                run.sampler.wake()
            else:
                assert (await run.publisher.publish()).probe_gap < 1e-4
            assert states(run) == [State.SERVING]
            same(await asked(run.sampler), first)
        run.sampler.sleep(1)
        shifted(run.policy, 1.05, version=1)
        assert (await run.publisher.publish()).probe_gap < 1e-4
        changed = await asked(run.sampler)
        assert versions(changed) == {1}
        assert [one.ids for one in changed] != [one.ids for one in first]
        waiting = asyncio.create_task(asked(run.sampler))
        while not run.sampler.waiting():
            await asyncio.sleep(0)
        with pytest.raises(SamplerError, match="8 requests are open; samplers sleep between rollouts"):
            run.sampler.sleep(1)
        same(await waiting, changed)

    with apart(tmp_path, 1, transport="shared", engine=VLLM, colocated=True) as run:
        asyncio.run(work(run))
        assert not run.replaced


def test_one_that_is_replaced_amid_a_sleep_loads_its_model_when_the_others_wake(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed while both sleep. Later the other one hangs when it is told to sleep."""

    async def work(run: Apart) -> None:
        await run.publisher.publish()
        first = await asked(run.sampler)
        run.sampler.sleep(1)
        run.processes.kill(0)
        await asyncio.to_thread(run.wait_for, 1, State.CALLED)
        assert states(run) == [State.CALLED, State.ASLEEP]
        run.sampler.wake()
        same(await asked(run.sampler), first)
        await asyncio.to_thread(run.wait_for, 2, State.SERVING)
        same(await asked(run.sampler), first)
        run.processes.kill(1, signal.SIGSTOP)
        run.sampler.sleep(2)
        assert State.ASLEEP in states(run)
        assert run.replaced == [0, 1]

    settings = {"colocated": True, "heartbeat_seconds": 5, "stall_seconds": 2}
    with apart(tmp_path, 2, transport="shared", engine=VLLM, **settings) as run:
        asyncio.run(work(run))
    assert "sampler 0 is lost (its line broke)" in caplog.text
    assert "rank 0 ordered sleep" in caplog.text
    assert "goes to sleep, last sign of life" in caplog.text
    assert "sampler 1 is lost (no sign of life for" in caplog.text
