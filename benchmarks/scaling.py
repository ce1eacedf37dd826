"""The training part of a step on 1, 2, 4 .. ranks: credit and update of the same made-up episodes, nothing sampled.

    python benchmarks/scaling.py --ranks 1,2,4 --model MODEL_DIR --device cuda
    python benchmarks/scaling.py --ranks 1,2 --episodes 16 --response 48 --rounds 2     # a small try on a CPU
    python benchmarks/scaling.py --ranks 1,2,4 --backend ddp --model MODEL_DIR --device cuda
    python benchmarks/scaling.py --ranks 2,4 --tensor 2 --model MODEL_DIR --device cuda             # tensor parallel
    python benchmarks/scaling.py --ranks 4 --sequence 4 --ring --response 16384 --episodes 16 --model MODEL_DIR ..

Every number of ranks runs in fresh processes; the first round is a warm-up. Tokens per second count all tokens of the
batch; efficiency is the speed divided by that of the first number of ranks, per rank. The work is the same for all
(strong scaling), or grows with the ranks (--weak). GiB is the most that rank 0 held on its GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from posttrain.cluster.launch import launch_local
from posttrain.config import RLConfig, parse_config
from posttrain.loops.credit import PackedStep, credited
from posttrain.loops.learner import Learner, Models
from posttrain.loops.update import update
from posttrain.task import Score
from posttrain.trainer.loading import load_config, model_path, pick_device
from posttrain.trainer.ranks import join_ranks, leave_ranks
from posttrain.trajectory import Source, Trajectory


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, by commas")
    parser.add_argument("--model", default="tiny_search_base", help="a model directory or a packaged model")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=128, help="of all prompts together")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--response", type=int, default=512, help="tokens at most; lengths vary from a quarter of it")
    parser.add_argument("--micro", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--critic", action="store_true", help="PPO instead of GRPO")
    parser.add_argument("--kl", action="store_true", help="with a reference")
    parser.add_argument("--checkpointing", action="store_true", help="of activations")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--keep-layers", action="store_true", help="trainer.reshard_after_forward: false")
    parser.add_argument("--backend", default="fsdp2", help="trainer.backend")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that hold a part of every layer; divides --ranks")
    parser.add_argument("--sequence", type=int, default=1, help="ranks that share each micro-batch; divides --ranks")
    parser.add_argument("--ring", action="store_true", help="these attend in a ring, whatever the number of heads")
    parser.add_argument("--weak", action="store_true", help="as many episodes for each rank")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # this is a rank; where rank 0 writes
    return parser.parse_args()


def config_of(given: argparse.Namespace) -> RLConfig:
    algorithm: dict[str, Any] = {"kl_coef": 1e-3 if given.kl else 0.0}
    if given.critic:
        algorithm |= {"advantage": "gae", "std": None, "length": None, "aggregate": "token_mean"}
    longest = given.prompt + given.response
    config = {
        "model": {
            "path": given.model, "device": given.device, "dtype": given.dtype,
            "gradient_checkpointing": given.checkpointing, "compile": False if given.no_compile else "auto",
        },
        "data": {"train": "unused"},
        "limits": {"max_episode_tokens": longest, "max_turn_tokens": given.response, "max_prompt_tokens": given.prompt},
        "batch": {
            "prompts_per_step": given.prompts, "samples_per_prompt": max(2, given.episodes // given.prompts),
            "tokens_per_micro_batch": max(given.micro, longest),
        },
        "algorithm": algorithm,
        "critic": {} if given.critic else None,
        "trainer": {
            "backend": given.backend, "offload": given.offload, "reshard_after_forward": not given.keep_layers,
            "tensor_parallel": given.tensor, "sequence_parallel": given.sequence,
            "sequence_parallel_kind": "ring" if given.ring else "auto",
        },
    }  # fmt: skip
    return parse_config(RLConfig, config)


def episodes(given: argparse.Namespace, count: int, vocabulary: int) -> list[Trajectory]:
    """Random tokens; log-probs of a distribution that is nearly uniform, rewards of 0 and 1."""
    chance = random.Random(0)
    made: list[Trajectory] = []
    for number in range(count):
        group = number % given.prompts
        prompt = random.Random(group).choices(range(10, vocabulary), k=given.prompt)
        length = chance.randint(max(1, given.response // 4), given.response)
        trajectory = Trajectory(task_id=f"{group}", group_id=f"{group}", episode_id=f"{number}")
        trajectory.add_context(prompt, Source.PROMPT)
        trajectory.add_sampled(chance.choices(range(10, vocabulary), k=length), [-10.0] * length, 0)
        value = float(chance.random() < 0.5)
        trajectory.outcome = Score(value)
        trajectory.rewards = [0.0] * (len(trajectory) - 1) + [value]
        made.append(trajectory)
    return sorted(made, key=lambda t: (t.group_id, t.episode_id))


def as_rank(given: argparse.Namespace) -> None:
    """One of the ranks: rounds of the training part; rank 0 writes what they took."""
    config = config_of(given)
    ranks = join_ranks(pick_device(given.device))
    learner = Models(config, optimizer_steps=1000).load(ranks)
    count = given.episodes * (ranks.size if given.weak else 1)
    vocabulary = load_config(model_path(given.model)).get_text_config().vocab_size
    made = episodes(given, count, vocabulary)
    seconds = [one_round(learner, made, number) for number in range(given.rounds + 1)][1:]
    best, tokens = min(seconds), sum(map(len, made))
    found = {"ranks": ranks.size, "tokens": tokens, "seconds": seconds, "tokens/s": tokens / best}
    if learner.policy.device.type == "cuda":
        found |= {"GiB": torch.cuda.max_memory_allocated() / 2**30, "device": torch.cuda.get_device_name()}
    if ranks.leads:
        given.rank.write_text(json.dumps(found))
    leave_ranks()


def one_round(learner: Learner, made: list[Trajectory], number: int) -> float:
    packed = PackedStep.of(made)
    wait(learner)
    started = time.perf_counter()
    update(learner, credited(packed, learner), step=number + 1)
    learner.publish()
    wait(learner)
    return time.perf_counter() - started


def wait(learner: Learner) -> None:
    """Until all ranks are here, and their GPUs are done."""
    if learner.policy.device.type == "cuda":
        torch.cuda.synchronize()
    learner.ranks.sum(torch.zeros(1))


def measured(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, *sys.argv, "--rank", str(result)]
        status = launch_local(command, count) if count > 1 else subprocess.run(command, check=False).returncode
        if status:
            sys.exit(f"{count} ranks: exit status {status}")
        return json.loads(result.read_text())


def main() -> None:
    given = options()
    if given.rank is not None:
        as_rank(given)
        return
    first: dict[str, Any] | None = None
    for count in map(int, given.ranks.split(",")):
        found = measured(count)
        first = first or found
        per_rank = [row["tokens/s"] / row["ranks"] for row in (found, first)]
        found["efficiency"] = per_rank[0] / per_rank[1]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
