"""The processes that train one model together: who they are, and the few collectives that the loop needs.

A run on one process has `ALONE`, with which every method gives back what it was given.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Value = TypeVar("Value")
# torch 2.13 has other names for these than 2.11, and warns of the old ones
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
PATIENCE = timedelta(minutes=30)  # the longest that one rank may keep the others waiting in a collective
LETTING_GO_SECONDS = 0.2
PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class DeepSpeedConfig(BaseModel):
    """What DeepSpeed's ZeRO divides among the ranks, and in what portions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Literal[2, 3] = Field(
        default=3, description="2: masters, moments and gradients, every rank has all weights; 3: weights, too"
    )
    bucket_elements: PositiveInt = Field(
        default=50_000_000, description="gradients that are summed over the ranks at once; a buffer of so many is kept"
    )
    persistent_below: NonNegativeInt = Field(
        default=100_000, description="stage 3: parameters of at most so many elements stay whole on every rank"
    )


class MegatronConfig(BaseModel):
    """What Megatron-core divides among the ranks besides layers (`trainer.tensor_parallel`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    expert_parallel: PositiveInt = Field(
        default=1, description="ranks over which the experts of each layer are spread; divides ranks and experts"
    )


class TrainerConfig(BaseModel):
    """How many processes train the models together, and how these are divided among them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: PositiveInt = Field(
        default=1, description="processes on this machine, one GPU each; under torchrun leave it out: it says how many"
    )
    backend: Literal["fsdp2", "ddp", "deepspeed", "megatron"] = Field(
        default="fsdp2",
        description="what divides policy and critic among several ranks (one has nothing to divide); the steps are the "
        "same. ddp: weights stay whole on every rank, masters and moments are divided",
    )
    deepspeed: DeepSpeedConfig | None = Field(default=None, description="for that backend; null = its defaults")
    megatron: MegatronConfig | None = Field(default=None, description="for that backend; null = its defaults")
    tensor_parallel: PositiveInt = Field(
        default=1, description="ranks that hold a part of every layer each; divides heads and key heads"
    )
    sequence_parallel: PositiveInt = Field(
        default=1, description="ranks that share each micro-batch, for episodes whose activations do not fit one"
    )
    sequence_parallel_kind: Literal["auto", "ulysses", "ring"] = Field(
        default="auto",
        description="how these attend: ulysses shares out heads, in a ring keys come round; auto: ulysses if it can",
    )
    offload: bool = Field(
        default=False, description="on GPUs: weights, gradients and moments live in host memory between their uses"
    )
    restarts: NonNegativeInt = Field(
        default=3, description="ranks killed from outside are started again, from the last checkpoint, so many times"
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="let go of gathered layers between forward and backward, and sum gradients after every "
        "micro-batch: less memory, more traffic; false: both once per update",
    )

    @property
    def zero(self) -> DeepSpeedConfig | None:
        """The options of ZeRO; None where `backend` is not deepspeed."""
        return self.deepspeed or DeepSpeedConfig() if self.backend == "deepspeed" else None

    @property
    def divides_weights(self) -> bool:
        """False for ddp alone, where every rank trains all weights and its sampler can run them as they are."""
        return self.backend != "ddp"

    @property
    def expert_parallel(self) -> int:
        """Ranks that hold different experts of the same layers."""
        return 1 if self.megatron is None else self.megatron.expert_parallel

    @property
    def team(self) -> int:
        """Ranks that work on the same micro-batch."""
        return self.tensor_parallel * self.sequence_parallel

    def problem_with(self, ranks: int) -> str | None:
        """Why this many ranks cannot be divided as the config asks for; None when they can."""
        if ranks % self.expert_parallel:
            return (
                f"trainer.megatron.expert_parallel = {self.expert_parallel} does not divide {ranks} "
                f"rank{'s' * (ranks > 1)}; choose a divisor, or set trainer.ranks to a multiple of it"
            )
        if ranks % self.team == 0:
            return None
        asked = {"tensor_parallel": self.tensor_parallel, "sequence_parallel": self.sequence_parallel}
        factors = [f"trainer.{key} = {count}" for key, count in asked.items() if count > 1]
        return (
            f"{' times '.join(factors)} makes teams of {self.team} ranks, which do not divide {ranks} "
            f"rank{'s' * (ranks > 1)}; set trainer.ranks to a multiple of {self.team}, or change these"
        )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a run, and which of them this one is.

    Rank 0 leads: it runs the loop, and the others take part in what concerns the models.
    """

    rank: int = 0
    size: int = 1
    on_this_host: int = 1  # ranks that share the cores of this machine
    mesh: DeviceMesh | None = None  # those that hold shards of the same weights; None for one rank
    tensor: DeviceMesh | None = None  # those that hold parts of the same layers; None where each has them whole
    writers: Any = None  # a process group of its own, on the host, for a thread that writes a checkpoint

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def divided(self, tensor: int) -> Ranks:
        """These ranks with a mesh for tensor parallelism over every `tensor` neighbours; every rank has to call it."""
        if tensor == 1 or self.mesh is None:
            return self
        shape, names = (self.size // tensor, tensor), ("shard", "tensor")
        grid = init_device_mesh(self.mesh.device_type, shape, mesh_dim_names=names)
        return replace(self, mesh=grid["shard"], tensor=grid["tensor"])

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place; every rank gets the same bits.

        Host tensors are summed on the GPUs where there are some: gloo takes 7 ms per megabyte.
        """
        if self.size == 1:
            return values
        over_gpus = self.mesh is not None and self.mesh.device_type == "cuda"
        there = values.cuda() if over_gpus else values
        dist.all_reduce(there)
        return values if there is values else values.copy_(there)

    def share(self, value: Value) -> Value:
        """On rank 0: gives `value` to every other rank, which waits for it in `receive`.

        Ranks are processes of one run: they may pickle for each other.
        """
        if self.size > 1:
            dist.broadcast_object_list([value], src=0)
        return value

    def receive(self) -> Any:
        """On the other ranks: what rank 0 shares."""
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Ranks()


