"""A place that Ray has given to a rank, as an actor. Imports little: every seat loads it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from posttrain.cluster.launch import LAUNCHER, free_port


class Seat:
    """Runs on the node that Ray has chosen."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the seat

    def where(self) -> tuple[str, str, int]:
        """(node, its address, a free port there)"""
        import ray

        address: str = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), address, free_port(address)

    def begin(self, command: Sequence[str], place: Mapping[str, str], folder: str) -> None:
        environment = {**os.environ, **place, LAUNCHER: str(os.getpid())}
        self._process = subprocess.Popen(
            list(command), env=environment, cwd=folder, stdout=self._output, stderr=subprocess.STDOUT
        )

    def state(self, seen: int) -> tuple[int | None, bytes]:
        """(exit status, None while it runs; what it printed behind the first `seen` bytes)"""
        assert self._process is not None
        status = self._process.poll()
        return status, os.pread(self._output.fileno(), 1 << 20, seen)

    def tell(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
