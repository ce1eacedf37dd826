"""Length-prefixed pickles between this program and worker processes that it started itself; never for outside data."""

from __future__ import annotations

import os
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


def claim_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """In a worker: keeps stdin and stdout for messages; foreign code's own reading and printing must not meet them."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, replies
