"""Rollouts that run ahead of training in samplers that are processes of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cluster.apart import pooled
from cluster.test_restart import assert_each_once
from loops.ahead import EPISODES, PATIENT, SECONDS, TWELVE, Killed, Patient, asked, assert_sampled_by, of_step
from loops.toy import largest_change, metric_rows, toy_config, trained, weights
from posttrain.algorithms import LOSSES
from posttrain.cluster.pool import State
from posttrain.config import RLConfig
from posttrain.loops import rl


def configured(folder: Path, staleness: int | None, samplers: int = 1, **sections: Any) -> RLConfig:
    """Every sequence has a forward of its own, so that nothing hangs on when requests arrive."""
    folder.mkdir(exist_ok=True)
    sampling = {"max_staleness": staleness, "engines": 1}
    alone = {"options": {"max_batch": 1}}
    cluster = {"samplers": samplers} | sections.pop("cluster", {})
    sections = {"tasks": TWELVE, "run": {"steps": 3}, **sections}
    return toy_config(folder, sampling=sampling, sampler=alone, cluster=cluster, **sections)


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)


# ---------------------------------------------------------------- the law


def test_bound_0_is_the_synchronous_run_to_the_bit(tmp_path: Path):
    runs: list[rl.Run] = []
    for name, staleness in (("sync", None), ("bound", 0)):
        folder = tmp_path / name
        sections = {"data": {"eval": str(folder / "train.jsonl")}, "eval": {"every": 2, "max_tasks": 3}}
        config = configured(folder, staleness, run={"steps": 2}, **sections)
        with pooled(folder, config.cluster) as (workers, _):
            run = rl.start(config, workers=workers)
            rl.train(run)
            run.close()
            runs.append(run)
    assert largest_change(*map(weights, runs)) == 0
    for step in (1, 2):
        assert [t.token_ids for t in of_step(runs[0], step)] == [t.token_ids for t in of_step(runs[1], step)]
        assert metric_rows(runs[1])[step]["gap/staleness_max"] == 0


# ---------------------------------------------------------------- a sampler that comes amid training


FIRST: list[Callable[[], None]] = []


def watched_loss(*arguments: Tensor) -> Tensor:
    """What lies in `FIRST` happens amid an update."""
    for call in FIRST:
        call()
    return LOSSES["ppo_clip"](*arguments)


@pytest.mark.parametrize("moment", ["training", "waiting"])
def test_the_only_sampler_is_killed_and_the_next_one_gets_weights_that_were_published(tmp_path: Path, moment: str):
    """Killed between the two updates of step 1, and while the trainer waits for step 2."""
    Patient.made = Patient.arrived = 0
    Patient.go.clear()
    sections = {
        "run": {"steps": 2},
        "batch": {"epochs": 2, "cpu_workers": 1},
        "optimizer": {"lr": 1e-3},
        "limits": {"max_turns": 2},
    }
    sections |= {"env": PATIENT, "algorithm": {"loss": f"{__name__}:watched_loss"}}
    config = configured(tmp_path, 1, **sections)
    with pooled(tmp_path, config.cluster) as (workers, beside):
        run = rl.start(config, workers=workers)
        Patient.made = 0
        states, sampler = [weights(run)], run.sampling.sampler
        run.on_row = lambda step, row: states.append(weights(run))

        def amid_training() -> None:
            if run.learner.policy.version != 1 or Patient.go.is_set():
                return
            until(lambda: Patient.arrived == EPISODES)
            beside.processes.kill(0)
            until(lambda: bool(beside.replaced) and bool(beside.pool.members(State.READY)))
            Patient.go.set()
            until(lambda: sampler.waiting().get("", (0, 0.0))[0] == EPISODES)
            assert not beside.pool.members(State.SERVING), "weights amid an update"

        def amid_rollout() -> None:
            until(lambda: sampler.given == 2)
            beside.processes.kill(0)
            Patient.go.set()

        if moment == "training":
            FIRST[:] = [amid_training]
        else:
            threading.Thread(target=amid_rollout, daemon=True).start()
        rl.train(run)
        run.close()
    FIRST.clear()
    second, measured = of_step(run, 2), metric_rows(run)
    assert [sorted({v for v in t.policy_versions if v >= 0}) for t in second] == [[0, 2]] * EPISODES
    assert measured[2]["gap/staleness_max"] == 2
    assert measured[2]["weights/probe_gap"] < 1e-3
    assert beside.pool.restarts == 1
    assert_sampled_by(run, second, {0: states[0], 2: states[1]})


# ---------------------------------------------------------------- kills


def test_what_ran_ahead_in_samplers_apart_survives_kills_of_a_sampler_and_of_the_run(tmp_path: Path):
    """Nothing is lost and nothing is there twice; complete steps come back as they were."""
    sections = {"run": {"steps": 5}, "checkpoint": {"every": 2}, "cluster": {"colocated": True}}
    whole = trained(toy_config(tmp_path, tasks=TWELVE, run={"steps": 5, "dir": str(tmp_path / "whole")}))
    config = configured(tmp_path, 2, samplers=2, **sections)
    with pooled(tmp_path, config.cluster) as (workers, beside):
        run = rl.start(config, workers=workers)

        def kill(step: int, row: Any) -> None:
            if step == 1:
                beside.processes.kill(0)
            if step == 3:
                raise Killed

        run.on_row = kill
        with pytest.raises(Killed):
            rl.train(run)
        run.close()
    with pooled(tmp_path, config.cluster) as (workers, _):
        resumed = rl.resume(config.run.directory, workers=workers)
        assert resumed.step == 2
        assert resumed.ahead is not None
        complete = {step: making.future.result() for step, making in resumed.ahead._making.items()}
        rl.train(resumed)
        resumed.close()
    assert asked(resumed) == asked(whole)
    assert_each_once(config.run.directory, 5, EPISODES)
    for step, filled in complete.items():
        kept = {t.episode_id: t.token_ids for t in filled.trajectories}
        assert {t.episode_id: t.token_ids for t in of_step(resumed, step)} == kept
    measured = metric_rows(resumed)
    assert all(measured[step]["gap/staleness_max"] <= 2 for step in range(1, 6))
    assert all(measured[step]["weights/probe_gap"] < 1e-3 for step in range(1, 6))
