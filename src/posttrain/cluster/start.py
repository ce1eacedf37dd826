"""Ranks of a run, however they were started (launcher, torchrun, Ray): they meet, rank 0 leads, the others follow."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from posttrain.cluster.exit_status import LEADER_GONE, was_killed
from posttrain.cluster.launch import die_with_launcher, launch_local
from posttrain.cluster.on_ray import launch_ray
from posttrain.cluster.supervisor import CALLS, Samplers
from posttrain.cluster.worker_group import SINGLE_PROCESS, LeaderLost, WorkerGroup, follow
from posttrain.config import ClusterConfig, ConfigError, RLConfig
from posttrain.trainer.loading import pick_device
from posttrain.trainer.ranks import Ranks, join_ranks, leave_ranks, world_size

PROGRAM = (sys.executable, "-m", "posttrain")


@contextmanager
def connected_ranks(config: RLConfig, ranks: int | None = None) -> Iterator[WorkerGroup | None]:
    """The other ranks of the run, for the process that leads it; None in one that has done its part when it gets here.

    One process: nothing happens. `trainer.ranks` (or `ranks`, instead): starts as many with this process's arguments,
    and waits for them. Started as one of several, by that or by torchrun: meets them.
    """
    wanted, there, samplers = ranks or config.trainer.ranks, world_size(), config.cluster.samplers
    begun = there > 1 or CALLS in os.environ
    if there == 1:
        _check(config, wanted)
    if not begun and wanted == 1 and config.cluster.ray is None and not samplers:
        yield SINGLE_PROCESS
    elif not begun:
        status = _launched(config, wanted)
        if status:
            sys.exit(status)
        yield None
    else:
        if wanted not in (1, there):
            raise ConfigError([f"trainer.ranks is {wanted}, but {there} ranks were started; leave it out"])
        if samplers and CALLS not in os.environ:
            fix = "give trainer.ranks (and cluster.ray, for several machines) instead"
            raise ConfigError([f"cluster.samplers is {samplers}, and torchrun starts none; {fix}"])
        yield from _met(config)


def _launched(config: RLConfig, count: int) -> int:
    """Exit status of the run. Ranks that were killed from outside (out of memory, a lost node) start again from the
    last checkpoint; one that fails by itself would fail again."""
    launch = (
        launch_local if config.cluster.ray is None else partial(launch_ray, cluster=config.cluster, gpus=_gpus(config))
    )
    arguments, status, samplers = sys.argv[1:], 0, _samplers(config, count)
    for left in range(config.trainer.restarts, -1, -1):
        status = launch([*PROGRAM, *arguments], count, samplers)
        if not was_killed(status) or not left:
            break
        print(f"starting {count} ranks again from the last checkpoint; {left - 1} restarts are left", file=sys.stderr)
        if (config.run.directory / "config.yaml").is_file():
            shown = [word for word in sys.argv[1:] if word == "--json"]
            arguments = ["resume", str(config.run.directory), "--ranks", str(count), *shown]
    return status


def _samplers(config: RLConfig, ranks: int) -> Samplers:
    cluster = config.cluster
    local = cluster.samplers > 0 and not cluster.ray and _gpus(config)
    return Samplers(
        count=cluster.samplers,
        restarts=cluster.sampler_restarts,
        command=[*PROGRAM, "sample-for-run"],
        devices=devices_for(ranks, cluster.samplers, colocated=cluster.colocated) if local else (),
        near=cluster.transport_of(config.sampler) == "shared",
    )


def devices_for(ranks: int, samplers: int, *, colocated: bool = False) -> list[str]:
    """The GPUs of this machine that the ranks leave, as CUDA_VISIBLE_DEVICES names them; colocated: those of the ranks,
    in turn. Raises ConfigError."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    needed = ranks if colocated else ranks + samplers
    if len(names) < needed:
        who = f"{ranks} ranks" + ("" if colocated else f" and {samplers} samplers")
        fix = "ask for fewer, set cluster.colocated, or set model.device=cpu"
        raise ConfigError([f"cluster.samplers: {who} need a GPU each, this machine shows {len(names)}; {fix}"])
    return [names[n % ranks] for n in range(samplers)] if colocated else names[ranks:needed]


def _gpus(config: RLConfig) -> bool:
    return pick_device(config.model.device).type == "cuda"


def _met(config: RLConfig) -> Iterator[WorkerGroup | None]:
    die_with_launcher()
    joined = join_ranks(pick_device(config.model.device))
    try:
        if joined.leads:
            yield from _leading(joined, config.cluster)
        else:
            _following(joined)
            yield None
    finally:
        leave_ranks()


def _leading(ranks: Ranks, cluster: ClusterConfig) -> Iterator[WorkerGroup]:
    workers = WorkerGroup.connect(ranks, cluster)
    try:
        yield workers
        workers.order("stop")
    finally:
        workers.close()


def _following(ranks: Ranks) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it, and ends the run in order
    try:
        follow(ranks)
    except LeaderLost:
        sys.exit(LEADER_GONE)


def _check(config: RLConfig, wanted: int) -> None:
    problem = config.trainer.problem_with(wanted)
    if problem is not None:
        raise ConfigError([problem])
    if wanted == 1 and config.trainer.offload:
        raise ConfigError(["trainer.offload is for models on several ranks; set trainer.ranks, or leave it out"])
