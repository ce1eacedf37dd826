"""A run whose episodes vLLM samples: needs a vllm that runs here (`scripts/test_vllm` makes an environment)."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from loops.ahead import EPISODES, PATIENT, TWELVE, Patient, assert_sampled_by, of_step
from loops.toy import largest_change, metric_rows, toy_config, trained, weights
from posttrain.config import RLConfig, config_yaml
from posttrain.loops import rl
from posttrain.runs.trajectories import read_trajectories
from posttrain.trainer.loading import model_path
from sampler.tiny import FLOAT32_GAP
from sampler.vllm_serving import Served

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of vllm's imports
]
SAMPLER = {"engine": "vllm", "options": {"kv_cache_memory_bytes": 1 << 27}}
GPUS = torch.cuda.device_count()
LEVELS = (2,) if GPUS else (1, 2)  # on a GPU vLLM starts no second engine in a process whose first one could sleep
ON_TWO_GPUS = pytest.mark.skipif(GPUS == 1, reason="two processes want a GPU each")
ON_CPU = pytest.mark.skipif(GPUS > 0, reason="on a GPU vLLM takes no adapters of float32")
PROBE, GAP = max(1e-4, FLOAT32_GAP), max(1e-3, 3 * FLOAT32_GAP)


def vllm_config(folder: Path, *, model: Mapping[str, Any] = MappingProxyType({}), **sections: Any) -> RLConfig:
    """In float32, also on a GPU."""
    return toy_config(folder, model={"dtype": "float32"} | dict(model), **sections)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rl.Run:
    return trained(vllm_config(tmp_path_factory.mktemp("vllm"), sampler=SAMPLER, checkpoint={"every": 1}))


def test_each_step_is_sampled_with_the_weights_of_the_step_before(run: rl.Run) -> None:
    rows = metric_rows(run)
    assert sorted(rows) == [1, 2]
    for row in rows.values():
        assert row["weights/probe_gap"] < PROBE
        assert row["gap/max"] < GAP
        assert row["gap/staleness"] == 0
        assert row["train/grad_norm"] > 0
    second = read_trajectories(run.directory.trajectories / "step-000002.parquet")
    assert {v for t in second for v in t.policy_versions} == {-1, 1}
    assert not run.learner.sampler_shares_weights


def test_a_run_goes_on_from_its_checkpoint(run: rl.Run, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run.directory.path, copy)
    shutil.rmtree(copy / "checkpoints" / "step-2")
    again = rl.resume(copy)
    try:
        assert again.step == 1
        rl.train(again)
    finally:
        again.close()
    before, after = weights(run), weights(again)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-4


@pytest.mark.parametrize("level", LEVELS)
def test_an_engine_that_sleeps_while_trained_samples_the_same(run: rl.Run, level: int, tmp_path: Path) -> None:
    """On a CPU vLLM frees nothing; the order of things is that of a GPU."""
    sleepy = rl.start(vllm_config(tmp_path, sampler=SAMPLER | {"sleep": level}))
    seen: list[tuple[bool, int]] = []
    sleepy.on_row = lambda step, row: seen.append((sleepy.sampling.resting, sleepy.sampling.sampler.version))
    try:
        rl.train(sleepy)
    finally:
        sleepy.close()
    assert seen == [(True, version if level == 1 else -1) for version in (0, 1)]
    before, after = weights(run), weights(sleepy)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-4


# ---------------------------------------------------------------- rollouts that run ahead


def test_bound_0_is_the_synchronous_run(run: rl.Run, tmp_path: Path) -> None:
    bound = trained(vllm_config(tmp_path, sampler=SAMPLER, sampling={"max_staleness": 0}))
    assert largest_change(weights(run), weights(bound)) < 1e-4
    assert [row["gap/staleness_max"] for row in metric_rows(bound).values()] == [0, 0]
    assert bound.learner.replica is None


def go_when(published: Callable[[], bool]) -> None:
    while not published():
        threading.Event().wait(0.005)
    Patient.go.set()


def patient(folder: Path, sampler: dict[str, Any], **sections: Any) -> RLConfig:
    """One step ahead, in episodes that wait for the weights of step 1 between their turns."""
    Patient.made = 0
    Patient.go.clear()
    sections |= {
        "env": PATIENT,
        "limits": {"max_turns": 2},
        "optimizer": {"lr": 1e-3},
        "sampling": {"max_staleness": 1},
    }
    return vllm_config(folder, tasks=TWELVE, run={"steps": 2}, sampler=sampler, **sections)


def assert_second_step_saw_both(run: rl.Run, first: dict[str, Tensor], then: dict[str, Tensor]) -> None:
    second = of_step(run, 2)
    assert [sorted({v for v in t.policy_versions if v >= 0}) for t in second] == [[0, 1]] * EPISODES
    assert_sampled_by(run, second, {0: first, 1: then})
    row = metric_rows(run)[2]
    assert row["gap/staleness_max"] == 1
    assert row["weights/probe_gap"] < max(1e-3, PROBE)


def test_an_engine_of_this_process_samples_while_the_policy_trains(tmp_path: Path) -> None:
    config = patient(tmp_path, SAMPLER)
    run = rl.start(config)
    Patient.made = 0
    states = [weights(run)]
    run.on_row = lambda step, row: states.append(weights(run))
    waiter = threading.Thread(target=go_when, args=(lambda: run.sampling.sampler.version >= 1,), daemon=True)
    waiter.start()
    try:
        rl.train(run)
    finally:
        run.close()
    assert_second_step_saw_both(run, *states[:2])


def by_command(folder: Path, config: RLConfig) -> list[dict[str, Any]]:
    """The rows of a run by `posttrain rl`."""
    (folder / "config.yaml").write_text(config_yaml(config))
    command = [sys.executable, "-m", "posttrain", "rl", str(folder / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log.txt"
    with Served(Path(model_path("tiny_search_base")), log).running() as server:
        yield server


def test_a_run_trains_with_a_server_and_outlives_its_restart(
    run: rl.Run, served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same weights as with the engine in this process: none of the server's first ones have sampled a token."""
    server = {"engine": "vllm_server", "url": served.url, "options": {"patience_seconds": 600}}
    over_http = rl.start(vllm_config(tmp_path, sampler=server))

    def restart(step: int, row: object) -> None:
        if step == 1:
            served.kill()
            served.start()

    over_http.on_row = restart
    try:
        with caplog.at_level(logging.WARNING, "posttrain"):
            rl.train(over_http)
    finally:
        over_http.close()
    rows = metric_rows(over_http)
    assert sorted(rows) == [1, 2]
    assert all(row["weights/probe_gap"] < PROBE and row["gap/max"] < GAP for row in rows.values())
    second = read_trajectories(over_http.directory.trajectories / "step-000002.parquet")
    assert {v for t in second for v in t.policy_versions} == {-1, 1}
    before, after = weights(run), weights(over_http)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-4


