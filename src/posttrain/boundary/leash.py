"""Runs a foreign command that ends when its starter does, with everything the command has started. Standard library
only. (A worker process of ours needs no other process around it: `workers`.)

Standard input, output and errors are the command's own. A starter that is killed cannot end its children; this process
sees that it has a new parent, and does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from posttrain.boundary.processes import TOKEN, kill_tree, living

CHECK_SECONDS = 0.25
NOT_STARTED = 127
KILLED = 128  # and the signal's number, as in a shell
_ROUNDS = 20
_START = "import sys; sys.path.append({root!r}); from posttrain.boundary.leash import main; sys.exit(main({starter}))"


def on_leash(*command: str) -> list[str]:
    """What to start in this process instead of the command. Only the command hears of PYTHONPATH and the like: it may
    be of another Python, to which our packages mean nothing."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-c", _START.format(root=root, starter=os.getpid()), *command]


def main(starter: int) -> int:
    """starter: process id. The command is in the arguments."""
    told_to_end = []
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the starter; the command would inherit SIG_IGN
    signal.signal(signal.SIGTERM, lambda number, _: told_to_end.append(number))
    try:
        child = subprocess.Popen(sys.argv[1:], start_new_session=True)
    except OSError as error:
        print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # these are the command's alone: its input ends when the starter closes it, and its output
    os.dup2(nothing, 1)  # when the command ends
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(CHECK_SECONDS)
            sweep(os.environ.get(TOKEN))
            return code if code >= 0 else KILLED - code
        if told_to_end or os.getppid() != starter:
            kill_tree(child.pid, os.environ.get(TOKEN, "none"))
            return 1


def sweep(token: str | None) -> None:
    """Kills whatever is left of the processes that carry the token, except this one (where there is a /proc)."""
    for _ in range(_ROUNDS if token else 0):
        left = living(token or "") - {os.getpid()}
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
