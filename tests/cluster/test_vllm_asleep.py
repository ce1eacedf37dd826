"""vLLM in processes beside a rank, which take turns with it: needs a vllm that runs here (`scripts/test_vllm`).

On a CPU it frees nothing; the order of things is that of a GPU.
"""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cluster.apart import Apart, apart
from cluster.test_apart import asked, same, shifted
from posttrain.cluster.pool import State
from posttrain.sampler.protocol import Sampled
from posttrain.sampler.requests import SamplerError

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of vllm's imports
]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="log-probs on a GPU are not that close")
VLLM = {"engine": "vllm", "options": {"kv_cache_memory_bytes": 1 << 27}}


def states(run: Apart) -> list[State]:
    return [member.state for member in run.pool.members()]


def versions(answers: list[Sampled]) -> set[int]:
    return {version for one in answers for version in one.versions}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    settings = {"colocated": True, "heartbeat_seconds": 10, "stall_seconds": 2}
    with apart(tmp_path_factory.mktemp("two"), 2, transport="shared", engine=VLLM, **settings) as run:
        yield run


@ON_CPU
def test_answers_are_the_same_after_a_sleep_and_none_are_given_meanwhile(two: Apart) -> None:
    async def work(run: Apart) -> None:
        await run.publisher.publish()
        first = await asked(run.sampler)
        for level, kept in ((1, 0), (2, -1)):
            run.sampler.sleep(level)
            assert states(run) == [State.ASLEEP] * 2
            assert run.sampler.version == kept
            with pytest.raises(SamplerError, match="asleep: wake them, or publish"):
                await asked(run.sampler)
            if level == 1:
                run.sampler.wake()
            else:
                assert (await run.publisher.publish()).probe_gap < 1e-4
            assert states(run) == [State.SERVING] * 2
            same(await asked(run.sampler), first)
        run.sampler.sleep(1)
        shifted(run.policy, 1.05, version=1)
        assert (await run.publisher.publish()).probe_gap < 1e-4
        changed = await asked(run.sampler)
        assert versions(changed) == {1}
        assert [one.ids for one in changed] != [one.ids for one in first]
        waiting = asyncio.create_task(asked(run.sampler))
        while not run.sampler.waiting():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        with pytest.raises(SamplerError, match="8 requests are open; samplers sleep between rollouts"):
            run.sampler.sleep(1)
        same(await waiting, changed)

    asyncio.run(work(two))
    assert not two.replaced


@ON_CPU
def test_one_that_is_replaced_amid_a_sleep_loads_its_model_when_the_others_wake(
    two: Apart, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed while both sleep; when it loads its model, the next sleep waits for it, and weights wake both. Later
    the other one hangs when it is told to sleep."""

    async def work(run: Apart) -> None:
        await run.publisher.publish()
        first = await asked(run.sampler)
        run.sampler.sleep(1)
        run.sampler.sleep(1)  # nothing more: who is replaced is told its model all the same
        run.processes.kill(0)
        await asyncio.to_thread(run.wait_for, 1, State.CALLED)
        assert states(run) == [State.CALLED, State.ASLEEP]
        run.sampler.wake()
        same(await asked(run.sampler), first)
        assert states(run) == [State.LOADING, State.SERVING]
        run.sampler.sleep(1)
        assert states(run) == [State.ASLEEP] * 2
        assert run.sampler.version == -1, "the new one has no weights to wake with"
        await run.publisher.publish()
        assert states(run) == [State.SERVING] * 2
        same(await asked(run.sampler), first)
        run.processes.kill(1, signal.SIGSTOP)
        run.sampler.sleep(2)
        assert run.replaced == [0, 1]
        await asyncio.to_thread(run.wait_for, 1, State.CALLED)
        assert states(run) == [State.ASLEEP, State.CALLED]

    asyncio.run(work(two))
    assert "sampler 0 is lost (its connection broke)" in caplog.text
    assert "rank 0 ordered sleep" in caplog.text
    assert "goes to sleep, last sign of life" in caplog.text
    assert "sampler 1 is lost (no sign of life for" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM frees memory on a GPU only")
def test_memory_of_a_gpu_goes_to_the_rank_and_comes_back(tmp_path: Path) -> None:
    """Weights go by CUDA IPC, over which the engine's own allocator has no say: they are copied out of it."""
    gib = 1 << 30
    engine = {"engine": "vllm", "options": {"kv_cache_memory_bytes": gib, "enable_sleep_mode": True}}

    async def work(run: Apart) -> None:
        await run.publisher.publish()
        for level in (1, 2):
            awake = torch.cuda.mem_get_info()[0]
            run.sampler.sleep(level)
            assert torch.cuda.mem_get_info()[0] - awake > 0.9 * gib
            if level == 1:
                run.sampler.wake()
            else:
                await run.publisher.publish()
            assert torch.cuda.mem_get_info()[0] - awake < 0.1 * gib
            assert versions(await asked(run.sampler)) == {0}
        run.sampler.sleep(1)
        shifted(run.policy, 1.01, version=1)
        await run.publisher.publish()
        assert versions(await asked(run.sampler)) == {1}

    with apart(tmp_path, 1, transport="shared", engine=engine, colocated=True) as run:
        asyncio.run(work(run))
