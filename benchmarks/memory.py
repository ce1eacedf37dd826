"""The plan's estimate of memory beside the measured peak of an update, for a list of layouts; one JSON line each.

    python -m benchmarks.memory --device cpu
    python -m benchmarks.memory --device cuda --ranks 1,2,4           # as many GPUs; larger ones are left out
    python -m benchmarks.memory --device cuda --case 0.5b --case 0.5b_step

Random weights and episodes, nothing sampled (but in the cases called step, which are whole steps with a sampler). Every
case runs in fresh processes. On a GPU the peak is torch.cuda.max_memory_allocated of the rank where it is largest; on a
CPU it is that of torch's own allocator, whose every call the profiler records: what lives before, and the highest sum
of what comes and goes. Optimizer moments are there: an update has been made before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.tiny import write_model
from benchmarks.work import HALF_B, TINY, WORKS

from posttrain.cluster.launch import launch_local
from posttrain.config import RLConfig
from posttrain.loops.credit import PackedStep, credited
from posttrain.loops.data_parallel import dealt
from posttrain.loops.learner import Learner, Models
from posttrain.loops.room import layout_of, setup_of
from posttrain.loops.update import update
from posttrain.packing import Batch, families_of
from posttrain.runs.layout import MicroBatch, SamplerRoom
from posttrain.runs.memory import GIB, estimate
from posttrain.runs.model_sizes import shape_at
from posttrain.task import Score
from posttrain.trainer.attention import layout_of as packed_layout
from posttrain.trainer.policy import Policy
from posttrain.trainer.prefix import shared_layout, use_shared
from posttrain.trainer.ranks import join_ranks, leave_ranks
from posttrain.trajectory import Source, Trajectory

LLAMA_100M: dict[str, Any] = {  # 98 million parameters
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY_LLAMA = LLAMA_100M | {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}
TINY_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4}
TINY_GEMMA = TINY | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 64}
SHAPES = {"tiny": TINY, "tiny_llama": TINY_LLAMA, "tiny_gemma": TINY_GEMMA, "100m": LLAMA_100M, "0.5b": HALF_B}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout, and the episodes of an update; `samples` of each of `prompts`, lengths in tokens."""

    model: str
    dtype: str = "float32"
    ranks: int = 1
    sequence: int = 1
    checkpointing: bool = False
    compiled: bool = True  # on a GPU
    keep_layers: bool = False
    backend: str = "fsdp2"
    offload: bool = False
    critic: bool = False
    kl: bool = False
    lora: int = 0  # rank of adapters on all linear layers
    workers: int = 1
    micro: int = 16384
    prompts: int = 4
    samples: int = 4
    prompt: int = 96
    response: int = 160
    whole_step: bool = False  # sampled by ours, as `benchmarks.step` does

    def config(self, folder: Path, device: str) -> RLConfig:
        algorithm: dict[str, Any] = {"kl_coef": 1e-3 if self.kl else 0.0}
        if self.critic:
            algorithm |= {"advantage": "gae", "std": None, "length": None, "aggregate": "token_mean"}
        longest = self.prompt + self.response
        return RLConfig.model_validate(
            {
                "model": {
                    "path": str(folder),
                    "device": device,
                    "dtype": self.dtype,
                    "gradient_checkpointing": self.checkpointing,
                    "compile": "auto" if self.compiled else False,
                    "lora": {"rank": self.lora} if self.lora else None,
                },
                "data": {"train": "unused"},
                "limits": {
                    "max_episode_tokens": longest,
                    "max_turn_tokens": self.response,
                    "max_prompt_tokens": self.prompt,
                },
                "batch": {
                    "prompts_per_step": self.prompts,
                    "samples_per_prompt": self.samples,
                    "tokens_per_micro_batch": max(self.micro, longest),
                    "cpu_workers": self.workers,
                },
                "algorithm": algorithm,
                "critic": {} if self.critic else None,
                "trainer": {
                    "backend": self.backend,
                    "offload": self.offload,
                    "reshard_after_forward": not self.keep_layers,
                    "sequence_parallel": self.sequence,
                },
            }
        )

    def episodes(self) -> list[Trajectory]:
        """Random tokens of the full lengths; log-probs of a nearly uniform distribution, rewards of 0 and 1."""
        vocabulary, made = SHAPES[self.model]["vocab_size"], list[Trajectory]()
        for number in range(self.prompts * self.samples):
            group, chance = number // self.samples, random.Random(f"{number}")
            prompt = random.Random(group).choices(range(10, vocabulary), k=self.prompt)
            trajectory = Trajectory(task_id=f"{group}", group_id=f"{group}", episode_id=f"{number}")
            trajectory.add_context(prompt, Source.PROMPT)
            sampled = chance.choices(range(10, vocabulary), k=self.response)
            trajectory.add_sampled(sampled, [-10.0] * self.response, 0)
            value = float(number % self.samples == 0)
            trajectory.outcome = Score(value)
            trajectory.rewards = [0.0] * (len(trajectory) - 1) + [value]
            made.append(trajectory)
        return made


