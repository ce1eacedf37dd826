"""A vLLM server that gets the policy's weights: needs vllm (`scripts/test_vllm` makes an environment)."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import SamplerError
from posttrain.sampler.vllm_server import VllmServerSampler
from posttrain.weights.manifest import WeightMismatch
from posttrain.weights.publish import Publisher, WeightError, publish

from .contract import Case, ModelCase, ModelSamplerContract, tiny_case
from .tiny import FLOAT32_GAP, WIDE_CONFIGS, Played, changed, gap, play, policy, prompt, together, tokenizer
from .vllm_serving import Served

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests here: it takes half a minute to start."""
    folder = tmp_path_factory.mktemp("served") / "model"
    policy("llama", seed=5, configs=WIDE_CONFIGS).save(folder, tokenizer())
    with Served(folder, folder.with_name("log.txt")).running() as server:
        yield server


@pytest.fixture(scope="module")
def trained(served: Served) -> Iterator[ModelCase]:
    model = policy("llama", configs=WIDE_CONFIGS)
    sampler = VllmServerSampler(model, served.url, tokenizer(), patience_seconds=600)
    publisher = Publisher(model, sampler)
    sampler.renew = publisher.publish
    asyncio.run(publisher.publish())
    yield replace(tiny_case(sampler, model, publisher.move), tolerance=FLOAT32_GAP)
    sampler.close()


@pytest.fixture
def sampler(trained: ModelCase) -> VllmServerSampler:
    assert isinstance(trained.sampler, VllmServerSampler)
    return trained.sampler


class TestContract(ModelSamplerContract):
    @pytest.fixture
    def case(self, trained: ModelCase) -> Case:
        return trained


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_every_transport_brings_the_same_weights(
    trained: ModelCase, sampler: VllmServerSampler, transport: str, tmp_path: Path
) -> None:
    model = trained.policy
    for _ in range(2):
        changed(model, 0.99)
        model.version += 1
        done = asyncio.run(publish(model, sampler, transport=transport, folder=str(tmp_path)))
        assert (done.version, done.transport, sampler.version) == (model.version, transport, model.version)
        assert done.probe_gap < FLOAT32_GAP
        assert done.bytes == sum(p.numel() * 4 for p in model.module.parameters())
    assert list(tmp_path.iterdir()) == []


def test_cached_prefixes_of_old_weights_are_gone(trained: ModelCase, sampler: VllmServerSampler) -> None:
    before = together(*(play(sampler, prompt(100), SamplingParams(max_new_tokens=3), seed=i) for i in range(3)))
    trained.update()
    after = together(*(play(sampler, prompt(100), SamplingParams(max_new_tokens=3), seed=i) for i in range(3)))
    assert gap(trained.policy, after) < FLOAT32_GAP < 3 * FLOAT32_GAP < gap(trained.policy, before)


def test_turns_that_weights_break_off_go_on_and_every_token_has_its_own_version(
    trained: ModelCase, sampler: VllmServerSampler
) -> None:
    """When the weights come, a turn may have ended, or not have begun; after some tries one is in the midst."""
    larger_and_smaller = [1.05, 1 / 1.05] * 4  # log-probs of ever larger weights would differ by ever more
    assert any(broken_off(trained, sampler, factor) for factor in larger_and_smaller)


def broken_off(trained: ModelCase, sampler: VllmServerSampler, factor: float) -> int:
    """How many of some turns new weights have broken off. Checks the versions of all tokens by their log-probs."""
    old, before = trained.policy.version, copy.deepcopy(trained.policy)

    async def main() -> list[Played]:
        params = SamplingParams(max_new_tokens=300)
        turns = [asyncio.create_task(play(sampler, prompt(40 + i), params, seed=i)) for i in range(6)]
        await asyncio.to_thread(writes, sampler, 10 * len(turns))
        await asyncio.to_thread(trained.update, factor)
        return list(await asyncio.gather(*turns))

    found = 0
    for episode in asyncio.run(main()):
        ((start, sampled),) = episode.turns
        count = sampled.versions.count(old)
        assert sampled.versions == [old] * count + [trained.policy.version] * (len(sampled.ids) - count)
        halves = [(before, slice(0, count))] * (count > 0)
        halves += [(trained.policy, slice(count, None))] * (count < len(sampled.ids))
        for model, half in halves:
            part = replace(
                sampled, ids=sampled.ids[half], logprobs=sampled.logprobs[half], versions=sampled.versions[half]
            )
            assert gap(model, [Played(episode.ids, [(start + (half.start or 0), part)])]) < FLOAT32_GAP
        found += len(halves) == 2
    return found


