"""Ranks and samplers placed by Ray: one actor each, with its share of cores and its GPU, all of them or none.

An actor only holds the place: the rank is a process of its own, the very command that this machine would run, so that
what trains is the same program. Run directory, config and data must lie where every node finds them.

    driver      waits for the placement group; starts the ranks and the samplers; prints what rank 0 prints; starts
                samplers again that were killed, or that rank 0 names; waits for the ranks to end
    seat        starts a process; keeps its last lines; ends it when the driver or the seat goes
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from posttrain.cluster.exit_status import LEADER_GONE, last_lines, launch_status
from posttrain.cluster.launch import GRACE_SECONDS, INTERRUPT_SECONDS
from posttrain.cluster.seat import Place, Seat
from posttrain.cluster.supervisor import NO_SAMPLERS, KillRequest, KillRequests, Samplers, SamplerSupervisor, calls_at
from posttrain.config import ClusterConfig, ConfigError

LOOK_SECONDS = 0.2
REACH_SECONDS = 10.0
GPU_PARTS = 10_000  # Ray counts parts of a GPU in these
KILLED = -signal.SIGKILL  # what is known of a rank whose node is gone


def launch_ray(
    command: Sequence[str], count: int, samplers: Samplers = NO_SAMPLERS, *, cluster: ClusterConfig, gpus: bool
) -> int:
    """As `launch_local`, on a Ray cluster. Raises ConfigError when it has no room within `cluster.wait_seconds`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(["cluster.ray: Ray is not installed; pip install 'posttrain[ray]'"]) from error
    _join(ray, count, cluster)
    try:
        room = Room(ray, count, cluster, gpus=gpus, near=samplers.near)
        return _Launch(ray, room, command, count, samplers).watched()
    finally:
        if cluster.timeline is not None:
            ray.timeline(str(cluster.timeline))
        ray.shutdown()  # a local cluster ends; elsewhere the seats and the placement group go with their owner


def _join(ray: Any, count: int, cluster: ClusterConfig) -> None:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "warning"}
    if cluster.ray == "local":
        cores = count * cluster.cpus_per_rank + cluster.samplers * cluster.cpus_per_sampler
        as_others = {"worker_niceness": 0}  # by default 15: beside any other process the run would get what that leaves
        ray.init(num_cpus=cluster.num_cpus or cores, address="local", _system_config=as_others, **quiet)
        return
    try:
        if (place := re.fullmatch(r"(.+):(\d+)", str(cluster.ray))) is not None:  # else Ray itself tries for minutes
            socket.create_connection((place[1], int(place[2])), REACH_SECONDS).close()
        ray.init(address=cluster.ray, log_to_driver=False, logging_level="warning")
    except OSError as error:
        fix = "start one with `ray start --head`, or use local"
        raise ConfigError([f"cluster.ray: no Ray cluster at {cluster.ray!r} ({error}); {fix}"]) from error