SMALL = {"prompts": 4, "samples": 4, "prompt": 64, "response": 64}
FEW = {"prompts": 2, "samples": 2, "prompt": 32, "response": 32}  # bfloat16 is slow on CPUs
CPU_CASES = {
    "tiny": Case(model="tiny", micro=4096, **SMALL),
    "tiny_several": Case(model="tiny", micro=512, **SMALL),
    "tiny_checkpointing": Case(model="tiny", micro=8192, checkpointing=True, **SMALL),
    "tiny_bfloat16": Case(model="tiny", dtype="bfloat16", **FEW),
    "tiny_llama": Case(model="tiny_llama", micro=4096, **SMALL),
    "tiny_llama_bfloat16_checkpointing": Case(model="tiny_llama", dtype="bfloat16", checkpointing=True, **FEW),
    "tiny_gemma": Case(model="tiny_gemma", micro=4096, **SMALL),
    "tiny_ppo": Case(model="tiny", micro=512, critic=True, kl=True, **SMALL),
    "tiny_lora": Case(model="tiny", micro=512, kl=True, lora=8, **SMALL),
    "tiny_lora_bfloat16": Case(model="tiny", dtype="bfloat16", lora=8, **FEW),
    "tiny_2_lora": Case(model="tiny", micro=512, ranks=2, kl=True, lora=8, **SMALL),
    "tiny_2": Case(model="tiny", micro=512, ranks=2, **SMALL),
    "tiny_2_kept": Case(model="tiny", micro=512, ranks=2, keep_layers=True, **SMALL),
    "tiny_2_ddp": Case(model="tiny", micro=512, ranks=2, backend="ddp", **SMALL),
    "tiny_2_checkpointing": Case(model="tiny", micro=512, ranks=2, checkpointing=True, **SMALL),
    "tiny_2_bfloat16": Case(model="tiny", dtype="bfloat16", ranks=2, **FEW),
    "tiny_2_ddp_bfloat16": Case(model="tiny", dtype="bfloat16", ranks=2, backend="ddp", **FEW),
    "tiny_2_ddp_ppo": Case(model="tiny", micro=512, ranks=2, backend="ddp", critic=True, kl=True, **SMALL),
    "tiny_2_ppo": Case(model="tiny", micro=512, ranks=2, critic=True, kl=True, **SMALL),
    "tiny_2_sequence": Case(model="tiny", micro=4096, ranks=2, sequence=2, **SMALL),
    "100m": Case(model="100m", micro=1024, prompts=2, samples=2),
    "100m_checkpointing": Case(model="100m", micro=1024, prompts=2, samples=2, checkpointing=True),
    "100m_lora": Case(model="100m", micro=1024, prompts=2, samples=2, lora=16),
    "100m_bfloat16": Case(model="100m", dtype="bfloat16", **FEW),
    "100m_2": Case(model="100m", micro=1024, prompts=2, samples=2, ranks=2),
    "100m_2_ddp": Case(model="100m", micro=1024, prompts=2, samples=2, ranks=2, backend="ddp"),
    "100m_2_bfloat16": Case(model="100m", dtype="bfloat16", ranks=2, **FEW),
}
HALF = {"model": "0.5b", "dtype": "bfloat16", "prompts": 16, "samples": 8, "prompt": 512, "response": 256}
LONG = HALF | {"prompts": 8, "samples": 4, "prompt": 1024, "response": 7168, "micro": 8192}
CUDA_CASES = {
    "0.5b": Case(**HALF),
    "0.5b_single": Case(**HALF, micro=40960),
    "0.5b_eager": Case(**HALF, compiled=False),
    "0.5b_checkpointing": Case(**HALF, checkpointing=True),
    "0.5b_lora": Case(**HALF, kl=True, lora=32),
    "0.5b_ppo": Case(**HALF, critic=True, kl=True),
    "0.5b_step": Case(**HALF, whole_step=True),
    "0.5b_long": Case(**LONG),
    "0.5b_2": Case(**HALF, ranks=2),
    "0.5b_2_kept": Case(**HALF, ranks=2, keep_layers=True),
    "0.5b_2_ddp": Case(**HALF, ranks=2, backend="ddp"),
    "0.5b_2_checkpointing": Case(**HALF, ranks=2, checkpointing=True),
    "0.5b_2_offload": Case(**HALF, ranks=2, offload=True),
    "0.5b_2_sequence": Case(**LONG, ranks=2, sequence=2),
    "0.5b_4": Case(**HALF, ranks=4),
    "0.5b_4_ddp": Case(**HALF, ranks=4, backend="ddp"),
    "0.5b_4_ppo": Case(**HALF, ranks=4, critic=True, kl=True),
}
CASES = {"cpu": CPU_CASES, "cuda": CUDA_CASES}


