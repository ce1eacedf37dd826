"""What TensorBoard and W&B hold of a run that was killed and resumed; the real packages, where they are installed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.runs.directory import RunDirectory
from posttrain.runs.sinks import wandb_id

STARTED = """
import sys
from pathlib import Path
from posttrain.runs.directory import RunDirectory
from posttrain.runs.sinks import Sinks

with RunDirectory.create(Path(sys.argv[1]), "run: {steps: 6}\\n", plan="") as run:
    sinks = Sinks(run, (sys.argv[2],))
    for step in (1, 2, 3, 4):
        sinks.write(step, {"reward/mean": step / 10})
    sinks.close()  # the packages write what they have when they feel like it; a kill may come after that
"""
RESUMED = """
import sys
from pathlib import Path
from posttrain.runs.directory import RunDirectory
from posttrain.runs.sinks import Sinks

with RunDirectory.resume(Path(sys.argv[1])) as run:
    run.rewind(2)
    sinks = Sinks(run, (sys.argv[2],), first_step=3)
    for step in (3, 4, 5, 6):
        sinks.write(step, {"reward/mean": 1 + step / 10})
    sinks.close()
"""
NOT_LOGGED_IN = """
import sys
from pathlib import Path
from posttrain.runs.config_file import ConfigError
from posttrain.runs.directory import RunDirectory
from posttrain.runs.sinks import Sinks

run = RunDirectory.create(Path(sys.argv[1]), "{}\\n", plan="")
try:
    Sinks(run, ("tensorboard", "wandb"))
except ConfigError as error:
    print(error)
run.abandon()
RunDirectory.create(Path(sys.argv[1]), "{}\\n", plan="").close()
print("started again")
"""


def in_a_process(code: str, *arguments: str, **env: str) -> str:
    """Its own, as a run has: wandb keeps the settings that it was first used with."""
    usual = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env = usual | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | env
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def killed_and_resumed(folder: Path, sink: str, **env: str) -> Path:
    """Rows 1 to 4, the checkpoint at 2, and rows 3 to 6 of the process that went on from it."""
    for code in (STARTED, RESUMED):
        in_a_process(code, str(folder / "run"), sink, **env)
    return folder / "run"


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = killed_and_resumed(tmp_path, "tensorboard")
    shown = events.EventAccumulator(str(run / "tensorboard")).Reload().Scalars("reward/mean")
    assert {event.step: round(event.value, 6) for event in shown} == {1: 0.1, 2: 0.2, 3: 1.3, 4: 1.4, 5: 1.5, 6: 1.6}
    assert len(shown) == 6


def records(file: Path) -> Iterator[Any]:
    """Of W&B's file, a LevelDB log: blocks of 32 KiB, each record with checksum, length and kind."""
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = proto.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandb_keeps_its_run_and_takes_every_row_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = killed_and_resumed(tmp_path, "wandb", WANDB_MODE="offline")
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    id = (run / "wandb_id").read_text()
    rows: list[list[tuple[int, float]]] = []
    for file in files:
        found = list(records(file))
        assert {r.run.run_id for r in found if r.WhichOneof("record_type") == "run"} == {id}
        axes = {(r.metric.glob_name, r.metric.step_metric) for r in found if r.WhichOneof("record_type") == "metric"}
        assert ("*", "step") in axes
        history = [r.history.item for r in found if r.WhichOneof("record_type") == "history"]
        said = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items} for items in history]
        rows.append([(row["step"], row["reward/mean"]) for row in said])
    assert rows == [[(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)], [(3, 1.3), (4, 1.4), (5, 1.5), (6, 1.6)]]


def test_a_wandb_run_is_that_of_the_directory_and_not_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    ids = []
    for place in ("here", "there"):
        with RunDirectory.create(tmp_path / place / "run", "{}", plan="") as run:
            ids.append(wandb_id(run))
        with RunDirectory.resume(tmp_path / place / "run") as run:
            assert wandb_id(run) == ids[-1]
    assert ids[0] != ids[1]
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    with RunDirectory.create(tmp_path / "third" / "run", "{}", plan="") as run:
        assert wandb_id(run) == "mine"


def test_wandb_without_a_login_says_what_to_do_and_the_folder_can_be_used_again(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    where = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:1"}  # no key is there
    said = in_a_process(NOT_LOGGED_IN, str(tmp_path / "run"), **where)
    assert "run.sinks names wandb, which does not start" in said
    assert "WANDB_MODE=offline" in said
    assert said.endswith("started again\n")
