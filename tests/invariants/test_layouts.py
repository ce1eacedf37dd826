"""How ranks divide a model among them changes no step: layers by heads, micro-batches by rows, both, and neither."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cluster.fleet import on_ranks, train
from loops.toy import toy_config
from posttrain.config import RLConfig
from posttrain.loops.collect import usable
from posttrain.loops.credit import PackedStep
from posttrain.loops.learner import Models
from posttrain.runs.trajectories import read_trajectories

from .steps import EXACT, SETTINGS, SHARDED, STEPS, assert_exact, config_in, largest_gap, rows, step_once

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"trainer": {"tensor_parallel": 2}, "checkpoint": SHARDED}),
    "tensor and shards": (4, {"trainer": {"tensor_parallel": 2}}),
    "whole weights": (2, {"trainer": {"backend": "ddp"}}),
}
GOING_ON: dict[str, tuple[str, int, dict[str, Any]]] = {  # which run, ranks, what of `trainer` is changed
    "tensor to one": ("tensor", 1, {"tensor_parallel": 1}),
    "tensor to shards": ("tensor", 4, {"tensor_parallel": 1}),
    "one to tensor": ("one", 2, {"tensor_parallel": 2}),
    "whole weights to tensor": ("whole weights", 2, {"backend": "fsdp2", "tensor_parallel": 2}),
    "one to whole weights": ("one", 2, {"backend": "ddp"}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two teams of two": (4, {"sequence_parallel": 2}),
    "halves of key heads": (4, {"sequence_parallel": 4}),
    "a ring": (3, {"sequence_parallel": 3}),
    "two rings": (4, {"sequence_parallel": 2, "sequence_parallel_kind": "ring"}),
    "rows, whole weights": (4, {"sequence_parallel": 2, "backend": "ddp"}),
    "rows and layers": (4, {"sequence_parallel": 2, "tensor_parallel": 2}),
}


def moved(base: Path, name: str) -> RLConfig:
    """A copy of a run without its last checkpoint, to go on in another layout."""
    origin, _, trainer = GOING_ON[name]
    folder = base / name
    shutil.copytree(base / origin, folder)
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS}")
    stored = folder / "run" / "config.yaml"
    text = stored.read_text().replace(f"{base / origin}/", f"{folder}/")
    for key, value in trainer.items():
        text, count = re.subn(rf"(?m)^  {key}: \w+$", f"  {key}: {value}", text)
        assert count == 1
    stored.write_text(text)
    sections: dict[str, Any] = SETTINGS | RUNS[origin][1] | {"trainer": trainer}
    return toy_config(folder, **sections)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs, and their last steps again in other layouts."""
    base = tmp_path_factory.mktemp("layouts")
    configs = {name: config_in(base / name, **sections) for name, (_, sections) in RUNS.items()}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: on_ranks(RUNS[n][0], base / f"log {n}", train, configs[n]), configs))
        again = {name: moved(base, name) for name in GOING_ON}
        list(pool.map(lambda n: on_ranks(GOING_ON[n][1], base / f"log {n}", train, again[n]), again))
    return base


@pytest.mark.parametrize("name", ["tensor", "tensor and shards", "whole weights"])
def test_p95_divided_layers_take_the_steps_of_one_process(base: Path, name: str):
    """Policy, critic, reference; rollouts included."""
    one, many = rows(base / "one"), rows(base / name)
    assert list(one) == list(many) == list(range(1, STEPS + 1))
    for step in one:
        assert_exact(many[step], one[step])
        assert many[step].get("gap/max", 0) < 1e-4
    ends = [base / run / "run" / "checkpoints" / f"step-{STEPS}" for run in ("one", name)]
    assert largest_gap(*ends) < 1e-6


@pytest.mark.parametrize("name", sorted(GOING_ON))
def test_a_run_goes_on_in_another_layout(base: Path, name: str):
    last, again = rows(base / "one")[STEPS], rows(base / name)[STEPS]
    for key, close in EXACT.items():
        assert again[key] == pytest.approx(last[key], abs=close, rel=0), key
    ends = [base / run / "run" / "checkpoints" / f"step-{STEPS}" for run in ("one", name)]
    assert largest_gap(*ends) < 1e-6


# ---------------------------------------------------------------- one update, without a rollout


@pytest.fixture(scope="module")
def packed(base: Path) -> PackedStep:
    kept = usable(read_trajectories(base / "one" / "run" / "trajectories" / "step-000001.parquet"))[:5]
    for trajectory in kept:
        trajectory.streams.clear()
    return PackedStep.of(kept)


@pytest.fixture(scope="module")
def alone(base: Path, packed: PackedStep) -> Path:
    return updated(base, "alone", 1, {}, packed)


def updated(base: Path, name: str, count: int, trainer: dict[str, Any], packed: PackedStep) -> Path:
    folder = base / f"update {name}"
    models = Models(config_in(folder, trainer=trainer), STEPS, version=4)
    on_ranks(count, folder / "log", step_once, models, packed.batch, packed.truncated, folder)
    return folder / "after"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_team_that_shares_every_micro_batch(base: Path, alone: Path, packed: PackedStep, name: str):
    assert largest_gap(alone, updated(base, name, *LAYOUTS[name], packed)) < 1e-6
    moments = load_file(alone / "optimizer.safetensors")
    assert max(float(moments[key].abs().max()) for key in moments if key.endswith("exp_avg")) > 1e-3
