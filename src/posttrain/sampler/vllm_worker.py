"""What vLLM's workers can do besides: say which tensors they have, and take new ones. Imports no vLLM: it is mixed into
the worker's class by name, and every method is called by name through `collective_rpc`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.weights.buckets import Group, connect, open_group, receive, tensors_in


class WeightReceiver:
    """Mixed into a vLLM worker; `model_runner`, `rank` and `reload_weights` are the worker's own."""

    model_runner: Any
    rank: int
    reload_weights: Any
    posttrain_group: Group | None = None

    def posttrain_unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(names that the engine has no tensor for, tensors that it needs and that are not among the names).

        All in Hugging Face layout; where the engine fuses some, its model says so in `packed_modules_mapping`.
        """
        model = self.model_runner.get_model()
        return unmatched(names, [name for name, _ in model.named_parameters()], packed_modules(model))

    @torch.no_grad()
    def posttrain_load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """New values for every tensor, from this process."""
        self._posttrain_reload(tensors)

    @torch.no_grad()
    def posttrain_load_files(self, folder: str) -> None:
        """New values for every tensor, from the safetensors of a folder in Hugging Face layout."""
        self._posttrain_reload(tensors_in(Path(folder)))

    def posttrain_join(self, host: str, port: int, world: int, backend: str) -> None:
        """Enters the group in which weights are broadcast; rank 0 is the trainer's."""
        store = connect(host, port, world)
        self.posttrain_group = open_group(store, rank=self.rank + 1, world=world, backend=backend)

    @torch.no_grad()
    def posttrain_load_broadcast(self) -> None:
        """New values for every tensor, from rank 0 of the group."""
        assert self.posttrain_group is not None, "posttrain_join comes first"
        self._posttrain_reload(receive(self.posttrain_group))

    def _posttrain_reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.reload_weights(weights_iterator=iter(tensors))
        prepare_tied(self.model_runner.get_model())


def prepare_tied(model: Any) -> None:
    """vLLM prepares a tied head once and not again when the embedding that it shares is reloaded: on a CPU it would go
    on with the old weights, packed."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)


def packed_modules(model: Any) -> Mapping[str, Sequence[str]]:
    """Fused module -> the modules that it is made of."""
    return getattr(model, "packed_modules_mapping", None) or {}


def unmatched(
    names: Sequence[str], own: Sequence[str], packed: Mapping[str, Sequence[str]]
) -> tuple[list[str], list[str]]:
    """See `WeightReceiver.posttrain_unmatched`. own: the engine's names. packed: see `packed_modules`."""
    needed = {part: None for name in own for part in unfused(name, packed)}
    given = set(names)
    return [name for name in names if name not in needed], [name for name in needed if name not in given]


def unfused(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The names under which a checkpoint holds the engine's tensor."""
    words = name.split(".")
    for place, word in enumerate(words):
        if word in packed:
            return [".".join([*words[:place], part, *words[place + 1 :]]) for part in packed[word]]
    return [name]
