"""Samplers in processes of their own: what they sample, and what becomes of it when one is killed or hangs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import torch

from cluster.apart import MODEL, apart
from posttrain.cluster.pool import State
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.sampler.requests import SamplerError
from posttrain.trainer.loading import LoraConfig
from posttrain.trainer.policy import Policy
from posttrain.weights.publish import WeightError

SHORT, LONG = SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=200)


def prompts(count: int) -> list[list[int]]:
    return [[(first + 7 * n) % 300 + 10 for n in range(9)] for first in range(count)]


async def asked(sampler: Sampler, params: SamplingParams = SHORT) -> list[Sampled]:
    requests = [sampler.sample(p, params, seed=n, session=f"s{n}") for n, p in enumerate(prompts(8))]
    return await asyncio.gather(*requests)


def same(found: list[Sampled], expected: list[Sampled]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.ids, one.stop_reason, one.stop) == (other.ids, other.stop_reason, other.stop)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def shifted(policy: Policy, by: float, version: int) -> None:
    with torch.no_grad():
        for _, parameter in policy.parameters():
            parameter.mul_(by)
    policy.version = version


def test_they_sample_what_the_policy_would_and_lost_requests_are_asked_again_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Two samplers; one is killed amid its requests, then the other, and each is replaced."""
    with apart(tmp_path, 2) as run:
        alone = NativeSampler(run.policy)

        async def work() -> None:
            first = await run.publisher.publish()
            assert first.transport == "broadcast"
            assert first.probe_gap < 1e-4
            assert first.bytes == run.publisher.manifest.bytes > 1e6
            same(await asked(run.sampler), await asked(alone))
            counted = run.sampler.counters()
            assert 8 <= counted["requests"] <= 8 + 2  # with the probe of each
            assert counted["tokens_prefilled"] >= 8 * 9
            shifted(run.policy, 1.01, version=3)
            await run.publisher.publish()
            found = await asked(run.sampler)
            assert {version for one in found for version in one.versions} == {3}
            same(found, await asked(alone))
            for number in (0, 1):
                waiting = asyncio.create_task(asked(run.sampler, LONG))
                await asyncio.sleep(0.05)
                run.processes.kill(number)
                same(await waiting, await asked(alone, LONG))
            await asyncio.to_thread(run.wait_for, 2, State.SERVING)  # who came later was given the weights, too
            same(await asked(run.sampler), await asked(alone))
            shifted(run.policy, 0.99, version=4)
            await run.publisher.publish()
            same(await asked(run.sampler), await asked(alone))

        asyncio.run(work())
        assert sorted(run.replaced) == [0, 1]
        assert run.sampler.counters()["requests"] >= 4 * 8  # also what those did that are lost
        assert run.publisher.counts()["cluster/sampler_restarts"] == 2
        assert 2 <= run.publisher.counts()["cluster/asked_again"] <= 16
    assert "sampler 0 is lost (its connection broke)" in caplog.text
    assert "sampler 1 is there again" in caplog.text


@pytest.mark.parametrize(
    ("transport", "why"),
    [("broadcast", "the process group broke"), ("shared", "sampler 0 is lost")],
)
def test_a_transfer_that_breaks_amid_requests_keeps_nobody_waiting(
    tmp_path: Path, transport: str, why: str, caplog: pytest.LogCaptureFixture
):
    """Weights are given by another thread than that of the requests. One sampler dies when both have been told."""
    with apart(tmp_path, 2, transport=transport) as run:

        def order(do: str, *what: object) -> None:
            if not run.replaced and run.policy.version == 1:
                run.processes.kill(0)
                run.processes.running[0].join()

        async def work() -> list[Sampled]:
            await run.publisher.publish()
            waiting = asyncio.create_task(asked(run.sampler, LONG))
            await asyncio.sleep(0.05)
            run.publisher.order = order
            shifted(run.policy, 1.01, version=1)
            await asyncio.to_thread(lambda: asyncio.run(run.publisher.publish()))
            return await waiting

        found = asyncio.run(work())
        assert {version for one in found for version in one.versions} <= {0, 1}
        assert 1 in {one.versions[-1] for one in found}
        assert run.replaced == [0]
    assert f"version 1 of the weights: {why}" in caplog.text


@pytest.mark.parametrize("transport", ["broadcast", "disk", "shared"])
def test_adapters_come_alone_also_to_a_sampler_that_was_replaced(tmp_path: Path, transport: str):
    """A scaling of 3: factors that were scaled on their way would not sample the very same."""
    pytest.importorskip("peft")
    model = MODEL.model_copy(update={"lora": LoraConfig(rank=4, alpha=12)})
    with apart(tmp_path, 1, model=model, transport=transport) as run:
        alone = NativeSampler(run.policy)

        async def work() -> None:
            trained = sum(parameter.numel() * 4 for _, parameter in run.policy.parameters())
            await run.publisher.publish()
            base = await asked(run.sampler)
            with torch.no_grad():
                for _, parameter in run.policy.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
            run.policy.version = 3
            found = await run.publisher.publish()
            assert found.bytes == trained < 4e5
            assert found.probe_gap < 1e-4
            same(await asked(run.sampler), await asked(alone))
            assert [one.ids for one in await asked(run.sampler)] != [one.ids for one in base]
            run.processes.kill(0)
            same(await asked(run.sampler), await asked(alone))

        asyncio.run(work())
        assert run.replaced == [0]


def test_samplers_of_another_machine_are_refused_shared_memory(tmp_path: Path):
    with apart(tmp_path, 1, transport="shared") as run:
        run.wait_for(1, State.READY)
        (member,) = run.pool.members()
        here, member.channel.said["machine"] = member.channel.said["machine"], "another one"
        with pytest.raises(WeightError, match=r"shared reaches samplers.*sampler 0 on another one; set broadcast"):
            asyncio.run(run.publisher.publish())
        member.channel.said["machine"] = here
        assert asyncio.run(run.publisher.publish()).probe_gap < 1e-4


def test_an_order_that_a_sampler_fails_of_is_raised_by_its_name(tmp_path: Path):
    """Only vLLM can sleep, which the config knows."""
    with apart(tmp_path, 1) as run:
        run.wait_for(1, State.READY)
        with pytest.raises(SamplerError, match=r"order to sleep failed \(sampler 0: .*no other engine.*sampler\.sleep"):
            run.sampler.sleep(1)
        assert not run.replaced


@pytest.mark.parametrize("transport", ["broadcast", "disk", "shared"])
def test_the_only_one_hangs_and_is_replaced(tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture):
    """Its requests wait for who comes in its place, and for the weights."""
    with apart(tmp_path, 1, transport=transport, heartbeat_seconds=4, stall_seconds=1) as run:
        alone = NativeSampler(run.policy)

        async def work() -> None:
            await run.publisher.publish()
            waiting = asyncio.create_task(asked(run.sampler, LONG))
            await asyncio.sleep(0.05)
            run.processes.kill(0, signal.SIGSTOP)
            same(await waiting, await asked(alone, LONG))

        asyncio.run(work())
        assert set(run.replaced) == {0}, "once, unless the next one is silent for as long by chance"
        assert (tmp_path / "weights").is_dir() == (transport == "disk")
    assert not (tmp_path / "weights").exists()
    assert "sampler 0 is lost (no sign of life for" in caplog.text
    assert "nothing has moved for" in caplog.text
    assert "serves, last sign of life" in caplog.text
    assert "requests, the oldest" in caplog.text
