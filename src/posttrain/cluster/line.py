"""What two processes of one run say to each other: one JSON object a line, over TCP.

Only between ranks that have met in `torch.distributed` before, which is how they know the address and the secret.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

SECONDS = 60.0  # for a rank that is there already to call


class RankLost(RuntimeError):
    """Another process of the run is gone; it says itself why."""


class Line:
    """One end of a connection; `rank` is whoever is at the other end."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._socket = connection
        self._read = connection.makefile("rb")
        self._sending = threading.Lock()
        self._reader: threading.Thread | None = None

    @classmethod
    def call(cls, address: tuple[str, int], secret: str, rank: int) -> Self:
        """From `rank` to rank 0."""
        line = cls(socket.create_connection(address, SECONDS), 0)
        line._socket.settimeout(None)
        line.send({"secret": secret, "rank": rank})
        return line

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises RankLost when nobody is there any more."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise RankLost(f"rank {self.rank} is gone ({error})") from error

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other end is closed."""
        try:
            read = self._read.readline()
            return json.loads(read) if read.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def listen(self, hear: Callable[[dict[str, Any] | None], object]) -> None:
        """Gives every message to `hear`, on a thread of its own, and None at the end."""

        def work() -> None:
            while (message := self.receive()) is not None:
                hear(message)
            hear(None)

        self._reader = threading.Thread(target=work, name=f"rank {self.rank}", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Both ends hear it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not None:
            self._reader.join()
        self._read.close()
        self._socket.close()


class Exchange:
    """Where rank 0 is called. `secret` keeps out whoever else can reach the port."""

    def __init__(self, host: str) -> None:
        local = host in ("localhost", "127.0.0.1", "::1")
        self._server = socket.create_server(("127.0.0.1" if local else "", 0))
        self._server.settimeout(SECONDS)
        self.address = ("127.0.0.1" if local else host, int(self._server.getsockname()[1]))
        self.secret = secrets.token_hex(16)

    def answer(self, count: int) -> tuple[Line, ...]:
        """Lines to ranks 1 to `count`, in this order. Raises RankLost when one of them does not call."""
        found: dict[int, Line] = {}
        with self._server:
            while len(found) < count:
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    missing = sorted({*range(1, count + 1)} - found.keys())
                    raise RankLost(f"ranks {missing} did not call within {SECONDS:.0f} seconds") from None
                connection.settimeout(SECONDS)
                line = Line(connection, -1)
                said = line.receive() or {}
                if not hmac.compare_digest(str(said.get("secret")), self.secret):
                    line.close()
                    continue
                connection.settimeout(None)
                line.rank = int(said["rank"])
                found[line.rank] = line
        return tuple(found[rank] for rank in sorted(found))
