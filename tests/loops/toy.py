"""Small real runs: the packaged model, a handful of questions, rewards written in a file beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.config import RLConfig, parse_config
from posttrain.loops import rl

QUESTIONS = ("Where was Bafi Gole born?", "Who founded Doli Works?", "Which region is Namosi in?", "Who is the mayor?")

REWARDS = '''
import zlib

def noise(episode, task):
    """Differs from episode to episode."""
    return zlib.crc32(episode.final_text.encode()) % 1000 / 1000

def short(episode, task):
    return -float(episode.policy_token_count)
'''


def rows(questions: Sequence[str] = QUESTIONS, **columns: Any) -> list[dict[str, Any]]:
    return [{"id": str(i), "question": text, "answer": "Doli", **columns} for i, text in enumerate(questions)]


def write_rows(path: Path, data: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def toy_config(
    folder: Path,
    *,
    tasks: Sequence[Mapping[str, Any]] | None = None,
    code: str = REWARDS,
    reward: str = "noise",
    **sections: Any,
) -> RLConfig:
    """One turn of at most 12 tokens, 2 prompts x 4 samples, 2 steps; `sections` are merged over that."""
    functions = folder / "functions.py"
    functions.write_text(code)
    write_rows(folder / "train.jsonl", rows() if tasks is None else tasks)
    base: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "steps": 2, "sinks": []},
        "model": {"path": "tiny_search_base"},
        "data": {"train": str(folder / "train.jsonl")},
        "reward": {"name": f"{functions}:{reward}", "isolate": False},
        "limits": {"max_turn_tokens": 12, "max_episode_tokens": 128},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 4, "tokens_per_micro_batch": 4096},
        "optimizer": {"lr": 1e-4},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section if isinstance(section, Mapping) else section
    return parse_config(RLConfig, base)


def trained(config: RLConfig) -> rl.Run:
    """A run that has done all its steps; closed."""
    run = rl.start(config)
    try:
        return rl.train(run)
    finally:
        run.close()


def metric_rows(run: rl.Run) -> dict[int, dict[str, Any]]:
    lines = (run.directory.path / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def weights(run: rl.Run) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in run.learner.policy.parameters()}


def largest_change(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> float:
    assert before.keys() == after.keys()
    return max(float((before[name] - after[name]).abs().max()) for name in before)
