"""LoRA adapters apart from the base and merged into it: needs peft."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.sampler.protocol import SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.weights.adapters import AdapterError, adapter_of, base_state, merged_state, write_adapter
from posttrain.weights.buckets import tensors_in
from posttrain.weights.manifest import Manifest, weights_of
from posttrain.weights.names import unmatched
from posttrain.weights.publish import publish
from sampler.tiny import WIDE_CONFIGS, gap, play, policy, prompt, together
from weights.lora import adapted
from weights.own_copy import OwnCopy

peft = pytest.importorskip("peft")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"r": 2, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"k_proj": 3}},
        {"target_modules": ["q_proj", "down_proj"]},
    ],
)
def test_base_and_factors_make_the_merged_weights(options: dict[str, Any]) -> None:
    """W + B A, by hand."""
    model = adapted(**options)
    base, adapter, merged = base_state(model.module), adapter_of(model.module), merged_state(model.module)
    assert list(base) == list(merged) == list(policy("llama", configs=WIDE_CONFIGS).module.state_dict())
    factors = dict(adapter.tensors)
    assert adapter.rank == max(a.shape[0] for name, a in factors.items() if ".lora_A." in name)
    layers = {name.removesuffix(".lora_A.weight") for name in factors if ".lora_A." in name}
    assert {layer.rpartition(".")[2] for layer in layers} == set(adapter.targets)
    for name, weight in merged.items():
        layer = name.removesuffix(".weight")
        change = factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"] if layer in layers else 0.0
        assert torch.allclose(weight, base[name] + change, atol=1e-5)
        assert torch.equal(weight, base[name]) == (layer not in layers)


def test_the_manifest_of_a_policy_with_adapters_is_that_of_its_base() -> None:
    model = adapted("tied")
    manifest = Manifest.of_module(model.module)
    manifest.check_fits(Manifest.of_module(policy("tied", configs=WIDE_CONFIGS).module))
    assert [name for name, _ in weights_of(model)] == list(manifest.tensors)
    names = [name for name, _ in adapter_of(model.module).tensors]
    assert not any("default" in name or name.startswith("base_model") for name in names)


def test_a_sampler_that_takes_no_adapters_gets_them_merged() -> None:
    model = adapted("qwen3")
    sampler = OwnCopy(policy("qwen3", seed=1, configs=WIDE_CONFIGS))
    for transport in ("memory", "disk"):
        done = asyncio.run(publish(model, sampler, transport=transport))
        assert done.bytes == Manifest.of_module(model.module).bytes
        played = together(*(play(sampler, prompt(30), SamplingParams(max_new_tokens=5), seed=i) for i in range(3)))
        assert gap(model, played) < 1e-4
    with model.module.disable_adapter():  # type: ignore[operator]
        assert gap(model, played) > 0.1


def test_peft_reads_what_is_written(tmp_path: Path) -> None:
    model = adapted(use_rslora=True)
    adapter = adapter_of(model.module)
    write_adapter(tmp_path, adapter.tensors, adapter.rank)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    assert list(tensors_in(tmp_path)) == [], "an adapter is no model"
    again = Policy(peft.PeftModel.from_pretrained(policy("llama", configs=WIDE_CONFIGS).module, tmp_path))
    read = merged_state(again.module)
    for name, tensor in merged_state(model.module).items():
        assert torch.allclose(tensor, read[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bias": "lora_only"}, "LoRA factors of linear layers the adapters have"),
        ({"use_dora": True}, "lora_magnitude_vector"),
        ({"modules_to_save": ["embed_tokens"]}, "embed_tokens.modules_to_save.default.weight"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens.lora_embedding_A.default"),
        ({"target_modules": ["embed_tokens"]}, "no LoRA factors of linear layers"),
    ],
)
def test_what_cannot_travel_apart_is_named(options: dict[str, Any], named: str) -> None:
    model = adapted("qwen2", **options)
    with pytest.raises(AdapterError, match=rf"{named}.*sampler\.options\.enable_lora: false"):
        adapter_of(model.module)


def test_one_adapter_at_a_time() -> None:
    model = adapted()
    model.module.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear"))  # type: ignore[operator]
    assert adapter_of(model.module).rank == 4
    model.module.base_model.set_adapter(["default", "other"])  # type: ignore[union-attr, operator]
    with pytest.raises(AdapterError, match=r"2 are active: \['default', 'other'\]"):
        adapter_of(model.module)


def test_factors_have_a_place_where_the_engine_has_prepared_a_layer() -> None:
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    own = ["a.qkv_proj.base_layer.weight", "a.o_proj.weight"]
    weights = [f"a.{x}_proj.weight" for x in "qkvo"]
    factors = ["a.q_proj.lora_A.weight", "a.q_proj.lora_B.weight"]
    assert unmatched([*weights, *factors], own, packed) == ([], [])
    assert unmatched([*weights[1:], "a.o_proj.lora_A.weight"], own, packed) == (
        ["a.o_proj.lora_A.weight"],
        ["a.q_proj.weight"],
    )