def test_old_weights_are_found_by_the_probe(
    trained: ModelCase, sampler: VllmServerSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(trained.policy, sampler)
    changed(trained.policy, 1.02)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "load_files", lambda folder, version: sampler.reset())  # a transfer that brings nothing
        with pytest.raises(WeightError, match="differ from the trainer's"):
            asyncio.run(publisher.publish())
    assert asyncio.run(publisher.publish()).probe_gap < FLOAT32_GAP


def test_what_does_not_fit_is_refused_before_anything_moves(
    trained: ModelCase, sampler: VllmServerSampler, served: Served, tmp_path: Path
) -> None:
    other = policy("qwen2", configs=WIDE_CONFIGS)
    with pytest.raises(WeightMismatch, match=r"model.layers.0.self_attn.q_proj.bias"):
        Publisher(other, sampler)
    stranger = VllmServerSampler(other, served.url)
    with pytest.raises(WeightMismatch, match=r"the engine has no place for model.layers.0.self_attn.q_proj.bias"):
        Publisher(other, stranger)
    with pytest.raises(SamplerError, match="no weights yet"):
        together(stranger.sample([1], SamplingParams(max_new_tokens=1), seed=0))
    stranger.close()
    with pytest.raises(SamplerError, match="trainer and engine must share it"):
        sampler.load_files(str(tmp_path), 99)
    assert sampler.version < 0, "what a failed transfer leaves behind is of no version"
    assert asyncio.run(publish(trained.policy, sampler)).probe_gap < FLOAT32_GAP, "and requests are not frozen for ever"


def test_cancelled_turns_are_aborted_on_the_server(trained: ModelCase, sampler: VllmServerSampler) -> None:
    """64 turns fill the server; it takes the next one at once only when they are gone."""

    async def main() -> float:
        long = SamplingParams(max_new_tokens=400)
        doomed = [asyncio.create_task(sampler.sample(prompt(40), long, seed=i)) for i in range(64)]
        await asyncio.sleep(0.5)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        await sampler.sample(prompt(9), SamplingParams(max_new_tokens=1), seed=0)
        return await asyncio.to_thread(running, sampler)

    assert asyncio.run(main()) == 0


def running(sampler: VllmServerSampler) -> float:
    """Requests in the server, by its own count; it tells with a delay."""
    end = time.monotonic() + 30
    while (count := told(sampler, "vllm:num_requests_running")) and time.monotonic() < end:
        time.sleep(0.2)
    return count


def writes(sampler: VllmServerSampler, count: int) -> None:
    """Returns when the server has written so many tokens more."""
    before, end = told(sampler, "vllm:generation_tokens_total"), time.monotonic() + 60
    while told(sampler, "vllm:generation_tokens_total") < before + count:
        assert time.monotonic() < end
        time.sleep(0.02)


def told(sampler: VllmServerSampler, name: str) -> float:
    """One of the server's metrics."""
    lines = sampler._control.get("/metrics").text.splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
    assert values
    return sum(values)


def test_a_server_that_is_started_anew_gets_its_weights_again(
    trained: ModelCase, sampler: VllmServerSampler, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a rollout: no token of the first weights gets through."""
    model = trained.policy

    async def main() -> list[Played]:
        params = SamplingParams(max_new_tokens=300)
        episodes = [
            asyncio.create_task(play(sampler, prompt(40 + i), params, seed=i, observations=[prompt(5)]))
            for i in range(4)
        ]
        await asyncio.sleep(0.3)
        await asyncio.to_thread(served.kill)
        served.start()
        return list(await asyncio.gather(*episodes))

    with caplog.at_level(logging.WARNING, "posttrain"):
        played = asyncio.run(main())
    assert gap(model, played) < FLOAT32_GAP
    assert {v for episode in played for _, turn in episode.turns for v in turn.versions} == {model.version}
    assert [r.message for r in caplog.records if "has other weights than it was given" in r.message]


def test_servers_that_cannot_be_trained_with_are_refused(served: Served) -> None:
    model = policy("llama", configs=WIDE_CONFIGS)
    with pytest.raises(SamplerError, match="nobody is there"):
        VllmServerSampler(model, "http://127.0.0.1:9/v1", patience_seconds=0)
    with pytest.raises(SamplerError, match=r"no route /collective_rpc: start it with VLLM_SERVER_DEV_MODE=1"):
        VllmServerSampler(model, f"{served.url}/nothing", patience_seconds=0)