def world_size() -> int:
    """How many ranks the launcher of this process has announced in its environment; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in PLACE) else 1


def join_ranks(device: torch.device) -> Ranks:
    """Meets the other ranks where the environment says; every rank has to call it. Blocks until all are there."""
    if world_size() == 1:
        return ALONE
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    options: dict[str, Any] = {}
    if device.type == "cuda":
        local %= torch.cuda.device_count()
        torch.cuda.set_device(local)
        options["device_id"] = torch.device("cuda", local)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if os.environ["MASTER_ADDR"] == "127.0.0.1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        options |= _meeting(int(os.environ["RANK"]), world_size(), int(os.environ["MASTER_PORT"]))
    dist.init_process_group(backend, timeout=PATIENCE, **options)
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    writers = dist.new_group(backend="gloo", timeout=PATIENCE)
    return Ranks(dist.get_rank(), size, on_this_host, mesh, writers=writers)


def _meeting(rank: int, size: int, port: int) -> dict[str, Any]:
    """Arguments for ranks of one machine, which meet where no other machine sees it: torch would listen at every
    address. Not under torchrun, which keeps the store itself."""
    how: dict[str, Any] = {"is_master": rank == 0, "timeout": PATIENCE}
    if rank == 0:
        how["master_listen_fd"] = socket.create_server(("127.0.0.1", port)).detach()
    store = dist.TCPStore("127.0.0.1", port, size, **how)  # type: ignore[reportPrivateImportUsage]
    return {"store": store, "rank": rank, "world_size": size}


def leave_ranks() -> None:
    """Ends what `join_ranks` began.

    A thread of gloo lets go of a collective's tensors some time after that has returned, and needs the interpreter's
    lock for it. If it finds the interpreter ending, the process is ended by SIGABRT ("terminate called without an
    active exception"), which a launcher takes for a kill from outside. Meshes and sharded layers keep the groups, and
    so their threads, until then; hence the pause, in which the lock is free.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(LETTING_GO_SECONDS)
