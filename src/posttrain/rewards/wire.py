"""Length-prefixed pickles between this program and worker processes that it started itself; never for outside data."""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

_HEADER_BYTES = 8


def send(stream: BinaryIO, message: Any) -> None:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(payload).to_bytes(_HEADER_BYTES, "little") + payload)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """The next message; raises EOFError when the other side is gone."""
    header = stream.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        raise EOFError("the other process closed its pipe")
    size = int.from_bytes(header, "little")
    payload = stream.read(size)
    if len(payload) < size:
        raise EOFError("the other process died while writing")
    return pickle.loads(payload)
