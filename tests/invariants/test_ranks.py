"""The number of ranks changes no step: losses, gradients, weights and moments are those of one process."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cluster.fleet import on_ranks, train
from loops.toy import toy_config
from posttrain.config import RLConfig
from posttrain.loops.collect import usable
from posttrain.loops.credit import Lesson, credited
from posttrain.loops.learner import Models, save_learner
from posttrain.loops.update import update
from posttrain.packing import Batch
from posttrain.runs.checkpoint import CheckpointStore
from posttrain.runs.trajectories import read_trajectories
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
        for key in EXACT.keys() & one[step].keys():
            assert two[step][key] == pytest.approx(one[step][key], abs=EXACT[key], rel=0), f"step {step}: {key}"
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


def step_once(models: Models, batch: Batch, truncated: torch.Tensor, folder: Path) -> None:
    """On every rank: loads, saves to `before`, learns a lesson, saves to `after`."""
    ranks = join_ranks(pick_device("cpu"))
    learner = models.load(ranks)
    for name in ("before", "after"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        save_learner(learner, folder / name)
        if name == "before":
            update(learner, credited(Lesson(batch, truncated), learner), step=2)
    leave_ranks()


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("bfloat16", 2e-3)])
def test_ranks_without_work_keep_the_others_company(runs: Path, tmp_path: Path, dtype: str, close: float):
    """Two segments on three ranks, from a checkpoint of two ranks, with all masters and moments: no bit is lost.

    Layers that stay gathered and activations that are computed again are no other function.
    """
    kept = usable(read_trajectories(runs / "2" / "run" / "trajectories" / "step-000001.parquet"))[:2]
    for trajectory in kept:
        trajectory.streams.clear()
    lesson = Lesson.of(kept)
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
        lesson_and_place = (lesson.batch, lesson.truncated, tmp_path / f"{count}")
        on_ranks(count, tmp_path / f"log{count}", step_once, models, *lesson_and_place)
    before = [tensors(tmp_path / count / "before") for count in "13"]
    shared = before[0].keys() & before[1].keys()
    assert all(torch.equal(before[0][name], before[1][name]) for name in shared)
    assert len(shared) > 30
    assert largest_gap(tmp_path / "1" / "after", tmp_path / "3" / "after") < close
    moved = [load_file(tmp_path / "3" / name / "model.safetensors") for name in ("before", "after")]
    assert max(float((moved[1][name] - moved[0][name]).abs().max()) for name in moved[0]) > 1e-4


@pytest.mark.parametrize(("count", "together"), [(4, 2), (4, 4)])
def test_ranks_that_share_every_micro_batch(runs: Path, tmp_path: Path, count: int, together: int):
    """Ulysses: rows of all heads become heads of all rows around attention; of two key heads, four ranks get halves."""
    kept = usable(read_trajectories(runs / "2" / "run" / "trajectories" / "step-000001.parquet"))[:5]
    for trajectory in kept:
        trajectory.streams.clear()
    lesson = Lesson.of(kept)
    configs = {
        1: config_in(tmp_path / "one"),
        count: config_in(tmp_path / "many", trainer={"sequence_parallel": together}),
    }
    for number, config in configs.items():
        models, folder = Models(config, STEPS, version=4), tmp_path / f"{number}"
        on_ranks(number, tmp_path / f"log{number}", step_once, models, lesson.batch, lesson.truncated, folder)
    assert largest_gap(tmp_path / "1" / "after", tmp_path / f"{count}" / "after") < 1e-6
    moments = load_file(tmp_path / "1" / "after" / "optimizer.safetensors")
    assert max(float(moments[name].abs().max()) for name in moments if name.endswith("exp_avg")) > 1e-3
