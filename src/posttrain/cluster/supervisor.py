"""Supervises the samplers of a launch, wherever they run: which of them start again, and when that ends the run. Rank
0 asks here for the end of a process that is lost."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from posttrain.cluster.exit_status import LEADER_GONE, how_ended, report_failure

CALLS = "POSTTRAIN_CALLS"  # HOST:PORT at which rank 0 answers samplers
SECRET = "POSTTRAIN_SECRET"  # that they know each other by
KILL_REQUESTS = "POSTTRAIN_KILL_REQUESTS"  # descriptor on which rank 0 names processes to be ended
SAMPLER = "POSTTRAIN_SAMPLER"  # number of a sampler
NEIGHBOURS = "POSTTRAIN_NEIGHBOURS"  # samplers on its machine
GAVE_UP = 1  # exit status of a launch
PATIENCE_SECONDS = 2.0  # for the end of rank 0 to be seen by whoever saw that of a sampler
KILL_GRACE_SECONDS = 5.0  # for a process that rank 0 wants ended: it may be ending, and saying why


class Peer(Protocol):
    """A channel: its text is rank or sampler, and the number."""

    @property
    def process(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """How many, what each of them runs, and how many may be started again.

    devices: of this machine, one for each, as CUDA_VISIBLE_DEVICES names them; empty without GPUs.
    near: they must be on the machine of rank 0.
    """

    count: int = 0
    restarts: int = 0
    command: Sequence[str] = ()
    devices: Sequence[str] = ()
    near: bool = False

    def place(self, number: int, neighbours: int) -> dict[str, str]:
        """The environment of one of them."""
        place = {SAMPLER: str(number), NEIGHBOURS: str(neighbours)}
        return place | ({"CUDA_VISIBLE_DEVICES": self.devices[number]} if self.devices else {})


NO_SAMPLERS = Samplers()


def calls_at(host: str, port: int) -> dict[str, str]:
    """What rank 0 and the samplers of a launch find each other by."""
    return {CALLS: f"{host}:{port}", SECRET: secrets.token_hex(16)}


class KillRequest(NamedTuple):
    """A process that rank 0 wants ended: rank or sampler, its number, its process id."""

    kind: str
    number: int
    process: int


def request_kill(channel: Peer) -> None:
    """On rank 0: the end of the process at the other end. Whoever started it sees to it; torchrun does not."""
    if KILL_REQUESTS in os.environ:
        os.write(int(os.environ[KILL_REQUESTS]), f"{channel} {channel.process}\n".encode())


def kill_requests_in(said: bytes) -> list[KillRequest]:
    """What `request_kill` has written."""
    words = [line.split() for line in said.decode().splitlines()]
    return [KillRequest(kind, int(number), int(process)) for kind, number, process in words]


class KillRequests:
    """Those that are not done yet. A process whose connection broke may have failed, which is no reason to start it
    again: it gets some seconds to end by itself."""

    def __init__(self) -> None:
        self._since: dict[KillRequest, float] = {}

    def due(self, new: Sequence[KillRequest]) -> list[KillRequest]:
        """Those to be done now. new: made since the last time."""
        now = time.monotonic()
        for one in new:
            self._since.setdefault(one, now)
        due = [one for one, since in self._since.items() if now - since >= KILL_GRACE_SECONDS]
        for one in due:
            del self._since[one]
        return due


class SamplerSupervisor:
    """Starts the samplers, and again those that were killed. `start` and `tail` (its last lines) take their number."""

    def __init__(self, samplers: Samplers, *, start: Callable[[int], None], tail: Callable[[int], str]) -> None:
        self._left, self._start, self._tail = samplers.restarts, start, tail
        self._alone: dict[int, float] = {}  # who has ended because of rank 0, and since when
        for number in range(samplers.count):
            start(number)

    def look(self, statuses: Sequence[int | None]) -> int | None:
        """Exit statuses, None while one runs -> that of the launch when it cannot go on."""
        for number, status in enumerate(statuses):
            if not status or (status == LEADER_GONE and not self._overdue(number)):
                continue  # it runs, or was told to stop, or rank 0 will be found dead
            if status > 0 and status != LEADER_GONE:
                report_failure(f"sampler {number}", status, self._tail(number))
                return status
            if not self._left:
                report_failure(f"sampler {number}", status, self._tail(number))
                print("no sampler may be started again (cluster.sampler_restarts)", file=sys.stderr)
                return GAVE_UP
            self._left -= 1
            self._alone.pop(number, None)
            print(f"sampler {number} {how_ended(status)}; it is started again ({self._left} left)", file=sys.stderr)
            self._start(number)
        return None

    def _overdue(self, number: int) -> bool:
        return time.monotonic() > self._alone.setdefault(number, time.monotonic()) + PATIENCE_SECONDS
