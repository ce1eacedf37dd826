"""PPO under ZeRO-2 and ZeRO-3 takes the steps of one process, as under FSDP2 (`test_ranks`), rollouts included.

What every backend owes in the small is in `trainer/test_backends.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.fleet import on_ranks, train
from loops.toy import toy_config
from posttrain.config import config_yaml
from posttrain.loops.collect import usable
from posttrain.loops.credit import PackedStep
from posttrain.loops.learner import Models
from posttrain.runs.trajectories import read_trajectories

from .steps import ADAPTERS, EXACT, SETTINGS, STEPS, assert_exact, config_in, largest_gap, rows, step_once, tensors

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="numbers of a CPU; GPUs: test_backends.py")

ZERO: dict[str, dict[str, Any]] = {
    stage: {"backend": "deepspeed", "deepspeed": {"stage": int(stage[-1])}} for stage in ("zero2", "zero3")
}
ZERO["zero3"]["deepspeed"]["persistent_below"] = 500
SHARDED = SETTINGS["checkpoint"] | {"sharded": True}
AGAIN = {  # who goes on from whose checkpoint: (source, ranks, trainer)
    "zero3 to one": ("zero3", 1, {}),
    "zero2 to zero3": ("zero2", 2, ZERO["zero3"]),
    "fsdp2 to zero2": ("fsdp2", 2, ZERO["zero2"]),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank, and on two of each backend; then its last step again, by others."""
    base = tmp_path_factory.mktemp("deepspeed")
    on_ranks(1, base / "log one", train, config_in(base / "one"))
    on_ranks(2, base / "log fsdp2", train, config_in(base / "fsdp2", checkpoint=SHARDED))
    for name, trainer in ZERO.items():
        on_ranks(2, base / f"log {name}", train, config_in(base / name, trainer=trainer))
    for name, (source, count, trainer) in AGAIN.items():
        shutil.copytree(base / source, base / name)
        shutil.rmtree(base / name / "run" / "checkpoints" / f"step-{STEPS}")
        config = toy_config(base / name, **SETTINGS | {"trainer": trainer})
        (base / name / "run" / "config.yaml").write_text(config_yaml(config))
        on_ranks(count, base / f"log {name}", train, config)
    return base


def end_of(runs: Path, name: str) -> Path:
    return runs / name / "run" / "checkpoints" / f"step-{STEPS}"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("backend", ZERO)
def test_p95_two_ranks_take_the_steps_of_one(runs: Path, backend: str) -> None:
    """Policy, critic, reference; sampled from the weights that were gathered."""
    one, two = rows(runs / "one"), rows(runs / backend)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    for step in one:
        assert one[step].keys() == two[step].keys()
        assert_exact(two[step], one[step])
        assert two[step].get("gap/max", 0) < 1e-4
    assert one[STEPS]["train/loss"] != one[STEPS - 1]["train/loss"]
    assert largest_gap(end_of(runs, "one"), end_of(runs, backend)) < 1e-6
    assert files_in(end_of(runs, "one")) == files_in(end_of(runs, backend))


@pytest.mark.parametrize("name", AGAIN)
def test_a_checkpoint_does_not_bind_a_run_to_its_backend(runs: Path, name: str) -> None:
    last, again = rows(runs / "one")[STEPS], rows(runs / name)[STEPS]
    for key, close in EXACT.items():
        assert again[key] == pytest.approx(last[key], abs=close, rel=0), key
    assert largest_gap(end_of(runs, "one"), end_of(runs, name)) < 1e-6


@pytest.mark.parametrize(
    ("backend", "dtype", "close", "ranks", "together"),
    [("zero2", "float32", 1e-6, 3, 1), ("zero3", "bfloat16", 2e-3, 3, 1), ("zero3", "float32", 1e-6, 2, 2)],
)
def test_ranks_without_work_and_ranks_that_share_it(
    runs: Path, tmp_path: Path, backend: str, dtype: str, close: float, ranks: int, together: int
) -> None:
    """Two segments on three ranks, or on two of a team; values are float32 whatever their critic is gathered in."""
    kept = usable(read_trajectories(runs / "one" / "run" / "trajectories" / "step-000001.parquet"))[:2]
    for trajectory in kept:
        trajectory.streams.clear()
    packed = PackedStep.of(kept)
    model = {"path": "tiny_search_base", "dtype": dtype}
    configs = {
        1: config_in(tmp_path / "one", model=model),
        ranks: config_in(
            tmp_path / "many",
            model=model | {"gradient_checkpointing": True},
            trainer=ZERO[backend] | {"sequence_parallel": together},
        ),
    }
    for count, config in configs.items():
        place = (packed.batch, packed.truncated, tmp_path / f"{count}")
        on_ranks(count, tmp_path / f"log {count}", step_once, Models(config, STEPS, version=4), *place)
    mine, yours = tensors(tmp_path / "1" / "after"), tensors(tmp_path / f"{ranks}" / "after")
    assert all("value_head" in name and "/master" in name for name in yours.keys() - mine.keys())
    assert max(float((mine[name].double() - yours[name].double()).abs().max()) for name in mine) < close
    begun = tensors(tmp_path / "1" / "before")
    assert max(float((mine[name].double() - begun[name].double()).abs().max()) for name in begun) > 1e-4


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that train adapters: on one rank, and on two."""
    base = tmp_path_factory.mktemp("adapted")
    for count, name, trainer in ((1, "one", {}), (2, "zero2", ZERO["zero2"]), (2, "zero3", ZERO["zero3"])):
        (base / name).mkdir()
        config = toy_config(base / name, **ADAPTERS | {"trainer": trainer})
        on_ranks(count, base / f"log {name}", train, config)
    return base


@pytest.mark.parametrize("name", list(ZERO))
def test_adapters_take_the_steps_of_one_process(adapted: Path, name: str):
    one, two = rows(adapted / "one"), rows(adapted / name)
    assert list(one) == list(two) == [1, 2, 3]
    for step in one:
        assert_exact(two[step], one[step])
    ends = [adapted / run / "run" / "checkpoints" / "step-3" for run in ("one", name)]
    assert largest_gap(*ends) < 1e-6
    assert any("adapter_model" in key for key in tensors(ends[1]))
