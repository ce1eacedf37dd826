"""Functions that behave badly, for tools that must bear it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

from posttrain.task import EpisodeInvalid
from posttrain.tools import ToolError, ToolResult, tool
from posttrain.trajectory import CallStatus

CALLS = 0


@tool
def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@tool
async def add_later(a: int, b: int = 1) -> int:
    """Adds two numbers on the event loop."""
    return a + b


@tool(workers=1)
def count() -> dict[str, int]:
    """Counts its calls in one process."""
    global CALLS
    CALLS += 1
    print("printing does not disturb the answer")
    return {"calls": CALLS, "pid": os.getpid()}


@tool(workers=1)
def misbehave(how: str) -> Any:
    """Does what its name says."""
    return BEHAVIOURS[how]()


def spawn(*, session: bool) -> int:
    """A child that outlives everybody who does not kill it; in a session of its own it has left the process group."""
    code = "import os, time; os.fork() and os._exit(0); time.sleep(600)"  # a daemon: its parent is gone at once
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=session).pid


def hang_with_children() -> None:
    spawn(session=False)
    spawn(session=True)
    subprocess.Popen(["sleep", "600"], env={})  # carries no mark
    while True:
        pass


def fork_and_crash() -> None:
    spawn(session=True)
    time.sleep(0.3)
    os._exit(7)


def raise_error(error: BaseException) -> None:
    raise error


BEHAVIOURS = {
    "hang": hang_with_children,
    "sleep": lambda: time.sleep(600),
    "big_number": lambda: 9**9**9**9,
    "exit": lambda: os._exit(3),
    "sys_exit": lambda: sys.exit("bye"),
    "fork_and_crash": fork_and_crash,
    "segfault": lambda: ctypes.string_at(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": lambda: bytearray(1 << 40),
    "raise": lambda: raise_error(ValueError("no such thing")),
    "connection": lambda: raise_error(ConnectionResetError("line broke")),
    "secret": lambda: raise_error(RuntimeError(f"401 for https://example.org?key={os.environ['SOME_API_KEY']}")),
    "own_error": lambda: raise_error(ToolError(CallStatus.FAILED, "busy", transient=True, retry_after=2.0)),
    "invalid": lambda: raise_error(EpisodeInvalid("tool_down", "gone")),
    "none": lambda: None,
    "bytes": lambda: b"\xff ok",
    "surrogate": lambda: "\ud800",
    "exception": lambda: ValueError("returned"),
    "object": lambda: {"a": {1, 2}},
    "result": lambda: ToolResult(text="t", data=[1], cost={"usd": 0.5}),
    "unpicklable": lambda: ToolResult(text="t", data=lambda: 0),
    "stdin": lambda: sys.stdin.read(),
}


def nap(seconds: float) -> int:
    """Sleeps, and tells its process."""
    time.sleep(seconds)
    return os.getpid()
