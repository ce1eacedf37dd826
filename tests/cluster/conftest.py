"""Fixtures of several files here."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from posttrain.cluster.channel import Channel


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel: rank 0's, rank 1's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        one, _ = server.accept()
    channels = Channel(one, 1), Channel(other, 0)
    yield channels
    for channel in channels:
        channel.close()
