"""The native sampler on a copy of the weights: what samples in a process of its own, where the policy is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.requests import NO_WEIGHTS, SamplerError
from posttrain.trainer.policy import Policy
from posttrain.weights.buckets import tensors_in
from posttrain.weights.names import unmatched


class OwnCopy(NativeSampler):
    """Samples from `model`, a copy of the policy, and refuses to before `load` has given it weights.

    Where `model` has adapters, only the adapters are loaded: the base weights are there from the start.
    The other arguments are those of `NativeSampler`.
    """

    in_one_process = True

    def __init__(
        self,
        model: Policy,
        tokenizer: Any | None = None,
        *,
        workers: int = 1,
        truncation: Literal["refuse", "allow"] = "refuse",
        **options: Any,
    ) -> None:
        super().__init__(model, tokenizer, workers=workers, truncation=truncation, **options)
        self.model_config, self.dtype = model.config, model.dtype
        model.version = NO_WEIGHTS

    def unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(names without a tensor in the engine, tensors of the engine without a name)"""
        return unmatched(names, [name for name, _ in self.policy.module.named_parameters()], {})

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies all tensors into the model, between two forwards. Any thread may call it.

        Open requests go on with the new weights, and what was cached is dropped. `tensors` may come one at a time: no
        forward runs before the last one is copied.
        """
        own = self.policy.module.state_dict(keep_vars=True)
        with self.paused():
            self.policy.version = NO_WEIGHTS  # should the transfer fail, half of the weights are of no version
            for name, tensor in tensors:
                own[name].copy_(tensor)
            self.policy.version = version

    def load_files(self, folder: str, version: int) -> None:
        """As `load`, from safetensors in Hugging Face layout."""
        self.load(tensors_in(Path(folder)), version)

    def load_broadcast(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
        """Raises SamplerError: a copy in the policy's own process needs no process group."""
        raise SamplerError("weights reach a native sampler in this process by memory; leave sampler.transport out")

    def _check(self, params: Any) -> None:
        if self.version == NO_WEIGHTS:
            raise SamplerError("the sampler has no weights yet: publish a policy to it (posttrain.weights)")
        super()._check(params)
