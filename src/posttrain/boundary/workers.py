"""Worker processes of this program, which end with it, whatever way that goes, and with all that they have started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
import sys
import weakref
from typing import BinaryIO, cast

from posttrain.boundary.processes import TOKEN, kill_tree

PARENT_PIPE = "POSTTRAIN_PARENT_PIPE"  # environment variable: number of the descriptor that ends with the parent
_PR_SET_CHILD_SUBREAPER = 36


class WorkerProcess:
    """Runs `main()` of a module of ours, which calls `end_with_parent` first. What is written to `requests` it reads
    on its standard input; what it writes to its standard output is read from `replies`."""

    def __init__(self, module: str) -> None:
        token = secrets.token_hex(8)
        reading, life = os.pipe()  # the worker ends when our end of this pipe is closed
        paths = [os.path.abspath(path) for path in sys.path]  # '' is the working folder
        marks = {TOKEN: token, PARENT_PIPE: str(reading), "PYTHONPATH": os.pathsep.join(paths)}
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **marks},
                pass_fds=(reading,),
                start_new_session=True,  # Ctrl-C is for the parent
            )
        except BaseException:
            os.close(life)
            raise
        finally:
            os.close(reading)
        self.token, self.process = token, process
        self.requests, self.replies = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
        self.kill = weakref.finalize(self, _kill, process, token, life)  # also at the program's end

    @property
    def is_alive(self) -> bool:
        return self.kill.alive and self.process.poll() is None


def _kill(process: subprocess.Popen[bytes], token: str, life: int) -> None:
    """Ends and reaps the process, its children, and closes its pipes."""
    kill_tree(process.pid, token)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    os.close(life)


def end_with_parent() -> None:
    """In a worker, before it has a second thread: from now on it ends with its parent, even in the midst of a call, and
    so does all that it starts.

    A watcher beside it reads a pipe that ends when the parent does. A thread could not: a call that holds the
    interpreter lock, such as `9**9**9**9`, would hold it too. Nor would the kernel's signal do (PR_SET_PDEATHSIG): it
    comes when the thread ends that started the worker, and not to what the worker has started.
    """
    pipe = int(os.environ.pop(PARENT_PIPE, "-1"))
    if pipe >= 0 and hasattr(os, "fork"):
        _start_watcher(pipe)
    _adopt_orphans()  # not earlier: the watcher would be adopted, too


def _start_watcher(pipe: int) -> None:
    """As no child of this process: code of others may wait for all children there are, `while os.wait()`. So whoever
    starts it ends at once; it stays in our process group, and carries our token."""
    worker = os.getpid()
    starter = os.fork()
    if starter:
        os.close(pipe)
        if os.waitpid(starter, 0)[1]:
            raise OSError("no watcher can be started beside this worker: os.fork failed")
        return
    status = 1
    try:
        if os.fork():
            status = 0
        else:
            _watch(pipe, worker)
    finally:
        os._exit(status)  # never further into the code of the worker


def _watch(pipe: int, worker: int) -> None:
    for stream in (0, 1, 2):  # the worker's end must be seen when it dies
        os.close(stream)
    os.read(pipe, 1)
    kill_tree(worker, os.environ.get(TOKEN, ""))


def _adopt_orphans() -> None:
    """Children that leave their parent become ours instead of init's, so that they are found and killed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
