from __future__ import annotations

import asyncio
from typing import Any

import pytest

from posttrain.boundary.local import Message, OwnNames, guarded


async def app(scope: Message, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def status(**headers: str) -> int:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(OwnNames(app)({"type": "http", "headers": pairs}, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "x.localhost", "10.0.0.7:80", ""]
)
def test_programs_of_this_machine_are_answered(host: str):
    """An address is no name that somebody could let lead here: a forwarded port may use any."""
    assert status(host=host) == 200
    assert status(host=host, origin="http://localhost:5173") == 200
    assert status(host=host, origin="http://127.0.0.1:8080") == 200


@pytest.mark.parametrize(
    "host", ["attacker.example:8000", "127.0.0.1.nip.io", "localhost.attacker.example", "localhost.", "[::1", "a@b:x"]
)
def test_a_name_that_was_made_to_lead_here_is_refused(host: str):
    assert status(host=host) == 403


@pytest.mark.parametrize("origin", ["http://attacker.example", "https://10.0.0.7", "null", "http://[", "file://"])
def test_a_page_from_elsewhere_is_refused(origin: str):
    assert status(host="127.0.0.1:8000", origin=origin) == 403


def test_a_token_keeps_pages_away_itself():
    assert guarded(app, "127.0.0.1", has_token=True) is app
    assert guarded(app, "0.0.0.0", has_token=False) is app  # whoever opens it to all wants other names
    assert isinstance(guarded(app, "localhost", has_token=False), OwnNames)
