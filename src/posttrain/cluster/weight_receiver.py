"""How new weights get into the process of a sampler: the other end of `weight_sender.py`, for every transport.

What breaks off a transfer is heard on the channel's thread: loading weights may block every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from posttrain.cluster.channel import Channel
from posttrain.sampler.own_copy import OwnCopy
from posttrain.sampler.vllm import VllmSampler
from posttrain.weights.buckets import Group, connect, open_group, read_buckets, receive
from posttrain.weights.shared import opened, take_over

Engine = OwnCopy | VllmSampler
Order = dict[str, Any]


class TransferReceiver:
    """Weights for `engine`, as rank 0 at the other end of `channel` gives them."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self.engine, self.channel = engine, channel
        self._group: Group | None = None
        self._buffers: list[Tensor] = []  # memory of rank 0
        self._pieces = SimpleQueue[Order | None]()  # what has been said of the transfer that goes on

    def hear(self, said: Order | None) -> bool:
        """Whether this was all for the transfer that goes on. None: rank 0 is gone. On the thread of the channel."""
        if said is not None and said.get("do") == "piece":
            self._pieces.put(said)
            return True
        group = self._group
        if group is not None and (said is None or said.get("meet") is not None):
            self._leave(group)  # another one comes, so this one has broken, or it has done its part
        if said is None or said.get("do") == "weights":
            self._pieces.put(None)
            self._pieces = SimpleQueue()
        if said is not None and "buckets" in said:
            said["pieces"] = self._pieces
        return False

    def load(self, order: Mapping[str, Any]) -> None:
        """As the order says. Raises what goes wrong, and RuntimeError when another transfer begins meanwhile."""
        version = int(order["version"])
        how = {"rank": order["rank"]} if order["rank"] else {}  # only an engine that knows adapters is given it
        if "folder" in order:
            self.engine.load_files(order["folder"], version, **how)
        elif "buckets" in order:
            self.engine.load(self._from_memory(order), version, **how)
        else:
            group = self._met(order["meet"])
            try:
                self.engine.load(receive(group), version, **how)
            except BaseException:
                self._leave(group)  # nothing more is received here, and rank 0 would send on for minutes
                raise

    def close(self) -> None:
        """Lets go of memory of rank 0, before the channel is closed: rank 0 waits for that, and then frees it."""
        self._buffers.clear()

    def _from_memory(self, order: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        if order["tickets"]:
            self._buffers = [opened(ticket) for ticket in order["tickets"]]
        pieces: SimpleQueue[Order | None] = order["pieces"]

        def hear() -> tuple[int, Callable[[], object]]:
            said = pieces.get()
            if said is None:
                raise RuntimeError("rank 0 gives up this transfer, or is gone")
            return said["buffer"], lambda: self.channel.send({"reply": said["reply"]})

        return take_over(read_buckets(order["buckets"]), self._buffers, hear)

    def _met(self, meet: Mapping[str, Any] | None) -> Group:
        """A new group, or with None the last one."""
        if meet is not None:
            self._meet(meet)
        group = self._group
        if group is None:
            raise RuntimeError("another process group was called for meanwhile")
        return group

    def _leave(self, group: Group) -> None:
        """Who waits in it gets an error. Another one, for the next transfer, may be there already."""
        if self._group is group:
            self._group = None
        group.abort()

    def _meet(self, meet: Mapping[str, Any]) -> None:
        if meet["backend"] == "nccl":
            torch.cuda.set_device(0)  # the only one that this process sees; the choice is a thread's own
        store = connect(meet["host"], meet["port"], meet["world"])
        self._group = open_group(store, rank=meet["rank"], world=meet["world"], backend=meet["backend"])
