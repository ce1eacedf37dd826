"""Attacks on the transport, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import logging
import resource
import socket
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest

from posttrain.tools.online.addresses import Address, Refused
from posttrain.tools.online.net import Answer, Net, NetOptions
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

from .stub import Reply, Stub

T = TypeVar("T")


def use(net: Net, action: Callable[[Net], Awaitable[T]]) -> T:
    async def run() -> T:
        try:
            return await action(net)
        finally:
            await net.close()

    return asyncio.run(run())


def fetch(url: str, *, resolver: Any = None, get: dict[str, Any] | None = None, **options: Any) -> Answer:
    net = Net(NetOptions(**options), resolver=resolver)
    return use(net, lambda opened: opened.fetch("GET", url, **({"redirects": True} if get is None else get)))


def names(*answers: list[str]) -> tuple[Callable[[str, int], Awaitable[list[Address]]], list[str]]:
    """A name server that gives the n-th answer to the n-th question, and what it was asked."""
    asked: list[str] = []

    async def resolver(host: str, port: int) -> list[Address]:
        asked.append(host)
        return [ipaddress.ip_address(text) for text in answers[min(len(asked), len(answers)) - 1]]

    return resolver, asked


def test_an_allowed_place_is_reached(stub: Stub):
    stub.on("/", Reply("hello", type="text/plain; charset=utf-8", headers={"x-more": "1"}))
    answer = fetch(f"{stub.url}/", allow=(stub.place,))
    assert (answer.status, answer.body, answer.content_type, answer.charset) == (200, b"hello", "text/plain", "utf-8")
    assert answer.headers["x-more"] == "1"


@pytest.mark.parametrize(
    "spelling",
    [
        "127.0.0.1", "localhost", "LOCALHOST.", "2130706433", "0x7f000001", "0177.0.0.1", "017700000001", "127.1",
        "0x7f.1", "0x7f.0x0.0x0.0x1", "0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[0:0:0:0:0:ffff:7f00:1]",
        "127。0。0。1", "①②⑦.⓪.⓪.①", "localhost%00.example.org", "[::1%25lo]", "example.org@127.0.0.1",
    ],
)  # fmt: skip
def test_this_machine_is_refused_however_it_is_spelt(stub: Stub, spelling: str):
    """Decimal, octal, hexadecimal and short forms are read by the system's own lookup, whose answer is checked."""
    port = int(stub.place.rpartition(":")[2])
    with pytest.raises(ToolError) as refused:
        fetch(f"http://{spelling}:{port}/", ports=(port,))
    assert refused.value.status in (CallStatus.FAILED, CallStatus.BAD_ARGUMENTS)
    assert not refused.value.transient
    assert not stub.requests


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1:{other}/", "http://169.254.169.254/", "file:///etc/passwd", "//[::1]/"]
)
def test_redirects_pass_the_same_checks(stub: Stub, target: str):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        stub.on("/", Reply(status=302, headers={"location": target.format(other=port)}))
        with pytest.raises(Refused):
            fetch(f"{stub.url}/", allow=(stub.place,), ports=(80, port))
        other.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            other.accept()


def test_redirects_within_what_is_allowed_are_followed(stub: Stub):
    stub.on("/", Reply(status=301, headers={"location": "/next"}))
    stub.on("/next", Reply("there"))
    answer = fetch(f"{stub.url}/", allow=(stub.place,))
    assert (answer.body, answer.url) == (b"there", f"{stub.url}/next")


def test_redirects_end(stub: Stub):
    stub.on("/", Reply(status=302, headers={"location": "/"}))
    with pytest.raises(ToolError, match="too often"):
        fetch(f"{stub.url}/", allow=(stub.place,), max_redirects=3)
    assert len(stub.requests) == 4


def test_redirects_are_not_followed_unless_asked_for(stub: Stub):
    stub.on("/", Reply(status=302, headers={"location": "/next"}))
    assert fetch(f"{stub.url}/", allow=(stub.place,), get={}).status == 302


