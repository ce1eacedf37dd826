"""The whole weights of a policy, gathered tensor by tensor where every rank holds only a shard of each.

Of a policy with adapters the adapters alone: a receiver loads the base weights from the same directory as the policy.
No rank ever holds all gathered weights: they are sent, or written, a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from posttrain.trainer.lora import trained_state
from posttrain.trainer.policy import Policy
from posttrain.trainer.sharding import free_gathered, sharded_parts, whole
from posttrain.weights.adapters import adapter_of, as_factors
from posttrain.weights.buckets import BUCKET_BYTES, Named, layout
from posttrain.weights.manifest import Manifest, Spec, once


def manifest_of(policy: Policy) -> Manifest:
    """The tensors that a sampler gets: whole, in the dtype that the policy computes in. Adapters keep their names."""
    manifest = Manifest.of_state(_state_of(policy))
    if not sharded_parts(policy.module):
        return manifest
    numbers = {name: spec for name, spec in manifest.tensors.items() if spec.dtype.is_floating_point}
    narrow = {name: replace(spec, dtype=policy.dtype) for name, spec in numbers.items()}
    return replace(manifest, tensors=manifest.tensors | narrow)


def gathered(policy: Policy) -> Iterator[Named]:
    """Every tensor of `manifest_of` once, in its order.

    Every rank has to ask for all of them, at the same time.
    """
    state = _state_of(policy)
    if policy.at_hand is nullcontext and not sharded_parts(policy.module):
        yield from once(state)
        return
    free_gathered(policy.module)
    for name, _ in once(state):
        with policy.at_hand(state[name]):
            local = state[name].detach()
            if isinstance(local, DTensor) and local.is_floating_point():
                local = local.to(policy.dtype)  # before it travels: half the bytes
            found = whole(local.to(policy.device))
        yield name, found


def _state_of(policy: Policy) -> dict[str, Tensor]:
    return trained_state(policy.module) if policy.adapted else policy.module.state_dict(keep_vars=True)


def gathered_state(policy: Policy, *, keep: bool) -> dict[str, Tensor]:
    """All of `gathered` in host memory, tied tensors tied; empty unless `keep`. Every rank has to call it."""
    state = {name: tensor.cpu() for name, tensor in gathered(policy) if keep}
    return state | {alias: state[name] for alias, name in manifest_of(policy).tied.items() if keep}


def factors_of(policy: Policy) -> Manifest:
    """`manifest_of` of a policy with adapters, as `as_factors` makes it. Raises AdapterError as `adapter_of` does."""
    adapter_of(policy.module)
    specs = manifest_of(policy).tensors.items()
    like = [(name, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for name, spec in specs]
    return Manifest.of_state(dict(as_factors(policy.module, like)))


def join_gather(policy: Policy) -> None:
    """Takes part in the collectives of `gathered` on a rank that does not need the tensors itself."""
    for _ in gathered(policy):
        pass


def write_files(tensors: Iterator[Named], manifest: Manifest, folder: Path) -> int:
    """As safetensors that `buckets.tensors_in` reads, a file per bucket; returns the bytes."""
    folder.mkdir(parents=True)
    buckets = layout([(name, spec.shape, spec.dtype) for name, spec in manifest.tensors.items()], BUCKET_BYTES)
    for number, bucket in enumerate(buckets):
        held = dict(next(tensors) for _ in bucket)
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in held.items()},
            folder / f"model-{number:05}.safetensors",
        )
    return manifest.bytes


def as_json(manifest: Manifest) -> dict[str, Any]:
    """For a channel to another process; `from_json` reads it."""
    tensors = {n: [list(s.shape), str(s.dtype).removeprefix("torch.")] for n, s in manifest.tensors.items()}
    return {"tensors": tensors, "tied": manifest.tied}


def from_json(said: Mapping[str, Any]) -> Manifest:
    tensors = {name: Spec(tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in said["tensors"].items()}
    return Manifest(tensors, dict(said["tied"]))
