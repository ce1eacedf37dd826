"""The command line on several ranks: `trainer.ranks`, torchrun, and what goes wrong before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli_runs import command_in
from loops.toy import metric_rows, rows, toy_config, write_rows
from posttrain.cluster.start import connected_ranks
from posttrain.config import ConfigError, config_yaml
from posttrain.loops import rl

COMMAND = ("-m", "posttrain")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", *COMMAND)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=170
    )


def test_two_ranks_by_the_command_and_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The same run both ways; then one more step of the first, on one rank."""
    files = []
    for name in ("own", "torchrun"):
        (tmp_path / name).mkdir()
        config = toy_config(tmp_path / name, run={"steps": 1}, checkpoint={"every": 1})
        files.append(tmp_path / name / "config.yaml")
        files[-1].write_text(config_yaml(config))
    with ThreadPoolExecutor(1) as pool:
        torchrun = pool.submit(command, *TORCHRUN, "rl", files[1], "--json")
        own = command_in(tmp_path, monkeypatch, capfd)("rl", files[0], "trainer.ranks=2", "--json")
    other = torchrun.result()
    for code, out, err in ((own.code, own.out, own.err), (other.returncode, other.stdout, other.stderr)):
        assert code == 0, err
        assert out.count('"step": 1') == 1, "rank 0 alone reports"
    metrics = [(tmp_path / name / "run" / "metrics.jsonl").read_text() for name in ("own", "torchrun")]
    assert '"train/policy_version": 1' in metrics[0]
    assert metrics[0].count("\n") == metrics[1].count("\n") == 1


def test_an_error_of_rank_0_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """It is rank 0 that says it; whoever has started it adds nothing."""
    config = toy_config(tmp_path, tasks=rows())
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(config))
    write_rows(tmp_path / "train.jsonl", [])
    assert "train.jsonl" in command_in(tmp_path, monkeypatch, capfd)("rl", file, "trainer.ranks=2").refused()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"ranks": 4, "tensor_parallel": 2, "sequence_parallel": 4},
            "trainer.tensor_parallel = 2 times trainer.sequence",
        ),
        (
            {"ranks": 5, "sequence_parallel": 2},
            "makes teams of 2 ranks, which do not divide 5 ranks; set trainer.ranks to",
        ),
        ({"tensor_parallel": 4}, "trainer.tensor_parallel = 4 makes teams of 4 ranks, which do not divide 1 rank;"),
    ],
)
def test_teams_that_the_ranks_cannot_form_are_refused(tmp_path: Path, trainer: dict[str, int], message: str):
    """Before any of them is started."""
    with pytest.raises(ConfigError, match=re.escape(message)), connected_ranks(toy_config(tmp_path, trainer=trainer)):
        pass


def test_ranks_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = toy_config(tmp_path, trainer={"offload": True})
    with pytest.raises(ConfigError, match=r"trainer\.offload is for models on several ranks"), connected_ranks(config):
        pass
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    config = toy_config(tmp_path, trainer={"ranks": 2})
    with pytest.raises(ConfigError, match=r"trainer\.ranks is 2, but 3 ranks were started"), connected_ranks(config):
        pass


def test_one_process_leads_alone(tmp_path: Path):
    config = toy_config(tmp_path, run={"steps": 1})
    with connected_ranks(config) as workers:
        assert workers is not None
        run = rl.start(config, workers=workers)
        rl.train(run)
        run.close()
    assert run.learner.sampled is run.learner.policy
    assert metric_rows(run)[1]["train/policy_version"] == 1
