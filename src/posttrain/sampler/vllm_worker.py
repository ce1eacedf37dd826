"""What vLLM's workers can do besides: say which tensors they have, and take new ones. Mixed into the worker's class by
name, and every method is called by name through `collective_rpc`. Imports vLLM where an adapter comes, not before.

Weights that come with `adapter`, a (number, rank), are the factors of a LoRA adapter: it replaces the one that is
there, under a number that no other had.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.weights.adapters import write_adapter
from posttrain.weights.buckets import Group, connect, open_group, receive, tensors_in
from posttrain.weights.names import WRAPPED, unfused, unmatched

AdapterTag = tuple[int, int] | None


class WeightReceiver:
    """Mixed into a vLLM worker, whose own are the first of these."""

    model_runner: Any
    rank: int
    reload_weights: Any
    add_lora: Any
    remove_lora: Any
    list_loras: Any
    posttrain_group: Group | None = None
    posttrain_stamp: str | None = None
    vllm_config: Any

    def posttrain_introduction(self) -> dict[str, Any]:
        """How the engine was set up, as far as it matters for training."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return {
            "logprobs_mode": str(model.logprobs_mode),
            "dtype": str(model.dtype).removeprefix("torch."),
            "workers": parallel.world_size,
        }

    def posttrain_unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(names that the engine has no tensor for, tensors that it needs and that are not among the names).

        All in Hugging Face layout; where the engine fuses some, its model says so in `packed_modules_mapping`.
        """
        model = self.model_runner.get_model()
        return unmatched(names, [name for name, _ in model.named_parameters()], packed_modules(model))

    @torch.no_grad()
    def posttrain_load(self, tensors: Iterable[tuple[str, Tensor]], adapter: AdapterTag = None) -> None:
        """New values for every tensor, from this process."""
        self._posttrain_take(tensors, adapter)

    @torch.no_grad()
    def posttrain_load_files(self, folder: str, adapter: AdapterTag = None) -> None:
        """New values for every tensor, from the safetensors of a folder in Hugging Face layout."""
        if not any(Path(folder).glob("*.safetensors")):
            raise FileNotFoundError(
                f"there are no weights in {folder} on this machine: trainer and engine must share it"
            )
        if adapter is None:
            self._posttrain_take(tensors_in(Path(folder)), None)
        else:
            self._posttrain_adopt(folder, adapter[0])

    def posttrain_mark(self, stamp: str) -> None:
        """Who gave the weights, and their version; a worker that was started anew has no stamp."""
        self.posttrain_stamp = stamp

    def posttrain_marked(self) -> str | None:
        return self.posttrain_stamp

    def posttrain_join(self, host: str, port: int, world: int, backend: str) -> None:
        """Enters the group in which weights are broadcast; rank 0 is the trainer's."""
        store = connect(host, port, world)
        self.posttrain_group = open_group(store, rank=self.rank + 1, world=world, backend=backend)

    @torch.no_grad()
    def posttrain_load_broadcast(self, adapter: AdapterTag = None) -> None:
        """New values for every tensor, from rank 0 of the group; after a failure all have to meet anew."""
        assert self.posttrain_group is not None, "posttrain_join comes first"
        group, self.posttrain_group = self.posttrain_group, None
        try:
            self._posttrain_take(receive(group), adapter)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"  # without its frames, which hold the group
        else:
            self.posttrain_group = group
            return
        del group  # with the last reference the connection ends, and the sender does not wait for the time limit
        raise RuntimeError(failure)

    def _posttrain_take(self, tensors: Iterable[tuple[str, Tensor]], adapter: AdapterTag) -> None:
        if adapter is None:
            model = self.model_runner.get_model()
            self.reload_weights(weights_iterator=at_wrapped_layers(tensors, model))
            prepare_tied(model)
            return
        number, rank = adapter
        with tempfile.TemporaryDirectory(prefix="posttrain-adapter-") as folder:  # vLLM takes them from files only
            write_adapter(Path(folder), list(tensors), rank)
            self._posttrain_adopt(folder, number)

    def _posttrain_adopt(self, folder: str, number: int) -> None:
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

        for other in self.list_loras():
            self.remove_lora(other)
        self.add_lora(LoRARequest(str(number), number, folder))


def at_wrapped_layers(tensors: Iterable[tuple[str, Tensor]], model: Any) -> Iterator[tuple[str, Tensor]]:
    """Under the names that the model's loader knows. Before 0.32 a layer that is prepared for adapters does not load
    what is meant for the layer inside."""
    inside = {
        part
        for name, layer in model.named_modules()
        if hasattr(layer, "base_layer") and not hasattr(type(layer), "load_weights")
        for part in unfused(name, packed_modules(model))
    }
    for name, tensor in tensors:
        layer, _, last = name.rpartition(".")
        yield (f"{layer}{WRAPPED}{last}" if layer in inside else name), tensor


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