# -- one process of a case ---------------------------------------------------------------------------------------------


def as_rank(case: Case, device: str, folder: Path, result: Path) -> None:
    """A process of a case; rank 0 writes the line."""
    found = case_on_this_rank(case, device, folder)
    if int(os.environ.get("RANK", "0")) == 0:
        result.write_text(json.dumps(found))


def case_on_this_rank(case: Case, device: str, folder: Path) -> dict[str, Any]:
    """Measures; what is compared is the rank that needed most, with the plan for the micro-batches of this one."""
    config = case.config(folder, device)
    ranks = join_ranks(torch.device(device))
    learner = Models(config, optimizer_steps=1000).load(ranks)
    packed = PackedStep.of(case.episodes())
    one_update(learner, packed)  # moments, compilers
    peak, parts = (measured_on_cpu if device == "cpu" else measured_on_gpu)(learner, packed)
    hand = dealt([len(part) for part in parts], learner.data_parallel_size)[learner.data_parallel_rank]
    layout = layout_of(config, device, ranks.size)
    setup = replace(
        setup_of(config, (shape_at(str(folder), config.model.lora), None), layout, None),
        micro_batches=tuple(micro_batch(parts[index], learner.policy) for index in hand),
        sampler=SamplerRoom(),
        batch_tokens=sum(map(len, parts)),
    )
    planned = estimate(setup)
    most = torch.tensor(float(peak), dtype=torch.float64)
    if ranks.size > 1:
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, ranks.writers)
    leave_ranks()
    parts_mib = {name: round(size / 2**20, 1) for name, size in planned.worst.parts.items()}
    return line(int(most), planned.torch_bytes) | {"moment": planned.worst.name, "parts_mib": parts_mib}


def line(measured: int, planned: int) -> dict[str, Any]:
    return {
        "measured_gib": round(measured / GIB, 3),
        "planned_gib": round(planned / GIB, 3),
        "error": round(planned / measured - 1, 3),
    }


def one_update(learner: Learner, packed: PackedStep) -> list[Batch]:
    """An update as the loop makes it, but for old log-probs, which the first one leaves; its micro-batches."""
    batch = credited(PackedStep(packed.batch, packed.truncated), learner)
    done = update(learner, batch, step=1)
    return done[-1].parts


def measured_on_gpu(learner: Learner, packed: PackedStep) -> tuple[int, list[Batch]]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    parts = one_update(learner, packed)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), parts


def measured_on_cpu(learner: Learner, packed: PackedStep) -> tuple[int, list[Batch]]:
    """What models and optimizers hold, and the highest sum of what torch's allocator gave since."""
    held = held_bytes(learner)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        parts = one_update(learner, packed)
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = highest = 0
    for _, size in steps:
        level += size
        highest = max(highest, level)
    return held + highest, parts


