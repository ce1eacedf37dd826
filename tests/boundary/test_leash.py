"""What a command on a leash finds. (That it ends with its starter: `invariants/test_nothing_lives_on.py`.)"""

from __future__ import annotations

import signal
import subprocess
import sys

from posttrain.boundary.leash import KILLED, NOT_STARTED, on_leash

SHOWS = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_a_command_and_what_it_starts_can_be_interrupted():
    """A signal that is ignored is ignored by all that is started: an agent could never stop a program by Ctrl-C."""
    done = subprocess.run(on_leash(sys.executable, "-c", SHOWS), capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_exit_status_is_that_of_the_command():
    def status(*command: str) -> int:
        return subprocess.run(on_leash(*command), capture_output=True).returncode

    assert status(sys.executable, "-c", "raise SystemExit(7)") == 7
    assert status(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)") == KILLED + signal.SIGKILL
    assert status("no such program") == NOT_STARTED
