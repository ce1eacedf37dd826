"""The number of ranks changes no step: losses, gradients, weights and moments are those of one process."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.fleet import on_ranks, train
from loops.toy import toy_config
from posttrain.loops.collect import usable
from posttrain.loops.credit import PackedStep
from posttrain.loops.learner import Models
from posttrain.runs.checkpoint import CheckpointStore
from posttrain.runs.trajectories import read_trajectories

from .steps import EXACT, SETTINGS, SHARDED, STEPS, assert_exact, config_in, largest_gap, rows, step_once, tensors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank and on two; then its last step again on one and on four, from the two's checkpoint."""
    base = tmp_path_factory.mktemp("ranks")
    configs = {1: config_in(base / "1"), 2: config_in(base / "2", checkpoint=SHARDED)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: on_ranks(n, base / f"log{n}", train, configs[n]), configs))
        again = {count: base / f"2 to {count}" for count in (1, 4)}
        for folder in again.values():
            shutil.copytree(base / "2", folder)
            shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS}")
            stored = folder / "run" / "config.yaml"
            stored.write_text(stored.read_text().replace(str(base / "2"), str(folder)))
        moved = {count: toy_config(folder, **SETTINGS | {"checkpoint": SHARDED}) for count, folder in again.items()}
        list(pool.map(lambda n: on_ranks(n, base / f"again{n}", train, moved[n]), moved))
    return base


def test_p95_two_ranks_take_the_steps_of_one(runs: Path):
    """Policy, critic, reference; rollouts included, which both ranks sample."""
    one, two = rows(runs / "1"), rows(runs / "2")
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    for step in one:
        assert one[step].keys() == two[step].keys()
        assert_exact(two[step], one[step])
        assert two[step]["train/policy_version"] == one[step]["train/policy_version"] == step - 1
        assert two[step].get("gap/max", 0) < 1e-4
    assert one[STEPS]["train/loss"] != one[STEPS - 1]["train/loss"]


def test_two_ranks_end_with_the_weights_and_moments_of_one(runs: Path):
    ends = [runs / count / "run" / "checkpoints" / f"step-{STEPS}" for count in "12"]
    assert largest_gap(*ends) < 1e-6
    assert largest_gap(ends[0].with_name("step-4"), ends[0]) > 1e-4
    files = [{str(path.relative_to(end)) for path in end.rglob("*") if path.is_file()} for end in ends]
    assert files[0] - files[1] == {"optimizer.safetensors", "critic_optimizer.safetensors"}
    assert sum(name.startswith("optimizer/") for name in files[1]) == 2, "one file a rank"
    latest = CheckpointStore(ends[1].parent).latest()  # whole, by its manifest
    assert latest is not None
    assert latest.path == ends[1]


@pytest.mark.parametrize("count", [1, 4])
def test_a_run_of_two_ranks_goes_on_with_as_many_as_there_are(runs: Path, count: int):
    last, again = rows(runs / "2")[STEPS], rows(runs / f"2 to {count}")[STEPS]
    for key, close in EXACT.items():
        assert again[key] == pytest.approx(last[key], abs=close, rel=0), key
    ends = [runs / name / "run" / "checkpoints" / f"step-{STEPS}" for name in ("2", f"2 to {count}")]
    assert largest_gap(*ends) < 1e-6


# ---------------------------------------------------------------- one update, without a rollout


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bfloat16", 2e-3)])
def test_ranks_without_work_keep_the_others_company(runs: Path, tmp_path: Path, dtype: str, close: float):
    """Two segments on three ranks, from a checkpoint of two ranks, with all masters and moments: no bit is lost.

    Layers that stay gathered and activations that are computed again are no other function.
    """
    kept = usable(read_trajectories(runs / "2" / "run" / "trajectories" / "step-000001.parquet"))[:2]
    for trajectory in kept:
        trajectory.streams.clear()
    packed = PackedStep.of(kept)
    checkpoint = runs / "2" / "run" / "checkpoints" / "step-4" if dtype == "float32" else None
    model = {"path": "tiny_search_base", "dtype": dtype}
    configs = {
        1: config_in(tmp_path / "one", model=model),
        3: config_in(
            tmp_path / "three",
            model=model | {"gradient_checkpointing": True},
            trainer={"reshard_after_forward": dtype == "bfloat16"},
        ),
    }
    for count, config in configs.items():
        models = Models(config, STEPS, checkpoint, version=4)  # old log-probs are computed
        packed_and_place = (packed.batch, packed.truncated, tmp_path / f"{count}")
        on_ranks(count, tmp_path / f"log{count}", step_once, models, *packed_and_place)
    before = [tensors(tmp_path / count / "before") for count in "13"]
    shared = before[0].keys() & before[1].keys()
    assert all(torch.equal(before[0][name], before[1][name]) for name in shared)
    assert len(shared) > 30
    assert largest_gap(tmp_path / "1" / "after", tmp_path / "3" / "after") < close
    moved = [load_file(tmp_path / "3" / name / "model.safetensors") for name in ("before", "after")]
    assert max(float((moved[1][name] - moved[0][name]).abs().max()) for name in moved[0]) > 1e-4
