"""The sampler that a config names: made, kept at the weights of the policy, and closed."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from posttrain.config import SAMPLING_RANKS, ConfigError, RLConfig, SamplerConfig
from posttrain.loops.learner import Learner
from posttrain.loops.record import record_sampler
from posttrain.runs.metrics import Metrics
from posttrain.sampler.native import NativeSampler, workers_for
from posttrain.sampler.protocol import CountingSampler, Sampler
from posttrain.sampler.requests import NO_WEIGHTS
from posttrain.sampler.server import ServerSampler
from posttrain.sampler.vllm import VllmSampler
from posttrain.sampler.vllm_server import VllmServerSampler
from posttrain.trainer.policy import Policy
from posttrain.weights.publish import Published, Publisher

log = logging.getLogger("posttrain")
LOOK_SECONDS = 0.1


class Publishes(Protocol):
    """Gives the weights of `policy` to a sampler of its own."""

    policy: Policy

    async def publish(self) -> Published: ...

    def counts(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def empty_cache() -> None:
    """Returns the memory that torch has freed but keeps in its cache to the GPU, for the engine."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(slots=True, kw_only=True)
class Sampling:
    """A sampler for training, and how new weights get into it. publisher: None where it runs the policy's own module.

    With `sampler.sleep` the engine and the trainer use the memory of a GPU in turn: rollout -> `rest` frees the
    engine's -> update -> `refresh` calls `make_room`, which returns torch's free memory to the device, and then gives
    the engine its weights and its cache again -> rollout.
    """

    sampler: Any  # a Sampler with `reset`
    publisher: Publishes | None = None
    sleep: Literal[0, 1, 2] = 0
    make_room: Callable[[], None] = empty_cache
    resting: bool = False
    counted: Mapping[str, int] = field(default_factory=dict[str, int])  # by the sampler, until the last row

    async def refresh(self, metrics: Metrics | None = None) -> None:
        """Before every rollout and evaluation: gives the sampler the current weights and drops its caches."""
        started = time.perf_counter()
        if self.resting:
            self.make_room()
        if self.publisher is None or self.sampler.version == self.publisher.policy.version:
            if self.resting:
                self.sampler.wake()
                self.resting = False
            self.sampler.reset()
            return
        done = await self.publisher.publish()
        self.resting = False
        if metrics is not None:
            metrics.record("weights/probe_gap", done.probe_gap)
            metrics.record("time/publish", time.perf_counter() - started)
            metrics.record("weights/bytes", done.bytes)
            metrics.record("speed/published_gib_per_second", done.gib_per_second)

    def rest(self) -> None:
        """After every rollout and evaluation: puts the engine to sleep where `sampler.sleep` asks for it."""
        if self.sleep:
            self.sampler.sleep(self.sleep)
            self.resting = True

    def renew_while_held(self, soon: Callable[[Callable[[], object]], None]) -> None:
        """In an asynchronous run: gives a restarted server its weights again, on the training thread while that waits.

        soon: `Background.soon`.
        """
        if isinstance(self.sampler, VllmServerSampler) and self.publisher is not None:
            self.sampler.renew = partial(_renewed, self.sampler, self.publisher, soon)

    def record(self, metrics: Metrics) -> None:
        """At the end of a step: what the publisher counts, and what the sampler has done since the last one."""
        for key, value in ({} if self.publisher is None else self.publisher.counts()).items():
            metrics.record(key, value)
        if isinstance(self.sampler, CountingSampler):
            now = self.sampler.counters()
            record_sampler(metrics, {name: count - self.counted.get(name, 0) for name, count in now.items()})
            self.counted = now

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        close_sampler(self.sampler)


def open_sampling(learner: Learner, tokenizer: Any, spread: Callable[[NativeSampler], Sampler]) -> Sampling:
    """For a run. spread: makes of the native sampler of this rank the one of all ranks.

    Raises ConfigError for several ranks whose sampler has weights of its own, or should run ahead of them.
    """
    config = learner.config
    engine = config.sampler.engine
    if engine != "native":
        if learner.ranks.size > 1:  # by torchrun; trainer.ranks is checked with the config
            raise ConfigError([f"sampler.engine: {engine} samples for a run on one rank; on several, use native"])
        return published_sampling(config, tokenizer, learner.policy)
    if learner.ranks.size > 1 and config.sampling.max_staleness is not None:
        raise ConfigError([f"sampling.max_staleness: {SAMPLING_RANKS}"])
    return Sampling(sampler=spread(sampler_of_rank(learner, tokenizer)))


