"""GRPO on Megatron-core's layers takes the step of one process, rollouts, reference and checkpoints included.

What every backend owes in the small is in `trainer/test_backends.py`. On GPUs only.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.fleet import on_ranks, train
from loops.toy import toy_config
from posttrain.config import RLConfig, config_yaml
from posttrain.loops.collect import usable
from posttrain.loops.credit import PackedStep
from posttrain.loops.learner import Models
from posttrain.runs.trajectories import read_trajectories
from posttrain.trainer.policy import Policy

from .steps import largest_gap, rows, step_once, tensors

GPUS = torch.cuda.device_count() if importlib.util.find_spec("megatron") is not None else 0
pytestmark = pytest.mark.skipif(GPUS < 2, reason="no megatron-core on 2 GPUs")

DIVIDED: dict[str, dict[str, Any]] = {
    "data": {"backend": "megatron"},
    "layers": {"backend": "megatron", "tensor_parallel": 2},
}
STEPS = 3
CLOSE = 1e-5  # of float32 weights and moments on a GPU, whose sums are in another order


def config_in(folder: Path, trainer: dict[str, Any]) -> RLConfig:
    folder.mkdir(parents=True, exist_ok=True)
    return toy_config(
        folder,
        run={"steps": STEPS},
        model={"dtype": "float32", "compile": False},
        batch={"prompts_per_step": 4, "samples_per_prompt": 4, "tokens_per_micro_batch": 160},
        optimizer={"lr": 1e-3, "eps": 1e-3},
        algorithm={"kl_coef": 0.01, "kl_in": "loss"},
        checkpoint={"every": 2, "keep": 9},
        trainer=trainer,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, and of two ranks in either layout."""
    base = tmp_path_factory.mktemp("megatron")
    for name, trainer in {"one": {}, **DIVIDED}.items():
        on_ranks(1 if name == "one" else 2, base / f"log {name}", train, config_in(base / name, trainer))
    return base


@pytest.mark.parametrize("layout", list(DIVIDED))
def test_a_run_samples_learns_and_keeps_what_loads_anywhere(runs: Path, layout: str) -> None:
    one, two = rows(runs / "one"), rows(runs / layout)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    assert two[1]["train/entropy"] == pytest.approx(one[1]["train/entropy"], abs=1e-2), "samples may differ by a token"
    for step in two:
        assert two[step]["gap/max"] < 1e-3, "the sampler has the weights that the layers have"
        assert two[step]["train/policy_version"] == step
    ends = [runs / name / "run" / "checkpoints" / f"step-{STEPS}" for name in ("one", layout)]
    assert tensors(ends[0]).keys() == tensors(ends[1]).keys()
    assert Policy.load(ends[1], "cpu").config.hidden_size == 128


@pytest.mark.parametrize("layout", list(DIVIDED))
def test_an_update_is_that_of_one_process(runs: Path, tmp_path: Path, layout: str) -> None:
    """The same trajectories, from the same weights: weights, moments and their files."""
    kept = usable(read_trajectories(runs / "one" / "run" / "trajectories" / "step-000001.parquet"))
    for trajectory in kept:
        trajectory.streams.clear()
    packed = PackedStep.of(kept)
    for count, trainer in ((1, {}), (2, DIVIDED[layout])):
        place = (packed.batch, packed.truncated, tmp_path / f"{count}")
        models = Models(config_in(tmp_path / f"config {count}", trainer), STEPS)
        on_ranks(count, tmp_path / f"log {count}", step_once, models, *place)
    assert largest_gap(tmp_path / "1" / "before", tmp_path / "2" / "before") == 0
    assert largest_gap(tmp_path / "1" / "after", tmp_path / "2" / "after") < CLOSE
    begun, ended = tensors(tmp_path / "2" / "before"), tensors(tmp_path / "2" / "after")
    assert max(float((ended[name] - begun[name]).abs().max()) for name in begun) > 1e-4


@pytest.mark.parametrize("layout", list(DIVIDED))
def test_a_checkpoint_does_not_bind_a_run_to_its_backend(runs: Path, tmp_path: Path, layout: str) -> None:
    """The last step again, by one process from the checkpoint of two ranks."""
    shutil.copytree(runs / layout, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "run" / "checkpoints" / f"step-{STEPS}")
    config = config_in(tmp_path / "again", {})
    (tmp_path / "again" / "run" / "config.yaml").write_text(config_yaml(config))
    on_ranks(1, tmp_path / "log", train, config)
    last, again = rows(runs / layout)[STEPS], rows(tmp_path / "again")[STEPS]
    assert again["train/entropy"] == pytest.approx(last["train/entropy"], abs=1e-2)
    assert again["train/policy_version"] == STEPS
