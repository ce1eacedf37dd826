"""Samplers apart, for tests: processes forked from a server that has imported torch, started again on request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from forked import server
from posttrain.cluster.channel import Channel, ChannelServer
from posttrain.cluster.pool import Pool, State
from posttrain.cluster.remote_sampler import PoolSampler
from posttrain.cluster.serving import serve
from posttrain.cluster.supervisor import CALLS, SAMPLER, SECRET
from posttrain.cluster.watchdog import Watchdog
from posttrain.cluster.weight_sender import PoolPublisher
from posttrain.cluster.worker_group import WorkerGroup
from posttrain.config import ClusterConfig, ModelConfig, SamplerConfig
from posttrain.packing import Batch
from posttrain.trainer.policy import Policy
from posttrain.weights.gather import as_json

MODEL = ModelConfig(path="tiny_search_base")


class Processes:
    """Starts samplers, and another one for each whose end is requested."""

    def __init__(self, folder: Path, address: tuple[str, int], secret: str, count: int) -> None:
        self._folder, self._address, self._secret = folder, address, secret
        self.running: dict[int, Any] = {}
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        host, port = self._address
        place = {CALLS: f"{host}:{port}", SECRET: self._secret, SAMPLER: str(number)}
        self.running[number] = server().Process(target=_run, args=(self._folder / f"sampler{number}", place))
        self.running[number].start()

    def replace(self, number: int, process: int) -> None:
        if self.running[number].pid == process:
            self.running[number].kill()
            self.running[number].join()
            self.start(number)

    def kill(self, number: int, how: int = signal.SIGKILL) -> None:
        os.kill(self.running[number].pid, how)

    def end(self) -> None:
        for process in self.running.values():
            process.join(20)
            process.kill()
            process.join()


def _run(log: Path, place: dict[str, str]) -> None:
    os.environ |= place
    torch.set_num_threads(1)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    serve()


class Pooled:
    """A pool and its processes, for a run that is led here."""

    def __init__(self, folder: Path, settings: ClusterConfig) -> None:
        server = ChannelServer("127.0.0.1")
        self.processes = Processes(folder, server.address, server.secret, settings.samplers)
        self.replaced: list[int] = []
        self.pool = Pool(server, settings, self._replace)
        server.keep_answering("sampler", self.pool.admit)

    def close(self) -> None:
        self.pool.close()
        self.processes.end()

    def _replace(self, channel: Channel) -> None:
        self.replaced.append(channel.rank)
        threading.Thread(target=self.processes.replace, args=(channel.rank, channel.process), daemon=True).start()


class Apart(Pooled):
    """The same with a policy on this side."""

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        transport: str = "broadcast",
        engine: Mapping[str, Any] = MappingProxyType({}),
        model: ModelConfig = MODEL,
        **settings: Any,
    ) -> None:
        super().__init__(folder, ClusterConfig(samplers=count, **settings))
        self.policy = Policy.from_config(model)
        self.sampler = PoolSampler(self.pool, self._note)
        options = SamplerConfig.model_validate({"transport": transport} | dict(engine))
        self.publisher = PoolPublisher(
            policy=self.policy,
            pool=self.pool,
            sampler=self.sampler,
            settings=options,
            order=lambda do, *what: None,
            logprobs=self._logprobs,
            folder=folder / "weights",
        )
        begin = {"model": model.model_dump(mode="json"), "sampler": options.model_dump(mode="json"), "engines": 1}
        self.pool.begin({"do": "begin", **begin, "manifest": as_json(self.publisher.manifest)})
        self.watchdog = Watchdog(self.pool.settings, (), self.pool)
        self.watchdog.waiting = self.sampler.waiting
        self.watchdog.start()

    def wait_for(self, count: int, state: State) -> None:
        self.pool.wait_for(lambda: len(self.pool.members(state)) == count)

    def close(self) -> None:
        self.watchdog.stop()
        self.publisher.close()
        super().close()

    def _note(self, do: str) -> None:
        self.watchdog.ordered = do, time.monotonic()

    @torch.no_grad()
    def _logprobs(self, batch: Batch) -> torch.Tensor:
        return self.policy.logprobs(batch).cpu()


@contextmanager
def apart(folder: Path, count: int, **options: Any) -> Iterator[Apart]:
    found = Apart(folder, count, **options)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def pooled(folder: Path, settings: ClusterConfig) -> Iterator[tuple[WorkerGroup, Pooled]]:
    """Samplers apart, and the worker group of a run that is led by this process and has no other ranks."""
    found = Pooled(folder, settings)
    try:
        yield WorkerGroup(pool=found.pool), found
    finally:
        found.close()