def sampler_of_rank(learner: Learner, tokenizer: Any) -> NativeSampler:
    """The native one, of one of the ranks of a run, or of the only one."""
    policy, config = learner.sampled, learner.config
    share = max(1, workers_for(policy.device) // learner.ranks.on_this_host)
    return native_sampler(config, tokenizer, policy, config.sampling.engines or share)


def native_sampler(config: RLConfig, tokenizer: Any, policy: Policy, workers: int) -> NativeSampler:
    """For training and evaluation. It truncates when asked to; the config refuses that for training."""
    try:
        return NativeSampler(policy, tokenizer, workers=workers, truncation="allow", **config.sampler.options)
    except ValueError as error:  # values that do not go together on this device
        raise ConfigError([f"sampler.options: {error}"]) from error


def published_sampling(config: RLConfig, tokenizer: Any, policy: Policy) -> Sampling:
    """vLLM, in this process or behind a server, which gets the weights of `policy`."""
    settings = config.sampler
    if settings.engine == "vllm":
        options = with_sleep(settings, policy.device).options
        engine = VllmSampler(policy, tokenizer, truncation="allow", **options)
    else:
        assert settings.url is not None
        how: dict[str, Any] = {"model": settings.model, "token": _token(settings), **settings.options}
        engine = VllmServerSampler(policy, settings.url, tokenizer, **how)
    try:
        # what `shared` is between processes, `auto` is in one: the config of a run is read for its evaluation, too
        transport = "auto" if settings.transport == "shared" else settings.transport
        gap = settings.max_probe_gap
        publisher = Publisher(policy, engine, transport=transport, folder=settings.folder, max_gap=gap)
    except BaseException:
        engine.close()
        raise
    if isinstance(engine, VllmServerSampler):
        engine.renew = publisher.publish
    return Sampling(sampler=engine, publisher=publisher, sleep=settings.sleep)


async def _renewed(
    sampler: VllmServerSampler, publisher: Publishes, soon: Callable[[Callable[[], object]], None]
) -> None:
    """Gives the weights of now, unless somebody else has given newer ones meanwhile."""
    loop, held, over = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hold() -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(held.set)
            over.wait()

    soon(hold)
    try:
        while sampler.version == NO_WEIGHTS and not held.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(held.wait(), LOOK_SECONDS)
        if sampler.version == NO_WEIGHTS:
            await publisher.publish()
    finally:
        over.set()


def with_sleep(settings: SamplerConfig, device: torch.device) -> SamplerConfig:
    """With the option that vLLM needs for `sleep` on a GPU."""
    if not settings.sleep:
        return settings
    if device.type != "cuda":
        log.warning("sampler.sleep: vLLM goes to sleep on a GPU only; on a %s it frees nothing", device.type)
        return settings
    return settings.model_copy(update={"options": {"enable_sleep_mode": True} | settings.options})


def ready_sampler(config: RLConfig, tokenizer: Any, load: Callable[[], Policy]) -> Sampler:
    """For evaluation: has the weights that `load` gives, or those of a server. Close it with `close_sampler`.

    Raises ConfigError for a token_env that is not set.
    """
    if config.sampler.engine == "server":
        return _server(config.sampler, tokenizer)
    policy = load()
    if config.sampler.engine == "native":
        return native_sampler(config, tokenizer, policy, workers_for(policy.device))
    sampling = published_sampling(config, tokenizer, policy)
    try:
        asyncio.run(sampling.refresh())
    except BaseException:
        sampling.close()
        raise
    return sampling.sampler


def _server(settings: SamplerConfig, tokenizer: Any) -> ServerSampler:
    assert settings.url is not None
    return ServerSampler(settings.url, tokenizer, model=settings.model, token=_token(settings), **settings.options)


def _token(settings: SamplerConfig) -> str | None:
    token = None if settings.token_env is None else os.environ.get(settings.token_env)
    if settings.token_env is not None and not token:
        raise ConfigError([f"sampler.token_env: the environment variable {settings.token_env} is not set"])
    return token


def close_sampler(sampler: Sampler) -> None:
    """Ends what the sampler runs or holds besides the policy."""
    if isinstance(sampler, VllmSampler | VllmServerSampler):
        sampler.close()
