"""What can be said of a vLLM engine without vLLM."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from posttrain.sampler.requests import SamplerError
from posttrain.sampler.vllm import VllmSampler
from posttrain.sampler.vllm_engine import settings_of

from .tiny import policy

KNOWN = [
    "block_size",
    "dtype",
    "enable_prefix_caching",
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
