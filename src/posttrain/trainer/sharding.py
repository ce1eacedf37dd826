"""One model over many ranks: FSDP2 (`fully_shard`, Zhao et al. 2023 without flat parameters).

Every rank holds a shard of each parameter, of its gradient and of its moments. The weights of a layer are gathered
right before it is computed and freed right after (or kept until the update, see `trainer.reshard_after_forward`).
Gradients are summed, not averaged, because losses carry weights that are fixed for the whole mini-batch. Parameters
that train are float32, being the optimizer's masters, and are gathered in the dtype that the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.trainer.compiling import run_plainly
from posttrain.trainer.ranks import Ranks, TrainerConfig, all_gather_single
from posttrain.trainer.tensor import check_layers, split_layer
from posttrain.trainer.vocabulary import split_vocabulary

Result = TypeVar("Result")
GATHERED = "posttrain_gathered"  # of a sharded module: the method that FSDP2 gathers its weights for
BUCKET_BYTES = 1 << 26  # of weights that are gathered at once


class RunGathered(Protocol):
    """Calls `work` with the parameters that belong to no layer gathered, and returns its result.

    Gradients of the result are reduced to the shards in the backward pass.
    """

    def __call__(self, work: Callable[[], Result], /) -> Result: ...


AtHand = Callable[[Tensor], AbstractContextManager[Any]]  # a context in which a parameter is whole, or a DTensor


class Sharded(Protocol):
    """A policy or critic, as far as gathering its weights goes."""

    module: nn.Module
    at_hand: AtHand


def unsharded(work: Callable[[], Result], /) -> Result:
    """The `RunGathered` of a module whose parameters are whole."""
    return work()


def shard(module: nn.Module, ranks: Ranks, config: TrainerConfig, dtype: torch.dtype) -> RunGathered:
    """Shards a module in place: each layer, then with `module` itself what is left (embedding, last norm, head).

    dtype: the one that the model computes in. Raises ModelError for a model that a team of ranks cannot divide.
    """
    assert ranks.mesh is not None
    options = _options(ranks.mesh, dtype, offload=config.offload)
    if ranks.tensor is not None:
        check_layers(module, ranks.tensor.size())
    for part in list(module.modules()):
        if isinstance(part, GradientCheckpointingLayer):
            widen(part)
            if ranks.tensor is not None:
                run_plainly(part)
                split_layer(part, ranks.tensor)
            fully_shard(part, reshard_after_forward=config.reshard_after_forward, **options)
    widen(module)
    if ranks.tensor is not None:
        split_vocabulary(module, ranks.tensor)
    fully_shard(module, reshard_after_forward=False, **options)  # its parameters are needed again at once
    for part in sharded_parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
    setattr(module, GATHERED, MethodType(lambda _, work: work(), module))
    register_fsdp_forward_method(module, GATHERED)  # replaces it by one that gathers first
    return getattr(module, GATHERED)


def shard_alone(module: nn.Module, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shards a part that computes in float32 whatever the model around it does; call it before `shard`."""
    fully_shard(module, **_options(mesh, torch.float32, offload=offload))


def _options(mesh: DeviceMesh, dtype: torch.dtype, *, offload: bool) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }


def widen(module: nn.Module) -> None:
    """Trainable parameters become float32: a step at the learning rates of RL is lost in bfloat16."""
    for parameter in module.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def sharded_parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def before_backward(module: nn.Module, *, last: bool) -> None:
    """To be called before each backward pass of an update, where layers stay gathered (no reshard_after_forward).

    Only after the `last` one gradients are summed over the ranks and gathered weights freed; until then every rank
    holds whole gradients, in float32.
    """
    for part in sharded_parts(module):
        part.set_requires_gradient_sync(last, recurse=False)
        part.set_reshard_after_backward(last, recurse=False)


def free_gathered(module: nn.Module) -> None:
    """Frees weights that a forward without backward left gathered; after a step they would be out of date."""
    for part in sharded_parts(module):
        part.reshard()


def whole(value: Tensor) -> Tensor:
    """The whole tensor, gathered from its shards; a collective, so every rank has to call it."""
    if not isinstance(value, DTensor):
        return value
    for count in range(1, value.device_mesh.ndim):  # shards of parts: first the shards to parts, then these
        value = value.redistribute(placements=[Replicate()] * count + list(value.placements[count:]))
    return value.full_tensor()


def norm(tensors: list[Tensor]) -> float:
    """2-norm of all tensors together, in float32 at least. Of sharded ones it is a collective with one result."""
    if not tensors:
        return 0.0
    own = [own_part(tensor) for tensor in tensors]
    norms = [torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in own]
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return float(torch.linalg.vector_norm(torch.stack(norms)))
    holders = torch.tensor([_holders(tensor) for tensor in tensors], dtype=torch.float64, device=norms[0].device)
    squares = (torch.stack(norms).double().square() / holders).sum()
    dist.all_reduce(squares)
    return float(squares.sqrt())


