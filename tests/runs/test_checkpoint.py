"""Checkpoints are whole or absent; the latest is told by its manifest; the best is never deleted."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.runs.checkpoint import CheckpointError, CheckpointStore, KeepBest, checkpoints_in


def write(content: str):
    def fill(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "model.safetensors").write_text(content)
        (folder / "optimizer.bin").write_text(content * 2)

    return fill


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.all()]


def test_what_was_committed_comes_back(tmp_path: Path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    state = {"optimizer_steps": 7, "lr": 0.1 + 0.2, "cursor": ["a", "b"], "none": None}
    store.commit(5, write("five"), state)
    latest = CheckpointStore(tmp_path / "checkpoints").latest()
    assert latest is not None
    assert (latest.step, latest.path.name) == (5, "step-5")
    assert latest.state() == state
    assert (latest.path / "policy" / "model.safetensors").read_text() == "five"
    assert set(latest.files) == {"policy/model.safetensors", "optimizer.bin", "state.json"}


def test_p118_latest_is_by_step_not_by_name_or_time(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.commit(9, write("9"), {})
    store.commit(10, write("10"), {})
    os.utime(tmp_path / "step-9", (2e9, 2e9))
    os.utime(tmp_path / "step-10", (1e9, 1e9))
    latest = store.latest()
    assert latest is not None
    assert latest.step == 10
    os.rename(tmp_path / "step-9", tmp_path / "step-99-copy")  # the manifest inside still says 9
    latest = store.latest()
    assert latest is not None
    assert latest.step == 10


def test_last_k_are_kept(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        store.commit(step, write(str(step)), {})
    assert steps(store) == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]
    with pytest.raises(ValueError, match="keep must be >= 1"):
        CheckpointStore(tmp_path, keep=0)


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 4)])
def test_the_best_is_never_deleted(tmp_path: Path, mode, best: int):
    values = {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1, 5: None, 6: float("nan"), 7: 0.4}
    for step, value in values.items():  # a new store each time: what is best survives restarts
        CheckpointStore(tmp_path, keep=1, keep_best=KeepBest("eval/reward", mode)).commit(step, write("x"), {}, value)
    store = CheckpointStore(tmp_path, keep=1, keep_best=KeepBest("eval/reward", mode))
    assert steps(store) == [best, 7]
    found = store.best()
    assert found is not None
    assert (found.step, found.metric) == (best, values[best])


def test_no_best_without_a_measure(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep=3, keep_best=KeepBest("eval/reward"))
    store.commit(1, write("x"), {})
    assert store.best() is None
    assert CheckpointStore(tmp_path).best() is None


def test_a_step_cannot_be_committed_twice_or_backwards(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.commit(5, write("x"), {})
    for step in (5, 4):
        with pytest.raises(CheckpointError, match=r"step-5 exists, so step . cannot be written after it"):
            store.commit(step, write("y"), {})
    assert steps(store) == [5]


def damage_bytes(folder: Path) -> str:
    path = folder / "policy" / "model.safetensors"
    path.write_text(path.read_text().replace("f", "F"))
    return r"policy/model.safetensors differs from what was written \(checksum\)"


def damage_size(folder: Path) -> str:
    (folder / "optimizer.bin").write_text("x")
    return r"optimizer.bin has 1 bytes; 8 were written"


def damage_missing(folder: Path) -> str:
    (folder / "optimizer.bin").unlink()
    return "optimizer.bin is missing"


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"format": 1,')
    return "manifest.json cannot be read"


def damage_manifest_deeply(folder: Path) -> str:
    (folder / "manifest.json").write_text("[" * 100_000)
    return "manifest.json cannot be read"


def damage_manifest_values(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"format": 1, "step": 1, "metric": null, "files": []}')
    return "manifest.json cannot be read"


def damage_manifest_step(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"format": 1, "step": Infinity, "metric": null, "files": {}}')
    return "manifest.json cannot be read"


def damage_no_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def damage_format(folder: Path) -> str:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    return "has format 9; this version reads format 1"


def damage_surplus(folder: Path) -> str:
    (folder / "evil.py").touch()
    return "evil.py is not in the manifest"


@pytest.mark.parametrize(
    "damage",
    [
        damage_bytes,
        damage_size,
        damage_missing,
        damage_manifest,
        damage_manifest_deeply,
        damage_manifest_values,
        damage_manifest_step,
        damage_no_manifest,
        damage_format,
        damage_surplus,
    ],
)
def test_damage_is_named_and_not_passed_over(tmp_path: Path, damage):
    store = CheckpointStore(tmp_path)
    store.commit(1, write("good"), {})
    store.commit(2, write("five"), {})
    message = damage(tmp_path / "step-2")
    with pytest.raises(CheckpointError, match=message):
        store.latest()
    shutil.rmtree(tmp_path / "step-2")  # what the message says to do
    latest = store.latest()
    assert latest is not None
    assert latest.step == 1


def test_a_failed_write_leaves_the_earlier_checkpoint(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.commit(1, write("x"), {})

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.commit(2, fail, {})
    with pytest.raises(ValueError, match="not JSON compliant"):
        CheckpointStore(tmp_path).commit(2, write("x"), {"loss": float("nan")})
    reopened = CheckpointStore(tmp_path)
    assert steps(reopened) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    reopened.commit(2, write("x"), {})


CHILD = """
import os, signal, sys
from pathlib import Path
from posttrain.runs.checkpoint import CheckpointStore, KeepBest
folder, kill_at, commits = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
seen = 0
def watch(event, arguments):
    global seen
    if event in WRITES or (event == "open" and arguments[0] and str(folder) in str(arguments[0])):
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
def fill(step):
    def write(target):
        (target / "policy").mkdir()
        (target / "policy" / "model.safetensors").write_bytes(bytes([step % 256]) * 2000)
    return write
