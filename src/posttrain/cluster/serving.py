"""A process that only samples: it has its own copy of the weights and answers rank 0.

    begin      loads the model, and checks that the policy's weights will fit
    weights    takes new ones, drops what was cached, and shows by a probe what it has
    sample     answers one request of the rollout (also: cancel, release)
    reset      drops what was cached
    sleep      gives up the memory of its GPU until new weights come
    wake       the same with the weights that it has kept
    stop       ends

Its process says once a second that it lives. Rank 0 replaces whoever is silent for too long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from posttrain.cluster.channel import Channel, RankLost, on_a_thread
from posttrain.cluster.exit_status import LEADER_GONE
from posttrain.cluster.launch import die_with_launcher
from posttrain.cluster.request_handler import RequestHandler
from posttrain.cluster.sampler import params_of
from posttrain.cluster.supervisor import CALLS, NEIGHBOURS, SAMPLER, SECRET
from posttrain.cluster.weight_receiver import Engine, TransferReceiver
from posttrain.config import ConfigError, ModelConfig, SamplerConfig
from posttrain.loops.build import load_tokenizer
from posttrain.loops.learner import SMALL_HIDDEN_SIZE, threads_for
from posttrain.sampler.native import workers_for
from posttrain.sampler.own_copy import OwnCopy
from posttrain.sampler.vllm import VllmSampler
from posttrain.trainer.loading import load_config, model_path, pick_device, pick_dtype
from posttrain.trainer.parallel import keep_freed_memory
from posttrain.trainer.policy import Policy
from posttrain.weights.gather import factors_of, from_json, manifest_of
from posttrain.weights.manifest import Manifest
from posttrain.weights.publish import check

CALL_SECONDS = 600.0  # rank 0 may start later, or on another node


class NotCalled(RuntimeError):
    """This process was not started by a run."""


def serve() -> None:
    """Until rank 0 says stop; exits with LEADER_GONE when rank 0 ends otherwise."""
    if SAMPLER not in os.environ:
        raise NotCalled("this command is for `cluster.samplers`, which starts it; start the run by `posttrain rl`")
    die_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it, and ends the run in order
    channel = _called()
    channel.beat()
    begin = channel.receive()
    if begin is None:
        sys.exit(LEADER_GONE)
    if begin["do"] == "stop":
        return
    engine = _engine(begin)
    serving = _Serving(engine, channel)
    try:
        with suppress(RankLost):  # what comes next says why: stop, or nothing
            channel.send({"ready": True})
        if not asyncio.run(serving.serve()):
            sys.exit(LEADER_GONE)
    except RankLost:
        sys.exit(LEADER_GONE)
    finally:
        serving.receiver.close()
        channel.close()  # its thread may be leaving a process group: the interpreter must not end under it
        if isinstance(engine, VllmSampler):
            engine.close()


def _called() -> Channel:
    """A channel to rank 0, as soon as it listens."""
    host, _, port = os.environ[CALLS].rpartition(":")
    secret, until = os.environ.pop(SECRET), time.monotonic() + CALL_SECONDS
    while True:
        try:
            return Channel.call((host, int(port)), secret, int(os.environ[SAMPLER]))
        except (OSError, RankLost):
            if time.monotonic() > until:
                sys.exit(LEADER_GONE)
            time.sleep(0.1)


def _engine(begin: Mapping[str, Any]) -> Engine:
    """Without weights that may be sampled from. Raises WeightMismatch when the policy's will never fit."""
    model, settings = ModelConfig.model_validate(begin["model"]), SamplerConfig.model_validate(begin["sampler"])
    device = pick_device(model.device)
    neighbours = int(os.environ.get(NEIGHBOURS, "1"))
    if device.type == "cpu":
        hidden_size = load_config(model_path(model.path)).get_text_config().hidden_size
        torch.set_num_threads(max(1, threads_for(hidden_size) // neighbours))
        if hidden_size < SMALL_HIDDEN_SIZE:
            keep_freed_memory()
    tokenizer = load_tokenizer(model.path)
    plain = {"compile": False, "gradient_checkpointing": False}
    if settings.engine == "vllm":
        on_host = {"device": "cpu", "dtype": pick_dtype(model.dtype, device)}
        policy = Policy.from_config(model.model_copy(update=plain | on_host))
        engine: Engine = VllmSampler(policy, tokenizer, truncation="allow", **settings.options)
        if not engine.in_one_process and settings.transport != "disk":
            raise ConfigError(["sampler.transport: an engine of several processes takes weights by disk; set disk"])
    else:
        workers = begin["engines"] or max(1, workers_for(device) // neighbours)
        policy = Policy.from_config(model.model_copy(update=plain))
        engine = OwnCopy(policy, tokenizer, workers=workers, truncation="allow", **settings.options)
    _check(from_json(begin["manifest"]), engine, policy)
    return engine


def _check(sent: Manifest, engine: Engine, own: Policy) -> None:
    """Raises WeightMismatch for what will be sent and does not fit the engine, which was made of a model like `own`."""
    whole = Manifest.of_config(engine.model_config, engine.dtype)
    if not own.adapted:
        check(sent, whole, engine, Manifest({}, {}))
    elif isinstance(engine, VllmSampler):
        sent.check_fits(factors_of(own))
        check(whole, whole, engine, sent)
    else:
        sent.check_fits(manifest_of(own))


class _Serving:
    def __init__(self, engine: Engine, channel: Channel) -> None:
        self.engine, self.channel = engine, channel
        self.requests = RequestHandler(engine, channel)
        self.receiver = TransferReceiver(engine, channel)
        self._loading: set[asyncio.Task[None]] = set()
        self._probing = asyncio.Lock()  # a transfer that broke for others may be whole here, and be followed by another

    async def serve(self) -> bool:
        """False when rank 0 ends without saying so."""
        orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(said: dict[str, Any] | None) -> None:
            if self.receiver.hear(said):  # at once: the loop may be waiting for an engine that waits for weights
                return
            with suppress(RuntimeError):  # the loop is closed: rank 0 hangs up after it has said stop
                loop.call_soon_threadsafe(orders.put_nowait, said)

        self.channel.listen(hear)
        while (order := await orders.get()) is not None:
            if self.requests.hear(order):
                continue
            match order["do"]:
                case "reset":
                    await self.requests.idle()
                    self.engine.reset()
                case "sleep" | "wake":
                    await self.requests.idle()
                    self._turn(order)
                case "weights":
                    task = asyncio.create_task(self._take(order))
                    self._loading.add(task)  # asyncio keeps none
                    task.add_done_callback(self._loading.discard)
                case "stop":
                    return True
                case do:
                    raise ValueError(f"rank 0 orders {do!r}, which is not known here: do all run the same version?")
        return False

    def _turn(self, order: Mapping[str, Any]) -> None:
        """Ranks and samplers take turns with the memory of a GPU. Nothing else is done meanwhile."""
        said: dict[str, Any] = {"reply": order["reply"]}
        try:
            assert isinstance(self.engine, VllmSampler), "the config lets no other engine sleep"
            if order["do"] == "sleep":
                self.engine.sleep(order["level"])
            else:
                self.engine.wake()
        except Exception as error:  # raised again where it was ordered
            said["error"] = f"{type(error).__name__}: {error}"
        self.channel.send(said)

    async def _take(self, order: Mapping[str, Any]) -> None:
        """A later order may come while this one waits for a sampler that is gone. Requests that come before weights are
        whole wait for it; when they do not become whole, rank 0 takes these requests away from here."""
        said: dict[str, Any] = {"reply": order["reply"]}
        self.requests.may_sample.clear()
        try:
            await asyncio.wrap_future(on_a_thread(lambda: self.receiver.load(order)))
            async with self._probing:
                if not len(self.requests):
                    self.engine.reset()
                self.requests.may_sample.set()
                probe, started = order["probe"], time.perf_counter()
                drawn = await self.engine.sample(probe["ids"], params_of(probe["params"]), seed=probe["seed"])
            said |= {"sampled": asdict(drawn), "probe_seconds": time.perf_counter() - started}
        except Exception as error:  # rank 0 decides
            said["error"] = f"{type(error).__name__}: {error}"
        with suppress(RankLost):  # the channel's own thread hears it, too
            self.channel.send(said)
