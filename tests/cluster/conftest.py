"""Fixtures of several files here."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from posttrain.cluster.line import Line


@pytest.fixture
def pair() -> Iterator[tuple[Line, Line]]:
    """Both ends of a line: rank 0's, rank 1's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        one, _ = server.accept()
    lines = Line(one, 1), Line(other, 0)
    yield lines
    for line in lines:
        line.close()
