"""What the doctor says of this machine, and of machines that lack something."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.loops import doctor
from posttrain.loops.doctor import Check, diagnose

Usage = namedtuple("Usage", "total used free")


def check(name: str, run_directory: Path | None = None) -> Check:
    return {line.name: line for line in diagnose(run_directory).checks}[name]


def test_this_machine_works_and_the_threads_are_left_as_they_were(tmp_path: Path):
    before = torch.get_num_threads()
    found = diagnose(tmp_path)
    assert found.works, found.render()
    assert torch.get_num_threads() == before
    assert {"python", "packages", "extras", "cores", "fast paths", "model", "disk"} <= {c.name for c in found.checks}
    assert list(tmp_path.iterdir()) == []
    assert all(c.advice for c in found.checks if c.status != "ok")


def test_the_model_line_compares_sampler_and_trainer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "AGREEMENT", {"float32": -1.0, "bfloat16": -1.0})
    assert check("model").status == "fail"
    assert "log-probs of sampler and trainer differ" in check("model").seen


def test_a_model_that_does_not_load_is_a_line_not_a_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PACKAGED_MODEL", "no_such_model")
    assert check("model").status == "fail"
    assert "ModelError" in check("model").seen
    assert not diagnose().works


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is off without a GPU")
def test_fast_paths_are_those_of_the_device():
    seen = check("fast paths").seen
    on, off = seen.split("; off: ")
    assert "prompts shared in training" in on
    assert set(off.split(", ")) == {
        "varlen attention",
        "FlashAttention 4",
        "log-prob kernels",
        "CUDA graphs",
        "compiled layers",
    }


@pytest.mark.parametrize(
    ("policy", "status"), [("PASSIVE", "ok"), ("passive", "ok"), ("ACTIVE", "warn"), (None, "warn")]
)
def test_wait_policy(policy: str | None, status: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert check("OMP_WAIT_POLICY").status == status


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(doctor.usable_cores() + 1))
    assert check("OMP_NUM_THREADS").status == "warn"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert check("OMP_NUM_THREADS").status == "ok"


@pytest.mark.parametrize(("free", "status"), [(50e9, "ok"), (5e9, "warn"), (0.5e9, "fail")])
def test_disk_of_a_folder_that_is_not_there_yet(
    free: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free, 0, free))
    assert check("disk", tmp_path / "a" / "b").status == status


def test_a_run_directory_below_a_file_is_none(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text("")
    for place in (tmp_path / "rows.jsonl", tmp_path / "rows.jsonl" / "run"):
        found = check("disk", place)
        assert (found.status, found.seen) == (
            "fail",
            f"{tmp_path}/rows.jsonl is a file; runs are written into a folder",
        )


def test_what_is_wrong_with_a_package():
    assert doctor._missing(Requirement("torch>=2")) is None
    assert "is needed" in str(doctor._missing(Requirement("torch>=99")))
    assert doctor._missing(Requirement("no-such-package-at-all")) == "no-such-package-at-all is not installed"


def test_a_wrong_package_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=99", "tensorboard>=99; extra == 'viewer'"])
    line = check("packages")
    assert (line.status, line.advice) == ("fail", "pip install --upgrade posttrain")
    assert "viewer" in check("extras").seen.split("not installed: ")[1]


def test_the_command_prints_lines_or_json_and_its_code_says_whether_all_works(monkeypatch: pytest.MonkeyPatch):
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert "fast paths" in shown.output
    monkeypatch.setattr(doctor, "PACKAGED_MODEL", "no_such_model")
    broken = CliRunner().invoke(app, ["doctor", "--json"])
    assert broken.exit_code == 1
    record = json.loads(broken.output)
    assert record["works"] is False
    assert [c["name"] for c in record["checks"] if c["status"] == "fail"] == ["model"]
