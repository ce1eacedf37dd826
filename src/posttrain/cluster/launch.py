"""Ranks on this machine: starts them, watches them, and leaves none behind.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

LAUNCHER = "POSTTRAIN_LAUNCHER"  # process id of whoever started a rank
LEADER_GONE = 75  # exit status of a rank that only found out that rank 0 was gone
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.1
LAST_WORDS_SECONDS = 1.0  # between the first failure and the verdict: whose fault it was
GRACE_SECONDS = 10.0
INTERRUPT_SECONDS = 60.0
TAIL = 60  # lines of a failed rank


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None  # None: the terminal's

    def tail(self) -> str:
        if self.output is None:
            return ""
        self.output.seek(0)
        return last_lines(self.output.read())


def launch_local(command: Sequence[str], count: int) -> int:
    """Runs `command` as `count` ranks until all have ended, and returns the exit status of the whole.

    When one fails, the others are ended and it is named on stderr, with its last lines. An interrupt goes to rank 0,
    which ends the run in order; a second one ends everything at once.
    """
    port = free_port()
    ranks = [_start(command, number, count, port) for number in range(count)]
    try:
        while (statuses := [rank.process.poll() for rank in ranks]) and None in statuses:
            if any(statuses):
                time.sleep(LAST_WORDS_SECONDS)
                break
            time.sleep(LOOK_SECONDS)
        return verdict([rank.process.poll() or 0 for rank in ranks], lambda rank: ranks[rank].tail())
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            ranks[0].process.send_signal(signal.SIGINT)
            _wait(ranks[:1], INTERRUPT_SECONDS)
            _wait(ranks, LAST_WORDS_SECONDS)
        return 128 + signal.SIGINT
    finally:
        _end(ranks)


def last_lines(said: bytes) -> str:
    return "\n".join(said.decode(errors="replace").splitlines()[-TAIL:])


def was_killed(status: int) -> bool:
    """Whether an exit status of a launch tells of a rank that was killed, and not by whoever started the run."""
    return status in {128 + signal.SIGKILL, 128 + signal.SIGBUS, 128 + signal.SIGSEGV, 128 + signal.SIGABRT}


def _start(command: Sequence[str], number: int, count: int, port: int) -> _Rank:
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), LAUNCHER: str(os.getpid())}
    environment = {**os.environ, **{key: str(value) for key, value in place.items()}, **address}
    output = tempfile.TemporaryFile() if number else None  # noqa: SIM115 -- closed in `_end`
    # a session of its own: the terminal's interrupt is for us, and we pass it on once
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    return _Rank(number, process, output)


def verdict(statuses: Sequence[int], tail: Callable[[int], str]) -> int:
    """0 when all ranks ended well; otherwise says which one is to blame, with its last lines, and gives its status.

    Not one that only noticed that another one was gone: one that was killed goes before one that failed, and rank 0,
    which says itself what it failed of, comes last.
    """
    failed = [rank for rank, status in enumerate(statuses) if status]
    if not failed:
        return 0
    killed = [rank for rank in failed if statuses[rank] < 0]
    others = [rank for rank in failed if rank and statuses[rank] != LEADER_GONE]
    guilty = (killed or others or failed)[0]
    status = statuses[guilty]
    if guilty or status < 0:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"
        said = tail(guilty)
        print(f"rank {guilty} {how}" + (f"; it said:\n{said}" if said else ""), file=sys.stderr)
    return 128 - status if status < 0 else status


def _wait(ranks: Sequence[_Rank], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(rank.process.poll() is None for rank in ranks):
        time.sleep(LOOK_SECONDS)


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.terminate()
    _wait(ranks, GRACE_SECONDS)
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
        rank.process.wait()
        if rank.output is not None:
            rank.output.close()


def die_with_launcher() -> None:
    """In a rank: the kernel ends it when its launcher is gone, however that went. Linux; elsewhere the lines break."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it went before we asked
        sys.exit(LEADER_GONE)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
