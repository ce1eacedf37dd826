"""What may be reached, by address and by name."""

from __future__ import annotations

import ipaddress

import httpx
import pytest

from posttrain.tools.online.addresses import Reach, Refused, fault, place

REACH = Reach(frozenset({80, 443}), frozenset({("127.0.0.1", 9000), ("stub.test", 80)}))


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("0.0.0.0", "unspecified"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("192.0.0.192", ""),  # Oracle's metadata
        ("198.18.0.1", "private"),
        ("192.88.99.1", "reserved"),
        ("3fff::1", "reserved"),
        ("169.254.169.254", "link-local"),  # metadata of most clouds
        ("100.100.100.200", "reserved"),  # Alibaba's metadata, carrier-grade NAT
        ("168.63.129.16", "reserved"),  # Azure's host
        ("224.0.0.1", "multicast"),
        ("239.255.255.250", "multicast"),
        ("240.0.0.1", "private"),
        ("255.255.255.255", "private"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("fec0::1", "private"),
        ("fc00::1", "private"),
        ("fd00:ec2::254", "private"),  # AWS metadata over IPv6
        ("ff02::1", "multicast"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:169.254.169.254", "link-local"),
        ("::127.0.0.1", "reserved"),
        ("64:ff9b::7f00:1", "loopback"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("64:ff9b:1::1", ""),
        ("2002:7f00:1::", "reserved"),
        ("2002:808:808::1", "reserved"),
        ("2001::1", ""),
        ("2001:db8::1", "private"),
    ],
)
def test_addresses_that_are_not_public(address: str, kind: str):
    found = fault(ipaddress.ip_address(address))
    assert found is not None, address
    assert kind in found  # which kind, where all versions of Python agree on it


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address: str):
    assert fault(ipaddress.ip_address(address)) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "http and https"),
        ("ftp://example.org/", "http and https"),
        ("gopher://example.org:70/_x", "http and https"),
        ("javascript:alert(1)", "http and https"),
        ("http://", "no host"),
        ("http:///path", "no host"),
        ("http://user:pass@example.org/", "password"),
        ("http://example.org@127.0.0.1/", "password"),
        ("http://example.org:22/", "port 22"),
        ("http://example.org:6379/", "port 6379"),
        ("https://example.org:25/", "port 25"),
        ("http://localhost/", "private network"),
        ("http://LOCALHOST./", "private network"),
        ("http://x.localhost/", "private network"),
        ("http://metadata.google.internal/", "private network"),
        ("http://printer.local/", "private network"),
        ("http://127.0.0.1/", "loopback"),
        ("http://127.0.0.1:9001/", "port 9001"),
        ("http://[::1]/", "loopback"),
        ("http://[::ffff:127.0.0.1]/", "loopback"),
        ("http://[::ffff:7f00:1]/", "loopback"),
        ("http://[fe80::1]/", "link-local"),
        ("http://169.254.169.254/latest/meta-data/", "link-local"),
        ("http://0.0.0.0/", "unspecified"),
    ],
)
def test_urls_refused_without_a_name_lookup(url: str, why: str):
    with pytest.raises(Refused, match=why) as refused:
        REACH.check_url(httpx.URL(url))
    assert not refused.value.transient


@pytest.mark.parametrize(
    "url",
    ["https://example.org/", "http://8.8.8.8/", "http://127.0.0.1:9000/x", "http://stub.test/", "http://Stub.Test./"],
)
def test_urls_that_pass(url: str):
    REACH.check_url(httpx.URL(url))


def test_one_bad_address_spoils_a_name():
    addresses = [ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("10.0.0.1")]
    with pytest.raises(Refused, match=r"host\.example leads to a private address"):
        REACH.check_addresses("host.example", addresses)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("http://Stub.Test/path", ("stub.test", 80)),
        ("https://stub.test", ("stub.test", 443)),
        ("[::1]:80", ("::1", 80)),
        ("http://[::1]:81/", ("::1", 81)),
    ],
)
def test_places(text: str, expected: tuple[str, int]):
    assert place(text) == expected


@pytest.mark.parametrize("text", ["stub.test", "", ":80", "http://"])
def test_what_is_no_place(text: str):
    with pytest.raises(ValueError, match="host:port"):
        place(text)
