"""A trainer that is killed by SIGKILL cannot end what it has started: that ends by itself, with what it has started in
its turn, also in sessions of its own. (Servers of MCP: `tools/mcp/test_client.py`; ranks: `cluster/test_launch.py`.)"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
SECONDS = 60
MINE = """
import subprocess, sys, time
from pathlib import Path

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

def begun(name):
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    Path(__file__).with_name(name).touch()

def tool(how: str) -> str:
    '''Begins, and does not end.'''
    begun("tool")
    return str(9**9**9**9)  # holds the interpreter lock

def waits(episode, task):
    begun("waits")
    time.sleep(600)

def computes(episode, task):
    begun("computes")
    return 9**9**9**9

if __name__ == "__main__":
    begun("agent")
    time.sleep(600)
"""
TRAINER = """
import asyncio, sys, threading, time
from posttrain.endpoint.agent import ExternalAgent
from posttrain.rewards import functions, isolation
from posttrain.sandbox import Sandbox
from posttrain.task import Task
from posttrain.tools import pool, worker
from posttrain.trajectory import Episode

what, mine = sys.argv[1:]
episode, task = Episode(task_id="t", episode_id="e", segments=()), Task(id="t", prompt=())

def reward(name):
    isolation.Worker(functions.FunctionSpec(f"{mine}:{name}")).evaluate([episode], task, 600)

def tool():
    job = worker.WorkerJob(name="tool", location=f"{mine}:tool")
    asyncio.run(pool.WorkerPool(job, size=1).call({"how": "x"}))

works = {
    "tool": tool,
    "waits": lambda: reward("waits"),
    "computes": lambda: reward("computes"),
    "agent": lambda: asyncio.run(ExternalAgent(command=[sys.executable, mine]).run(task, "http://x", "key")),
    "sandbox": lambda: Sandbox(allow_unisolated=True).run_blocking("while True: pass", timeout_s=600),
}
threading.Thread(target=works[what], daemon=True).start()
time.sleep(600)
"""


def parents() -> dict[int, int]:
    """Process id -> that of its parent, zombies aside."""
    found: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:
            continue  # gone
        if state != "Z":
            found[int(stat.parent.name)] = int(parent)
    return found


def started_by(process: int) -> set[int]:
    everybody, found, more = parents(), set[int](), {process}
    while more:
        found |= more
        more = {child for child, parent in everybody.items() if parent in found} - found
    return found - {process}


def in_sessions_of(processes: set[int]) -> set[int]:
    """A worker's watcher is in its session and a child of nobody. Ours is left out."""

    def session(process: int) -> int:
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(process)
        return 0

    sessions = {session(process) for process in processes} - {0, os.getsid(0)}
    return {process for process in parents() if session(process) in sessions}


@pytest.mark.parametrize("what", ["tool", "waits", "computes", "agent", "sandbox"])
def test_nothing_that_a_killed_trainer_has_started_lives_on(tmp_path: Path, what: str):
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, what, str(mine)])
    ends, family = time.monotonic() + SECONDS, set[int]()
    while len(family) < 3 or not (what == "sandbox" or (tmp_path / what).exists()):
        assert time.monotonic() < ends, f"not begun: {family}"
        time.sleep(0.05)
        family = started_by(trainer.pid)
    family |= in_sessions_of(family)
    assert what == "sandbox" or len(family) > 3, "a watcher, or a leash, is among them"
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    ends = time.monotonic() + SECONDS
    while (alive := family & parents().keys()) and time.monotonic() < ends:
        time.sleep(0.05)
    for process in alive:
        os.kill(process, signal.SIGKILL)
    assert not alive, f"{len(alive)} of {len(family)}"
