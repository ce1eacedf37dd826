"""Ranks and samplers on this machine: starts them, watches them, and leaves none behind.

Rank 0 has the terminal. Of the others only what they print is kept, and shown when one of them fails.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from posttrain.cluster.exit_status import LEADER_GONE, culprits, last_lines, launch_status
from posttrain.cluster.supervisor import (
    KILL_REQUESTS,
    NO_SAMPLERS,
    KillRequest,
    KillRequests,
    Samplers,
    SamplerSupervisor,
    calls_at,
    kill_requests_in,
)

LAUNCHER = "POSTTRAIN_LAUNCHER"  # process id of whoever started a rank
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.1
FAILURE_OUTPUT_SECONDS = 1.0  # between the first failure and the report of whose fault it was
GRACE_SECONDS = 10.0
HERE = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # else it listens where the host's name leads
INTERRUPT_SECONDS = 600.0  # for rank 0 to finish what it writes; a second interrupt is quicker


@dataclass(frozen=True, slots=True)
class Started:
    """A process and what it prints; None: on the terminal."""

    process: subprocess.Popen[bytes]
    output: IO[bytes] | None

    def tail(self) -> str:
        if self.output is None:
            return ""
        self.output.seek(0)
        return last_lines(self.output.read())


def launch_local(command: Sequence[str], count: int, samplers: Samplers = NO_SAMPLERS) -> int:
    """Runs `command` as `count` ranks until all have ended, and returns the exit status of the whole.

    When one fails, the others are ended and it is named on stderr, with its last lines. An interrupt goes to rank 0,
    which ends the run in order; a second one ends everything at once. Samplers run beside them: one that is killed is
    started again, one that fails ends all; so too after an interrupt, since the step in progress needs them.
    """
    with ExitStack() as held:
        requests, told = os.pipe()
        held.callback(lambda: [os.close(descriptor) for descriptor in (requests, told)])
        os.set_blocking(requests, False)
        port = held.enter_context(free_port())
        calls = calls_at("127.0.0.1", held.enter_context(free_port())) if samplers.count else {}
        ranks = list[Started]()
        held.callback(lambda: end(ranks))
        for number in range(count):
            ranks.append(_start(command, _place(number, count, port) | calls, number > 0, told))
        here = _Here(samplers, calls, ranks, requests)
        held.callback(here.end)
        try:
            while (statuses := [rank.process.poll() for rank in ranks]) and None in statuses:
                if any(statuses):
                    _await_failure_output(ranks)
                    break
                if (status := here.look()) is not None:
                    return status
                time.sleep(LOOK_SECONDS)
            return launch_status([rank.process.poll() or 0 for rank in ranks], lambda rank: ranks[rank].tail())
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                ranks[0].process.send_signal(signal.SIGINT)
                here.look_until_ended(ranks[0], INTERRUPT_SECONDS)
                _wait(ranks[:1], GRACE_SECONDS)  # it may be writing, and needs no sampler for that
                _wait(ranks, FAILURE_OUTPUT_SECONDS)
            return 128 + signal.SIGINT


def _await_failure_output(ranks: Sequence[Started]) -> None:
    """Until it can be told whose fault it was. Who has only noticed may end first; rank 0 is still saying what it has
    failed of, or fails because of another one, which still says it."""
    _wait(ranks, FAILURE_OUTPUT_SECONDS)
    if not culprits([rank.process.poll() or 0 for rank in ranks]):
        _wait(ranks, GRACE_SECONDS)


def _kill_requested(requests: Sequence[KillRequest], started: Mapping[str, Sequence[Started]]) -> None:
    """Ends processes that rank 0 has named, unless others are in their places already."""
    for one in requests:
        process = started[one.kind][one.number].process
        if process.pid == one.process and process.poll() is None:
            process.kill()
            process.wait()


class _Here:
    """The samplers of a launch on this machine. requests: the descriptor on which rank 0 asks for the end of a rank or
    of a sampler."""

    def __init__(self, samplers: Samplers, calls: dict[str, str], ranks: Sequence[Started], requests: int) -> None:
        self._samplers, self._calls, self._ranks, self._requests = samplers, calls, ranks, requests
        self._kill_requests = KillRequests()
        self.started: list[Started] = []
        self._supervisor = SamplerSupervisor(samplers, start=self._begin, tail=self._tail)

    def look(self) -> int | None:
        """Ends who is lost to rank 0, and starts again who was killed; the exit status of the run when it cannot go
        on."""
        due = self._kill_requests.due(read_kill_requests(self._requests))
        _kill_requested(due, {"rank": self._ranks, "sampler": self.started})
        return self._supervisor.look([one.process.poll() for one in self.started])

    def look_until_ended(self, rank: Started, seconds: float) -> None:
        """Or until the samplers cannot go on."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and rank.process.poll() is None and self.look() is None:
            time.sleep(LOOK_SECONDS)

    def end(self) -> None:
        end(self.started)

    def _begin(self, number: int) -> None:
        """Also in the place of one that has ended."""
        end(self.started[number : number + 1])
        place = self._calls | self._samplers.place(number, self._samplers.count)
        self.started[number : number + 1] = [_start(self._samplers.command, place, True)]

    def _tail(self, number: int) -> str:
        return self.started[number].tail()


def read_kill_requests(descriptor: int) -> list[KillRequest]:
    """See `kill_requests_in`; does not wait for any."""
    said = b""
    with suppress(BlockingIOError):
        while more := os.read(descriptor, 1 << 12):
            said += more
    return kill_requests_in(said)


def _place(number: int, count: int, port: int) -> dict[str, str]:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _start(command: Sequence[str], place: Mapping[str, str], keeps: bool, told: int | None = None) -> Started:
    """keeps: what it prints goes to a file, which is closed in `end`. told: where rank 0 writes its kill requests."""
    environment = HERE | environment_of(place) | ({} if told is None else {KILL_REQUESTS: str(told)})
    output = tempfile.TemporaryFile() if keeps else None  # noqa: SIM115
    # a session of its own: the terminal's interrupt is for us, and we pass it on once
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=() if told is None else (told,),
    )
    return Started(process, output)


def environment_of(place: Mapping[str, str]) -> dict[str, str]:
    """Of a process that is started here. What a torchrun around has said is not for it: it would make rank 0 wait for a
    store that nobody keeps."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    return around | dict(place) | {LAUNCHER: str(os.getpid())}


def _wait(started: Sequence[Started], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(one.process.poll() is None for one in started):
        time.sleep(LOOK_SECONDS)


def end(started: Sequence[Started]) -> None:
    """Of all of them, in order at first."""
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
    _wait(started, GRACE_SECONDS)
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        if one.output is not None:
            one.output.close()


def die_with_launcher() -> None:
    """In a rank: the kernel ends it when its launcher is gone, however that went. Linux; elsewhere its channel ends."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it went before we asked
        sys.exit(LEADER_GONE)


@contextmanager
def free_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Of this machine; inside the block the system gives it to nobody who asks for any, and who names it may listen.

    Held by a socket that is bound and does not listen. Elsewhere than on Linux it would keep out the listener too, so
    the port is only looked up there.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port
