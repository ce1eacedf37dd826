"""Publishing to a sampler that has its own copy of the weights: a native one on a second policy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.weights.manifest import WeightMismatch
from posttrain.weights.names import unmatched
from posttrain.weights.publish import Publisher, WeightError, probe, publish
from sampler.tiny import WIDE_CONFIGS, changed, gap, play, policy, prompt, together
from weights.own_copy import OwnCopy


def pair(family: str = "qwen3") -> tuple[Policy, OwnCopy]:
    return policy(family, configs=WIDE_CONFIGS), OwnCopy(policy(family, seed=1, configs=WIDE_CONFIGS))


@pytest.mark.parametrize("family", ["qwen3", "tied", "gemma3"])
@pytest.mark.parametrize("transport", ["auto", "disk"])
def test_the_sampler_then_samples_from_the_policy(family: str, transport: str) -> None:
    trained, sampler = pair(family)
    trained.version = 4
    before = together(*(play(sampler, prompt(30), SamplingParams(max_new_tokens=5), seed=i) for i in range(3)))
    done = asyncio.run(publish(trained, sampler, transport=transport))
    assert (done.version, sampler.version) == (4, 4)
    assert done.transport == ("memory" if transport == "auto" else "disk")
    assert done.probe_gap < 1e-5
    assert done.gib_per_second > 0
    after = together(*(play(sampler, prompt(30), SamplingParams(max_new_tokens=5), seed=i) for i in range(3)))
    assert gap(trained, after) < 1e-5
    assert gap(trained, before) > 0.1


def test_weights_that_did_not_arrive_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, sampler = pair()
    publisher = Publisher(trained, sampler)
    asyncio.run(publisher.publish())
    changed(trained, 1.02)
    load = sampler.load
    monkeypatch.setattr(sampler, "load", lambda tensors, version: load(tensors[1:], version))
    with pytest.raises(WeightError, match=r"by memory, .* limit is 0.001 \(sampler.max_probe_gap\)"):
        asyncio.run(publisher.publish())


def test_the_limit_of_the_probe_is_the_callers_and_nan_is_over_every_limit() -> None:
    trained, sampler = pair()
    asyncio.run(publish(trained, sampler))
    changed(sampler.policy, 1 + 1e-4)
    sampler.reset()
    seen = asyncio.run(probe(trained, sampler))
    assert 1e-5 < seen < 0.1
    with pytest.raises(WeightError, match="limit is 1e-09"):
        asyncio.run(publish(trained, sampler, max_gap=1e-9))


def test_what_can_never_work_is_refused_before_anything_moves() -> None:
    trained, sampler = pair()
    with pytest.raises(WeightMismatch, match="is not in the policy"):
        Publisher(policy("llama", configs=WIDE_CONFIGS), sampler)
    with pytest.raises(WeightMismatch, match="bfloat16"):
        Publisher(policy("qwen3", dtype=torch.bfloat16, configs=WIDE_CONFIGS), OwnCopy(trained))


@pytest.mark.parametrize(
    ("left_out", "unknown", "missing"),
    [
        ("", [], []),
        ("model.layers.0.self_attn.k_proj.weight", [], ["model.layers.0.self_attn.k_proj.weight"]),
        ("model.layers.0.mlp.up_proj.weight", [], ["model.layers.0.mlp.up_proj.weight"]),
        ("model.norm.weight", [], ["model.norm.weight"]),
    ],
)
def test_fused_tensors_are_filled_by_all_their_parts(left_out: str, unknown: list[str], missing: list[str]) -> None:
    packed: dict[str, Any] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    layer = "model.layers.0"
    own = [f"{layer}.self_attn.qkv_proj.weight", f"{layer}.mlp.gate_up_proj.weight", "model.norm.weight"]
    sent = [
        *(f"{layer}.self_attn.{x}_proj.weight" for x in "qkv"),
        *(f"{layer}.mlp.{x}_proj.weight" for x in ("gate", "up")),
        "model.norm.weight",
    ]
    assert unmatched([name for name in sent if name != left_out], own, packed) == (unknown, missing)
    assert unmatched([*sent, "lm_head.weight"], own, packed) == (["lm_head.weight"], [])
