"""Which tensors a policy has, and whether they are those that an engine was made for. A mismatch names the tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from posttrain.trainer.policy import Policy
from posttrain.weights.adapters import base_state, merged_state
from posttrain.weights.buckets import Named

SHOWN = 3  # tensors that an error names


class WeightMismatch(ValueError):
    """The weights at hand are not those that the engine needs; nothing was transferred."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tensors in Hugging Face layout, each once. tied: other name of a tied tensor -> the name it is listed under."""

    tensors: dict[str, Spec]
    tied: dict[str, str]

    @classmethod
    def of_module(cls, module: nn.Module) -> Manifest:
        """Without adapters: with them merged it has the same tensors."""
        return cls.of_state(base_state(module))

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Manifest:
        tensors: dict[str, Spec] = {}
        tied: dict[str, str] = {}
        names: dict[int, str] = {}
        for name, tensor in state.items():
            first = names.setdefault(id(tensor), name)
            if first != name:
                tied[name] = first
            else:
                tensors[name] = Spec(tuple(tensor.shape), tensor.dtype)
        return cls(tensors, tied)

    @classmethod
    def of_config(cls, config: Any, dtype: torch.dtype) -> Manifest:
        """What a model of this transformers config has, without making its weights."""
        config = copy.deepcopy(config)
        config.dtype = dtype
        with torch.device("meta"):
            return cls.of_module(AutoModelForCausalLM.from_config(config, dtype=dtype))

    @property
    def bytes(self) -> int:
        return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in self.tensors.values())

    def check_fits(self, engine: Manifest) -> None:
        """Raises WeightMismatch unless `engine` needs exactly these tensors, tied in the same way."""
        problems = [f"{name} is not in the policy" for name in engine.tensors if name not in self.tensors]
        for name, spec in self.tensors.items():
            wanted = engine.tensors.get(name)
            if wanted is None:
                problems.append(f"{name} is not in the engine's model")
            elif wanted != spec:
                problems.append(f"{name} is {spec} in the policy and {wanted} in the engine")
        if self.tied != engine.tied and not problems:
            apart = sorted(set(self.tied.items()) ^ set(engine.tied.items()))
            problems = [f"{alias} is tied to {name} on one side only" for alias, name in apart]
        refuse(problems)


def refuse(problems: Sequence[str]) -> None:
    """Raises WeightMismatch with the first of them."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise WeightMismatch(f"weights do not fit the engine: {'; '.join(problems[:SHOWN])}{more}")


def weights_of(policy: Policy) -> list[Named]:
    """Every tensor once, in Hugging Face layout, in the policy's memory; adapters are merged into copies."""
    return once(merged_state(policy.module))


def once(state: dict[str, Tensor]) -> list[Named]:
    """The tensors of a state dict, tied ones only once, under their first name."""
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return [(name, tensor.detach()) for name, tensor in state.items() if first[id(tensor)] == name]
