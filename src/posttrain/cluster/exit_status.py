"""Exit statuses of the processes of a run: which process failed first, and whether starting again may help."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence

LEADER_GONE = 75  # exit status of a rank or sampler that only found out that rank 0 was gone
TAIL = 60  # lines of a failed process


def launch_status(statuses: Sequence[int], tail: Callable[[int], str]) -> int:
    """0 when all ranks ended well; otherwise says which one is to blame, with its last lines, and gives its status.

    Not one that only noticed that another one was gone: one that was killed goes before one that failed, and rank 0,
    which says itself what it failed of, comes last.
    """
    failed = [rank for rank, status in enumerate(statuses) if status]
    if not failed:
        return 0
    first = (culprits(statuses) or failed)[0]
    status = statuses[first]
    if first or status < 0:
        report_failure(f"rank {first}", status, tail(first))
    return 128 - status if status < 0 else status


def culprits(statuses: Sequence[int]) -> list[int]:
    """Ranks that were killed; without any those that failed, besides rank 0, and not because it was gone."""
    killed = [rank for rank, status in enumerate(statuses) if status < 0]
    return killed or [rank for rank, status in enumerate(statuses) if rank and status not in (0, LEADER_GONE)]


def report_failure(who: str, status: int, said: str) -> None:
    """On stderr, with its last lines."""
    print(f"{who} {how_ended(status)}" + (f"; it said:\n{said}" if said else ""), file=sys.stderr)


def how_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"failed with exit status {status}"


def was_killed(status: int) -> bool:
    """Whether an exit status of a launch tells of a rank that was killed, and not by whoever started the run."""
    return status in {128 + signal.SIGKILL, 128 + signal.SIGBUS, 128 + signal.SIGSEGV, 128 + signal.SIGABRT}


def last_lines(said: bytes) -> str:
    return "\n".join(said.decode(errors="replace").splitlines()[-TAIL:])
