"""The process in which a user's reward function runs, so that it can be killed: `python -m posttrain.rewards.worker`.

Speaks with its parent over stdin and stdout: first a FunctionSpec, answered by ("ready", None) or ("error", text); then
any number of (episodes, task, seconds), answered by ("outcomes", [...]), ("count", text) or ("unpicklable", text). What
the function prints goes to stderr. The process ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from posttrain.boundary.pipes import claim_standard_streams, receive, send
from posttrain.rewards.functions import FunctionSpec, RewardError, RewardFunction
from posttrain.task import Task
from posttrain.trajectory import Episode

try:
    import resource
except ImportError:  # not on Windows
    resource = None

_CPU_GRACE_SECONDS = 30


def main() -> None:
    requests, replies = claim_standard_streams()
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    spec: FunctionSpec = receive(requests)
    try:
        function = spec.load()
    except BaseException:
        send(replies, ("error", traceback.format_exc()))
        return
    send(replies, ("ready", None))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            episodes, task, seconds = receive(requests)
            _limit_cpu(seconds)
            send(replies, _reply(function, episodes, task))


def _reply(function: RewardFunction, episodes: Sequence[Episode], task: Task) -> tuple[str, Any]:
    try:
        outcomes = function.judge(episodes, task)
    except RewardError as error:
        return "count", str(error)
    try:
        pickle.dumps(outcomes)
    except Exception as error:
        return "unpicklable", f"the reward function's result cannot leave its process: {error!r}"
    return "outcomes", outcomes


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _limit_cpu(seconds: float) -> None:
    """A call that holds the interpreter lock also holds the thread above: the kernel ends it if the parent is gone."""
    if resource is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(usage.ru_utime + usage.ru_stime + seconds * (os.cpu_count() or 1)) + _CPU_GRACE_SECONDS
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or allowed < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))


if __name__ == "__main__":
    sys.exit(main())
