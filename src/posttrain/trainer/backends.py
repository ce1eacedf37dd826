"""Which settings of a run each backend of the trainer does not support, told before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.trainer.ranks import TrainerConfig

FIX = "set trainer.backend: fsdp2, or leave it out"
Problem = tuple[str, str]  # (config key, what is wrong and what to do)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNeeds:
    """What a run asks for outside of `trainer`."""

    samplers_apart: bool
    shards_on_disk: bool  # checkpoint.sharded
    compiles: bool  # model.compile: true
    adapters: bool
    critic: bool


def backend_problem(trainer: TrainerConfig, needs: RunNeeds) -> Problem | None:
    """The first setting that the chosen backend does not support; None when there is none."""
    options = {"deepspeed": trainer.deepspeed, "megatron": trainer.megatron}
    for name, given in options.items():
        if given is not None and trainer.backend != name:
            return f"trainer.{name}", f"trainer.backend is {trainer.backend}, which has no use for it; set {name} there"
    if trainer.backend == "fsdp2":
        return None
    of_backend = {"ddp": _of_ddp, "deepspeed": _of_deepspeed, "megatron": _of_megatron}[trainer.backend]
    found = of_backend(trainer, needs)
    return next(((key, message) for wrong, key, message in found if wrong), None)


def _of_ddp(trainer: TrainerConfig, needs: RunNeeds) -> list[tuple[bool, str, str]]:
    return [
        (trainer.tensor_parallel > 1, "trainer.tensor_parallel", f"ddp has every layer whole on every rank; {FIX}"),
        (needs.shards_on_disk, "checkpoint.sharded", f"what ddp divides is gathered to be written; {FIX}"),
        (trainer.offload, "trainer.offload", f"what ddp divides stays on the GPU; {FIX}"),
        (
            not trainer.reshard_after_forward,
            "trainer.reshard_after_forward",
            f"with ddp layers are always there; {FIX}",
        ),
    ]


def _of_deepspeed(trainer: TrainerConfig, needs: RunNeeds) -> list[tuple[bool, str, str]]:
    stage = 3 if trainer.zero is None else trainer.zero.stage
    return [
        (trainer.tensor_parallel > 1, "trainer.tensor_parallel", f"DeepSpeed divides no layers; {FIX}"),
        (needs.samplers_apart, "cluster.samplers", f"what DeepSpeed divides is not sent to samplers apart; {FIX}"),
        (needs.shards_on_disk, "checkpoint.sharded", f"DeepSpeed's parts are gathered to be written; {FIX}"),
        (
            not trainer.reshard_after_forward,
            "trainer.reshard_after_forward",
            f"with DeepSpeed that is trainer.deepspeed.stage: 2; {FIX}",
        ),
        (
            stage == 2 and trainer.offload,
            "trainer.offload",
            "DeepSpeed's stage 2 takes no step after one that was skipped; set trainer.deepspeed.stage: 3",
        ),
        (
            stage == 3 and needs.compiles,
            "model.compile",
            f"layers that ZeRO-3 gathers part by part are not compiled; {FIX}",
        ),
    ]


def _of_megatron(trainer: TrainerConfig, needs: RunNeeds) -> list[tuple[bool, str, str]]:
    return [
        (needs.critic, "critic", f"Megatron-core's layers train the policy alone; {FIX}"),
        (needs.adapters, "model.lora", f"Megatron-core's layers take no adapters; {FIX}"),
        (needs.compiles, "model.compile", f"Megatron-core's layers are not compiled; {FIX}"),
        (needs.shards_on_disk, "checkpoint.sharded", f"Megatron-core's parts are gathered to be written; {FIX}"),
        (
            trainer.sequence_parallel > 1,
            "trainer.sequence_parallel",
            f"Megatron-core's layers share no micro-batch but in teams of trainer.tensor_parallel; {FIX}",
        ),
        (trainer.offload, "trainer.offload", f"Megatron-core's parts stay on the GPU; {FIX}"),
        (
            not trainer.reshard_after_forward,
            "trainer.reshard_after_forward",
            f"Megatron-core's layers are never gathered; {FIX}",
        ),
    ]
