"""LoRA through peft, where it is installed: trains adapters only, saves merged and apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.trainer.loading import ModelError
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig
from posttrain.trainer.policy import Policy

from .batches import ragged_batch
from .models import tiny_policy

peft = pytest.importorskip("peft")


def test_adapters_train_and_the_base_stays() -> None:
    plain = tiny_policy("qwen3")
    before = plain.logprobs(ragged_batch()).detach()
    policy = Policy(peft.get_peft_model(plain.module, peft.LoraConfig(r=4, target_modules="all-linear")))
    assert torch.allclose(policy.logprobs(ragged_batch()), before, atol=1e-6)
    assert all("lora_" in name for name, _ in policy.parameters())
    optimizer = Optimizer(policy.parameters(), OptimizerConfig(lr=1e-2))
    policy.logprobs(ragged_batch()).sum().backward()
    optimizer.step()
    after = policy.logprobs(ragged_batch())
    assert not torch.allclose(after, before, atol=1e-3)
    with policy.module.disable_adapter():
        assert torch.allclose(policy.logprobs(ragged_batch()), before, atol=1e-6)


def test_p121_the_saved_model_has_the_adapters_effect(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    policy = Policy(peft.get_peft_model(tiny_policy("llama").module, config))
    expected = policy.logprobs(ragged_batch())
    policy.save(tmp_path)
    assert torch.equal(policy.logprobs(ragged_batch()), expected)
    assert torch.allclose(Policy.load(tmp_path, "cpu", "float32").logprobs(ragged_batch()), expected, atol=1e-4)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_prompt_tuning_is_refused() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ModelError, match="virtual tokens before the input"):
        Policy(peft.get_peft_model(tiny_policy("llama").module, config))
