from __future__ import annotations

import pytest

from posttrain.boundary.urls import is_loopback, server_url

SECRET = "s3cret-0123456789"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host/",
        f"http://{SECRET}@host/",
        f"http://host/?api_key={SECRET}",
        f"http://host/mcp?x=1&exaApiKey={SECRET}",
        f"https://host/?access_token={SECRET}",
        f"https://host/?X-Amz-Signature={SECRET}",
        f"https://host/?client-secret={SECRET}",
        f"ftp://host/?key={SECRET}",
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(url: str):
    with pytest.raises(ValueError, match="must not hold a") as refused:
        server_url(url, "http://127.0.0.1:8000", keys="key_env")
    assert SECRET not in str(refused.value)
    assert "key_env" in str(refused.value)


@pytest.mark.parametrize("url", ["ftp://x/y", "127.0.0.1:80", "", "http://", "file:///etc/passwd", "http://[::1", "x"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(ValueError, match="URL"):
        server_url(url, "http://127.0.0.1:8000")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://host/v1?version=3", "http://[::1]:1/x?key="])
def test_addresses_of_servers(url: str):
    assert str(server_url(url, "")) == url


def test_this_machine():
    own = ["http://127.0.0.1:1", "http://localhost/x", "http://[::1]:3", "http://127.9.9.9"]
    assert all(map(is_loopback, own))
    assert not any(map(is_loopback, ["http://10.0.0.1", "http://localhost.example", "https://example.org"]))
