"""vLLM over several worker processes: needs vllm (`scripts/test_vllm` makes an environment)."""

from __future__ import annotations

import asyncio
import importlib.util
import os

import pytest
import torch

from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import SamplerError
from posttrain.sampler.vllm import VllmSampler, across_workers
from posttrain.weights.manifest import WeightMismatch, weights_of
from posttrain.weights.publish import Publisher

from .tiny import FLOAT32_GAP, WIDE_CONFIGS, changed, gap, play, policy, prompt, together, tokenizer

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here")
@pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs, or two cores")
@pytest.mark.filterwarnings("ignore")  # of vllm's imports
def test_workers_get_their_parts_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = policy("qwen3", configs=WIDE_CONFIGS)
    sampler = VllmSampler(model, tokenizer(), tensor_parallel_size=2, kv_cache_memory_bytes=1 << 27)
    try:
        assert not sampler.in_one_process
        for transport in ("auto", "broadcast", "broadcast", "disk"):
            changed(model, 1.03)
            model.version += 1
            done = asyncio.run(Publisher(model, sampler, transport=transport).publish())  # type: ignore[arg-type]
            assert done.transport == ("disk" if transport == "auto" else transport)
            assert done.probe_gap < FLOAT32_GAP
        params = SamplingParams(max_new_tokens=8)
        played = together(*(play(sampler, prompt(40), params, seed=i, observations=[prompt(5)]) for i in range(3)))
        assert gap(model, played) < FLOAT32_GAP
        with pytest.raises(SamplerError, match="several worker processes"):
            sampler.load(weights_of(model), model.version)
        with pytest.raises(WeightMismatch, match=r"model.layers.0.self_attn.q_norm.weight"):
            Publisher(policy("qwen2", configs=WIDE_CONFIGS), sampler)
    finally:
        sampler.close()


def test_a_tensor_is_unknown_when_no_worker_has_it_and_missing_when_any_needs_it() -> None:
    first = (["b", "x"], ["a2"])  # has a, a2
    second = (["a", "x"], [])  # has b
    assert across_workers(["a", "b", "x"], [first, second]) == (["x"], ["a2"])
    assert across_workers(["a"], [([], [])]) == ([], [])