class Room:
    """The placement group. A bundle for every rank, then one for every sampler, unless these are in those of the ranks.

    near: all on one machine, as samplers need that share memory with rank 0.
    """

    def __init__(self, ray: Any, ranks: int, cluster: ClusterConfig, *, gpus: bool, near: bool) -> None:
        from ray.util.placement_group import placement_group

        self._ray = ray
        self._shares = _shares(ranks, cluster, gpus=gpus)
        bundles = _bundles(self._shares)
        self._group = placement_group(bundles, strategy="STRICT_PACK" if near else "PACK")
        if not self._group.wait(cluster.wait_seconds):
            asked = {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}
            there = {name: ray.cluster_resources().get(name, 0) for name in asked}
            free = {name: ray.available_resources().get(name, 0) for name in asked}
            who = f"{ranks} ranks" + (f" and {cluster.samplers} samplers" if cluster.samplers else "")
            how = " of one machine, since sampler.transport is shared" if near else ""
            has = f"after {cluster.wait_seconds} s the cluster has {there} in all and {free} free"
            raise ConfigError([f"cluster.ray: {who} ask for {asked}{how}; {has}"])

    def seat(self, index: int) -> Any:
        """An actor for this rank, or for this sampler behind the ranks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, share = self._shares[index]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        seat = self._ray.remote(Seat)
        options = {"num_cpus": share["CPU"], "num_gpus": share.get("GPU", 0), "scheduling_strategy": strategy}
        return seat.options(**options).remote()


def _shares(ranks: int, cluster: ClusterConfig, *, gpus: bool) -> list[tuple[int, dict[str, float]]]:
    """(bundle, what it takes of it), of every rank and then of every sampler."""
    bundles = [n % ranks if cluster.colocated else ranks + n for n in range(cluster.samplers)]
    cores = [cluster.cpus_per_rank] * ranks + [cluster.cpus_per_sampler] * cluster.samplers
    homes = [*range(ranks), *bundles]
    together = Counter(homes)
    shares: list[tuple[int, dict[str, float]]] = []
    for home, count in zip(homes, cores, strict=True):
        gpu = {"GPU": int(GPU_PARTS / together[home]) / GPU_PARTS} if gpus else {}
        shares.append((home, {"CPU": float(count)} | gpu))
    return shares


def _bundles(shares: Sequence[tuple[int, dict[str, float]]]) -> list[dict[str, float]]:
    bundles: list[dict[str, float]] = [{} for _ in range(1 + max(home for home, _ in shares))]
    for home, share in shares:
        bundles[home]["CPU"] = bundles[home].get("CPU", 0.0) + share["CPU"]
        if "GPU" in share:
            bundles[home]["GPU"] = 1.0
    return bundles


@dataclass(slots=True)
class _Seated:
    """A seat, and what is known of its process."""

    actor: Any
    said: bytes = b""
    status: int | None = None
    kill_requests: tuple[KillRequest, ...] = ()  # the last look's
    heard: int = 0  # kill requests, in all

    def look(self, ray: Any) -> bytes:
        """Brings it up to date; what it has printed since the last time. A seat that does not answer may start yet."""
        self.kill_requests = ()
        try:
            seen = ray.get(self.actor.state.remote(len(self.said), self.heard), timeout=REACH_SECONDS)
        except ray.exceptions.GetTimeoutError:
            return b""
        except ray.exceptions.RayActorError:
            self.status = KILLED
            return b""
        self.status, self.kill_requests = seen.status, seen.kill_requests
        self.said += seen.said
        self.heard += len(seen.kill_requests)
        return seen.said


class _Launch:
    """A launch while it runs."""

    def __init__(self, ray: Any, room: Room, command: Sequence[str], count: int, samplers: Samplers) -> None:
        self._ray, self._room, self._samplers, self._kill_requests = ray, room, samplers, KillRequests()
        self._seats = [_Seated(room.seat(index)) for index in range(count + samplers.count)]
        self._ranks, self._samplers_seated = self._seats[:count], self._seats[count:]
        places: list[Place] = ray.get([seat.actor.where.remote() for seat in self._seats])
        port, calls = places[0].ports
        meet = {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(port)}
        self._calls = calls_at(places[0].address, calls) if samplers.count else {}
        self._nodes = [place.node for place in places[count:]]
        for seat, place in zip(self._ranks, _numbered([place.node for place in places[:count]]), strict=True):
            ray.get(seat.actor.begin.remote(command, place | meet | self._calls, os.getcwd()))

    def watched(self) -> int:
        supervisor = SamplerSupervisor(
            self._samplers, start=self._begin, tail=lambda n: last_lines(self._samplers_seated[n].said)
        )
        try:
            if (status := self._until_ended(supervisor)) is not None:
                return status
            statuses = [seat.status or 0 for seat in self._ranks]
            return launch_status(statuses, lambda rank: last_lines(self._ranks[rank].said) if rank else "")
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                self._ranks[0].actor.tell.remote(signal.SIGINT)
                self._until_ended(supervisor, time.monotonic() + INTERRUPT_SECONDS)
            return 128 + signal.SIGINT

    def _until_ended(self, supervisor: SamplerSupervisor, until: float = math.inf) -> int | None:
        """Until then, by the monotonic clock, and once a rank has failed for some seconds more, ranks may end by
        themselves; they are ended then. Not None: the samplers cannot go on."""
        while any(seat.status is None for seat in self._ranks):
            self._look_at_ranks()
            self._kill_requested(self._kill_requests.due(self._ranks[0].kill_requests))
            if any(seat.status for seat in self._ranks):
                until = min(until, time.monotonic() + GRACE_SECONDS)
            elif (status := self._look_at_samplers(supervisor)) is not None:
                return status
            if time.monotonic() > until:
                for seat in [seat for seat in self._ranks if seat.status is None]:
                    seat.actor.tell.remote(signal.SIGKILL)
                    seat.status = LEADER_GONE  # ended by us: not the one to blame
            time.sleep(LOOK_SECONDS)
        return None

    def _look_at_ranks(self) -> None:
        """What rank 0 has printed is printed here."""
        for rank, seat in enumerate(self._ranks):
            if seat.status is None:
                said = seat.look(self._ray)
                if rank == 0:
                    sys.stdout.write(said.decode(errors="replace"))
                    sys.stdout.flush()

    def _kill_requested(self, requests: Sequence[KillRequest]) -> None:
        """Ends processes that rank 0 has named, unless others are in their places already."""
        for one in requests:
            seats = self._ranks if one.kind == "rank" else self._samplers_seated
            seats[one.number].actor.tell.remote(signal.SIGKILL, one.process)

    def _look_at_samplers(self, supervisor: SamplerSupervisor) -> int | None:
        for seat in self._samplers_seated:
            if seat.status is None:
                seat.look(self._ray)
        return supervisor.look([seat.status for seat in self._samplers_seated])

    def _begin(self, number: int) -> None:
        """A sampler's process, on its seat or, when the seat is gone, on another one in the same bundle."""
        seat = self._samplers_seated[number]
        if seat.status == KILLED and not self._answers(seat):
            seat = self._samplers_seated[number] = _Seated(self._room.seat(len(self._ranks) + number))
        seat.status, seat.said = None, b""
        place = self._calls | self._samplers.place(number, Counter(self._nodes)[self._nodes[number]])
        seat.actor.begin.remote(self._samplers.command, place, os.getcwd())

    def _answers(self, seat: _Seated) -> bool:
        try:
            self._ray.get(seat.actor.tell.remote(0), timeout=REACH_SECONDS)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return False
        return True


def _numbered(nodes: Sequence[str]) -> list[dict[str, str]]:
    """What torchrun would say to each rank. A seat sees its own GPU only, so that each is the first of its process."""
    size, on_node, seen = len(nodes), Counter(nodes), Counter[str]()
    places: list[dict[str, str]] = []
    for rank, node in enumerate(nodes):
        numbers = {"RANK": rank, "LOCAL_RANK": seen[node], "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": on_node[node]}
        places.append({name: str(number) for name, number in numbers.items()})
        seen[node] += 1
    return places
