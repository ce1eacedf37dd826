"""LoRA adapters in vLLM: needs vllm (`scripts/test_vllm` makes an environment) and peft."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import SamplerError
from posttrain.sampler.vllm import VllmSampler
from posttrain.trainer.policy import Policy
from posttrain.weights.adapters import AdapterError, adapter_of
from posttrain.weights.manifest import Manifest, WeightMismatch
from posttrain.weights.publish import Publisher, WeightError, publish
from weights.lora import adapted

from .tiny import WIDE_CONFIGS, Played, gap, play, policy, prompt, together, tokenizer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of vllm's imports
]
ON_GPU = torch.cuda.is_available()
LIMIT = 0.15 if ON_GPU else 1e-4  # of log-probs: in bfloat16 on a GPU, where vLLM takes no adapters of float32
SMALL = {"kv_cache_memory_bytes": 1 << 27}


def fitting(family: str, **options: Any) -> Policy:
    model = adapted(family, **options)
    if ON_GPU:
        model.module.to(torch.bfloat16)
    return model


def trained(model: Policy) -> None:
    """Other factors, in place, and the next version; they do not grow over many of these."""
    factor = 0.75 if model.version % 2 else 1.3
    with torch.no_grad():
        for _, weight in model.parameters():
            weight.mul_(factor)
    model.version += 1


def played(sampler: VllmSampler, length: int = 40) -> list[Played]:
    params = SamplingParams(max_new_tokens=8)
    return together(*(play(sampler, prompt(length), params, seed=i, observations=[prompt(5)]) for i in range(3)))


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Policy, VllmSampler]]:
    model = fitting("llama", r=3, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    sampler = VllmSampler(model, tokenizer(), truncation="allow", **SMALL)
    try:
        asyncio.run(publish(model, sampler))
        yield model, sampler
    finally:
        sampler.close()


@pytest.mark.parametrize("transport", ["memory", "disk", "broadcast"])
def test_only_the_adapter_moves_and_is_sampled_from(pair: tuple[Policy, VllmSampler], transport: str) -> None:
    model, sampler = pair
    publisher = Publisher(model, sampler, transport=transport)  # type: ignore[arg-type]
    assert publisher.sends_adapters
    for _ in range(2):
        before = played(sampler)
        trained(model)
        done = asyncio.run(publisher.publish())
        assert (done.version, sampler.version) == (model.version, model.version)
        assert done.probe_gap < LIMIT
        assert done.bytes == sum(p.nbytes for _, p in model.parameters()) < Manifest.of_module(model.module).bytes
        after = played(sampler)
        assert gap(model, after) < LIMIT
        assert gap(model, before) > 2 * LIMIT, "the update changed nothing: the case is badly made"
        assert {v for episode in after for _, turn in episode.turns for v in turn.versions} == {model.version}


def test_prefixes_are_shared_under_one_adapter_and_not_with_the_next(pair: tuple[Policy, VllmSampler]) -> None:
    model, sampler = pair
    asyncio.run(publish(model, sampler))
    played(sampler, 100)
    reused = sampler.stats.tokens_reused
    played(sampler, 100)
    assert sampler.stats.tokens_reused >= reused + 3 * 96
    trained(model)
    asyncio.run(publish(model, sampler))
    reused = sampler.stats.tokens_reused
    together(sampler.sample(prompt(100), SamplingParams(max_new_tokens=1), seed=0))
    assert sampler.stats.tokens_reused == reused


def test_an_adapter_that_comes_in_the_middle_of_a_turn_goes_on_with_it(pair: tuple[Policy, VllmSampler]) -> None:
    model, sampler = pair
    asyncio.run(publish(model, sampler))
    old = model.version

    async def main() -> Played:
        turn = asyncio.create_task(play(sampler, prompt(40), SamplingParams(max_new_tokens=120), seed=3))
        before = sampler.stats.steps
        while sampler.stats.steps < before + 20 and not turn.done():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.001)
        trained(model)
        adapter = adapter_of(model.module)
        sampler.load(adapter.tensors, model.version, rank=adapter.rank)
        return await turn

    episode = asyncio.run(main())
    sampled = episode.turns[0][1]
    new = sampled.versions.count(old + 1)
    assert sampled.versions == [old] * (120 - new) + [old + 1] * new
    assert 0 < new < 120
    late = type(sampled)(
        ids=sampled.ids[-new:],
        logprobs=sampled.logprobs[-new:],
        versions=sampled.versions[-new:],
        stop_reason=sampled.stop_reason,
    )
    assert gap(model, [Played(episode.ids, [(160 - new, late)])]) < LIMIT


def test_an_old_adapter_is_found_by_the_probe(
    pair: tuple[Policy, VllmSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sampler = pair
    publisher = Publisher(model, sampler)
    trained(model)
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "load", lambda tensors, version, rank: setattr(sampler, "version", version))
        with pytest.raises(WeightError, match="differ from the trainer's"):
            asyncio.run(publisher.publish())
    assert asyncio.run(publisher.publish()).probe_gap < LIMIT


def test_adapters_of_other_layers_or_ranks_are_refused_by_name(pair: tuple[Policy, VllmSampler]) -> None:
    _, sampler = pair
    with pytest.raises(WeightMismatch, match=r"no place for model.layers.0.mlp.gate_proj.lora_A.weight"):
        Publisher(fitting("llama"), sampler)
    sampler.close()
    with pytest.raises(SamplerError, match="max_lora_rank cannot be set: it is that of the policy's adapter"):
        VllmSampler(fitting("llama"), **SMALL, max_lora_rank=8)
    with pytest.raises(AdapterError, match="enable_lora: false"):
        VllmSampler(fitting("llama", use_dora=True), **SMALL)


def test_without_enable_lora_the_merged_weights_move() -> None:
    """Also of adapters that vLLM does not know."""
    model = fitting("tied", use_dora=True)
    sampler = VllmSampler(model, tokenizer(), enable_lora=False, **SMALL)
    try:
        publisher = Publisher(model, sampler)
        assert not publisher.sends_adapters
        plain = policy("tied", configs=WIDE_CONFIGS)
        for _ in range(2):
            trained(model)
            done = asyncio.run(publisher.publish())
            assert done.bytes == sum(p.numel() for p in plain.module.parameters()) * model.dtype.itemsize
            assert done.probe_gap < LIMIT
            assert gap(model, played(sampler)) < LIMIT
    finally:
        sampler.close()


@pytest.mark.skipif(not ON_GPU, reason="on a CPU vLLM takes adapters of float32")
def test_adapters_of_float32_are_refused_with_the_two_ways_out() -> None:
    with pytest.raises(SamplerError, match=r"the policy is float32; set model.dtype: bfloat16; an engine in"):
        VllmSampler(adapted("llama"), **SMALL)