store = CheckpointStore(folder, keep=2, keep_best=KeepBest("m"))
latest = store.latest()
start = latest.step if latest else 0
print("ready", start, flush=True)
sys.addaudithook(watch)
for step in range(start + 1, start + 1 + commits):
    store.commit(step, fill(step), {"step": step}, metric=-abs(step - 3))
    print(step, flush=True)
os.write(1, f"events {seen}\\n".encode())
"""


def child(folder: Path, kill_at: int, commits: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", CHILD, str(folder), str(kill_at), str(commits)]
    source = str(Path(__file__).resolve().parents[2] / "src")
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": source})


def check_after_kill(folder: Path, reported: int, attempted: int) -> None:
    """The latest is the last step that was reported or the one being committed, and whole; the best is still there."""
    store = CheckpointStore(folder, keep=2, keep_best=KeepBest("m"))
    latest = store.latest()
    found = latest.step if latest else 0
    assert reported <= found <= attempted
    if latest:
        assert latest.state() == {"step": found}
        assert (latest.path / "policy" / "model.safetensors").read_bytes() == bytes([found % 256]) * 2000
    if found >= 3:
        best = store.best()
        assert best is not None
        assert best.step == 3
    for checkpoint in store.all():
        checkpoint.verify()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def last_step(output: str) -> int:
    numbers = [int(line.rsplit(" ", 1)[-1]) for line in output.splitlines() if not line.startswith("events")]
    return numbers[-1] if numbers else 0


def test_killed_at_every_single_write(tmp_path: Path):
    """Two commits and a prune, killed before each operation on the file system in turn."""
    base = tmp_path / "base"
    output, _ = child(base, 0, 3).communicate()
    whole = tmp_path / "whole"
    shutil.copytree(base, whole)
    output, _ = child(whole, 0, 2).communicate()
    events = int(output.split()[-1])
    assert events > 15
    for kill_at in range(1, events + 1):
        folder = tmp_path / f"kill-{kill_at}"
        shutil.copytree(base, folder)
        process = child(folder, kill_at, 2)
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        check_after_kill(folder, last_step(output), last_step(output) + 1)
        shutil.rmtree(folder)


def test_killed_at_random_moments_and_resumed_each_time(tmp_path: Path):
    """One folder that lives through 60 kills; progress is never lost and goes on."""
    chance = random.Random(0)
    reported = 0
    for _ in range(60):
        process = child(tmp_path, 0, 10_000)
        assert process.stdout is not None
        started = process.stdout.readline()
        time.sleep(chance.random() * 0.06)
        process.kill()
        output, _ = process.communicate()
        reported = last_step(started + output)
        check_after_kill(tmp_path, reported, reported + 1)
    assert reported > 10


def test_checkpoints_that_go_while_somebody_looks_are_not_damaged(tmp_path: Path):
    """`posttrain show` and `eval` look while the run commits, and deletes, as fast as it can."""
    store, over = CheckpointStore(tmp_path, keep=1), threading.Event()

    def work() -> None:
        step = 0
        while not over.is_set():
            step += 1
            store.commit(step, lambda draft: None, {})

    committing = threading.Thread(target=work)
    committing.start()
    try:
        for _ in range(5000):
            checkpoints_in(tmp_path)
    finally:
        over.set()
        committing.join()
    (left,) = store.all()
    (left.path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoints_in(tmp_path)
