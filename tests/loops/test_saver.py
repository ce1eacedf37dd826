"""Checkpoints that are written while training goes on are those that are written at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loops.toy import toy_config
from posttrain.loops import rl
from posttrain.loops.saver import Saver
from posttrain.runs.checkpoint import CheckpointStore


def finished(folder: Path, **checkpoint: object) -> dict[str, bytes]:
    """The files of all checkpoints of a run; the policy of step 1 is written while step 2 changes it."""
    folder.mkdir()
    ppo = {"advantage": "gae", "std": None, "length": None}
    written = {"every": 1, "keep": 9} | checkpoint
    alone = {"cpu_workers": 1}
    config = toy_config(folder, run={"steps": 3}, checkpoint=written, critic={}, algorithm=ppo, batch=alone)
    run = rl.start(config)
    try:
        rl.train(run)
    finally:
        run.close()
    store = CheckpointStore(config.run.directory / "checkpoints", keep=9)
    found = store.all()
    for checkpoint_ in found:
        checkpoint_.verify()
    assert [checkpoint_.step for checkpoint_ in found] == [1, 2, 3]
    return {f"{c.step}/{name}": (c.path / name).read_bytes() for c in found for name in c.files}


def test_background_checkpoints_are_the_same_bytes(tmp_path: Path):
    assert finished(tmp_path / "now") == finished(tmp_path / "later", background=True)


def test_what_goes_wrong_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(CheckpointStore, "finish", full)
    with pytest.raises(OSError, match="no space left"):
        finished(tmp_path / "run", background=True)


def test_one_piece_of_work_at_a_time():
    order: list[str] = []
    gate = threading.Event()
    saver = Saver(background=True)

    def slow() -> None:
        gate.wait(60)
        order.append("slow")

    saver.do(slow)
    order.append("training")
    gate.set()
    saver.do(lambda: order.append("next"))
    saver.wait()
    assert order == ["training", "slow", "next"]
