"""Ranks that are killed in the middle of a run, on this machine and on a real Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from loops.toy import toy_config
from posttrain.cluster import start
from posttrain.config import ConfigError, config_yaml
from posttrain.runs.trajectories import read_trajectories

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
STEPS, SECONDS = 5, 240
SLOW = """
import time, zlib

def noise(episode, task):
    time.sleep(0.1)
    return zlib.crc32(episode.final_text.encode()) % 1000 / 1000
"""


def ranks_of(config: Path) -> dict[int, int]:
    """Rank -> process id of what trains by this config, or by its run directory."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            said = dict(line.partition("=")[::2] for line in (process / "environ").read_bytes().decode().split("\0"))
        except (OSError, ValueError):
            continue  # gone, or not ours
        if "RANK" in said and any(word.startswith(str(config.parent)) for word in words):
            found[int(said["RANK"])] = int(process.name)
    return found


def killed_once(config: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Rank 1 dies by SIGKILL after the second checkpoint."""
    command = [sys.executable, "-m", "posttrain", "rl", str(config), "trainer.ranks=2", *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + SECONDS
    while not (config.parent / "run" / "checkpoints" / "step-2").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(ranks_of(config)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize(
    "settings", [(), pytest.param(("cluster.ray=local",), marks=NEEDS_RAY)], ids=["here", "on Ray"]
)
def test_a_killed_rank_starts_all_again_from_the_last_checkpoint(tmp_path: Path, settings: tuple[str, ...]):
    file = tmp_path / "config.yaml"
    file.write_text(
        config_yaml(toy_config(tmp_path, code=SLOW, run={"steps": STEPS}, checkpoint={"every": 1, "keep": STEPS}))
    )
    done = killed_once(file, *settings)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "starting 2 ranks again from the last checkpoint" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["train/policy_version"] for row in rows] == [*range(1, STEPS + 1)]
    episodes = [
        t.episode_id for f in sorted((tmp_path / "run" / "trajectories").iterdir()) for t in read_trajectories(f)
    ]
    assert len(episodes) == len(set(episodes)) == 8 * STEPS
    assert not ranks_of(file)


def test_a_rank_that_fails_by_itself_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[list[str]] = []
    monkeypatch.setattr(start, "launch_local", lambda command, count: tried.append(list(command)) or 1)
    with pytest.raises(SystemExit) as ended, start.mustered(toy_config(tmp_path, trainer={"ranks": 2})):
        pass
    assert ended.value.code == 1
    assert len(tried) == 1


def test_restarts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[list[str]] = []
    killed = 128 + signal.SIGKILL
    monkeypatch.setattr(start, "launch_local", lambda command, count: tried.append(list(command)) or killed)
    config = toy_config(tmp_path, trainer={"ranks": 2, "restarts": 2})
    with pytest.raises(SystemExit) as ended, start.mustered(config):
        pass
    assert ended.value.code == killed
    assert len(tried) == 3
    assert tried[0] == tried[2], "no run directory yet: from the beginning"


@NEEDS_RAY
def test_a_cluster_without_room_says_what_it_has(tmp_path: Path):
    cluster = {"ray": "local", "num_cpus": 1, "wait_seconds": 2}
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(toy_config(tmp_path, trainer={"ranks": 2}, cluster=cluster)))
    command = [sys.executable, "-m", "posttrain", "rl", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert "2 ranks ask for {'CPU': 2.0}; after 2 s the cluster has {'CPU': 1.0}" in done.stderr
    assert "Traceback" not in done.stderr


@NEEDS_RAY
def test_no_cluster_where_one_is_said_to_be(tmp_path: Path):
    config = toy_config(tmp_path, trainer={"ranks": 2}, cluster={"ray": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"no Ray cluster at '127\.0\.0\.1:1'"), start.mustered(config):
        pass
