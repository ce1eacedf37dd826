"""Named tensors through a process group, a bucket at a time: one broadcast of bytes per bucket, whatever the dtypes.

Sender and receivers need no common code path around it: the sender says first what comes (names, shapes, dtypes), so
that a receiver knows every bucket before it arrives. Works on gloo (CPU) and NCCL (CUDA). Knows no model.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, distributed

Named = tuple[str, Tensor]  # a tensor and its name in Hugging Face layout
BUCKET_BYTES = 64 << 20
JOIN = timedelta(seconds=60)
TRANSFER = timedelta(seconds=600)
ALIGNMENT = 16  # bytes: a view of another dtype must begin at a multiple of its size


@dataclass(slots=True, eq=False)
class Group:
    """A process group apart from torch's default one, and where its tensors live. Rank 0 sends."""

    processes: Any  # a torch.distributed process group; None after `abort`
    device: torch.device

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0, in place. Raises RuntimeError when the group is broken."""
        if self.processes is None:
            raise RuntimeError("the process group has been left")
        self.processes.broadcast(tensor, 0).wait()

    def abort(self) -> None:
        """Ends the group: whoever waits in a collective of it, here or in another process, gets an error.

        Gloo's own abort does not interrupt waiting processes. Its connections close once nothing refers to the group,
        and the other processes see that at once.
        """
        processes, self.processes = self.processes, None
        if processes is not None:
            processes.abort()


def listen(host: str, world: int) -> Any:
    """The store at which the members of a group meet; `store.port` is to be told to the others.

    Members of one machine meet at an address that no other machine sees, where torch would listen at all.
    """
    how: dict[str, Any] = {"port": 0, "is_master": True, "timeout": JOIN, "wait_for_workers": False}
    if host == "127.0.0.1":
        server = socket.create_server((host, 0))
        how |= {"port": int(server.getsockname()[1]), "master_listen_fd": server.detach()}
    return distributed.TCPStore(host, world_size=world, **how)  # type: ignore[reportPrivateImportUsage]


def connect(host: str, port: int, world: int) -> Any:
    """The store of the process that called `listen`."""
    return distributed.TCPStore(host, port, world, is_master=False, timeout=JOIN)  # type: ignore[reportPrivateImportUsage]


def open_group(store: Any, *, rank: int, world: int, backend: str) -> Group:
    """Waits until all members are there. backend: gloo or nccl.

    Several groups may live in one process, beside torch's own. Raises ValueError for another backend.
    """
    if backend == "gloo":
        return Group(distributed.ProcessGroupGloo(store, rank, world, TRANSFER), torch.device("cpu"))
    if backend == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = TRANSFER
        return Group(distributed.ProcessGroupNCCL(store, rank, world, options), device)
    raise ValueError(f"weights are broadcast by gloo or nccl, not by {backend!r}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: bytes `start` to `stop` of its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


def layout(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], bucket_bytes: int) -> list[list[Place]]:
    """Buckets of at most `bucket_bytes`, in the order given; a tensor larger than that has a bucket of its own."""
    buckets: list[list[Place]] = []
    end = bucket_bytes
    for name, shape, dtype in tensors:
        size = torch.Size(shape).numel() * dtype.itemsize
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if not buckets or start + size > bucket_bytes:
            buckets.append([])
            start = 0
        end = start + size
        buckets[-1].append(Place(name, tuple(shape), dtype, start, end))
    return buckets


def send(tensors: Sequence[Named], group: Group, bucket_bytes: int = BUCKET_BYTES) -> int:
    """Broadcasts all tensors from this process, which is rank 0; returns the bytes sent."""
    return send_in_order([(n, t.shape, t.dtype) for n, t in tensors], iter(tensors), group, bucket_bytes)


def send_in_order(
    described: Iterable[tuple[str, Sequence[int], torch.dtype]],
    tensors: Iterator[Named],
    group: Group,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """As `send`, for tensors that come one at a time, as `described` and in its order; full buckets go at once."""
    buckets = layout(described, bucket_bytes)
    _send_text(json.dumps(as_json(buckets)), group)
    for bucket in buckets:
        buffer = torch.empty(bucket[-1].stop, dtype=torch.uint8, device=group.device)
        for place, (name, tensor) in zip(bucket, tensors, strict=False):
            assert name == place.name, f"{name} came where {place.name} was announced"
            view(buffer, place).copy_(tensor)
        group.broadcast(buffer)
    return sum(bucket[-1].stop for bucket in buckets)


def receive(group: Group) -> Iterator[Named]:
    """What rank 0 sends. Every bucket is memory of its own: whoever keeps a tensor keeps its bucket."""
    for bucket in read_buckets(json.loads(_receive_text(group))):
        buffer = torch.empty(bucket[-1].stop, dtype=torch.uint8, device=group.device)
        group.broadcast(buffer)
        for place in bucket:
            yield place.name, view(buffer, place)


def tensors_in(folder: Path) -> Iterator[Named]:
    """The tensors of a model in Hugging Face layout, one at a time; other safetensors beside it are left alone."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield name, file.get_tensor(name)


def view(buffer: Tensor, place: Place) -> Tensor:
    """The tensor that lies there, in the memory of its bucket."""
    return buffer[place.start : place.stop].view(place.dtype).view(place.shape)


def as_json(buckets: list[list[Place]]) -> list[list[Any]]:
    """For another process; `read_buckets` reads it."""
    return [[[p.name, p.shape, str(p.dtype).removeprefix("torch."), p.start, p.stop] for p in b] for b in buckets]


def read_buckets(described: list[list[Any]]) -> list[list[Place]]:
    return [
        [Place(name, tuple(shape), getattr(torch, dtype), start, stop) for name, shape, dtype, start, stop in bucket]
        for bucket in described
    ]


def _send_text(text: str, group: Group) -> None:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=group.device)
    group.broadcast(torch.tensor([len(data)], dtype=torch.long, device=group.device))
    group.broadcast(data)


def _receive_text(group: Group) -> str:
    length = torch.zeros(1, dtype=torch.long, device=group.device)
    group.broadcast(length)
    data = torch.empty(int(length), dtype=torch.uint8, device=group.device)
    group.broadcast(data)
    return bytes(data.cpu().numpy()).decode()
