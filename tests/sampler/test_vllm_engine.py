"""What can be said of a vLLM engine without vLLM."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from posttrain.sampler.requests import SamplerError
from posttrain.sampler.vllm import VllmSampler
from posttrain.sampler.vllm_engine import settings_for, settings_of
from posttrain.sampler.vllm_worker import at_wrapped_layers
from posttrain.weights.adapters import Adapter

from .tiny import policy

KNOWN = [
    "block_size",
    "dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "model",
    "tensor_parallel_size",
]


def test_settings_are_the_given_ones_over_defaults_that_this_vllm_knows() -> None:
    made = settings_of({"max_num_seqs": 7, "enable_prefix_caching": False}, KNOWN, torch.bfloat16)
    assert made["max_num_seqs"] == 7
    assert made["enable_prefix_caching"] is False
    assert made["dtype"] == "bfloat16"
    assert made["logprobs_mode"] == "processed_logprobs"
    assert "generation_config" not in made, "an older vLLM does not know it"


def test_an_engine_whose_cache_has_a_size_starts_on_a_gpu_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses to start where less than its share is free, though it would not take that much."""
    cache = {"kv_cache_memory_bytes": 1 << 30}
    assert "gpu_memory_utilization" not in settings_of(cache, KNOWN, torch.bfloat16), "on a CPU it does not ask"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert settings_of(cache, KNOWN, torch.bfloat16)["gpu_memory_utilization"] == pytest.approx(0.01)
    assert settings_of(cache | {"gpu_memory_utilization": 0.5}, KNOWN, torch.bfloat16)["gpu_memory_utilization"] == 0.5
    for own in ({}, {"kv_cache_memory_bytes": None}):
        assert "gpu_memory_utilization" not in settings_of(own, KNOWN, torch.bfloat16), "vLLM's own"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("max_num_seq", r"options.max_num_seq is no setting of this vLLM; did you mean max_num_seqs\?"),
        ("model", "options.model cannot be set: the model is model.path"),
        ("logprobs_mode", "log-probs must be those"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(option: str, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        settings_of({option: 1}, KNOWN, torch.float32)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_it_is_told_what_to_install() -> None:
    with pytest.raises(SamplerError, match=r"cannot be imported .*: install it"):
        VllmSampler(policy())


class Prepared(nn.Module):
    """A layer as vLLM before 0.32 prepares it for adapters."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Loading(Prepared):
    """A layer as 0.32 does."""

    def load_weights(self, weights: object) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(("wrap", "inside"), [(Prepared, "base_layer."), (Loading, ""), (nn.Sequential, "")])
def test_weights_find_the_layers_that_are_prepared_for_adapters(wrap: type[nn.Module], inside: str) -> None:
    class Model(nn.Module):
        packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.qkv_proj = wrap(nn.Linear(2, 2))
            self.norm = nn.LayerNorm(2)

    sent = [(name, torch.zeros(1)) for name in ("q_proj.weight", "k_proj.bias", "norm.weight")]
    names = [name for name, _ in at_wrapped_layers(sent, Model())]
    assert names == [f"q_proj.{inside}weight", f"k_proj.{inside}bias", "norm.weight"]


@pytest.mark.parametrize(("rank", "prepared"), [(1, 1), (2, 8), (8, 8), (65, 128), (512, 512)])
def test_an_engine_is_prepared_for_the_next_rank_that_vllm_knows(rank: int, prepared: int) -> None:
    factors = [("a.q_proj.lora_A.weight", torch.zeros(rank, 4)), ("a.q_proj.lora_B.weight", torch.zeros(4, rank))]
    wanted = {"enable_lora": True, "max_lora_rank": prepared, "lora_target_modules": ["q_proj"]}
    assert settings_for(Adapter(rank, factors), torch.bfloat16) == wanted


def test_a_rank_beyond_all_is_refused() -> None:
    with pytest.raises(SamplerError, match="rank 512 at most, and the policy's has 513"):
        settings_for(Adapter(513, []), torch.bfloat16)
