"""Addresses of servers and where their keys are, as configs give them. No secret may stand in a config: it is stored
with the run, and messages repeat it."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

import httpx
from pydantic import AfterValidator

from posttrain.boundary.redaction import variable_name

VariableName = Annotated[str, AfterValidator(variable_name)]

_SECRET_PARAMETER = re.compile(
    r"(key|token|secret|password|passwd|pwd|auth|signature|credentials?)$|^sig$", re.IGNORECASE
)


def server_url(text: str, example: str, *, keys: str = "an environment variable") -> httpx.URL:
    """The address of an HTTP server; `example` and `keys` (where keys belong) are for the message of the ValueError.

    One with a user, a password or a key among its parameters is refused, and not repeated.
    """
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{text[:200]!r} is no URL: {error}") from error
    if url.userinfo:
        raise ValueError(f"a URL must not hold a user name or password: it would be stored and logged; use {keys}")
    given = [name for name, value in url.params.multi_items() if value]
    parameter = next(filter(_SECRET_PARAMETER.search, given), None)
    if parameter is not None:
        raise ValueError(
            f"a URL must not hold a key (its parameter {parameter!r}): it would be stored and logged; use {keys}"
        )
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"expected a URL such as {example}, got {text[:200]!r}")
    return url


def is_loopback(url: str | httpx.URL) -> bool:
    """Whether the address is this machine's own."""
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
