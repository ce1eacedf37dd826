"""Whatever way the ranks of a run are started, from here on one of them leads and the others follow."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from posttrain.cluster.crew import NOBODY, Crew, LeaderLost, follow
from posttrain.cluster.launch import LEADER_GONE, die_with_launcher, launch_local, was_killed
from posttrain.cluster.on_ray import launch_ray
from posttrain.config import ConfigError, RLConfig
from posttrain.trainer.loading import pick_device
from posttrain.trainer.ranks import Ranks, join_ranks, leave_ranks, world_size


@contextmanager
def mustered(config: RLConfig, ranks: int | None = None) -> Iterator[Crew | None]:
    """The crew of the run for whoever is to lead it; None in a process that has done its part when it gets here.

    One process: nothing happens. `trainer.ranks` (or `ranks`, instead): starts as many with this process's arguments,
    and waits for them. Started as one of several, by that or by torchrun: meets them.
    """
    wanted, there = ranks or config.trainer.ranks, world_size()
    if there == 1:
        _check(config, wanted)
    if there == wanted == 1 and config.cluster.ray is None:
        yield NOBODY
    elif there == 1:
        status = _launched(config, wanted)
        if status:
            sys.exit(status)
        yield None
    else:
        if wanted not in (1, there):
            raise ConfigError([f"trainer.ranks is {wanted}, but {there} ranks were started; leave it out"])
        yield from _met(config)


def _launched(config: RLConfig, count: int) -> int:
    """Exit status of the run. Ranks that were killed from outside (out of memory, a lost node) start again from the
    last checkpoint; one that fails by itself would fail again."""
    launch = (
        launch_local if config.cluster.ray is None else partial(launch_ray, cluster=config.cluster, gpus=_gpus(config))
    )
    arguments, status = sys.argv[1:], 0
    for left in range(config.trainer.restarts, -1, -1):
        status = launch([sys.executable, "-m", "posttrain", *arguments], count)
        if not was_killed(status) or not left:
            break
        print(f"starting {count} ranks again from the last checkpoint; {left - 1} restarts are left", file=sys.stderr)
        if (config.run.directory / "config.yaml").is_file():
            arguments = ["resume", str(config.run.directory), "--ranks", str(count)]
    return status


def _gpus(config: RLConfig) -> bool:
    return pick_device(config.model.device).type == "cuda"


def _met(config: RLConfig) -> Iterator[Crew | None]:
    die_with_launcher()
    joined = join_ranks(pick_device(config.model.device))
    try:
        if joined.leads:
            yield from _leading(joined)
        else:
            _following(joined)
            yield None
    finally:
        leave_ranks()


def _leading(ranks: Ranks) -> Iterator[Crew]:
    crew = Crew.muster(ranks)
    try:
        yield crew
        crew.order("stop")
    finally:
        crew.close()


def _following(ranks: Ranks) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it, and ends the run in order
    try:
        follow(ranks)
    except LeaderLost:
        sys.exit(LEADER_GONE)


def _check(config: RLConfig, wanted: int) -> None:
    if wanted == 1 and config.trainer.offload:
        raise ConfigError(["trainer.offload is for models on several ranks; set trainer.ranks, or leave it out"])