def held_bytes(learner: Learner) -> int:
    models = [learner.policy, learner.replica, learner.ref, learner.critic]
    tensors: list[Tensor] = [t for model in models if model is not None for t in model.module.parameters()]
    tensors += [] if learner.critic is None else list(learner.critic.head.parameters())
    for optimizer in (learner.optimizer, learner.critic_optimizer):
        if optimizer is not None:
            state = optimizer._adamw.state
            tensors += [*optimizer.masters, *(v for s in state.values() for v in s.values() if isinstance(v, Tensor))]
    local = [getattr(t, "_local_tensor", t) for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def micro_batch(part: Batch, policy: Policy) -> MicroBatch:
    """What the policy makes of it."""
    shared = sum(family.prefix for family in families_of(part)) if policy.computes_prefixes_once else 0
    saved = sum((len(f.segments) - 1) * f.prefix for f in families_of(part)) if shared else 0
    rows = len(part) - saved
    if policy.device.type == "cpu":  # buckets are padded
        found = shared_layout(part, policy.device) if use_shared(policy.device, policy.dtype, policy.module) else None
        rows = len((found or packed_layout(part.lengths, policy.device)).token_of_row)
    return MicroBatch(rows=rows, tokens=len(part), read=int(part.loss_mask.sum()), shared=shared)


def whole_step(folder: Path, device: str) -> dict[str, Any]:
    """Rollout and update by `benchmarks.ours`, which is what docs/performance.md tells of; the plan is the config's."""
    from benchmarks.ours import Ours

    from posttrain.loops.room import room_of

    work, kv = WORKS["h100"], {"kv_gib": 8.0}
    ours = Ours(folder, work, model={"device": device, "dtype": "bfloat16"}, batch={"tokens_per_micro_batch": 16384},
                sampler=kv)  # fmt: skip
    for round_ in range(2):
        ours.step(round_)
    torch.cuda.reset_peak_memory_stats()
    ours.step(2)
    longest = work.prompt_tokens + work.most_tokens
    limits = {"max_prompt_tokens": work.prompt_tokens, "max_turn_tokens": work.most_tokens}
    record = ours.config.model_dump() | {
        "limits": limits | {"max_episode_tokens": longest}, "sampler": {"options": kv},
    }  # fmt: skip
    size = torch.cuda.get_device_properties(0).total_memory / GIB
    room = room_of(RLConfig.model_validate(record), gpu_gib=size)
    return line(torch.cuda.max_memory_allocated(), room.estimate.torch_bytes) | {"moment": room.estimate.worst.name}


# -- all cases ---------------------------------------------------------------------------------------------------------


def measured(name: str, case: Case, device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder, result = Path(temporary) / "model", Path(temporary) / "result.json"
        write_model(folder, SHAPES[case.model], device)
        command = [sys.executable, str(Path(__file__).resolve()), "--device", device, "--case", name]
        command += ["--rank", str(folder), str(result)]
        status = (
            launch_local(command, case.ranks) if case.ranks > 1 else subprocess.run(command, check=False).returncode
        )
        if status:
            return {"case": name, "failed": status}
        return {"case": name, "ranks": case.ranks, "model": case.model, "dtype": case.dtype} | json.loads(
            result.read_text()
        )


def chosen(given: argparse.Namespace) -> dict[str, Case]:
    cases = CASES[given.device]
    counts = set(map(int, given.ranks.split(",")))
    unknown = set(given.case) - set(cases)
    if unknown:
        sys.exit(f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    return {n: c for n, c in cases.items() if (n in given.case if given.case else c.ranks in counts)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--case", action="append", default=[], help="may be given again; default: all")
    parser.add_argument("--ranks", default="1,2,4", help="of the cases to run")
    parser.add_argument("--rank", nargs=2, type=Path, help=argparse.SUPPRESS)  # this is one: model, result
    given = parser.parse_args(arguments)
    if given.rank is not None:
        folder, result = given.rank
        case = CASES[given.device][given.case[0]]
        if case.whole_step:
            result.write_text(json.dumps(whole_step(folder, given.device)))
        else:
            as_rank(case, given.device, folder, result)
        return
    for name, case in chosen(given).items():
        print(json.dumps(measured(name, case, given.device)), flush=True)


if __name__ == "__main__":
    main()
