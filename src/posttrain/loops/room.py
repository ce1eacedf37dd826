"""Whether a run fits its devices: the plan's estimate of memory for a config, and what would fit where it does not.

Lengths are taken at their limits: prompts of `limits.max_prompt_tokens`, episodes of `limits.max_episode_tokens`. A run
whose episodes stay shorter needs less.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import getitem
from typing import Any

import torch

from posttrain.config import ConfigError, RLConfig
from posttrain.loops.learner import needs_replica, shares_reference, wants_reference
from posttrain.loops.sampler_room import sampler_room
from posttrain.numba_code import may_compile
from posttrain.runs.layout import Layout, MicroBatch, Roles
from posttrain.runs.memory import ERROR_BAND, GIB, Estimate, ProcessSetup, estimate
from posttrain.runs.model_shape import ModelShape
from posttrain.runs.model_sizes import UnknownSizes, shape_at
from posttrain.trainer.flash_attention import VARLEN_TAKES_GQA
from posttrain.trainer.loading import pick_device
from posttrain.trainer.ranks import Ranks

log = logging.getLogger("posttrain")

MOST_RANKS = 1024


class DoesNotFit(ConfigError):
    """The run needs more memory than a device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A layout that fits, by the settings that lead to it."""

    settings: tuple[str, ...]
    ranks: int
    bytes: int

    @property
    def text(self) -> str:
        return f"{' '.join(self.settings)}: {self.bytes / GIB:.1f} GiB on each of {self.ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a process of a run needs, and what its device has (None: not known)."""

    estimate: Estimate
    layout: Layout
    device_bytes: int | None
    proposal: Proposal | None = None

    @property
    def fits(self) -> bool:
        return self.device_bytes is None or self.estimate.bytes <= self.device_bytes

    @property
    def surely_not(self) -> bool:
        """Whether it is too large by more than the error of the estimate (ERROR_BAND)."""
        return self.device_bytes is not None and self.estimate.bytes > (1 + ERROR_BAND) * self.device_bytes

    @property
    def verdict(self) -> str:
        need = f"{self.estimate.bytes / GIB:.1f} GiB"
        if self.device_bytes is None:
            return f"needs {need}; how much a GPU has is not known here: give --gpu-gib or cluster.gpu_memory_gib"
        has = f"{self.device_bytes / GIB:.1f} GiB"
        if self.fits:
            return f"fits: {need} of {has}"
        found = "" if self.proposal is None else f"; this would fit: {self.proposal.text}"
        return f"does not fit: needs {need} ({self.estimate.worst.name}) of {has}{found}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bytes."""
        moments = {m.name: {"parts": m.parts, "sum": m.bytes} for m in self.estimate.moments}
        proposal = None if self.proposal is None else {"settings": self.proposal.settings, "bytes": self.proposal.bytes}
        return {
            "moments": moments, "worst": self.estimate.worst.name, "torch": self.estimate.torch_bytes,
            "outside": self.estimate.outside, "host": self.estimate.host, "needs": self.estimate.bytes,
            "has": self.device_bytes, "fits": self.fits, "proposal": proposal,
        }  # fmt: skip


def room_of(config: RLConfig, *, gpu_gib: float | None = None) -> Room:
    """The estimate that `posttrain plan` shows, with a layout that fits where the config's does not.

    gpu_gib: memory of one GPU, instead of cluster.gpu_memory_gib and of the GPU in this machine. With either setting
    the plan is for GPUs, also on a machine without one.

    Raises ModelError where there is no config.json, UnknownSizes for what it does not know (architectures, engines),
    and ConfigError for the size of GPUs in a run on CPUs.
    """
    shapes, given = _shapes(config), gpu_gib if gpu_gib is not None else config.cluster.gpu_memory_gib
    if given is not None and config.model.device == "cpu":
        fix = "leave --gpu-gib and cluster.gpu_memory_gib out, or set model.device to auto"
        raise ConfigError([f"model.device is cpu, and GPUs are said to have {given:g} GiB: {fix}"])
    device = "cuda" if given is not None or config.model.device == "cuda" else pick_device(config.model.device).type
    ranks = config.trainer.ranks
    size = int(given * GIB) if given is not None else size_here(device, ranks)
    found = _room(config, shapes, device, size, ranks)
    if found.fits:
        return found
    return replace(found, proposal=next(proposals(config, shapes, found), None))