def test_a_name_that_leads_to_this_machine_is_refused(stub: Stub):
    port = int(stub.place.rpartition(":")[2])
    for addresses in (["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"]):
        resolver, asked = names(addresses)
        with pytest.raises(Refused, match="leads to"):
            fetch(f"http://attacker.example:{port}/", resolver=resolver, ports=(port,))
        assert asked == ["attacker.example"]
    assert not stub.requests


def test_every_connection_is_checked_by_its_own_lookup(stub: Stub):
    """A name server that says a public address first and this machine's next (rebinding) gains nothing."""
    port = int(stub.place.rpartition(":")[2])
    resolver, asked = names(["8.8.8.8"], ["127.0.0.1"])
    net = Net(NetOptions(ports=(port,)), resolver=resolver)

    async def check_then_fetch(opened: Net) -> None:
        await opened.check(f"http://attacker.example:{port}/")
        with pytest.raises(Refused, match="loopback"):
            await opened.fetch("GET", f"http://attacker.example:{port}/")

    use(net, check_then_fetch)
    assert asked == ["attacker.example"] * 2
    assert not stub.requests


def test_a_lookup_is_made_once_per_connection_and_its_answer_is_connected_to(stub: Stub):
    """An allowed name: its first address is taken, although a second lookup would lead elsewhere."""
    stub.on("/", Reply("here"))
    port = int(stub.place.rpartition(":")[2])
    resolver, asked = names(["127.0.0.1"], ["203.0.113.1"])
    net = Net(NetOptions(allow=(f"stub.test:{port}",)), resolver=resolver)

    async def twice(opened: Net) -> list[bytes]:
        url = f"http://stub.test:{port}/"
        return [(await opened.fetch("GET", url)).body for _ in range(2)]

    assert use(net, twice) == [b"here", b"here"]
    assert asked == ["stub.test"]
    assert stub.last.headers["host"] == f"stub.test:{port}"


def test_the_next_address_is_tried_where_one_is_down(stub: Stub):
    stub.on("/", Reply("here"))
    port = int(stub.place.rpartition(":")[2])
    resolver, _ = names(["127.0.0.9", "127.0.0.1"])  # nobody listens on the first
    answer = fetch(f"http://stub.test:{port}/", resolver=resolver, allow=(f"stub.test:{port}",))
    assert answer.body == b"here"


def test_a_service_that_fetches_for_us_gets_only_checked_urls():
    resolver, _ = names(["10.0.0.1"])
    net = Net(NetOptions(), resolver=resolver)
    for url in ("http://intern.example/", "http://127.0.0.1/", "http://example.org:22/"):
        with pytest.raises(Refused):
            use(net, lambda opened, url=url: opened.check(url))


def test_bytes_are_capped(stub: Stub):
    stub.on("/", Reply(b"x" * 5000, type="text/plain"))
    with pytest.raises(ToolError, match="longer than 1000 bytes"):
        fetch(f"{stub.url}/", allow=(stub.place,), max_bytes=1000)
    answer = fetch(f"{stub.url}/", allow=(stub.place,), max_bytes=1000, get={"cut": True})
    assert (len(answer.body), answer.cut) == (1000, True)
    whole = fetch(f"{stub.url}/", allow=(stub.place,), max_bytes=5000)
    assert (len(whole.body), whole.cut) == (5000, False)


@pytest.mark.alone
def test_a_compressed_bomb_ends_at_the_limit(stub: Stub):
    bomb = gzip.compress(bytes(200 << 20), compresslevel=9)
    assert len(bomb) < 300_000
    stub.on("/", Reply(bomb, headers={"content-encoding": "gzip"}))
    started = time.monotonic()
    answer = fetch(f"{stub.url}/", allow=(stub.place,), max_bytes=1 << 20, get={"cut": True})
    assert (len(answer.body), answer.cut) == (1 << 20, True)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "deflate", "zstd"])
def test_other_packings_are_refused(stub: Stub, encoding: str):
    stub.on("/", Reply(gzip.compress(gzip.compress(b"x")), headers={"content-encoding": encoding}))
    with pytest.raises(ToolError, match="not asked for"):
        fetch(f"{stub.url}/", allow=(stub.place,))


