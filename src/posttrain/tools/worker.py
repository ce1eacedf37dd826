"""The process in which sync tools run, so that they can be killed: `main` is started by `posttrain.tools.pool`.

Speaks with its parent over stdin and stdout: first a WorkerJob, answered by None or a text that says why it cannot be
loaded; then any number of argument dicts, each answered by a ToolResult or an exception. What the tool prints goes to
stderr.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from posttrain.boundary.pipes import claim_standard_streams, receive, send
from posttrain.boundary.workers import end_with_parent
from posttrain.location import locate
from posttrain.tools.invoke import as_error, as_result
from posttrain.tools.protocol import ToolError
from posttrain.tools.schema import Signature
from posttrain.trajectory import CallStatus

try:
    import resource
except ImportError:  # not on Windows
    resource = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """What a worker is for: a function by its location, options that the policy does not see, and its memory."""

    name: str
    location: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    memory_bytes: int | None = None  # of address space

    def load(self) -> Callable[[Mapping[str, Any]], Any]:
        found = locate(self.location)
        function = getattr(found, "function", found)  # a FunctionTool holds its function
        signature = Signature(function, self.name, given=self.options)
        return lambda arguments: function(**signature.bind(arguments), **self.options)


def main() -> None:
    end_with_parent()
    requests, replies = claim_standard_streams()
    job: WorkerJob = receive(requests)
    try:
        call = job.load()
        _limit_memory(job.memory_bytes)
    except BaseException:
        send(replies, traceback.format_exc())
        return
    send(replies, None)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            _answer(replies, job.name, call, receive(requests))


def _answer(replies: BinaryIO, name: str, call: Callable[[Mapping[str, Any]], Any], arguments: Any) -> None:
    reply: Any
    try:
        reply = as_result(call(arguments))
    except (Exception, SystemExit) as error:
        reply = as_error(name, error)
    try:
        pickle.dumps(reply)
    except Exception as error:
        reply = ToolError(CallStatus.FAILED, f"the result of {name} cannot leave its process: {error}")
    send(replies, reply)


def _limit_memory(size: int | None) -> None:
    if size is not None and resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
