"""Rollouts that run ahead of several ranks, in samplers apart."""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from cluster.apart import Processes
from cluster.fleet import on_ranks, train
from cluster.test_ahead_apart import configured, until
from cluster.test_restart import assert_each_once
from loops.ahead import EPISODES
from loops.toy import largest_change
from posttrain.cluster.launch import free_port
from posttrain.cluster.supervisor import CALLS, SECRET
from posttrain.config import ConfigError, RLConfig


def lead_or_follow(config: RLConfig, calls: str, secret: str) -> None:
    os.environ |= {CALLS: calls, SECRET: secret}
    train(config)


def on_two_ranks(config: RLConfig, during: Callable[[Processes], None] = lambda processes: None) -> None:
    """Trains, with samplers apart; `during` runs on a thread beside it."""
    folder, secret = config.run.directory.parent, secrets.token_hex(8)
    with free_port() as port:
        processes = Processes(folder, ("127.0.0.1", port), secret, config.cluster.samplers)
        beside = threading.Thread(target=during, args=(processes,))
        beside.start()
        try:
            on_ranks(2, folder / "said", lead_or_follow, config, f"127.0.0.1:{port}", secret)
        finally:
            beside.join()
            processes.end()


def measured(config: RLConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run.directory / "metrics.jsonl").read_text().splitlines()]


def test_two_ranks_with_bound_0_do_what_they_do_synchronously(tmp_path: Path):
    found: list[dict[str, Tensor]] = []
    for name, staleness in (("sync", None), ("bound", 0)):
        config = configured(tmp_path / name, staleness, run={"steps": 2}, trainer={"ranks": 2})
        on_two_ranks(config)
        found.append(load_file(config.run.directory / "checkpoints" / "step-2" / "model.safetensors"))
    assert largest_change(*found) == 0


def test_two_ranks_run_ahead_and_their_only_sampler_is_replaced(tmp_path: Path):
    shared = {"colocated": True}  # the weights, gathered from both ranks, go through shared memory
    config = configured(tmp_path, 1, run={"steps": 4}, trainer={"ranks": 2}, cluster=shared)

    def kill(processes: Processes) -> None:
        until(lambda: (config.run.directory / "trajectories" / "step-000001.parquet").exists())
        processes.kill(0)
        processes.running[0].join()
        processes.start(0)

    on_two_ranks(config, kill)
    assert_each_once(config.run.directory, 4, EPISODES)
    rows = measured(config)
    oldest = [row["gap/staleness_max"] for row in rows]
    assert oldest[0] == 0
    assert max(oldest) == 1, "something ran ahead, and within the bound"
    assert all(row["weights/probe_gap"] < 1e-3 for row in rows)
    assert "sampler 0 is there again" in (config.run.directory / "log.txt").read_text()


def test_ranks_that_sample_do_not_run_ahead(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"sampling\.max_staleness.*trainer\.ranks is 2.*set cluster\.samplers"):
        configured(tmp_path, 1, samplers=0, trainer={"ranks": 2})
    config = configured(tmp_path, 1, samplers=0)
    with pytest.raises(AssertionError, match=r"ranks that sample themselves do not run ahead; set cluster\.samplers"):
        on_ranks(2, tmp_path / "said", train, config)  # as torchrun, or resume with --ranks
