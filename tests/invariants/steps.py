"""What tests of ranks and layouts share: the run whose steps are compared, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loops.toy import toy_config
from posttrain.config import RLConfig
from posttrain.loops.credit import PackedStep, credited
from posttrain.loops.learner import Models, staged
from posttrain.loops.update import update
from posttrain.packing import Batch
from posttrain.trainer.loading import pick_device
from posttrain.trainer.ranks import join_ranks, leave_ranks
from posttrain.trainer.shards_on_disk import read_shards

STEPS = 5
SETTINGS: dict[str, Any] = {
    "run": {"steps": STEPS},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 160, "cpu_workers": 1},
    "optimizer": {"lr": 1e-3, "eps": 1e-3},
    "algorithm": {
        "advantage": "gae", "std": None, "length": None, "aggregate": "token_mean", "lam": 0.95,
        "kl_coef": 0.01, "kl_in": "reward", "kl_estimator": "k1", "kl_target": 0.001,
        "shaping": {"normalise": "running"},
    },
    "critic": {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "warmup_steps": 1},
    "checkpoint": {"every": 4, "keep": 9},
}  # fmt: skip
ADAPTERS: dict[str, Any] = {
    "run": {"steps": 3},
    "model": {"lora": {"rank": 4, "alpha": 8}},
    "batch": SETTINGS["batch"],
    "optimizer": SETTINGS["optimizer"],
    "algorithm": {"kl_coef": 0.01, "kl_in": "loss"},
    "checkpoint": {"every": 2, "keep": 9},
}
SHARDED = SETTINGS["checkpoint"] | {"sharded": True, "background": True}
EXACT = {"train/loss": 1e-6, "critic/loss": 1e-6, "ref/kl": 1e-6, "train/entropy": 1e-6} | {
    "train/grad_norm": 2e-5,
    "critic/grad_norm": 2e-5,
}


def config_in(folder: Path, **sections: Any) -> RLConfig:
    folder.mkdir()
    return toy_config(folder, **SETTINGS | sections)


def rows(folder: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())}


def assert_exact(found: dict[str, float], expected: dict[str, float]) -> None:
    """The metrics of a step that must not hang on how many take it."""
    for key in EXACT.keys() & expected.keys():
        message = f"step {expected['step']}: {key} is {found[key]}, expected {expected[key]}"
        assert found[key] == pytest.approx(expected[key], abs=EXACT[key], rel=0), message


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        if "optimizer" not in file.parent.name:
            found |= {f"{file.relative_to(checkpoint)}/{name}": value for name, value in load_file(file).items()}
    for folder in checkpoint.glob("*optimizer"):
        found |= {f"{folder.name}.safetensors/{name}": value for name, value in read_shards(folder).items()}
    return found


def largest_gap(one: Path, other: Path) -> float:
    mine, yours = tensors(one), tensors(other)
    assert mine.keys() == yours.keys()
    return max(float((mine[name].double() - yours[name].double()).abs().max()) for name in mine)


def step_once(models: Models, batch: Batch, truncated: torch.Tensor, folder: Path) -> None:
    """On every rank: loads, saves to `before`, learns a packed step, saves to `after`."""
    ranks = join_ranks(pick_device(models.config.model.device))
    learner = models.load(ranks)
    for name in ("before", "after"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        staged(learner)(folder / name)
        if name == "before":
            update(learner, credited(PackedStep(batch, truncated), learner), step=2)
    leave_ranks()
