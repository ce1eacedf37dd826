"""Runs that train adapters: killed and resumed to the bit, and the same steps on one rank and on two."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cluster.fleet import on_ranks, train
from invariants.killing import GRPO, Life, Moment, live, remains
from loops.toy import toy_config
from posttrain.config import config_yaml

from .steps import ADAPTERS, assert_exact, largest_gap, rows, tensors

pytest.importorskip("peft")

STEPS = ADAPTERS["run"]["steps"]
KILLS = (Moment(point="trajectories are about to appear", count=3), Moment(point="draft has weights only"))


def test_killed_and_resumed_is_bit_identical_to_never_killed(tmp_path: Path):
    settings = (*GRPO, "model.lora.rank=4", "run.steps=4", "optimizer.lr=1e-3")
    live(tmp_path / "whole", settings)
    life = Life(tmp_path / "killed").lead(settings, KILLS)
    assert len(life.kills) == len(KILLS)
    whole, killed = remains(tmp_path / "whole"), remains(life.folder)
    assert killed.differences(whole) == []
    assert "adapter/adapter_model.safetensors" in whole.checkpoint
    assert not any(name.endswith("/model.safetensors") or name == "model.safetensors" for name in whole.checkpoint)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On one rank, on two, and on two that share the rows of each micro-batch and compute activations again; then the
    last step again on one, from the shards of two."""
    base = tmp_path_factory.mktemp("adapters")
    sharded = ADAPTERS["checkpoint"] | {"sharded": True, "background": True}
    again = {"model": ADAPTERS["model"] | {"gradient_checkpointing": True}}
    layouts = {"1": {}, "2": {"checkpoint": sharded}, "2 as one": {"trainer": {"sequence_parallel": 2}} | again}
    layouts["2, whole weights"] = {"trainer": {"backend": "ddp"}}
    for name, settings in layouts.items():
        (base / name).mkdir()
        on_ranks(int(name[0]), base / f"log {name}", train, toy_config(base / name, **ADAPTERS | settings))
    shutil.copytree(base / "2", base / "2 to 1")
    shutil.rmtree(base / "2 to 1" / "run" / "checkpoints" / f"step-{STEPS}")
    config = toy_config(base / "2 to 1", **ADAPTERS)
    (base / "2 to 1" / "run" / "config.yaml").write_text(config_yaml(config))
    on_ranks(1, base / "log again", train, config)
    return base


@pytest.mark.parametrize("other", ["2", "2 as one", "2, whole weights", "2 to 1"])
def test_ranks_take_the_steps_of_one(runs: Path, other: str):
    """The reference is the base below the adapters on one rank, and where weights stay whole; else a second copy of it,
    sharded, on two."""
    one, two = rows(runs / "1"), rows(runs / other)
    assert list(one) == list(two) == list(range(1, STEPS + 1))
    for step in one:
        assert_exact(two[step], one[step])
        assert two[step]["gap/max"] < 1e-4
    assert one[STEPS]["ref/kl"] > 1e-6 > abs(one[1]["ref/kl"])
    ends = [runs / name / "run" / "checkpoints" / f"step-{STEPS}" for name in ("1", other)]
    assert largest_gap(*ends) < 1e-6
    trained = {name for name in tensors(ends[1]) if "adapter_model" in name}
    moments = {name for name in tensors(ends[1]) if "exp_avg_sq" in name}
    assert len(trained) == len(moments) > 0
