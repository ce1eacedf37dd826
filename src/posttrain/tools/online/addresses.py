"""Which addresses a tool may reach: public ones, and what the operator named.

A policy writes URLs, and a page redirects to URLs: neither may reach this machine, its neighbours, or the service that
hands a cloud machine its credentials. What counts is the address that is connected to, however it was spelt, named or
redirected to.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
DEFAULT_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # leads to the IPv4 address in its last 32 bits
_INTERNAL = tuple(  # not for the public, which `ipaddress` learnt late or not at all
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Azure's host, as every machine there sees it
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata
        "192.88.99.0/24",  # relays of 6to4
        "2002::/16",  # 6to4 and, in the next, Teredo: tunnels that end at any IPv4 address
        "2001::/23",
        "64:ff9b:1::/48",  # local-use translation
        "100::/64",
        "3fff::/20",  # documentation
        "5f00::/16",  # segment routing
    )
)
_LOCAL_NAMES = (".localhost", ".local", ".internal", ".localdomain", ".home.arpa")


class Refused(ToolError):
    """The address may not be reached; asking again will not help."""

    def __init__(self, message: str) -> None:
        super().__init__(CallStatus.FAILED, message)


def fault(address: Address) -> str | None:
    """Why this address may not be reached; None for a public one."""
    if address.version == 6:
        if address.ipv4_mapped is not None:
            return fault(address.ipv4_mapped)
        if address in _NAT64:
            return fault(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    checks = {
        "an unspecified": address.is_unspecified,
        "a loopback": address.is_loopback,
        "a link-local": address.is_link_local,
        "a multicast": address.is_multicast,
        "a private": address.is_private or (address.version == 6 and address.is_site_local),
        "a reserved": address.is_reserved or not address.is_global or any(address in network for network in _INTERNAL),
    }
    return next((f"{kind} address" for kind, hit in checks.items() if hit), None)


@dataclass(frozen=True, slots=True)
class Reach:
    """What may be reached: public addresses on `ports`, and the places of `allow` ("host:port") wherever they are."""

    ports: frozenset[int]
    allow: frozenset[tuple[str, int]] = frozenset()

    def check_url(self, url: httpx.URL) -> None:
        """Raises `Refused` for what can be refused without asking a name server."""
        if url.scheme not in DEFAULT_PORTS:
            raise Refused(f"only http and https URLs can be opened, got {url.scheme or 'no scheme'!r}")
        if not url.host:
            raise Refused("the URL names no host")
        if url.userinfo:
            raise Refused("URLs with a user name or password are not opened")
        port = url.port or DEFAULT_PORTS[url.scheme]
        if self.allows(url.host, port):
            return
        if port not in self.ports:
            raise Refused(f"port {port} is not opened; allowed are {', '.join(map(str, sorted(self.ports)))}")
        self.check_name(url.host)

    def check_name(self, host: str) -> None:
        name = host.rstrip(".").lower()
        if "%" in name or not name:
            raise Refused(f"{host!r} is no host name")
        if name == "localhost" or name.endswith(_LOCAL_NAMES):
            raise Refused(f"{host} is a name of a private network, which is not opened")
        literal = parse_literal(name)
        if literal is not None:
            self.check_addresses(host, [literal])

    def check_addresses(self, host: str, addresses: list[Address]) -> None:
        """One bad address spoils the name: who answers with both wants the bad one to be tried."""
        if not addresses:
            raise ToolError(CallStatus.FAILED, f"{host}: no such host")
        for address in addresses:
            kind = fault(address)
            if kind is not None:
                raise Refused(f"{host} leads to {kind}, which is not opened")

    def allows(self, host: str, port: int) -> bool:
        return (host.rstrip(".").lower(), port) in self.allow


def parse_literal(host: str) -> Address | None:
    """The address of a canonical literal; other spellings (0x7f.1, 2130706433) are left to the name lookup."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def place(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or of a URL. Raises ValueError."""
    split = urlsplit(text if "://" in text else f"//{text}")
    port = split.port or DEFAULT_PORTS.get(split.scheme)
    if not split.hostname or port is None:
        raise ValueError(f"expected host:port or a URL, such as 127.0.0.1:8080, got {text!r}")
    return split.hostname.rstrip(".").lower(), port