@torch.no_grad()
def own_part(tensor: Tensor) -> Tensor:
    """The local shard of a sharded tensor, in the same memory; of any other tensor itself.

    Elementwise updates work on these: on DTensors torch needs seconds to plan an operation on hundreds of shards.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def of_own_part(part: Tensor, model: Tensor) -> Tensor:
    """The inverse of `own_part`: `part` as the local shard of a tensor like `model`. Scalars come back as they are."""
    if not isinstance(model, DTensor) or not part.dim():
        return part
    size = {"shape": model.shape, "stride": model.stride()}
    return DTensor.from_local(part, model.device_mesh, model.placements, run_check=False, **size)


def _holders(tensor: Tensor) -> int:
    """How many ranks hold the same shard."""
    assert isinstance(tensor, DTensor)
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return dist.get_world_size() // math.prod(size for size, placement in sizes if not placement.is_replicate())


def like(value: Tensor, model: Tensor) -> Tensor:
    """A copy of `value`, sharded and placed like `model`; every rank has to have the whole value."""
    if isinstance(value, DTensor):
        return value.to(model.device)
    if not isinstance(model, DTensor) or not value.dim():
        return value.to(model.device, copy=True)
    mesh = model.device_mesh
    spread = distribute_tensor(value.to(mesh.device_type), mesh, model.placements, src_data_rank=None)
    return spread.to(model.device)


def empty_like(model: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in host memory with the shape and the shards of `model`."""
    return torch.empty_like(model.detach(), dtype=dtype, device="cpu")


@torch.no_grad()
def copy_weights(source: Sharded, target: nn.Module) -> None:
    """Gathers the trained parameters of a sharded model into those of a whole module, in place and in its dtype.

    target: loaded like `source`, so that parameters that do not train are equal already. Every rank has to call it.
    """
    free_gathered(source.module)
    into = dict(target.named_parameters())
    trained = [(into[name], p) for name, p in source.module.named_parameters() if p.requires_grad]
    by_rows = [(place, p) for place, p in trained if isinstance(p, DTensor) and p.device_mesh.ndim == 1]
    for bucket in _buckets(by_rows):
        _gather_rows(bucket)
    for place, parameter in trained:
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 1:
            continue
        with source.at_hand(parameter):
            local = parameter.detach().to(dtype=place.dtype)  # before it travels: half the bytes
            place.copy_(whole(local.to(place.device)))


def _buckets(pairs: Iterable[tuple[Tensor, DTensor]]) -> Iterator[list[tuple[Tensor, DTensor]]]:
    """Groups neighbours of one dtype, up to BUCKET_BYTES: a collective for each tensor would mostly wait."""
    bucket: list[tuple[Tensor, DTensor]] = []
    for place, parameter in pairs:
        room = BUCKET_BYTES - sum(other.nbytes for other, _ in bucket)
        if bucket and (place.nbytes > room or place.dtype is not bucket[0][0].dtype):
            yield bucket
            bucket = []
        bucket.append((place, parameter))
    if bucket:
        yield bucket


def _gather_rows(bucket: Sequence[tuple[Tensor, DTensor]]) -> None:
    """Gathers tensors sharded by rows: every rank holds ceil(rows / ranks) of them in order, the last ones fewer."""
    mesh = bucket[0][1].device_mesh
    count, own = mesh.size(), []
    for place, parameter in bucket:
        local = parameter.to_local().to(device=place.device, dtype=place.dtype)
        padded = place.new_zeros(-(-len(place) // count), *place.shape[1:])
        padded[: len(local)] = local
        own.append(padded.flatten())
    sent = torch.cat(own)
    everyone = sent.new_empty(count * len(sent))
    all_gather_single(everyone, sent, group=mesh.get_group())
    parts = everyone.view(count, -1).split([len(part) for part in own], dim=1)
    for (place, _), part in zip(bucket, parts, strict=True):
        place.copy_(part.reshape(-1, *place.shape[1:])[: len(place)])


def whole_state(source: Sharded, *, keep: bool) -> dict[str, Tensor]:
    """The state dict of a sharded model, tensor by tensor gathered into host memory; empty where not `keep`."""
    free_gathered(source.module)
    state: dict[str, Tensor] = {}
    for name, value in source.module.state_dict(keep_vars=True).items():
        with source.at_hand(value):
            full = whole(value.detach())
            if keep:
                state[name] = full.to("cpu", copy=True)
    return state
