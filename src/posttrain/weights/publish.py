"""Gives the policy's weights to a sampler that has its own copy, and proves that they arrived.

publish: manifest against the engine -> transfer -> caches dropped, version set -> a probe prompt is sampled, and its
log-probs must be those of the trainer. What does not fit stops the run before anything is transferred; what arrived
wrong, before anything is sampled with it.

Of a policy with LoRA adapters only these move, after the base has moved once; to samplers that take no adapters the
weights move with the adapters merged into them.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor

from posttrain.packing import Batch, pack
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory
from posttrain.weights.adapters import adapter_of, base_state, has_adapters, merged_state, write_adapter
from posttrain.weights.manifest import Manifest, once, refuse

T = TypeVar("T")
Transport = Literal["auto", "memory", "disk", "broadcast"]
PROBE_PROMPT = 40  # tokens; more than one block of an engine's cache
PROBE_PARAMS = SamplingParams(max_new_tokens=12)
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # by dtype: what rounding alone has been seen to do, and some
MAX_GAP_ON_GPU = 3e-2  # in float32: the attention of engines multiplies numbers of ten bits there (TF32)


class WeightError(RuntimeError):
    """The weights that the sampler works with are not the trainer's."""


class Receiver(Sampler, Protocol):
    """A sampler with weights of its own.

    Every `load` brings all tensors, in Hugging Face layout, and sets `version` to that of the policy; open requests go
    on with the new weights, and caches of the old ones are dropped. in_one_process: its only worker is this process.
    """

    in_one_process: bool
    dtype: torch.dtype

    @property
    def model_config(self) -> Any:
        """The transformers config that its model was made of."""
        ...

    def unmatched(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """(names without a tensor in the engine, tensors of the engine without a name)"""
        ...

    def load(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
        """From the memory of this process."""
        ...

    def load_files(self, folder: str, version: int) -> None:
        """From safetensors in a folder that the engine can read."""
        ...

    def load_broadcast(self, tensors: Sequence[tuple[str, Tensor]], version: int) -> None:
        """By broadcasts from this process to all workers of the engine."""
        ...


@runtime_checkable
class AdapterReceiver(Receiver, Protocol):
    """A receiver that can take LoRA adapters without the base weights.

    With `rank` a `load` brings the factors of an adapter of that rank (`load_files`: from a folder in peft's layout).
    The adapter is used until the next one, or new base weights, are loaded.
    """

    takes_adapters: bool

    def load(self, tensors: Sequence[tuple[str, Tensor]], version: int, *, rank: int = 0) -> None: ...

    def load_files(self, folder: str, version: int, *, rank: int = 0) -> None: ...

    def load_broadcast(self, tensors: Sequence[tuple[str, Tensor]], version: int, *, rank: int = 0) -> None: ...


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

    transport: auto is memory where the engine's only worker lives in this process, else disk. folder: where files lie
    meanwhile, if not in the system's temporary folder. max_gap: of the probe; None = by the dtype.
    """

    def __init__(
        self,
        policy: Policy,
        sampler: Receiver,
        *,
        transport: Transport = "auto",
        folder: str | None = None,
        max_gap: float | None = None,
    ) -> None:
        self.policy, self.sampler, self.folder = policy, sampler, folder
        self.transport = transport if transport != "auto" else "memory" if sampler.in_one_process else "disk"
        self.max_gap = max_gap if max_gap is not None else usual_gap(policy)
        self._wanted = Manifest.of_config(sampler.model_config, sampler.dtype)
        self._wanted_adapter = Manifest({}, {})
        if self.sends_adapters:
            self._wanted_adapter = Manifest.of_state(dict(adapter_of(policy.module).tensors))
        check(Manifest.of_module(policy.module), self._wanted, sampler, self._wanted_adapter)

    @property
    def sends_adapters(self) -> bool:
        """Whether the policy's adapters move apart from its base."""
        apart = isinstance(self.sampler, AdapterReceiver) and self.sampler.takes_adapters
        return apart and has_adapters(self.policy.module)

    async def publish(self) -> Published:
        """Moves the weights, after which the sampler samples from the policy as it is, at its version.

        Raises WeightMismatch naming a tensor that does not fit, and WeightError when the probe differs too much.
        """
        started = time.perf_counter()
        moved = self.move() if self.sampler.in_one_process else await _beside_the_loop(self.move)
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
            version=self.policy.version,
            transport=self.transport,
            bytes=moved,
            seconds=seconds,
            probe_gap=gap,
        )

    def move(self) -> int:
        """The transfer alone, without a proof; returns the bytes. Raises WeightMismatch as `publish` does."""
        parts = self._parts()
        for part in parts:
            self._move(part)
        return sum(part.bytes for part in parts)

    def counts(self) -> dict[str, float]:
        """Metrics of its own: none."""
        return {}

    def close(self) -> None:
        """Nothing is left of a transfer."""

    def _parts(self) -> list[Part]:
        """The parts to be moved, in order. Raises WeightMismatch for what the engine was not made for."""
        module = self.policy.module
        if not self.sends_adapters:
            return [self._weights(merged_state(module))]
        base = [self._weights(base_state(module))] if self.sampler.version < 0 else []
        adapter = adapter_of(module)
        Manifest.of_state(dict(adapter.tensors)).check_fits(self._wanted_adapter)
        return [*base, Part(adapter.tensors, adapter.rank)]

    def _move(self, part: Part) -> None:
        version = self.policy.version
        if self.transport == "memory":
            self.sampler.load(part.tensors, version, **part.how)
        elif self.transport == "broadcast":
            self.sampler.load_broadcast(part.tensors, version, **part.how)
        else:
            with tempfile.TemporaryDirectory(prefix="posttrain-weights-", dir=self.folder) as folder:
                part.write(Path(folder))
                self.sampler.load_files(folder, version, **part.how)

    def _weights(self, state: dict[str, Tensor]) -> Part:
        Manifest.of_state(state).check_fits(self._wanted)
        return Part(once(state))


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors that move together: all weights or, where `rank` (of LoRA) is set, the factors of an adapter."""

    tensors: list[tuple[str, Tensor]]
    rank: int = 0

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.tensors)

    @property
    def how(self) -> dict[str, int]:
        """Arguments that only samplers that take adapters know."""
        return {"rank": self.rank} if self.rank else {}

    def write(self, folder: Path) -> None:
        if self.rank:
            write_adapter(folder, self.tensors, self.rank)
        else:
            here = {name: tensor.cpu().contiguous() for name, tensor in self.tensors}
            save_file(here, folder / "model.safetensors", metadata={"format": "pt"})


async def _beside_the_loop(work: Callable[[], T]) -> T:
    """Runs `work` on a thread of its own, so that the event loop goes on and open requests can be interrupted.

    Not on asyncio's shared threads: environments that wait for these very weights may occupy all of them.
    """
    thread = ThreadPoolExecutor(1, "weights")
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)


async def publish(policy: Policy, sampler: Receiver, **options: Any) -> Published:
    """Publishes once. See `Publisher`, whose options these are."""
    return await Publisher(policy, sampler, **options).publish()


def check(manifest: Manifest, wanted: Manifest, sampler: Receiver, adapter: Manifest) -> None:
    """Compares the tensors with those of the engine's model config, and with those that the engine really has.

    Raises WeightMismatch.
    """
    manifest.check_fits(wanted)
    unknown, missing = sampler.unmatched([*manifest.tensors, *adapter.tensors])
    refuse(
        [f"the engine has no place for {name}" for name in unknown]
        + [f"the engine needs {name}, which the policy lacks" for name in missing if name not in manifest.tied]
    )


def usual_gap(policy: Policy) -> float:
    """The default limit for differences between the probe's log-probs: by dtype and device."""
    if policy.dtype is torch.float32 and torch.cuda.is_available():
        return MAX_GAP_ON_GPU
    return MAX_GAP.get(policy.dtype, max(MAX_GAP.values()))


async def probe(policy: Policy, sampler: Sampler) -> float:
    """The largest |log-prob of the sampler - log-prob of the trainer| over a few tokens that the sampler draws."""
    ids = probe_prompt(int(policy.config.get_text_config().vocab_size))
    batch = probe_batch(ids, [await sampler.sample(ids, PROBE_PARAMS, seed=policy.version)])
    with torch.no_grad():
        logprobs = policy.logprobs(batch).cpu()
    return float((logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().max())


def probe_batch(ids: list[int], drawn: Sequence[Sampled]) -> Batch:
    """A batch with a segment for each continuation that a sampler has drawn after `ids`."""
    trajectories = []
    for number, sampled in enumerate(drawn):
        trajectory = Trajectory(task_id="probe", group_id="probe", episode_id=f"probe {number}")
        trajectory.add_context(ids, Source.PROMPT)
        trajectory.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
        trajectories.append(trajectory)
    return pack(trajectories)


def probe_prompt(vocabulary: int) -> list[int]:
    """PROBE_PROMPT ids without meaning, the same in every call."""
    return random.Random(0).choices(range(vocabulary), k=PROBE_PROMPT)
