"""Ranks that are killed in the middle of a run, on this machine and on a real Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from forked import Program
from loops.toy import toy_config, trained
from posttrain.cluster import start
from posttrain.config import ConfigError, RLConfig, config_yaml, load_config
from posttrain.runs.trajectories import read_trajectories

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
STEPS, SECONDS = 5, 600
RECIPE = Path(__file__).resolve().parents[2] / "recipes/tiny_search.yaml"
SMALL = ("batch.prompts_per_step=4", "eval.every=0", "eval.at_start=false", "eval.max_tasks=24", "run.sinks=[]")
SLOW = """
import time, zlib

def noise(episode, task):
    time.sleep(0.1)
    return zlib.crc32(episode.final_text.encode()) % 1000 / 1000
"""


def processes() -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """(process id, words of the command, environment) of all processes that can be looked at."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            said = dict(line.partition("=")[::2] for line in (process / "environ").read_bytes().decode().split("\0"))
        except (OSError, ValueError):
            continue  # gone, or not ours
        yield int(process.name), words, said


def ranks_of(config: Path) -> dict[int, int]:
    """Rank -> process id of what trains by this config, or by its run directory."""
    return {
        int(said["RANK"]): process
        for process, words, said in processes()
        if "RANK" in said and any(word.startswith(str(config.parent)) for word in words)
    }


def samplers_of(config: Path) -> dict[int, int]:
    """Number -> process id of the samplers that call rank 0 of this config."""
    rank, everybody = ranks_of(config)[0], list(processes())
    (calls,) = [said["POSTTRAIN_CALLS"] for process, _, said in everybody if process == rank]
    return {
        int(said["POSTTRAIN_SAMPLER"]): process
        for process, _, said in everybody
        if "POSTTRAIN_SAMPLER" in said and said["POSTTRAIN_CALLS"] == calls
    }


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def begun(config: Path, *settings: str) -> Program:
    """`posttrain rl`; its ranks and samplers are programs that begin from nothing."""
    return Program(config.parent, "rl", config, *settings)


def wait_for(path: Path, process: Program) -> None:
    until = time.monotonic() + SECONDS
    while not path.exists():
        assert process.poll() is None, process.ended(0)
        assert time.monotonic() < until
        time.sleep(0.02)


def assert_each_once(run: Path, steps: int, episodes_per_step: int) -> None:
    """No row and no trajectory is missing, and none is there twice."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    episodes = [t.episode_id for f in sorted((run / "trajectories").iterdir()) for t in read_trajectories(f)]
    assert len(episodes) == len(set(episodes)) == episodes_per_step * steps


def test_a_rank_that_hangs_is_named_and_all_start_again_from_the_last_checkpoint(tmp_path: Path):
    file, run = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(
        config_yaml(toy_config(tmp_path, code=SLOW, run={"steps": STEPS}, checkpoint={"every": 1, "keep": STEPS}))
    )
    process = begun(file, "trainer.ranks=2", "cluster.heartbeat_seconds=6", "cluster.stall_seconds=4")
    wait_for(run / "checkpoints" / "step-2", process)
    os.kill(ranks_of(file)[1], signal.SIGSTOP)
    status, _, err = process.ended(SECONDS)
    assert status == 0, err
    assert "rank 1 is lost (no sign of life for" in err
    assert re.search(r"nothing has moved for \d+ s. rank 0 ordered \w+ \d+ s ago; rank 1 \(process \d+\) ", err)
    assert "rank 1 was killed by SIGKILL" in err
    assert "starting 2 ranks again from the last checkpoint" in err
    assert_each_once(run, STEPS, 8)
    assert not ranks_of(file)


@NEEDS_RAY
def test_a_search_agent_learns_the_same_though_a_sampler_and_a_rank_are_killed(tmp_path: Path):
    """Ray: two FSDP2 ranks, two samplers on seats of their own. The seat of a sampler dies, later a rank."""
    steps, settings = 10, ["run.steps=10", f"run.dir={tmp_path / 'run'}", "checkpoint.every=4", *SMALL]
    alone = trained(load_config(RLConfig, RECIPE, [*settings, f"run.dir={tmp_path / 'alone'}"]))
    file, run = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(config_yaml(load_config(RLConfig, RECIPE, settings)))
    process = begun(file, "trainer.ranks=2", "cluster.samplers=2", "cluster.ray=local")
    wait_for(run / "trajectories" / "step-000002.parquet", process)
    os.kill(parent(samplers_of(file)[1]), signal.SIGKILL)
    wait_for(run / "checkpoints" / "step-4", process)
    os.kill(ranks_of(file)[1], signal.SIGKILL)
    status, out, err = process.ended(SECONDS)
    assert status == 0, err
    assert "sampler 1 was killed by SIGKILL; it is started again" in err
    assert "SIGABRT" not in err
    assert "starting 2 ranks again from the last checkpoint" in err
    (em,) = [line.split()[1] for line in out.splitlines() if line.startswith("eval/component/em ")]
    assert float(em) == alone.measured["eval/component/em"] > 0.2
    assert_each_once(run, steps, alone.plan.episodes_per_step)
    assert "sampler 1 is lost (its connection broke)" in (run / "log.txt").read_text()
    assert not ranks_of(file)


def test_a_rank_that_fails_by_itself_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[list[str]] = []
    monkeypatch.setattr(start, "launch_local", lambda command, *_: tried.append(list(command)) or 1)
    with pytest.raises(SystemExit) as ended, start.connected_ranks(toy_config(tmp_path, trainer={"ranks": 2})):
        pass
    assert ended.value.code == 1
    assert len(tried) == 1


def test_restarts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[list[str]] = []
    killed = 128 + signal.SIGKILL
    monkeypatch.setattr(start, "launch_local", lambda command, *_: tried.append(list(command)) or killed)
    config = toy_config(tmp_path, trainer={"ranks": 2, "restarts": 2})
    with pytest.raises(SystemExit) as ended, start.connected_ranks(config):
        pass
    assert ended.value.code == killed
    assert len(tried) == 3
    assert tried[0] == tried[2], "no run directory yet: from the beginning"


def test_what_goes_on_after_a_kill_prints_as_it_was_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tried: list[list[str]] = []
    monkeypatch.setattr(
        start, "launch_local", lambda command, *_: (tried.append(list(command)), 137 if len(tried) == 1 else 0)[1]
    )
    monkeypatch.setattr(sys, "argv", ["posttrain", "rl", "c.yaml", "--json"])
    config = toy_config(tmp_path, trainer={"ranks": 2})
    config.run.directory.mkdir()
    (config.run.directory / "config.yaml").touch()
    with start.connected_ranks(config) as workers:
        assert workers is None
    assert tried[1][-5:] == ["resume", str(config.run.directory), "--ranks", "2", "--json"]


@NEEDS_RAY
def test_a_cluster_without_room_says_what_it_has(tmp_path: Path):
    cluster = {"ray": "local", "num_cpus": 1, "wait_seconds": 2}
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(toy_config(tmp_path, trainer={"ranks": 2}, cluster=cluster)))
    status, _, err = begun(file).ended(SECONDS)
    assert status == 1
    assert "2 ranks ask for {'CPU': 2.0}; after 2 s the cluster has {'CPU': 1.0}" in err
    assert "Traceback" not in err


@NEEDS_RAY
def test_no_cluster_where_one_is_said_to_be(tmp_path: Path):
    config = toy_config(tmp_path, trainer={"ranks": 2}, cluster={"ray": "127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"no Ray cluster at '127\.0\.0\.1:1'"), start.connected_ranks(config):
        pass
