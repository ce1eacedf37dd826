"""A seat: the Ray actor that starts and watches the process of a rank or a sampler. Imports little: every seat loads
it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from posttrain.cluster.launch import environment_of, free_port, read_kill_requests
from posttrain.cluster.supervisor import KILL_REQUESTS, KillRequest


@dataclass(frozen=True, slots=True)
class Place:
    """Where a seat is: its node, the node's address, and two ports that are free there."""

    node: str
    address: str
    ports: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of a process: its exit status, None while it runs; what it printed behind what was known; and what
    rank 0 wants killed besides those that were known, see `supervisor.kill_requests_in`."""

    status: int | None
    said: bytes
    kill_requests: tuple[KillRequest, ...] = ()


class Seat:
    """Runs on the node that Ray has chosen."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the seat
        self._ports = ExitStack()  # those that are held for rank 0
        self._kills_requested: list[KillRequest] = []
        self._kill_requests, self._told = os.pipe()
        os.set_blocking(self._kill_requests, False)

    def where(self) -> Place:
        import ray

        address: str = ray.util.get_node_ip_address()
        self._ports.close()
        ports = (self._ports.enter_context(free_port(address)), self._ports.enter_context(free_port(address)))
        return Place(ray.get_runtime_context().get_node_id(), address, ports)

    def begin(self, command: Sequence[str], place: Mapping[str, str], folder: str) -> None:
        """Starts a process; what an earlier one here has printed is forgotten."""
        self.tell(9)
        self._output.close()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        environment = environment_of(place) | {KILL_REQUESTS: str(self._told)}
        with _interruptible():
            self._process = subprocess.Popen(
                list(command),
                env=environment,
                cwd=folder,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(self._told,),
            )

    def state(self, seen: int, heard: int = 0) -> Seen:
        """seen: bytes of its output that are known; heard: how many of its kill requests. Whoever asked may not
        wait for the answer, so both are kept."""
        assert self._process is not None
        status = self._process.poll()
        self._kills_requested += read_kill_requests(self._kill_requests)
        return Seen(status, os.pread(self._output.fileno(), 1 << 20, seen), tuple(self._kills_requested[heard:]))

    def tell(self, number: int, process: int | None = None) -> None:
        """Sends a signal, while it runs. process: only if that is its id."""
        here = self._process
        if here is not None and here.poll() is None and process in (None, here.pid):
            here.send_signal(number)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ray blocks the interrupt in its processes, and what they start inherits that: rank 0 would never hear of one."""
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