def test_gzip_is_unpacked_and_damage_is_noticed(stub: Stub):
    good = gzip.compress(b"hello " * 100)
    stub.on("/good", Reply(good, headers={"content-encoding": "gzip"}))
    stub.on("/short", Reply(good[:-20], headers={"content-encoding": "gzip"}))
    stub.on("/wrong", Reply(zlib.compress(b"x"), headers={"content-encoding": "gzip"}))
    assert fetch(f"{stub.url}/good", allow=(stub.place,)).body == b"hello " * 100
    for path in ("short", "wrong"):
        with pytest.raises(ToolError, match="damaged") as damaged:
            fetch(f"{stub.url}/{path}", allow=(stub.place,))
        assert damaged.value.transient


@pytest.mark.alone
def test_time_is_capped(stub: Stub):
    stub.on("/", Reply("late", wait=1.0))
    started = time.monotonic()
    with pytest.raises(ToolError, match=r"within 0\.2 s") as late:
        fetch(f"{stub.url}/", allow=(stub.place,), seconds=0.2)
    assert (late.value.status, late.value.transient) == (CallStatus.TIMEOUT, True)
    assert time.monotonic() - started < 0.9


@pytest.mark.alone
def test_a_dripping_server_does_not_hold_us():
    """A byte now and then resets every read timeout; the request's own deadline holds."""

    async def run() -> None:
        async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await asyncio.sleep(0.02)

        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        net = Net(NetOptions(seconds=0.3, allow=(place,)))
        with pytest.raises(ToolError) as late:
            await net.fetch("GET", f"http://{place}/")
        assert late.value.status is CallStatus.TIMEOUT
        await net.close()
        for writer in writers:
            writer.close()
        server.close()
        await asyncio.sleep(0.05)

    started = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - started < 1.5


def test_broken_connections_are_transient(stub: Stub):
    stub.on("/", Reply("half", promise=100))
    with pytest.raises(ToolError, match="broke off") as broken:
        fetch(f"{stub.url}/", allow=(stub.place,))
    assert broken.value.transient
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(ToolError, match="cannot be reached") as down:
            fetch(f"http://{place}/", allow=(place,))
    assert down.value.transient


def test_unknown_names_are_final():
    with pytest.raises(ToolError, match="no such host") as unknown:
        fetch("http://nobody.invalid/")
    assert unknown.value.status is CallStatus.FAILED


@pytest.mark.parametrize("url", ["http://[", "http://x y/", "http://exa\x00mple.org/", "http://a:99999/"])
def test_what_is_no_url(url: str):
    with pytest.raises(ToolError) as wrong:
        fetch(url)
    assert not wrong.value.transient


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("7", 7, 7),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        ("Wed, 21 Oct 2065 07:28:00 GMT", 1e6, 1e10),
        ("soon", None, None),
        ("", None, None),
        ("-3", None, None),
    ],
)
def test_retry_after(stub: Stub, header: str, low: float | None, high: float | None):
    stub.on("/", Reply(status=429, headers={"retry-after": header}))
    waits = fetch(f"{stub.url}/", allow=(stub.place,)).retry_after
    assert waits is None if low is None else waits is not None and low <= waits <= (high or 0)


def test_no_cookie_is_kept(stub: Stub):
    stub.on("/", Reply("x", headers={"set-cookie": "who=me; Path=/"}))
    net = Net(NetOptions(allow=(stub.place,)))

    async def twice(opened: Net) -> None:
        for _ in range(2):
            await opened.fetch("GET", f"{stub.url}/")

    use(net, twice)
    assert "cookie" not in stub.last.headers