def check_room(config: RLConfig, ranks: Ranks) -> None:
    """At the start of a run: raises DoesNotFit where the device's size is known and surely too small."""
    device = pick_device(config.model.device).type
    try:
        found = _room(config, _shapes(config), device, size_here(device, ranks.on_this_host), ranks.size)
    except UnknownSizes as error:
        log.warning("whether the run fits is not known: %s", error)
        return
    if found.surely_not:
        raise DoesNotFit([f"the run {found.verdict}; `posttrain plan` shows the parts and what would fit"])


def size_here(device: str, ranks: int) -> int | None:
    """Bytes of a GPU of this machine, or of the share of its memory that one of `ranks` processes has."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


Shapes = tuple[ModelShape, ModelShape | None]


def _shapes(config: RLConfig) -> Shapes:
    critic = config.critic.path if config.critic is not None else None
    return shape_at(config.model.path, config.model.lora), None if critic is None else shape_at(critic)


def _room(config: RLConfig, shapes: Shapes, device: str, size: int | None, ranks: int) -> Room:
    unknown = {"deepspeed": "DeepSpeed", "megatron": "Megatron-core"}.get(config.trainer.backend)
    if ranks > 1 and unknown:
        raise UnknownSizes(f"what {unknown} keeps is not estimated; plan with trainer.backend: fsdp2 for a first idea")
    layout = layout_of(config, device, ranks)
    return Room(estimate=estimate(setup_of(config, shapes, layout, size)), layout=layout, device_bytes=size)


def layout_of(config: RLConfig, device: str, ranks: int) -> Layout:
    """How one process of a run on `ranks` processes divides models and work. device: "cuda" or "cpu"."""
    model, trainer = config.model, config.trainer
    half = model.dtype == "bfloat16" or (model.dtype == "auto" and device == "cuda")
    return Layout(
        device="cuda" if device == "cuda" else "cpu",
        dtype_bytes=2 if half else 4,
        ranks=ranks,
        tensor_parallel=trainer.tensor_parallel,
        sequence_parallel=trainer.sequence_parallel,
        whole_weights=not trainer.divides_weights,
        offload=trainer.offload,
        reshard_after_forward=trainer.reshard_after_forward,
        gradient_checkpointing=model.gradient_checkpointing,
        compiled=model.compiles_on(device) and trainer.tensor_parallel == 1,
        numba=device == "cpu" and not half and may_compile(),
        grouped_keys=VARLEN_TAKES_GQA or device == "cpu",
        workers=1 if device == "cuda" or ranks > 1 else config.batch.cpu_workers,
    )


def setup_of(config: RLConfig, shapes: Shapes, layout: Layout, size: int | None) -> ProcessSetup:
    """Everything that `memory.estimate` needs. size: bytes of the device, None = not known."""
    roles = Roles(
        ref=wants_reference(config) and not shares_reference(config, layout.ranks),
        critic=config.critic is not None,
        copy=needs_replica(config, layout.ranks),
    )
    micro, count = largest_micro_batch(config, layout)
    batch = config.batch
    return ProcessSetup(
        policy=shapes[0],
        critic=shapes[1],
        layout=layout,
        roles=roles,
        micro_batches=(micro,) * min(2, count),
        sampler=sampler_room(config, shapes[0], layout, size),
        batch_tokens=batch.mini_batch_prompts * batch.samples_per_prompt * config.limits.max_episode_tokens,
    )


def largest_micro_batch(config: RLConfig, layout: Layout) -> tuple[MicroBatch, int]:
    """(the largest micro-batch of a process, how many it works on in an update); see `packing.segment_bins`."""
    batch, longest = config.batch, config.limits.max_episode_tokens
    prompt = min(config.limits.max_prompt_tokens, longest - 1)
    group, written = batch.samples_per_prompt, longest - prompt
    shared = prompt if layout.shares_prefixes and group > 1 else 0
    rows = batch.mini_batch_prompts * (group * longest - (group - 1) * shared)
    teams = max(layout.teams, layout.workers)
    count = max(-(-rows // batch.tokens_per_micro_batch), min(teams, batch.mini_batch_prompts * group))
    most = min(batch.tokens_per_micro_batch, max(longest, -(-rows // count)))
    part = most / rows
    return MicroBatch(
        rows=most,
        tokens=round(part * batch.mini_batch_prompts * group * longest),
        read=round(part * batch.mini_batch_prompts * group * written),
        shared=round(part * batch.mini_batch_prompts * shared),
    ), -(-count // layout.teams)


# -- what would fit ----------------------------------------------------------------------------------------------------


def proposals(config: RLConfig, shapes: Shapes, found: Room) -> Iterator[Proposal]:
    """Layouts that fit, best first: on as few GPUs as possible, and among these the one that costs least speed."""
    device, size, now = found.layout.device, found.device_bytes, found.layout.ranks
    more = [now << k for k in range(11) if now << k <= MOST_RANKS]
    for ranks in more if device == "cuda" else [now]:
        for changes in _changes(config, shapes[0], ranks, found):
            settings = tuple(f"{key}={_shown(value)}" for key, value in changes.items())
            try:
                changed = _changed(config, changes)
            except ValueError:
                continue
            room = _room(changed, shapes, device, size, ranks)
            if room.fits:
                yield Proposal(settings=settings, ranks=ranks, bytes=room.estimate.bytes)


def _changes(config: RLConfig, shape: ModelShape, ranks: int, found: Room) -> Iterator[dict[str, Any]]:
    """Changes to the config, by dotted key, that save memory on `ranks` processes; what costs least speed first."""
    base: dict[str, Any] = {} if ranks == found.layout.ranks else {"trainer.ranks": ranks}
    if not config.trainer.reshard_after_forward and ranks > 1:
        base |= {"trainer.reshard_after_forward": True}
    least, most = config.limits.max_episode_tokens, config.batch.tokens_per_micro_batch
    sizes = [most, *(size for size in (most // 2, most // 4) if size > least), least]
    team_now = config.trainer.sequence_parallel
    parts = config.trainer.tensor_parallel
    shares_heads = shape.part(parts).shares_heads
    teams = [u for u in (1, 2, 4, 8) if ranks % (u * parts) == 0 and u >= team_now and shares_heads(u)]
    checkpointing = [False, True] if not config.model.gradient_checkpointing else [True]
    offloading = [False, True] if ranks > 1 and not config.trainer.offload else [config.trainer.offload]
    cache = found.estimate.named("rollout").parts.get("keys and values", 0)
    caches = [None, round(cache / GIB / 2, 2)] if cache > GIB and config.sampler.engine == "native" else [None]
    backends = [None] if config.trainer.divides_weights or ranks == 1 else [None, "fsdp2"]
    layouts = product(backends, offloading, teams, checkpointing, caches, dict.fromkeys(sizes))
    for backend, offload, team, again, kv, size in layouts:
        changes = dict(base)
        if backend is not None:
            changes["trainer.backend"] = backend
        if kv is not None:
            changes["sampler.options.kv_gib"] = kv
        if size != most:
            changes["batch.tokens_per_micro_batch"] = size
        if again and not config.model.gradient_checkpointing:
            changes["model.gradient_checkpointing"] = True
        if team != team_now:
            changes["trainer.sequence_parallel"] = team
        if offload and not config.trainer.offload:
            changes["trainer.offload"] = True
        if changes:
            yield changes


def _changed(config: RLConfig, changes: dict[str, Any]) -> RLConfig:
    """The same config with other settings, checked like any. Raises ValueError where they do not go together."""
    record = config.model_dump()
    for key, value in changes.items():
        *sections, name = key.split(".")
        reduce(getitem, sections, record)[name] = value
    return RLConfig.model_validate(record)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
