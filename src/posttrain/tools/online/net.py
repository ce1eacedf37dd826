"""HTTP that reaches only what it may, reads only so much, and takes only so long.

Names are looked up once per connection, all their addresses are checked (`addresses`), and the connection goes to a
checked address: an answer of the name server that changes afterwards changes nothing. Redirects pass the same checks.
Bodies are unpacked piece by piece, so that a compressed bomb ends at the limit. No cookies, no proxies of the
environment, no credentials but those of the request.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import http.cookiejar
import ipaddress
import os
import socket
import ssl
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from posttrain.boundary.urls import VariableName
from posttrain.tools.online.addresses import Address, Reach, Refused, parse_literal, place
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

USER_AGENT = "posttrain/0.1 (research agent; HTTP client)"
Resolver = Callable[[str, int], Awaitable[list[Address]]]
_REDIRECTS = (301, 302, 303, 307, 308)
SocketOption = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]


class NetOptions(BaseModel):
    """The limits of one tool's requests. Every limit counts seconds, bytes or redirects, as its name says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float = Field(default=30.0, gt=0)  # one request from the name lookup to its last byte, redirects included
    max_bytes: int = Field(default=5 << 20, ge=1)  # of an answer, both as sent and unpacked
    max_redirects: int = Field(default=5, ge=0)
    max_connections: int = Field(default=32, ge=1)
    ports: tuple[int, ...] = (80, 443, 8080, 8443)  # of hosts that are not named in `allow`
    allow: tuple[str, ...] = ()  # "host:port" of places that may be reached wherever they are, such as 127.0.0.1:8080
    proxy_env: VariableName | None = None
    # the environment variable with the URL of a proxy; the proxy then looks names up, so it must refuse private ones

    @field_validator("allow")
    @classmethod
    def _are_places(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for text in allow:
            place(text)
        return allow

    def reach(self, trusted: Iterable[str] = ()) -> Reach:
        return Reach(frozenset(self.ports), frozenset(place(text) for text in (*self.allow, *trusted)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A complete HTTP answer; `cut` when the body went on beyond the limit. `url` is where the redirects ended."""

    url: str
    status: int
    headers: httpx.Headers
    body: bytes
    cut: bool = False

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def charset(self) -> str | None:
        found = [part.strip() for part in self.headers.get("content-type", "").split(";")[1:]]
        named = [part[8:].strip("\"' ") for part in found if part.lower().startswith("charset=")]
        return named[0] if named else None

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait, as the server asked: a number or a date."""
        asked = self.headers.get("retry-after", "").strip()
        if asked.isascii() and asked.isdigit():
            return float(asked)
        try:
            when = email.utils.parsedate_to_datetime(asked)
        except ValueError:
            return None
        return max(0.0, when.timestamp() - time.time())


class Net:
    """A client under `options`; `trusted` are places of the operator ("host:port" or URLs), reached wherever they are.

    One per tool; usable from several event loops. Raises `ToolError`: TIMEOUT past the deadline, FAILED otherwise,
    `transient` where another try may succeed. HTTP error statuses are answers, not errors.
    """

    def __init__(self, options: NetOptions, trusted: Iterable[str] = (), *, resolver: Resolver | None = None) -> None:
        self.options = options
        self.reach = options.reach(trusted)
        self._resolver = resolver or resolve
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None]]] = {}

    async def fetch(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        form: Mapping[str, Any] | None = None,
        redirects: bool = False,
        cut: bool = False,
    ) -> Answer:
        """One request. `cut`: a body beyond the limit is cut there and marked, instead of being an error."""
        client = await self._open()
        options = {"headers": headers, "params": params, "json": json, "data": form, "follow_redirects": redirects}
        with _as_tool_errors(self.options.seconds):
            async with asyncio.timeout(self.options.seconds):
                async with client.stream(method, checked(url), **options) as response:  # type: ignore[arg-type]
                    body, was_cut = await self._read(response)
        if was_cut and not cut:
            raise ToolError(CallStatus.FAILED, f"the answer is longer than {self.options.max_bytes} bytes")
        return Answer(
            url=str(response.url), status=response.status_code, headers=response.headers, body=body, cut=was_cut
        )

    async def check(self, url: str) -> None:
        """Raises what fetching `url` would raise for its address: for URLs that a service fetches in our place."""
        parsed = checked(url)
        self.reach.check_url(parsed)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        if not self.reach.allows(parsed.host, port):
            self.reach.check_addresses(parsed.host, await self._resolver(parsed.host, port))

    async def close(self) -> None:
        """Closes this event loop's connections; those of other loops are closed when these shut down."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session[1].aclose()

    async def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is not None:
            return session[0]
        for known in [known for known in self._sessions if known.is_closed()]:
            del self._sessions[known]
        client = httpx.AsyncClient(
            transport=GuardedTransport(self.options, self.reach, self._resolver),
            timeout=None,  # the request has one deadline: httpx's restart with every byte
            max_redirects=self.options.max_redirects,
            trust_env=False,
            headers={"user-agent": USER_AGENT, "accept-encoding": "gzip"},
            cookies=http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[])),
        )
        guard = _closing(client)
        self._sessions[loop] = (client, guard)
        await anext(guard)
        return client

    async def _read(self, response: httpx.Response) -> tuple[bytes, bool]:
        limit = self.options.max_bytes
        unpacker = _Unpacker(response.headers.get("content-encoding", ""))
        body, received = bytearray(), 0
        async for piece in response.aiter_raw():
            received += len(piece)
            for part in unpacker.parts(piece, limit + 1):
                body += part
                if len(body) > limit:
                    return bytes(body[:limit]), True
            if received > limit:
                return bytes(body), True
        unpacker.finish(received)
        return bytes(body), False


async def _closing(client: httpx.AsyncClient) -> AsyncGenerator[None]:
    """Started once and left suspended: an event loop that shuts down finishes its async generators, hence this one."""
    try:
        yield
    finally:
        await client.aclose()


def checked(url: str) -> httpx.URL:
    """Raises ToolError(BAD_ARGUMENTS) for what is no URL."""
    try:
        return httpx.URL(url.strip())
    except (httpx.InvalidURL, ValueError, TypeError) as error:
        raise ToolError(CallStatus.BAD_ARGUMENTS, f"this is no URL: {url[:200]!r}") from error


async def resolve(host: str, port: int) -> list[Address]:
    """Every address of a name, in the system's order. Raises ToolError when there is none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        transient = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        raise ToolError(CallStatus.FAILED, f"{host}: no such host", transient=transient) from error
    return [ipaddress.ip_address(entry[4][0]) for entry in found]


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that `reach` allows, never to names."""

    def __init__(self, reach: Reach, resolver: Resolver) -> None:
        self._reach = reach
        self._resolver = resolver
        self._sockets: httpcore.AsyncNetworkBackend = httpcore.AnyIOBackend()  # type: ignore[assignment]

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore's signature)
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._addresses(host, port)
        for position, address in enumerate(addresses):
            try:
                return await self._sockets.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except httpcore.ConnectError:
                if position == len(addresses) - 1:
                    raise
        raise AssertionError("unreachable: there is an address, and the last failure is raised")

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise Refused("local sockets are not opened")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> Sequence[Address]:
        literal = parse_literal(host)
        addresses = [literal] if literal is not None else await self._resolver(host, port)
        if not self._reach.allows(host, port):
            self._reach.check_addresses(host, addresses)
        return addresses


class GuardedTransport(httpx.AsyncBaseTransport):
    """httpx over httpcore's pool with the guarded backend: every request, hence every redirect, is checked."""

    def __init__(self, options: NetOptions, reach: Reach, resolver: Resolver) -> None:
        self._reach = reach
        limits = {"max_connections": options.max_connections, "keepalive_expiry": 15.0}
        proxy = None if options.proxy_env is None else os.environ.get(options.proxy_env)
        if proxy is None:
            backend = GuardedBackend(reach, resolver)
            self._pool = httpcore.AsyncConnectionPool(_tls(), network_backend=backend, **limits)
        else:
            self._pool = httpcore.AsyncHTTPProxy(proxy, ssl_context=_tls(), **limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._reach.check_url(request.url)
        url = request.url
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _as_httpx_errors():
            response = await self._pool.handle_async_request(asked)
        if response.status in _REDIRECTS:  # httpx would read and unpack the body, whatever its size
            await _Body(response).aclose()
            return httpx.Response(response.status, headers=response.headers, stream=httpx.ByteStream(b""))
        return httpx.Response(
            response.status, headers=response.headers, stream=_Body(response), extensions=response.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx_errors():
            async for piece in self._response.aiter_stream():
                yield piece

    async def aclose(self) -> None:
        with _as_httpx_errors():
            await self._response.aclose()


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class _Unpacker:
    """Content-Encoding, at most gzip and in one layer: bombs are built of several."""

    def __init__(self, encoding: str) -> None:
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip"):
            raise ToolError(CallStatus.FAILED, f"the answer is packed as {encoding[:40]!r}, which was not asked for")
        self._gzip = zlib.decompressobj(zlib.MAX_WBITS | 16) if name.endswith("gzip") else None

    def parts(self, data: bytes, most: int) -> Iterator[bytes]:
        """What `data` holds, in parts of at most `most` bytes."""
        if self._gzip is None:
            yield data
            return
        try:
            while data:
                yield self._gzip.decompress(data, most)
                data = self._gzip.unconsumed_tail
        except zlib.error as error:
            raise ToolError(CallStatus.FAILED, f"the answer is damaged: {error}", transient=True) from error

    def finish(self, received: int) -> None:
        if self._gzip is not None and received and not self._gzip.eof:
            raise ToolError(CallStatus.FAILED, "the answer is damaged: it ends too early", transient=True)


@contextmanager
def _as_httpx_errors() -> Iterator[None]:
    """httpcore's failures under httpx's names, which are the same."""
    try:
        yield
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError) as error:
        raise getattr(httpx, type(error).__name__, httpx.TransportError)(str(error)) from error


@contextmanager
def _as_tool_errors(seconds: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ToolError(CallStatus.TIMEOUT, f"no complete answer within {seconds:g} s", transient=True) from None
    except httpx.TooManyRedirects as error:
        raise ToolError(CallStatus.FAILED, "the page redirects too often") from error
    except httpx.UnsupportedProtocol as error:
        raise Refused("only http and https URLs can be opened") from error
    except httpx.ConnectError as error:
        raise ToolError(CallStatus.FAILED, "the server cannot be reached", transient=True) from error
    except httpx.HTTPError as error:
        detail = f"the connection broke off ({type(error).__name__})"
        raise ToolError(CallStatus.FAILED, detail, transient=True) from error
    except httpx.InvalidURL as error:
        raise ToolError(CallStatus.FAILED, "the page redirects to something that is no URL") from error
