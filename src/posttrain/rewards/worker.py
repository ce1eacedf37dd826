"""The process in which a user's reward function runs, so that it can be killed: `main` is started by
`posttrain.rewards.isolation`.

Speaks with its parent over stdin and stdout: first a FunctionSpec, answered by ("ready", None) or ("error", text); then
any number of (episodes, task), answered by ("outcomes", [...]), ("count", text) or ("unpicklable", text). What the
function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any

from posttrain.boundary.pipes import claim_standard_streams, receive, send
from posttrain.boundary.workers import end_with_parent
from posttrain.rewards.functions import FunctionSpec, RewardError, RewardFunction
from posttrain.task import Task
from posttrain.trajectory import Episode


def main() -> None:
    end_with_parent()
    requests, replies = claim_standard_streams()
    spec: FunctionSpec = receive(requests)
    try:
        function = spec.load()
    except BaseException:
        send(replies, ("error", traceback.format_exc()))
        return
    send(replies, ("ready", None))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            episodes, task = receive(requests)
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
