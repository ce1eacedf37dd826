"""Rollouts that run ahead of training, in a sampler on a seat of a real Ray cluster."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from cluster.test_ahead_apart import configured
from cluster.test_ahead_ranks import measured
from cluster.test_restart import NEEDS_RAY, SECONDS, assert_each_once, begun, parent, samplers_of, wait_for
from loops.ahead import EPISODES
from posttrain.config import config_yaml


@NEEDS_RAY
def test_on_ray_the_seat_of_the_only_sampler_dies(tmp_path: Path):
    """It is in the bundle of the rank, and so is that of its replacement; weights go through shared memory."""
    config = configured(tmp_path, 1, run={"steps": 4})
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(config))
    process = begun(file, "cluster.ray=local", "cluster.colocated=true")
    wait_for(config.run.directory / "trajectories" / "step-000001.parquet", process)
    os.kill(parent(samplers_of(file)[0]), signal.SIGKILL)
    status, _, err = process.ended(SECONDS)
    assert status == 0, err
    assert "SIGABRT" not in err, "a sampler ended while its thread left the process group"
    assert "sampler 0 was killed by SIGKILL; it is started again" in err
    assert_each_once(config.run.directory, 4, EPISODES)
    assert max(row["gap/staleness_max"] for row in measured(config)) == 1
