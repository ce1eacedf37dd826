"""The other ranks as the workers of rank 0: what it can order, and how they do it.

    order     rank 0 does at the same time                 another rank does
    begin     loads its models                             loads its models, of the same config and checkpoint
    publish   copies the weights to its sampler            the same, and empties its sampler
    sample    other things                                 answers one request of the rollout
    gather    gives the weights to samplers elsewhere      helps to gather
    probe     compares what these drew with the policy     helps to compute
    room      gives freed memory back to its GPU           the same, so that samplers there can wake
    learn     assigns credit and updates                   the same, on its share of the micro-batches
    save      gathers the shards and writes                helps to gather
    stop      ends                                         ends

Orders come over channels of their own, so that a rank can wait for hours; collectives are only for what all do at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.cluster.channel import Channel, ChannelServer
from posttrain.cluster.pool import LAST_SECONDS, Pool
from posttrain.cluster.remote_sampler import PoolSampler
from posttrain.cluster.request_handler import RequestHandler
from posttrain.cluster.sampler import SpreadSampler
from posttrain.cluster.watchdog import Watchdog
from posttrain.cluster.weight_sender import PoolPublisher
from posttrain.config import ClusterConfig, RLConfig
from posttrain.loops.build import load_tokenizer
from posttrain.loops.credit import PackedStep, credited, kl_of_some
from posttrain.loops.learner import Learner, Models, staged
from posttrain.loops.samplers import Sampling, empty_cache, open_sampling, sampler_of_rank, with_sleep
from posttrain.loops.saver import Saver
from posttrain.loops.update import update
from posttrain.packing import Batch
from posttrain.sampler.native import NativeSampler
from posttrain.trainer.ranks import ALONE, Ranks
from posttrain.weights.gather import as_json, join_gather
from posttrain.weights.shared import collect


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """As rank 0 sees it; a run on one process has SINGLE_PROCESS. pool: of samplers that are processes of their own."""

    ranks: Ranks = ALONE
    channels: tuple[Channel, ...] = ()
    pool: Pool | None = None
    watchdog: Watchdog | None = None

    @classmethod
    def connect(cls, ranks: Ranks, settings: ClusterConfig) -> WorkerGroup:
        """On rank 0: waits for the other ranks to call. Samplers may call from now on."""
        pool = Pool.listen(settings) if settings.samplers else None
        channels: tuple[Channel, ...] = ()
        if ranks.size > 1:
            server = ChannelServer(os.environ["MASTER_ADDR"])
            ranks.share((server.address, server.secret))
            channels = server.answer(ranks.size - 1)
        return cls(ranks, channels, pool, Watchdog(settings, channels, pool))

    def order(self, do: str, *what: Any) -> None:
        """`what` is given to every rank as it is here."""
        self.note(do)
        for channel in self.channels:
            channel.send({"do": do})
        if self.channels and what:
            self.ranks.share(what)

    def note(self, do: str) -> None:
        """For the watchdog: what others are ordered to do from now on."""
        if self.watchdog is not None:
            self.watchdog.ordered = do, time.monotonic()

    def sampler(self, local: NativeSampler) -> NativeSampler | SpreadSampler:
        return SpreadSampler(local, self.channels) if self.channels else local

    def sampling(self, learner: Learner, tokenizer: Any) -> Sampling:
        """What the run samples with: the sampler of this process, those of all ranks, or those beside them."""
        if self.pool is None:
            found = open_sampling(learner, tokenizer, self.sampler)
        else:
            found = self._apart(learner, self.pool)
            for channel in self.channels:
                channel.listen(lambda said: None)  # for its signs of life
        if self.watchdog is not None:
            self.watchdog.waiting = getattr(found.sampler, "waiting", dict)
            self.watchdog.start()
        return found

    def _apart(self, learner: Learner, pool: Pool) -> Sampling:
        config, sampler = learner.config, PoolSampler(pool, self.note)
        settings = with_sleep(config.sampler, learner.policy.device)
        publisher = PoolPublisher(
            policy=learner.policy,
            pool=pool,
            sampler=sampler,
            settings=settings,
            order=self.order,
            logprobs=lambda batch: self._logprobs(learner, batch),
            folder=weights_folder(config),
        )
        sections = {"model": config.model.model_dump(mode="json"), "sampler": settings.model_dump(mode="json")}
        engines = {"engines": config.sampling.engines, "manifest": as_json(publisher.manifest)}
        pool.begin({"do": "begin", **sections, **engines})
        return Sampling(sampler=sampler, publisher=publisher, sleep=settings.sleep, make_room=self._make_room)

    def _logprobs(self, learner: Learner, batch: Batch) -> Tensor:
        self.order("probe", batch)
        return logprobs_of(learner, batch)

    def _make_room(self) -> None:
        self.order("room")
        release_gpu_memory(self.ranks)

    def close(self) -> None:
        if self.watchdog is not None:
            self.watchdog.stop()
        if self.pool is not None:
            self.pool.close()
            collect()
        until = time.monotonic() + LAST_SECONDS
        for channel in self.channels:
            channel.close(until - time.monotonic())


def weights_folder(config: RLConfig) -> Path:
    """Where weights lie for samplers apart: nowhere that another run may use, which would remove them."""
    run = config.run.directory
    if config.sampler.folder is None:
        return run / "posttrain-weights"
    name = hashlib.sha256(f"{socket.gethostname()} {run.resolve()}".encode()).hexdigest()[:12]
    return Path(config.sampler.folder) / f"posttrain-weights-{name}"


SINGLE_PROCESS = WorkerGroup()
WAITS = "waits for orders"


class LeaderLost(RuntimeError):
    """Rank 0 has ended without saying so."""


def follow(ranks: Ranks) -> None:
    """What every rank but the first does, until rank 0 says stop. Raises LeaderLost when rank 0 ends otherwise."""
    address, secret = ranks.receive()
    channel = Channel.call(address, secret, ranks.rank)
    channel.does = "loads its models"
    channel.beat()
    first = channel.receive()
    if first is None:
        raise LeaderLost
    if first["do"] == "stop":
        return
    models: Models = ranks.receive()[0]
    learner = models.load(ranks)
    apart = learner.config.cluster.samplers
    sampler = None if apart else sampler_of_rank(learner, load_tokenizer(learner.config.model.path))
    asyncio.run(_Follower(learner, sampler, channel).serve())


class _Follower:
    def __init__(self, learner: Learner, sampler: NativeSampler | None, channel: Channel) -> None:
        self.learner = learner
        self.sampler = sampler
        self.channel = channel
        self.saver = Saver(background=learner.config.checkpoint.background)
        self.requests = None if sampler is None else RequestHandler(sampler, channel)

    async def serve(self) -> None:
        orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(said: dict[str, Any] | None) -> None:
            with suppress(RuntimeError):  # the loop is closed: rank 0 hangs up after it has said stop
                loop.call_soon_threadsafe(orders.put_nowait, said)

        self.channel.listen(hear)
        self.channel.does = WAITS
        while (order := await orders.get()) is not None:
            if self.requests is not None:
                if self.requests.hear(order):
                    continue
                await self.requests.idle()
            if order["do"] == "stop":
                self.saver.wait()
                return
            self.channel.does = f"does {order['do']}"
            self._obey(order["do"])
            self.channel.does = WAITS
        raise LeaderLost

    def _obey(self, do: str) -> None:
        learner = self.learner
        match do:
            case "publish":
                learner.publish()
                if self.sampler is not None:
                    self.sampler.reset()
            case "gather":
                join_gather(learner.policy)
            case "probe":
                logprobs_of(learner, learner.ranks.receive()[0])
            case "room":
                release_gpu_memory(learner.ranks)
            case "save":
                self.saver.wait()
                (draft,) = learner.ranks.receive()
                write = staged(learner)
                self.saver.do(lambda: write(draft))
            case "learn":
                packed, step, learner.kl_coef = learner.ranks.receive()
                learn(learner, packed, step)
            case _:
                raise ValueError(f"rank 0 orders {do!r}, which is not known here: do all ranks run the same version?")


def release_gpu_memory(ranks: Ranks) -> None:
    """What torch has freed goes back to the GPUs, on all ranks before this ends on any; every rank has to ask."""
    empty_cache()
    ranks.sum(torch.zeros(1))


@torch.no_grad()
def logprobs_of(learner: Learner, batch: Batch) -> Tensor:
    """[T] on the host, at temperature 1; every rank has to ask."""
    logprobs = learner.policy.logprobs(batch).cpu()
    learner.free_gathered()
    return logprobs


def learn(learner: Learner, packed: PackedStep | None, step: int) -> None:
    """The second and third part of `rl.train_step`, without looking at what comes of it."""
    batch = None if packed is None else credited(packed, learner)
    if batch is not None and learner.kl_is_only_measured:
        kl_of_some(batch, learner)
    update(learner, batch, step=step)
