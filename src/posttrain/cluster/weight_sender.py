"""How the policy's weights get into samplers that are processes of their own.

One `publish` on rank 0, between two steps; requests may be open, and go on under the new weights
  consumes      the policy, gathered tensor by tensor where ranks hold its shards: every rank helps
  waits for     the samplers: the first time all of them, later one at least
  unblocked by  their replies: each has loaded the weights, dropped what it had cached, and sampled the probe
  produces      samplers at the policy's version, whose log-probs of the probe are the trainer's

by broadcast: one process group of rank 0 and all that need the weights (gloo, NCCL between GPUs), formed anew when
others need them than the last time. shared: buckets in memory of rank 0 that samplers on its machine see, each told
over its channel. by disk: safetensors in the run directory, kept until the next version.
A sampler that is lost meanwhile is left out, and the others are given the weights again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future
from concurrent.futures import TimeoutError as NotYet
from concurrent.futures import wait as wait_for_any
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.cluster.channel import RankLost, machine, on_a_thread
from posttrain.cluster.pool import Member, Message, Pool, State
from posttrain.cluster.remote_sampler import PoolSampler
from posttrain.cluster.sampler import plain, sampled
from posttrain.packing import Batch
from posttrain.sampler.config import SamplerConfig
from posttrain.sampler.requests import SamplerError
from posttrain.trainer.policy import Policy
from posttrain.weights.adapters import adapter_of, as_factors, write_adapter
from posttrain.weights.buckets import BUCKET_BYTES, Group, as_json, layout, listen, open_group, send_in_order
from posttrain.weights.gather import factors_of, gathered, manifest_of, write_files
from posttrain.weights.manifest import Manifest
from posttrain.weights.publish import PROBE_PARAMS, Published, WeightError, probe_batch, probe_prompt, usual_gap
from posttrain.weights.shared import Shelf, hand_over

log = logging.getLogger("posttrain")
ATTEMPTS = 5
LOOK_SECONDS, REPLY_SECONDS = 0.1, 5.0
Replies = dict[Member, "Future[Message]"]


class NotDelivered(RuntimeError):
    """The weights did not reach everybody; those who are left are given them again."""


class GatherFailed(Exception):
    """Another rank is gone: there are no whole weights any more."""


@dataclass(slots=True, kw_only=True)
class PoolPublisher:
    """Keeps the members of `pool` at the weights of `policy`.

    order: tells the other ranks what to do at the same time. logprobs: of a batch, by all ranks. folder: on a disk that
    every sampler sees.

    Only the thread that trains gives weights. So none are given while a step changes them, and ranks never hear two
    orders at once.
    """

    policy: Policy
    pool: Pool
    sampler: PoolSampler
    settings: SamplerConfig
    order: Callable[..., None]
    logprobs: Callable[[Batch], Tensor]
    folder: Path
    failure: Exception | None = None  # of weights given amid a rollout, for whoever publishes next
    manifest: Manifest = field(init=False)
    adapter_rank: int = field(init=False)  # > 0 where factors of an adapter are given to engines that know such
    _group: Group | None = None
    _grouped: list[Member] = field(default_factory=list[Member])
    _probe_seconds: float = 0.0  # of the transfer that goes on
    _shelf: Shelf | None = None
    _shelved: list[Member] = field(default_factory=list[Member])  # who has tickets for it

    def __post_init__(self) -> None:
        known = self.policy.adapted and self.settings.engine == "vllm"
        self.adapter_rank = adapter_of(self.policy.module).rank if known else 0
        self.manifest = factors_of(self.policy) if known else manifest_of(self.policy)
        self.pool.on_ready = self._somebody_is_ready
        shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed

    @property
    def transport(self) -> str:
        return self.pool.settings.transport_of(self.settings)

    async def publish(self) -> Published:
        """From now on all samplers sample from the policy as it is, at its version.

        Raises WeightError when the probe of one of them differs too much, or when the weights do not arrive.
        """
        if self.failure is not None:
            raise self.failure
        if self.sampler.given < 0:
            self.pool.wait_for(lambda: len(self.pool.members(State.READY)) == self.pool.count)
        self.sampler.reset()
        self.sampler.wake(self.policy.version)
        started, self._probe_seconds = time.perf_counter(), 0.0
        gap = self._give_all()
        self.sampler.given = self.policy.version
        return Published(
            version=self.policy.version,
            transport=self.transport,
            bytes=self.manifest.bytes,
            seconds=time.perf_counter() - started - self._probe_seconds,
            probe_gap=gap,
        )

    def counts(self) -> dict[str, float]:
        return {"cluster/sampler_restarts": self.pool.restarts, "cluster/asked_again": self.sampler.asked_again}

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        if self._shelf is not None:
            self._shelf.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- who comes amid a rollout --------------------------------------------------------------------------------------

    def _somebody_is_ready(self) -> None:
        """On the thread of its channel. The first weights are given by `publish`; later, a sampler that calls gets them
        at once while the ranks wait for what comes of a rollout, and otherwise from the next `publish`."""
        loop = self.sampler.loop
        if self.sampler.given < 0:
            return
        if self.pool.soon is not None:
            self.pool.soon(self._catch_up)
        elif loop is not None:
            with suppress(RuntimeError):  # the loop is closed: between two rollouts, `publish` will see to it
                loop.call_soon_threadsafe(self._catch_up)

    def _catch_up(self) -> None:
        """Between an update and its publication there is nothing to catch up with: `publish` gives to everybody."""
        behind = self.sampler.given == self.policy.version and self.pool.members(State.READY)
        if not behind or self.failure is not None:
            return
        try:
            self._give_all()
        except Exception as error:  # raised by the next `publish`; nobody waits until then
            self.failure = error
            self.sampler.fail(error)

    # -- giving --------------------------------------------------------------------------------------------------------

    def _give_all(self) -> float:
        """To everybody who lacks the policy's version; returns the largest gap of a probe."""
        gap, failures = 0.0, 0
        while failures < ATTEMPTS:
            self.pool.wait_for(lambda: bool(self.pool.members(State.READY, State.SERVING)))
            there = self.pool.members(State.READY, State.SERVING)
            lacking = [member for member in there if member.version != self.policy.version]
            if not lacking:
                return gap
            try:
                gap = max(gap, self._deliver(lacking))
            except NotDelivered as failure:
                if self._group is not None:
                    self._group.abort()  # somebody may still wait in it, with the forwards of a sampler held up
                    self._group = None
                failures += 1
                log.warning("version %d of the weights: %s", self.policy.version, failure)
        raise WeightError(
            f"version {self.policy.version} of the weights did not reach all samplers in {ATTEMPTS} attempts; what "
            "they said is in the log"
        )

    def _deliver(self, members: list[Member]) -> float:
        try:
            replies = self._sent(members)
        except NotDelivered:
            self._shelved.clear()  # they may have come to nothing
            for member in members:  # with half of the weights it must not serve
                self.sampler.withdraw(member)
            raise
        found: dict[Member, Any] = {}
        failed: list[str] = []
        drawing = [0.0]
        for member, reply in replies.items():
            try:
                said = reply.result()
                found[member] = sampled(said["sampled"])
                drawing.append(said["probe_seconds"])
            except (RankLost, SamplerError) as error:
                failed.append(str(error))
                self.sampler.withdraw(member)
        started = time.perf_counter()
        gap = self._checked(found) if found else 0.0
        self._probe_seconds += max(drawing) + time.perf_counter() - started
        for member in found:
            member.version = self.policy.version
            self.sampler.serve(member)
        if failed:
            raise NotDelivered("; ".join(failed))
        return gap

    def _sent(self, members: list[Member]) -> Replies:
        if self.transport == "disk":
            return self._by_disk(members)
        return self._by_memory(members) if self.transport == "shared" else self._by_broadcast(members)

    def _ask(self, members: Sequence[Member], how: Callable[[int], Message]) -> Replies:
        prompt = probe_prompt(int(self.policy.config.get_text_config().vocab_size))
        probe = {"ids": prompt, "params": plain(PROBE_PARAMS), "seed": self.policy.version}
        common = {"do": "weights", "version": self.policy.version, "rank": self.adapter_rank, "probe": probe}
        return {member: self.pool.ask(member, common | how(rank)) for rank, member in enumerate(members, 1)}

    def _by_disk(self, members: list[Member]) -> Replies:
        place = self.folder / f"version-{self.policy.version}"
        if not place.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)
            draft = self.folder / "draft"
            self.order("gather")
            self._write(draft)
            draft.rename(place)
        return self._ask(members, lambda rank: {"folder": str(place.resolve())})

    def _write(self, folder: Path) -> None:
        if self.adapter_rank:
            folder.mkdir(parents=True)
            write_adapter(folder, list(self._tensors()), self.adapter_rank)
        else:
            write_files(self._tensors(), self.manifest, folder)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Those of the manifest, in its order; the other ranks have been told to help."""
        tensors = _from_ranks(gathered(self.policy))
        return as_factors(self.policy.module, tensors) if self.adapter_rank else tensors

    def _by_broadcast(self, members: list[Member]) -> Replies:
        """Raises NotDelivered when the group cannot be formed, or breaks."""
        world, device = len(members) + 1, self.policy.device
        meet, store, backend = None, None, "nccl" if device.type == "cuda" else "gloo"
        if self._group is None or self._grouped != members:
            host = self.pool.server.address[0]
            store = listen(host, world)
            meet = {"host": host, "port": store.port, "world": world, "backend": backend}
        replies = self._ask(members, lambda rank: {"meet": None if meet is None else meet | {"rank": rank}})
        if store is not None:
            self._group = self._met(store, replies, backend)
            self._grouped = members
        assert self._group is not None
        self._send(self._group, replies)
        return replies

    def _by_memory(self, members: list[Member]) -> Replies:
        """Raises WeightError for samplers on other machines, and NotDelivered when one goes, or cannot take them."""
        _refuse_other_machines(members)
        buckets = layout(self._described(), BUCKET_BYTES)
        if self._shelf is None:
            self._shelf = Shelf(self.policy.device, min(BUCKET_BYTES, max(bucket[-1].stop for bucket in buckets)))
        shelf, new = self._shelf, [member for member in members if member not in self._shelved]
        self._shelved += new
        tickets = [shelf.tickets() if member in new else None for member in members]
        said = as_json(buckets)
        replies = self._ask(members, lambda rank: {"buckets": said, "tickets": tickets[rank - 1]})
        with self._all_gathered() as tensors:
            hand_over(buckets, tensors, shelf, lambda number: self._piece(number, replies))
        return replies

    def _piece(self, number: int, replies: Replies) -> Callable[[], None]:
        """Says which buffer it lies in; what comes back waits until all have it."""
        taken = {member: self.pool.ask(member, {"do": "piece", "buffer": number}) for member in replies}

        def wait() -> None:
            for member, answer in taken.items():
                wait_for_any([answer, replies[member]], return_when=FIRST_COMPLETED)
                failed = answer if answer.done() else replies[member]  # it ends without the rest: an error
                if (error := failed.exception()) is not None:
                    raise NotDelivered(str(error)) from error

        return wait

    def _described(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, spec.shape, spec.dtype) for name, spec in self.manifest.tensors.items()]

    def _met(self, store: Any, replies: Replies, backend: str) -> Group:
        """A member that goes, or fails, before it is in the group would keep the others waiting for minutes."""

        def work() -> Group:
            if backend == "nccl":
                torch.cuda.set_device(self.policy.device)
            return open_group(store, rank=0, world=len(replies) + 1, backend=backend)

        opened = on_a_thread(work)
        while True:
            try:
                return opened.result(LOOK_SECONDS)
            except NotYet:
                if failed := _failed(replies):
                    raise NotDelivered(f"before the group was complete: {failed}") from None
            except RuntimeError as error:
                raise NotDelivered(f"no process group: {error}") from error

    def _send(self, group: Group, replies: Replies) -> None:
        with self._all_gathered() as tensors:
            try:
                send_in_order(self._described(), tensors, group)
            except RuntimeError as error:
                wait_for_any(replies.values(), REPLY_SECONDS, return_when=FIRST_EXCEPTION)  # who has left it says why
                raise NotDelivered(f"the process group broke: {_failed(replies) or error}") from error

    @contextmanager
    def _all_gathered(self) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Every tensor is gathered, whatever becomes of them: the other ranks count on it."""
        self.order("gather")
        tensors = self._tensors()
        try:
            yield tensors
        finally:
            for _ in tensors:
                pass

    def _checked(self, found: dict[Member, Any]) -> float:
        """Raises WeightError naming the sampler whose log-probs are not the trainer's."""
        prompt = probe_prompt(int(self.policy.config.get_text_config().vocab_size))
        batch = probe_batch(prompt, list(found.values()))
        gap = (self.logprobs(batch) - batch.rollout_logprobs).abs().where(batch.loss_mask, torch.tensor(0.0))
        limit = self.settings.max_probe_gap or usual_gap(self.policy)
        gaps = [float(part.max()) for part in gap.split(batch.lengths)]
        for member, largest in zip(found, gaps, strict=True):
            if not largest <= limit:  # NaN, too
                raise WeightError(
                    f"after giving version {self.policy.version} to {member} by {self.transport}, its log-probs of a "
                    f"probe differ from the trainer's by {largest:.3g}; the limit is {limit:.3g} "
                    "(sampler.max_probe_gap)"
                )
        return max(gaps)


def _failed(replies: Replies) -> str:
    """What samplers say that have failed, or are lost, so far."""
    errors = [reply.exception() for reply in replies.values() if reply.done()]
    return "; ".join(str(error) for error in errors if error is not None)


def _refuse_other_machines(members: Sequence[Member]) -> None:
    here = machine()
    if elsewhere := [
        f"{member} on {member.channel.said.get('machine')}"
        for member in members
        if member.channel.said.get("machine") != here
    ]:
        raise WeightError(
            f"sampler.transport: shared reaches samplers on the machine of rank 0 ({here}) alone, and there is "
            f"{', '.join(elsewhere)}; set broadcast or disk"
        )


def _from_ranks(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """So that a failure of the ranks is not taken for one of the samplers."""
    try:
        yield from tensors
    except RuntimeError as error:
        raise GatherFailed(f"the weights could not be gathered from all ranks: {error}") from error
