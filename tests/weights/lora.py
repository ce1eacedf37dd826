"""Policies with LoRA adapters: needs peft; whoever imports this is skipped without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.trainer.policy import Policy
from sampler.tiny import WIDE_CONFIGS, policy

peft = pytest.importorskip("peft")


def adapted(family: str = "llama", **options: Any) -> Policy:
    """Adapters that change a lot, on every linear layer unless told otherwise."""
    usual = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    plain = policy(family, configs=WIDE_CONFIGS)
    torch.manual_seed(1)
    return Policy(peft.get_peft_model(plain.module, peft.LoraConfig(**usual | options)))
