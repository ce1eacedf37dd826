"""Gives the policy's weights to a sampler that has its own copy, and proves that they arrived.

publish: manifest against the engine -> transfer -> caches dropped, version set -> a probe prompt is sampled, and its
log-probs must be those of the trainer. What does not fit stops the run before anything is transferred; what arrived
wrong, before anything is sampled with it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from posttrain.packing import pack
from posttrain.sampler.protocol import Sampler, SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory
from posttrain.weights.manifest import Manifest, refuse, weights_of

Transport = Literal["auto", "memory", "disk", "broadcast"]
PROBE_PROMPT = 40  # tokens; more than one block of an engine's cache
PROBE_TOKENS = 12
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # by dtype: what rounding alone has been seen to do, and some


class WeightError(RuntimeError):
    """The weights that the sampler works with are not the trainer's."""


class Receiver(Sampler, Protocol):
    """A sampler with weights of its own."""

    in_one_process: bool
    dtype: torch.dtype

    @property
    def model_config(self) -> Any:
        """The transformers config that its model was made of."""
        ...

    def unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]: ...

    def load(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None: ...

    def load_files(self, folder: str, version: int) -> None: ...

    def load_broadcast(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A transfer: `seconds` of it without the probe; `probe_gap` is the largest difference of a log-prob."""

    version: int
    transport: str
    bytes: int
    seconds: float
    probe_gap: float

    @property
    def gib_per_second(self) -> float:
        return self.bytes / 2**30 / max(self.seconds, 1e-9)


class Publisher:
    """Keeps a sampler at the weights of `policy`. Raises WeightMismatch at once when it could never work.

    transport: auto is memory where the engine's only worker lives in this process, else disk. max_gap: of the probe;
    None = by the dtype.
    """

    def __init__(
        self, policy: Policy, sampler: Receiver, *, transport: Transport = "auto", max_gap: float | None = None
    ) -> None:
        self.policy, self.sampler = policy, sampler
        self.transport = transport if transport != "auto" else "memory" if sampler.in_one_process else "disk"
        self.max_gap = max_gap if max_gap is not None else MAX_GAP.get(policy.dtype, max(MAX_GAP.values()))
        self._wanted = Manifest.of_config(sampler.model_config, sampler.dtype)
        check(Manifest.of_module(policy.module), self._wanted, sampler)

    async def publish(self) -> Published:
        """From now on the sampler samples from the policy as it is, at its version.

        Raises WeightMismatch naming a tensor that does not fit, and WeightError when the probe differs too much.
        """
        manifest, tensors = Manifest.of_module(self.policy.module), weights_of(self.policy)
        manifest.check_fits(self._wanted)
        started = time.perf_counter()
        TRANSPORTS[self.transport](self.policy, self.sampler, tensors)
        seconds = time.perf_counter() - started
        gap = await probe(self.policy, self.sampler)
        if not gap <= self.max_gap:  # NaN, too
            raise WeightError(
                f"after giving version {self.policy.version} to the sampler by {self.transport}, its log-probs of a "
                f"probe differ from the trainer's by {gap:.3g}; the limit is {self.max_gap:.3g} "
                "(sampler.max_probe_gap). The two compute different things (another dtype, an option of the engine), "
                "or old weights are still in use"
            )
        return Published(
            version=self.policy.version, transport=self.transport, bytes=manifest.bytes, seconds=seconds, probe_gap=gap
        )


async def publish(policy: Policy, sampler: Receiver, **options: Any) -> Published:
    """Once; see `Publisher`, which also takes the options."""
    return await Publisher(policy, sampler, **options).publish()


def check(manifest: Manifest, wanted: Manifest, sampler: Receiver) -> None:
    """Against the model that the engine was made for, and against the tensors that the engine has made of it."""
    manifest.check_fits(wanted)
    unknown, missing = sampler.unmatched(list(manifest.tensors))
    refuse(
        [f"the engine has no place for {name}" for name in unknown]
        + [f"the engine needs {name}, which the policy lacks" for name in missing if name not in manifest.tied]
    )


async def probe(policy: Policy, sampler: Sampler) -> float:
    """The largest |log-prob of the sampler - log-prob of the trainer| over a few tokens that the sampler draws."""
    ids = probe_prompt(int(policy.config.get_text_config().vocab_size))
    params = SamplingParams(max_new_tokens=PROBE_TOKENS)
    sampled = await sampler.sample(ids, params, seed=policy.version)
    trajectory = Trajectory(task_id="probe", group_id="probe", episode_id="probe")
    trajectory.add_context(ids, Source.PROMPT)
    trajectory.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
    batch = pack([trajectory])
    with torch.no_grad():
        logprobs = policy.logprobs(batch).cpu()
    return float((logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max())


def probe_prompt(vocabulary: int) -> list[int]:
    """Ids that mean nothing, the same at every time."""
    return random.Random(0).choices(range(vocabulary), k=PROBE_PROMPT)


def _by_memory(policy: Policy, sampler: Receiver, tensors: list[tuple[str, Tensor]]) -> None:
    sampler.load(tensors, policy.version)


def _by_disk(policy: Policy, sampler: Receiver, tensors: list[tuple[str, Tensor]]) -> None:
    with tempfile.TemporaryDirectory(prefix="posttrain-weights-") as folder:
        policy.save(folder)
        sampler.load_files(folder, policy.version)


def _by_broadcast(policy: Policy, sampler: Receiver, tensors: list[tuple[str, Tensor]]) -> None:
    sampler.load_broadcast(tensors, policy.version)


TRANSPORTS: dict[str, Callable[[Policy, Receiver, list[tuple[str, Tensor]]], None]] = {
    "memory": _by_memory,
    "disk": _by_disk,
    "broadcast": _by_broadcast,
}