def test_a_server_samples_ahead_and_outlives_its_restart(served: Served, tmp_path: Path) -> None:
    """It is killed while step 2 is sampled and the policy trains, and sampled turns are those of published weights."""
    server = {"engine": "vllm_server", "url": served.url, "options": {"patience_seconds": 600}}
    run = rl.start(patient(tmp_path, server))
    Patient.made = 0
    states = [weights(run)]
    run.on_row = lambda step, row: states.append(weights(run))

    def restart() -> None:
        go_when(lambda: run.sampling.sampler.version >= 1)
        served.kill()
        served.start()

    waiter = threading.Thread(target=restart, daemon=True)
    waiter.start()
    try:
        rl.train(run)
    finally:
        run.close()
        waiter.join()
    assert_second_step_saw_both(run, *states[:2])


@ON_CPU
def test_adapters_alone_reach_the_engine(tmp_path: Path) -> None:
    run = trained(vllm_config(tmp_path, sampler=SAMPLER, model={"lora": {"rank": 4, "alpha": 6}}))
    first, second = metric_rows(run).values()
    moved = sum(parameter.numel() * 4 for _, parameter in run.learner.policy.parameters())
    assert (first["weights/bytes"], second["weights/bytes"]) == (3_485_696 + moved, moved)
    for row in (first, second):
        assert row["weights/probe_gap"] < PROBE
        assert row["gap/max"] < GAP


@ON_CPU
@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_vllm_beside_two_ranks_is_given_adapters_alone(tmp_path: Path, transport: str) -> None:
    """Old log-probs are the trainer's: every rank computes its share of them."""
    settings = {"cluster": {"samplers": 1}, "trainer": {"ranks": 2}}
    lora = {"lora": {"rank": 4, "alpha": 6}}
    config = vllm_config(tmp_path, sampler=SAMPLER | {"transport": transport}, model=lora, **settings)
    for row in by_command(tmp_path, config):
        assert 0 < row["weights/probe_gap"] < PROBE
        assert row["weights/bytes"] < 3e5
        assert row["gap/max"] < GAP


@ON_TWO_GPUS
def test_vllm_beside_two_ranks_sleeps_while_they_train(run: rl.Run, tmp_path: Path) -> None:
    """An engine that never sleeps has sampled the same. After evaluations it wakes with the weights that it kept."""
    beside = {"cluster": {"samplers": 1, "colocated": True}, "trainer": {"ranks": 2}}
    evaluations = {"data": {"eval": str(tmp_path / "train.jsonl")}, "eval": {"every": 1, "at_start": True}}
    config = vllm_config(tmp_path, sampler=SAMPLER | {"sleep": 1}, **beside, **evaluations)
    rows = [row for row in by_command(tmp_path, config) if row["step"]]
    for row, awake in zip(rows, metric_rows(run).values(), strict=True):
        assert 0 < row["weights/probe_gap"] < PROBE
        assert row["reward/mean"] == pytest.approx(awake["reward/mean"], abs=1e-6)
    after = load_file(tmp_path / "run" / "checkpoints" / "step-2" / "model.safetensors")
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in weights(run).items()) < 1e-4


@ON_TWO_GPUS
def test_vllm_in_a_process_of_its_own_runs_ahead(tmp_path: Path) -> None:
    """One rank and one sampler beside it, which gets the weights through shared memory amid its requests."""
    ahead = {"tasks": TWELVE, "run": {"steps": 3}, "sampling": {"max_staleness": 1}}
    config = vllm_config(tmp_path, sampler=SAMPLER | {"transport": "shared"}, cluster={"samplers": 1}, **ahead)
    rows = by_command(tmp_path, config)
    assert [row["train/policy_version"] for row in rows] == [1, 2, 3]
    assert all(0 < row["weights/probe_gap"] < PROBE for row in rows)
    assert [row["gap/staleness_max"] for row in rows] == [0, 1, 1]
    assert rows[0]["gap/max"] < GAP, "later ones are those of stale tokens"


@ON_TWO_GPUS
def test_vllm_in_a_process_of_its_own(tmp_path: Path) -> None:
    """One rank and one sampler beside it, which gets the weights by broadcast."""
    rows = by_command(tmp_path, vllm_config(tmp_path, sampler=SAMPLER, cluster={"samplers": 1}))
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["weights/probe_gap"] < PROBE
        assert row["weights/bytes"] > 1e6
        assert row["gap/max"] < GAP
        assert row["gap/staleness"] == 0
