"""Job scripts: what they ask for, and what they do where SLURM is (stand-ins that show what they get)."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest

from cli_runs import Command, command_in, write_config
from posttrain.cluster.scripts import Job, ray_command, slurm_script

STAND_INS = {"scontrol": "printf 'node7\\nnode8\\n'", "srun": 'printf "%s\\n" "$@"'}
PLACE = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "41"}


def run_script(folder: Path, text: str) -> list[str]:
    """The words of the command that srun would run."""
    for name, body in STAND_INS.items():
        tool = folder / name
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
    environment = os.environ | PLACE | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment, cwd=folder, check=True)
    return done.stdout.splitlines()


def test_a_slurm_job_starts_a_run_and_goes_on_with_it_when_it_is_requeued(tmp_path: Path):
    run_dir = tmp_path / "my runs" / "a"
    job = Job(
        config=Path("c.yaml"), run_dir=run_dir, name="a", settings=("reward.name='x y'",), nodes=2, gpus=4, hours=1.5
    )
    script = slurm_script(job)
    for line in (
        "--job-name=a",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--time=1:30:00",
        "--requeue",
    ):
        assert f"#SBATCH {line}\n" in script
    words = run_script(tmp_path, script)
    assert words[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4"]
    assert words[words.index("--rdzv-endpoint") + 1] == "node7:20041"
    assert words[-5:] == ["-m", "posttrain", "rl", "c.yaml", "reward.name='x y'"]
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").touch()
    assert run_script(tmp_path, script)[-5:] == ["posttrain", "resume", str(run_dir), "--ranks", "8"]


def test_ranks_on_cpus_ask_for_no_gpu():
    script = slurm_script(
        Job(config=Path("c"), run_dir=Path("r"), name="n", gpus=0, ranks=3, cpus=6, partition="small")
    )
    assert "gpus" not in script
    assert "--nproc-per-node 3 " in script
    assert "#SBATCH --cpus-per-task=6\n#SBATCH --time=24:00:00\n#SBATCH --partition=small\n" in script


def test_a_ray_job_is_a_command(tmp_path: Path):
    job = Job(config=Path("c.yaml"), run_dir=Path("r"), name="n", settings=("run.steps=3",), nodes=2, gpus=4)
    assert ray_command(job, "http://head:8265").split(" -- ")[1].split() == [
        *("python", "-m", "posttrain", "rl", "c.yaml", "run.steps=3", "trainer.ranks=8", "cluster.ray=auto"),
    ]


def test_samplers_apart_take_their_gpus_from_the_ranks(tmp_path: Path):
    job = Job(config=Path("c.yaml"), run_dir=Path("r"), name="n", nodes=2, gpus=4, samplers=3)
    assert "trainer.ranks=5 " in ray_command(job, "http://head:8265")
    with pytest.raises(ValueError, match=r"cluster\.samplers is 3, and torchrun starts none"):
        slurm_script(job)
    with pytest.raises(ValueError, match="leaves no GPU to a rank"):
        Job(config=Path("c.yaml"), run_dir=Path("r"), name="n", nodes=1, gpus=4, samplers=4)


@pytest.mark.parametrize(
    "asked",
    [
        {"nodes": 0},
        {"gpus": -1},
        {"ranks": 0},
        {"cpus": 0},
        {"hours": 0},
        {"hours": math.nan},
        {"hours": math.inf},
    ],
)
def test_jobs_that_cannot_be(asked: dict[str, float]):
    with pytest.raises(ValueError, match="a job needs nodes, ranks and cpus >= 1"):
        Job(config=Path("c"), run_dir=Path("r"), name="n", **asked)  # type: ignore[arg-type]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_in(tmp_path, monkeypatch, capfd)


def test_the_command_prints_a_script_for_the_run_of_a_config(tmp_path: Path, command: Command):
    write_config(tmp_path / "c.yaml")
    done = command("launch", "c.yaml", "run.dir=here", "run.steps=3", "--nodes", "2", "--gpus", "0", "--ranks", "1")
    assert done.code == 0
    assert run_script(tmp_path, done.out)[-4:] == ["rl", "c.yaml", "run.steps=3", "run.dir=here"]
    assert "hours > 0; got nodes=0" in command("launch", "c.yaml", "--nodes", "0").refused()
    assert "trainer.ranks=16" in command("launch", "c.yaml", "--on", "ray", "--nodes", "2").out
