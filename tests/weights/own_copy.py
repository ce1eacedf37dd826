"""A sampler that has its own copy of the weights, as engines have: the native one on a second policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.vllm_worker import unmatched
from posttrain.trainer.policy import Policy
from posttrain.weights.buckets import tensors_in


class OwnCopy(NativeSampler):
    """Samples from a policy of its own."""

    in_one_process = True

    def __init__(self, model: Policy, tokenizer: Any | None = None) -> None:
        super().__init__(model, tokenizer, truncation="allow")
        self.model_config, self.dtype = model.config, model.dtype

    def unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        return unmatched(names, [name for name, _ in self.policy.module.named_parameters()], {})

    def load(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
        own = dict(self.policy.module.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                own[name].copy_(tensor)
        self.policy.version = version
        self.reset()

    def load_files(self, folder: str, version: int) -> None:
        self.load(list(tensors_in(Path(folder))), version)

    def load_broadcast(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError
