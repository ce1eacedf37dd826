"""Messages between two processes of one run: one JSON object a line, over TCP, and heartbeats between them.

Address and secret are known from elsewhere: to ranks by `torch.distributed`, to samplers from who started them.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

log = logging.getLogger("posttrain")
Result = TypeVar("Result")
BEAT_SECONDS = 1.0
SECONDS = 60.0  # for a rank that is there already to call
HELLO_SECONDS, HELLO_BYTES = 10.0, 1 << 12  # for whoever calls to say who it is; others wait meanwhile


class RankLost(RuntimeError):
    """Another process of the run is gone; it says itself why."""


class Channel:
    """One end of a connection; `rank` is the number of whoever is at the other end, and `kind` what it is."""

    def __init__(self, connection: socket.socket, rank: int, kind: str = "rank") -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank, self.kind = rank, kind
        self.said: dict[str, Any] = {}  # with which the other end called
        self.heard = self.moved = time.monotonic()  # when something came, and when something besides signs of life
        self.does = self.doing = ""  # what this end does, and what the other end does, for signs of life
        self._socket = connection
        self._read = connection.makefile("rb")
        self._sending = threading.Lock()
        self._unsent = deque[bytes]()  # what the kernel had no room for
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None  # while something is unsent

    @classmethod
    def call(cls, address: tuple[str, int], secret: str, rank: int) -> Self:
        """From a rank or sampler of this number to rank 0."""
        channel = cls(socket.create_connection(address, SECONDS), 0)
        channel._socket.settimeout(None)
        channel.send({"secret": secret, "rank": rank, "process": os.getpid(), "machine": machine()})
        return channel

    def send(self, message: Mapping[str, Any]) -> None:
        """Waits for nobody: what the other end does not read yet is sent on a thread, in the order of the calls. Raises
        RankLost when nobody is there any more."""
        said, sent = json.dumps(message).encode() + b"\n", 0
        with self._sending:
            if self._unsent:
                self._unsent.append(said)
                return
            try:
                sent = self._socket.send(said, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                raise RankLost(f"{self} is gone ({error})") from error
            if sent < len(said):
                self._unsent.append(said[sent:])
                self._writer = _started(self._send_rest, f"to {self}")

    def _send_rest(self) -> None:
        left = True
        try:
            while left:
                self._socket.sendall(self._unsent[0])
                with self._sending:
                    self._unsent.popleft()
                    left = bool(self._unsent)  # if not, the next that is too much starts another thread
        except OSError:
            with self._sending:
                self._unsent.clear()
            self._hang_up()  # whoever listens hears it

    def receive(self, most: int = -1) -> dict[str, Any] | None:
        """The next message; None when the other end is closed, and for one of more than `most` bytes."""
        try:
            read = self._read.readline(most)
            return json.loads(read) if read.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    @property
    def process(self) -> int:
        """Process id of whoever called, on its machine."""
        return int(self.said.get("process", 0))

    def __str__(self) -> str:
        return f"{self.kind} {self.rank}"

    def beat(self) -> None:
        """From now on gives a sign of life every second, on a thread of its own, until the other end is gone."""

        def work() -> None:
            with suppress(RankLost):
                while True:
                    self.send({"beat": self.does})
                    time.sleep(BEAT_SECONDS)

        _started(work, "beat")

    def listen(self, hear: Callable[[dict[str, Any] | None], object]) -> None:
        """Gives every message to `hear`, on a thread of its own, and None at the end. Signs of life it keeps."""
        self.heard = self.moved = time.monotonic()

        def work() -> None:
            while (message := self.receive()) is not None:
                self.heard = time.monotonic()
                if "beat" in message:
                    self.doing = message["beat"]
                    continue
                self.moved = self.heard
                hear(message)
            hear(None)

        self._reader = _started(work, str(self))

    def wait_for_end(self, seconds: float) -> None:
        """Until the other end has closed the channel, which has to be listened to; not longer than that."""
        if self._reader is not None:
            self._reader.join(max(0.0, seconds))

    def close(self, patience: float = 0.0) -> None:
        """Both ends hear it. patience: seconds in which what is unsent may still be sent."""
        if self._writer is not None:
            self._writer.join(max(0.0, patience))
        self._hang_up()
        for thread in (self._reader, self._writer):
            if thread is not None and thread is not threading.current_thread():
                thread.join()
        self._read.close()
        self._socket.close()

    def _hang_up(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class ChannelServer:
    """Where rank 0 is called. `secret` keeps out whoever else can reach the port."""

    def __init__(self, host: str, port: int = 0, secret: str | None = None) -> None:
        """port: 0 takes a free one. secret: None makes one."""
        local = host in ("localhost", "127.0.0.1", "::1")
        self._server = _listening("127.0.0.1" if local else host, port)
        self._server.settimeout(SECONDS)
        self._closed = False
        self.address = ("127.0.0.1" if local else host, int(self._server.getsockname()[1]))
        self.secret = secrets.token_hex(16) if secret is None else secret

    def answer(self, count: int) -> tuple[Channel, ...]:
        """Channels to ranks 1 to `count`, in this order. Raises RankLost when one of them does not call."""
        found: dict[int, Channel] = {}
        with self._server:
            while len(found) < count:
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    missing = sorted({*range(1, count + 1)} - found.keys())
                    raise RankLost(f"ranks {missing} did not call within {SECONDS:.0f} seconds") from None
                if (channel := self._admitted(connection, "rank")) is not None:
                    found[channel.rank] = channel
        return tuple(found[rank] for rank in sorted(found))

    def keep_answering(self, kind: str, hear: Callable[[Channel], None]) -> None:
        """Gives a channel to everybody who calls, one at a time, to `hear`, on a thread of its own, until `close`."""

        def work() -> None:
            while True:
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    if self._closed:
                        return
                    log.warning("no %s can call just now (%s)", kind, error)  # too many open files, for instance
                    time.sleep(BEAT_SECONDS)
                    continue
                if (channel := self._admitted(connection, kind)) is not None:
                    hear(channel)

        _started(work, f"calls of a {kind}")

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # who waits in `accept` wakes up
        self._server.close()

    def _admitted(self, connection: socket.socket, kind: str) -> Channel | None:
        """None for who does not know the secret."""
        connection.settimeout(HELLO_SECONDS)
        channel = Channel(connection, -1, kind)
        said: Any = channel.receive(HELLO_BYTES)
        secret = str(said.get("secret")) if isinstance(said, dict) else ""  # a stranger may say anything
        if not hmac.compare_digest(secret.encode(errors="replace"), self.secret.encode()):
            channel.close()
            return None
        connection.settimeout(None)
        channel.rank, channel.said = int(said["rank"]), said
        return channel


def _listening(host: str, port: int) -> socket.socket:
    """At this address alone, if it is one of this machine's. A name may lead elsewhere here than on other machines, and
    an address may be that of a gateway: then at all, by IPv4 and IPv6."""
    with suppress(ValueError, OSError):
        six = ipaddress.ip_address(host).version == 6
        return socket.create_server((host, port), family=socket.AF_INET6 if six else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def machine() -> str:
    """The same for processes that may share memory: of one host (or one container) since it was started."""
    booted = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {booted.read_text().strip() if booted.is_file() else ''}".strip()


def _started(work: Callable[[], object], name: str) -> threading.Thread:
    """Runs before anybody knows of it: another thread may close the channel meanwhile, and joins what it knows of."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def on_a_thread(work: Callable[[], Result]) -> Future[Result]:
    """`work`, on a thread that nobody waits for at the end of the process."""
    done = Future[Result]()
    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)  # a new thread would start with one per core
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    _started(run, "work of a channel")
    return done
