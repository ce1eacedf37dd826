"""Ranks placed by Ray: one actor per rank, with its share of cores and its GPU, all of them or none.

An actor only holds the place: the rank is a process of its own, the very command that this machine would run, so that
what trains is the same program. Run directory, config and data must lie where every node finds them.

    driver      waits for the placement group; starts the ranks; prints what rank 0 prints; waits for all to end
    seat        starts a process; keeps its last lines; ends it when the driver or the seat goes
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from posttrain.cluster.launch import GRACE_SECONDS, LEADER_GONE, last_lines, verdict
from posttrain.cluster.seat import Seat
from posttrain.config import ClusterConfig, ConfigError

LOOK_SECONDS = 0.2
REACH_SECONDS = 10.0
KILLED = -signal.SIGKILL  # what is known of a rank whose node is gone


def launch_ray(command: Sequence[str], count: int, *, cluster: ClusterConfig, gpus: bool) -> int:
    """As `launch_local`, on a Ray cluster. Raises ConfigError when it has no room within `cluster.wait_seconds`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(["cluster.ray: Ray is not installed; pip install 'posttrain[ray]'"]) from error
    _join(ray, count, cluster)
    try:
        seats = _seats(ray, count, cluster, gpus=gpus)
        return _watched(ray, seats, command)
    finally:
        ray.shutdown()  # a local cluster ends; elsewhere the seats and the placement group go with their owner


def _join(ray: Any, count: int, cluster: ClusterConfig) -> None:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    if cluster.ray == "local":
        ray.init(num_cpus=cluster.num_cpus or count * cluster.cpus_per_rank, address="local", **quiet)
        return
    try:
        if (place := re.fullmatch(r"(.+):(\d+)", str(cluster.ray))) is not None:  # else Ray itself tries for minutes
            socket.create_connection((place[1], int(place[2])), REACH_SECONDS).close()
        ray.init(address=cluster.ray, log_to_driver=False, logging_level="warning")
    except OSError as error:
        fix = "start one with `ray start --head`, or use local"
        raise ConfigError([f"cluster.ray: no Ray cluster at {cluster.ray!r} ({error}); {fix}"]) from error


def _seats(ray: Any, count: int, cluster: ClusterConfig, *, gpus: bool) -> list[Any]:
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = {"CPU": float(cluster.cpus_per_rank)} | ({"GPU": 1.0} if gpus else {})
    group = placement_group([share] * count, strategy="PACK")
    if not group.wait(cluster.wait_seconds):
        asked = {name: amount * count for name, amount in share.items()}
        there = {name: ray.cluster_resources().get(name, 0) for name in share}
        free = {name: ray.available_resources().get(name, 0) for name in share}
        has = f"after {cluster.wait_seconds} s the cluster has {there} in all and {free} free"
        raise ConfigError([f"cluster.ray: {count} ranks ask for {asked}; {has}"])
    seat = ray.remote(Seat)
    return [
        seat.options(
            num_cpus=share["CPU"],
            num_gpus=share.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(count)
    ]


def _watched(ray: Any, seats: Sequence[Any], command: Sequence[str]) -> int:
    places = ray.get([seat.where.remote() for seat in seats])
    _, address, port = places[0]
    for seat, place in zip(seats, _numbered([node for node, _, _ in places]), strict=True):
        ray.get(seat.begin.remote(command, {**place, "MASTER_ADDR": address, "MASTER_PORT": str(port)}, os.getcwd()))
    said = [b""] * len(seats)
    try:
        return verdict(_ended(ray, seats, said), lambda rank: last_lines(said[rank]) if rank else "")
    except KeyboardInterrupt:
        ray.get(seats[0].tell.remote(signal.SIGINT))
        _ended(ray, seats, said)
        return 128 + signal.SIGINT


def _numbered(nodes: Sequence[str]) -> list[dict[str, str]]:
    """What torchrun would say to each rank. A seat sees its own GPU only, so that each is the first of its process."""
    size, on_node, seen = len(nodes), Counter(nodes), Counter[str]()
    places: list[dict[str, str]] = []
    for rank, node in enumerate(nodes):
        numbers = {"RANK": rank, "LOCAL_RANK": seen[node], "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": on_node[node]}
        places.append({name: str(number) for name, number in numbers.items()})
        seen[node] += 1
    return places


def _ended(ray: Any, seats: Sequence[Any], said: list[bytes]) -> list[int]:
    """Exit statuses. Once one has failed, the others get some seconds to end by themselves, and are ended then.

    said: what each has printed; that of rank 0 is printed here as it comes.
    """
    statuses: list[int | None] = [None] * len(seats)
    until: float | None = None
    while None in statuses:
        for rank, seat in enumerate(seats):
            if statuses[rank] is None:
                statuses[rank], more = _look(ray, seat, len(said[rank]))
                said[rank] += more
                if rank == 0:
                    sys.stdout.write(more.decode(errors="replace"))
                    sys.stdout.flush()
        if any(statuses) and until is None:
            until = time.monotonic() + GRACE_SECONDS
        if until is not None and time.monotonic() > until:
            for rank in [rank for rank, status in enumerate(statuses) if status is None]:
                seats[rank].tell.remote(signal.SIGKILL)
                statuses[rank] = LEADER_GONE  # ended by us: not the one to blame
        time.sleep(LOOK_SECONDS)
    return [status for status in statuses if status is not None]


def _look(ray: Any, seat: Any, seen: int) -> tuple[int | None, bytes]:
    try:
        return ray.get(seat.state.remote(seen))
    except ray.exceptions.RayActorError:
        return KILLED, b""
