"""Servers that listen on this machine's own address, without a token, are still within reach of pages in a browser."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "::1", "localhost")
Message = MutableMapping[str, Any]
Asgi = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
_REFUSAL = b'{"detail": "this server answers programs of its own machine; a page from elsewhere has no business here"}'


def guarded(app: Asgi, host: str, *, has_token: bool) -> Asgi:
    """The application, behind `OwnNames` where nothing else keeps pages away."""
    return app if has_token or host not in LOOPBACK else OwnNames(app)


class OwnNames:
    """Answers 403 to requests of pages from elsewhere: they say so (Origin), or call this machine by a name that was
    made to lead here (Host; DNS rebinding)."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._is_ours(dict(scope["headers"])):
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})
            return
        await self._app(scope, receive, send)

    def _is_ours(self, headers: dict[bytes, bytes]) -> bool:
        origin, host = (headers.get(name, b"").decode("latin-1") for name in (b"origin", b"host"))
        return (not origin or _is_local(origin)) and (not host or _is_local(f"//{host}", any_address=True))


def _is_local(url: str, *, any_address: bool = False) -> bool:
    """any_address: an address cannot be made to lead elsewhere, so as a Host it is as good as a name of ours."""
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback or any_address
    except ValueError:
        return False
