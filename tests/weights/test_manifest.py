from __future__ import annotations

import pytest
import torch

from posttrain.weights.manifest import Manifest, Spec, WeightMismatch, weights_of
from sampler.tiny import CONFIGS, WIDE_CONFIGS, policy


@pytest.mark.parametrize("family", list(WIDE_CONFIGS))
def test_a_model_has_what_its_config_promises(family: str) -> None:
    model = policy(family, configs=WIDE_CONFIGS)
    manifest = Manifest.of_module(model.module)
    manifest.check_fits(Manifest.of_config(model.config, torch.float32))
    assert [name for name, _ in weights_of(model)] == list(manifest.tensors)
    assert manifest.bytes == sum(tensor.numel() * 4 for _, tensor in weights_of(model))


def test_tied_tensors_are_listed_once() -> None:
    manifest = Manifest.of_module(policy("tied", configs=WIDE_CONFIGS).module)
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in manifest.tensors


def test_weights_share_the_policys_memory() -> None:
    model = policy()
    assert {t.data_ptr() for _, t in weights_of(model)} == {p.data_ptr() for p in model.module.parameters()}


def test_every_kind_of_mismatch_names_its_tensor() -> None:
    wanted = Manifest({"a": Spec((2, 3), torch.float32), "b": Spec((4,), torch.float32)}, {})
    for tensors, message in (
        ({"a": Spec((2, 3), torch.float32)}, "b is not in the policy"),
        ({**wanted.tensors, "c": Spec((1,), torch.float32)}, "c is not in the engine's model"),
        ({**wanted.tensors, "a": Spec((3, 2), torch.float32)}, r"a is float32\[3, 2\] .* float32\[2, 3\]"),
        ({**wanted.tensors, "b": Spec((4,), torch.bfloat16)}, r"b is bfloat16\[4\]"),
    ):
        with pytest.raises(WeightMismatch, match=message):
            Manifest(tensors, {}).check_fits(wanted)
    with pytest.raises(WeightMismatch, match="c is tied to a on one side only"):
        Manifest(wanted.tensors, {"c": "a"}).check_fits(wanted)


def test_a_model_of_another_size_or_dtype_is_refused() -> None:
    manifest = Manifest.of_module(policy("llama").module)
    with pytest.raises(WeightMismatch, match=r"model.embed_tokens.weight .*; and \d+ more"):
        manifest.check_fits(Manifest.of_config(WIDE_CONFIGS["llama"](), torch.float32))
    with pytest.raises(WeightMismatch, match="bfloat16"):
        manifest.check_fits(Manifest.of_config(CONFIGS["llama"](), torch.bfloat16))
    with pytest.raises(WeightMismatch, match=r"q_norm.weight is not in the policy"):
        manifest.check_fits(Manifest.of_config(CONFIGS["qwen3"](), torch.float32))
