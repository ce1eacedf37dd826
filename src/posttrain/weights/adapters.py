"""LoRA adapters, as peft puts them into a policy's layers: apart from the base, or merged into it. Imports no peft.

An adapter travels as its factors, a fraction of the weights. Their names are those of peft's files without the prefix:
`model.layers.0.self_attn.q_proj.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank]. The scaling is inside B,
so that neither alpha nor its variants have to be understood by whoever takes it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from posttrain.weights.buckets import Named

PEFT = "base_model.model."  # in front of all names in a module with adapters
FACTORS = ("lora_A", "lora_B")
SHOWN = 3  # tensors that an error names
MERGE = "have them merged into the weights instead (sampler.options.enable_lora: false)"


class AdapterError(ValueError):
    """The adapters are of a kind that cannot travel apart from the base."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors by name, in the order of the model. rank: the largest."""

    rank: int
    tensors: list[Named]

    @property
    def targets(self) -> list[str]:
        """Last words of the names of the layers that have one, such as q_proj."""
        return sorted({layer_of(name).rpartition(".")[2] for name, _ in self.tensors})


def has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "peft_config")


def layer_of(name: str) -> str:
    """The layer that a factor belongs to."""
    return name.rsplit(".", 2)[0]


def adapter_of(module: nn.Module) -> Adapter:
    """The adapter that is active in a module with adapters. Its B are copies, its A share the module's memory.

    Raises AdapterError where more than the factors of linear layers is trained, and for several adapters at once.
    """
    inner = _without_peft(module)
    active = _only_active(module)
    modules: Iterable[tuple[str, Any]] = inner.named_modules()
    layers: dict[str, Any] = {name: layer for name, layer in modules if active in getattr(layer, "lora_A", {})}
    if not layers:
        raise AdapterError("the policy's adapters are no LoRA factors of linear layers: " + MERGE)
    _refuse_more_than_factors(inner, layers, active)
    tensors: list[Named] = []
    for name, layer in layers.items():
        a, b = layer.lora_A[active].weight.detach(), layer.lora_B[active].weight.detach()
        tensors += [(f"{name}.lora_A.weight", a), (f"{name}.lora_B.weight", b * layer.scaling[active])]
    return Adapter(max(tensor.shape[0] for _, tensor in tensors[::2]), tensors)


def as_factors(module: nn.Module, trained: Iterable[Named]) -> Iterator[Named]:
    """What trains in a module with adapters, by its names there -> the same as factors, named and scaled as those of
    `adapter_of`."""
    active, layers = _only_active(module), dict(_without_peft(module).named_modules())
    for name, tensor in trained:
        layer, _, factor = name.removeprefix(PEFT).removesuffix(f".{active}.weight").rpartition(".")
        scaled = tensor * layers[layer].scaling[active] if factor == "lora_B" else tensor  # type: ignore[index, operator]
        yield f"{layer}.{factor}.weight", scaled


def base_state(module: nn.Module) -> dict[str, Tensor]:
    """The weights below the adapters in Hugging Face layout, tied ones under every name; of a plain module all."""
    state = _without_peft(module).state_dict(keep_vars=True)
    if not has_adapters(module):
        return state
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if ".lora_" not in name}


def merged_state(module: nn.Module) -> dict[str, Tensor]:
    """As `base_state`, with the adapters' effect; a second copy of the model for as long as it is held."""
    if not has_adapters(module):
        return base_state(module)
    merged: Any = copy.deepcopy(module)  # merging in place could not be undone to the bit
    return merged.merge_and_unload().state_dict(keep_vars=True)


def write_adapter(folder: Path, tensors: Sequence[Named], rank: int) -> None:
    """As peft writes adapters, so that other programs read it."""
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,  # the scaling is inside B
        "target_modules": Adapter(rank, list(tensors)).targets,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    named = {f"{PEFT}{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _without_peft(module: nn.Module) -> nn.Module:
    return module.get_base_model() if has_adapters(module) else module  # type: ignore[operator]


def _only_active(module: Any) -> str:
    active = list(module.active_adapters)
    if len(active) != 1:
        raise AdapterError(f"one adapter at a time travels apart from the base, and {len(active)} are active: {active}")
    return active[0]


def _refuse_more_than_factors(inner: nn.Module, layers: Mapping[str, Any], active: str) -> None:
    """Everything that is trained, and every adapter that has an effect, must be among the factors."""
    known = {f"{name}.{factor}.{active}.weight" for name in layers for factor in FACTORS}
    others = [name for name, tensor in inner.named_parameters() if tensor.requires_grad and name not in known]
    others += [name for name, layer in layers.items() if active in getattr(layer, "lora_variant", {})]  # DoRA, ...
    if others:
        more = f", and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise AdapterError(
            f"besides LoRA factors of linear layers the adapters have {', '.join(others[:SHOWN])}{more}: {MERGE}"
        )
