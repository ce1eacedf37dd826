"""One run, one folder, one writer; and logs that a kill cannot spoil."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.runs.directory import RunDirectory, RunError
from posttrain.runs.durable import JsonLog, LogError, disk_problem, read_rows, remove_tree, sweep, write_atomic


def test_a_new_run_has_its_config_and_plan(tmp_path: Path):
    with RunDirectory.create(tmp_path / "runs" / "a", "run: {}\n", "steps 3\n") as run:
        assert run.config_file.read_text() == "run: {}\n"
        assert (run.path / "plan.txt").read_text() == "steps 3\n"
        assert run.trajectories.is_dir()
        assert run.checkpoints.is_dir()


def test_an_existing_run_is_refused_with_what_to_do(tmp_path: Path):
    RunDirectory.create(tmp_path / "a", "run: {}\n", "").close()
    with pytest.raises(RunError, match=r"already holds a run. Go on with it: `posttrain resume .*a`. .*set run.name"):
        RunDirectory.create(tmp_path / "a", "run: {}\n", "")
    assert (tmp_path / "a" / "config.yaml").read_text() == "run: {}\n"


def test_a_folder_with_other_things_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"is not empty \(it holds 'thesis.tex'\)"):
        RunDirectory.create(tmp_path, "run: {}\n", "")


def test_a_start_that_was_killed_can_be_started_again(tmp_path: Path):
    RunDirectory.create(tmp_path / "a", "run: {}\n", "").close()
    (tmp_path / "a" / "config.yaml").unlink()  # the last file that a start writes
    (tmp_path / "a" / ".config.yaml.draft").write_text("ru")
    RunDirectory.create(tmp_path / "a", "run: {}\n", "").close()
    assert not (tmp_path / "a" / ".config.yaml.draft").exists()


def test_resume_of_nothing_lists_the_runs_there_are(tmp_path: Path):
    RunDirectory.create(tmp_path / "good", "run: {}\n", "").close()
    with pytest.raises(RunError, match=r"does not exist; .*Runs in .*: good"):
        RunDirectory.resume(tmp_path / "bad")
    (tmp_path / "bad").mkdir()
    with pytest.raises(RunError, match="is no run directory"):
        RunDirectory.resume(tmp_path / "bad")
    (tmp_path / "good" / "checkpoints" / "step-2").mkdir()
    with pytest.raises(RunError, match=r"give the folder that the run was started with: .*/good$"):
        RunDirectory.resume(tmp_path / "good" / "checkpoints" / "step-2")


def test_two_processes_cannot_write_one_run(tmp_path: Path):
    with RunDirectory.create(tmp_path / "a", "run: {}\n", ""):
        with pytest.raises(RunError, match=f"another process \\(process {os.getpid()} on "):
            RunDirectory.resume(tmp_path / "a")
        code = "import sys, pathlib, posttrain.runs.directory as d; d.RunDirectory.resume(pathlib.Path(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(tmp_path / "a")]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "is being written by another process" in other.stderr
    RunDirectory.resume(tmp_path / "a").close()


def test_a_worker_that_outlives_its_killed_run_does_not_keep_the_lock(tmp_path: Path):
    code = f"""
import os, sys, time
from pathlib import Path
from posttrain.runs.directory import RunDirectory
run = RunDirectory.create(Path({str(tmp_path / "a")!r}), "run: {{}}", "")
if os.fork() == 0:
    Path({str(tmp_path / "forked")!r}).touch()
    time.sleep(5)
    os._exit(0)
while not Path({str(tmp_path / "forked")!r}).exists():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    RunDirectory.resume(tmp_path / "a").close()


def test_rewind_removes_what_came_after_the_checkpoint(tmp_path: Path):
    with RunDirectory.create(tmp_path / "a", "run: {}\n", "") as run:
        for step in range(1, 6):
            run.metrics.append({"step": step, "reward/mean": step / 10})
            run.timing.append({"step": step, "time/step": 1.0})
            (run.trajectories / f"step-{step:06d}.parquet").touch()
        before = (run.path / "metrics.jsonl").read_bytes()
        run.rewind(3)
        assert [row["step"] for row in run.metrics.rows()] == [1, 2, 3]
        assert [row["step"] for row in run.timing.rows()] == [1, 2, 3]
        assert sorted(path.name for path in run.trajectories.iterdir())[-1] == "step-000003.parquet"
        for step in (4, 5):
            run.metrics.append({"step": step, "reward/mean": step / 10})
        assert (run.path / "metrics.jsonl").read_bytes() == before


def test_a_torn_last_line_is_cut_off(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1, "a": 1}\n{"step": 2, "a"')
    assert read_rows(path) == [{"step": 1, "a": 1}]
    log = JsonLog(path)
    log.append({"step": 2, "a": 2})
    log.close()
    assert path.read_bytes() == b'{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n'


@pytest.mark.parametrize("damaged", [b"garbage", b"\xff", b"[" * 100_000], ids=["garbage", "no text", "deep"])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_deleted(tmp_path: Path, damaged: bytes):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    with pytest.raises(LogError, match=r"log.jsonl:2 is not a row of this log"):
        JsonLog(path)
    assert path.read_bytes().count(b"\n") == 3


def test_what_json_lacks_is_stored_as_null(tmp_path: Path):
    log = JsonLog(tmp_path / "log.jsonl")
    log.append({"step": 1, "a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": -0.1}})
    log.sync()
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {
        "step": 1,
        "a": None,
        "b": [None, 1.5],
        "c": {"d": -0.1},
    }


def test_log_txt_takes_the_messages_of_the_package(tmp_path: Path):
    with RunDirectory.create(tmp_path / "a", "run: {}\n", "") as run:
        handler = run.log_handler()
        logger = logging.getLogger("posttrain.test")
        logger.addHandler(handler)
        logger.warning("2 episodes were invalid")
        logger.removeHandler(handler)
        handler.close()
        assert "WARNING posttrain.test: 2 episodes were invalid" in (run.path / "log.txt").read_text()


def test_atomic_write_and_removal_leave_no_traces(tmp_path: Path):
    write_atomic(tmp_path / "a.txt", "one")
    write_atomic(tmp_path / "a.txt", b"two")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "two"
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / ".trash-folder").mkdir()  # of an earlier killed removal
    remove_tree(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    (tmp_path / ".draft-x").mkdir()
    (tmp_path / ".draft-y").touch()
    sweep(tmp_path, (".draft-",))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_is_denied_besides_files_is_not_taken_for_the_disk(tmp_path: Path):
    """Of a port or another process the traceback is what tells."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as denied:
        (tmp_path / "file" / "below").read_text()
    assert "choose another place" in str(disk_problem(denied.value))
    assert disk_problem(OSError(errno.ENOSPC, "No space left on device")), "a write names no file"
    with pytest.raises(OSError, match="x" * 300) as named:
        Path("x" * 300).read_text()
    assert str(disk_problem(named.value)).endswith("; choose another name")
    assert disk_problem(PermissionError(errno.EACCES, "Permission denied (while attempting to bind)")) is None
    assert disk_problem(ProcessLookupError(errno.ESRCH, "No such process")) is None
