"""Buckets of weights in memory that other processes of this machine see: CUDA IPC on a GPU, shared memory on a CPU.

Two buffers (a shelf) are used in turn. The giver fills one while takers still copy from the other. It fills a buffer
only after all takers have reported that they have copied what was in it, and takers read it only after the giver has
reported that it is full. Both synchronise their device before they report, because messages between processes know
nothing of CUDA streams. A bucket larger than a buffer goes in pieces. Messages are plain data; no pickle is read.

Memory of a CPU has no name, and so is gone with the last process that holds it, however that ends.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from posttrain.weights.buckets import Named, Place, view

Buckets = Sequence[Sequence[Place]]
BUFFERS = 2
IN_MEMORY = Path("/dev/shm")  # where Linux keeps POSIX shared memory


class NotShared(RuntimeError):
    """The memory of another process cannot be opened here."""


class Shelf:
    """BUFFERS buffers of `size` bytes on `device`."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.size = size
        self._files: list[IO[bytes]] = []
        self.buffers = [self._buffer(device) for _ in range(BUFFERS)]

    def tickets(self) -> list[dict[str, Any]]:
        """JSON values with which `opened` maps the buffers in one other process; call it once for every process."""
        if self._files:
            paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
            return [{"file": path, "size": self.size} for path in paths]
        return [{"cuda": _plain(buffer.untyped_storage()._share_cuda_()[1:])} for buffer in self.buffers]

    def close(self) -> None:
        """After this no process can open the buffers any more; a process that has opened them keeps them."""
        self.buffers.clear()
        for file in self._files:
            file.close()

    def _buffer(self, device: torch.device) -> Tensor:
        if device.type == "cuda":
            return torch.empty(self.size, dtype=torch.uint8, device=device)
        file = tempfile.TemporaryFile(dir=IN_MEMORY if IN_MEMORY.is_dir() else None)  # noqa: SIM115 -- see `close`
        _reserve(file, self.size)
        self._files.append(file)
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=self.size, dtype=torch.uint8)


def _reserve(file: IO[bytes], size: int) -> None:
    """Takes the memory now: where there is less, its first use would kill the process. Raises NotShared."""
    try:
        os.posix_fallocate(file.fileno(), 0, size) if hasattr(os, "posix_fallocate") else file.truncate(size)
    except OSError as error:
        file.close()
        raise NotShared(
            f"no {size / 2**20:.0f} MiB of shared memory for weights ({error.strerror}); enlarge {IN_MEMORY} "
            "(docker run --shm-size), or set sampler.transport to broadcast or disk"
        ) from error


def opened(ticket: dict[str, Any]) -> Tensor:
    """The buffer, as this process sees it; on a GPU as memory of the current device, whichever it lies on.

    Raises NotShared.
    """
    try:
        if "file" in ticket:
            return torch.from_file(ticket["file"], shared=True, size=ticket["size"], dtype=torch.uint8)
        device = torch.cuda.current_device()
        storage = torch.UntypedStorage._new_shared_cuda(device, *_unplain(ticket["cuda"]))
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise NotShared(
            f"buffers of rank 0 cannot be opened here ({error}); both processes must run on one machine, in one "
            "container, and GPUs must reach each other; else set sampler.transport to broadcast or disk"
        ) from error


def collect() -> None:
    """Frees the buffers of shelves that are closed and that no other process holds any more."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()


def hand_over(
    buckets: Buckets, tensors: Iterator[Named], shelf: Shelf, say: Callable[[int], Callable[[], object]]
) -> None:
    """All tensors, which come in the order of `buckets`.

    say: tells all takers that the next piece lies in this buffer; what it returns waits until all have copied it.
    """
    outstanding = deque[Callable[[], object]]()
    number = 0
    for bucket in buckets:
        held = [_bytes(next(tensors), place) for place in bucket]
        for start, stop in _pieces(bucket, shelf.size):
            if len(outstanding) == BUFFERS:
                outstanding.popleft()()
            buffer = shelf.buffers[number % BUFFERS]
            for place, data in zip(bucket, held, strict=True):
                first, last = max(start, place.start), min(stop, place.stop)
                if first < last:
                    buffer[first - start : last - start].copy_(data[first - place.start : last - place.start])
            _finish(buffer.device)
            outstanding.append(say(number % BUFFERS))
            number += 1
    for taken in outstanding:
        taken()


def take_over(
    buckets: Buckets, buffers: Sequence[Tensor], hear: Callable[[], tuple[int, Callable[[], object]]]
) -> Iterator[Named]:
    """What `hand_over` gives. Every bucket is memory of this process: whoever keeps a tensor keeps its bucket.

    hear: waits until the next piece lies there; (in which buffer, what says that it has been copied).
    """
    for bucket in buckets:
        own = torch.empty(bucket[-1].stop, dtype=torch.uint8, device=buffers[0].device)
        for start, stop in _pieces(bucket, len(buffers[0])):
            number, done = hear()
            own[start:stop].copy_(buffers[number][: stop - start])
            _finish(own.device)
            done()
        for place in bucket:
            yield place.name, view(own, place)


def _pieces(bucket: Sequence[Place], size: int) -> list[tuple[int, int]]:
    """(start, stop) in the bucket, of at most `size` bytes each."""
    end = bucket[-1].stop
    return [(start, min(start + size, end)) for start in range(0, end, size)]


def _bytes(named: Named, place: Place) -> Tensor:
    name, tensor = named
    assert name == place.name, f"{name} came where {place.name} was announced"
    return tensor.to(place.dtype).contiguous().reshape(-1).view(torch.uint8)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _plain(handle: Sequence[Any]) -> list[Any]:
    return [{"hex": part.hex()} if isinstance(part, bytes) else part for part in handle]


def _unplain(handle: Sequence[Any]) -> list[Any]:
    return [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle]