def test_proxies_of_the_environment_are_ignored_unless_named(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    stub.on("/", Reply("direct"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert fetch(f"{stub.url}/", allow=(stub.place,)).body == b"direct"


def test_a_named_proxy_is_used(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    """It gets the whole URL and looks the name up itself; literal private addresses are still refused here."""
    stub.on("/page", Reply("through"))
    stub.routes["http://public.example/page"] = stub.routes["/page"]
    monkeypatch.setenv("MY_PROXY", stub.url)
    assert fetch("http://public.example/page", proxy_env="MY_PROXY").body == b"through"
    assert stub.last.headers["host"] == "public.example"
    with pytest.raises(Refused):
        fetch("http://127.0.0.1/page", proxy_env="MY_PROXY")


def test_a_client_serves_one_event_loop_after_the_other(stub: Stub):
    stub.on("/", Reply("x"))
    net = Net(NetOptions(allow=(stub.place,)))
    for _ in range(2):
        assert asyncio.run(net.fetch("GET", f"{stub.url}/")).body == b"x"
    asyncio.run(net.close())


def test_many_requests_at_once(stub: Stub):
    stub.on("/", Reply("x", wait=0.05))
    net = Net(NetOptions(allow=(stub.place,), max_connections=8))

    async def many(opened: Net) -> list[Answer]:
        return await asyncio.gather(*(opened.fetch("GET", f"{stub.url}/") for _ in range(32)))

    assert [answer.body for answer in use(net, many)] == [b"x"] * 32


def test_options_say_what_is_wrong():
    with pytest.raises(ValueError, match="host:port"):
        NetOptions(allow=("127.0.0.1",))
    with pytest.raises(ValueError, match="extra"):
        NetOptions.model_validate({"timeout": 3})


def test_nothing_is_logged_of_headers(stub: Stub, caplog: pytest.LogCaptureFixture):
    stub.on("/", Reply("x"))
    with caplog.at_level(logging.DEBUG):
        fetch(f"{stub.url}/", allow=(stub.place,), get={"headers": {"x-api-key": "top-secret-key"}})
    assert "top-secret-key" not in caplog.text


def forever(head: bytes, piece: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return send


def once(answer: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(answer)


@contextmanager
def raw_server(send: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that reads what it is sent once and then writes as told."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    connection.recv(65536)
                    send(connection)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


OK, MOVED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 302 Found\r\nlocation: http://10.0.0.1/\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.alone
@pytest.mark.parametrize(
    "send",
    [
        forever(OK, b"x: " + b"a" * 1000 + b"\r\n"),
        forever(OK + b"x: ", b"a" * 65536),
        forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        forever(b"HTTP/1.1 200 ", b"O" * 65536),
        forever(CHUNKED + b"1;", b"a" * 65536),
        forever(CHUNKED + b"0\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
        forever(CHUNKED, b"1\r\na\r\n" * 1000),
        forever(MOVED + b"\r\n", b"a" * 65536),
        once(MOVED + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b"0" * 50_000_000)),
        once(b"HTTP/1.1 302 F\r\nlocation: http://a" + b"b" * 60_000 + b"/\r\ncontent-length: 0\r\n\r\n"),
        once(b"HTTP/1.1 302 F\r\nlocation: \xff\xfe\x00http://x\r\ncontent-length: 0\r\n\r\n"),
        once(b"HTTP/1.1 302 F\r\nlocation: http:\\\\127.0.0.1\r\ncontent-length: 0\r\n\r\n"),
        once(b"HTTP/1.1 302 F\r\nlocation: http://u:p@example.org/\r\ncontent-length: 0\r\n\r\n"),
        once(OK + b"content-length: -5\r\n\r\nabc"),
        once(OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"),
        once(b"hello"),
    ],
    ids=[
        "headers", "a header", "continue", "a status", "a chunk's extension", "trailers", "tiny chunks",
        "a redirect's body", "a redirect's bomb", "a far place", "a place of bytes", "backslashes", "a password",
        "a negative length", "two lengths", "no HTTP",
    ],
)  # fmt: skip
def test_answers_that_never_end_or_make_no_sense(send: Callable[[socket.socket], None]):
    """Ended by a limit of bytes or of time, typed, and without being kept in memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    with raw_server(send) as port, pytest.raises(ToolError) as refused:
        fetch(f"http://127.0.0.1:{port}/", allow=(f"127.0.0.1:{port}",), seconds=0.8, max_bytes=100_000)
    assert refused.value.status in (CallStatus.FAILED, CallStatus.TIMEOUT)
    assert time.monotonic() - started < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
