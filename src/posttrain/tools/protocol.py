"""What a tool is: a spec that the policy reads, and a call. Standard library only.

A tool knows nothing of deadlines, retries, caches and budgets: those are put around it (`posttrain.tools.guards`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from posttrain.trajectory import CallStatus

FAILURES = frozenset({CallStatus.FAILED, CallStatus.TIMEOUT, CallStatus.BAD_ARGUMENTS, CallStatus.OVER_BUDGET})


class ToolError(Exception):
    """A call that gave no result.

    message: safe to show to the policy: no secret, no path of this machine.
    transient: the same call may well succeed later (a busy server, a lost connection); `retry_after` seconds from now
        at the earliest, when whoever refused it said so.
    attempts: how often it was tried, here or by whoever served it.
    """

    def __init__(
        self,
        status: CallStatus | str,
        message: str,
        *,
        transient: bool = False,
        retry_after: float | None = None,
        attempts: int = 1,
    ) -> None:
        if status not in FAILURES:
            raise ValueError(f"a ToolError is one of {', '.join(sorted(FAILURES))}, got {status}")
        super().__init__(message)
        self.status = CallStatus(status)
        self.message = message
        self.transient = transient
        self.retry_after = retry_after
        self.attempts = attempts

    def after(self, attempts: int) -> ToolError:
        """The same error after so many attempts."""
        again = _restored(self.status, self.message, self.transient, self.retry_after, attempts)
        for note in getattr(self, "__notes__", ()):
            again.add_note(note)
        return again

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.status, self.message, self.transient, self.retry_after, self.attempts)


def _restored(status: CallStatus, message: str, transient: bool, retry_after: float | None, attempts: int) -> ToolError:
    return ToolError(status, message, transient=transient, retry_after=retry_after, attempts=attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What the policy is told. `parameters` is the JSON schema of an object.

    version: another one where the same arguments may now give something else; stored results belong to one version.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    version: str = ""

    def schema(self) -> dict[str, Any]:
        """The form that chat templates and OpenAI's API take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call gave.

    text: what the policy reads.
    data: the same for programs, JSON-able; search tools give a list of documents {id, title, text, url}.
    cost: what it took, by unit: {"requests": 1, "usd": 0.001}. A cached result cost nothing.
    attempts: as of ToolError. bytes_cut: what a limit has taken from text and data.
    """

    text: str
    data: Any = None
    cost: Mapping[str, float] = field(default_factory=dict[str, float])
    cached: bool = False
    attempts: int = 1
    bytes_cut: int = 0


@runtime_checkable
class Tool(Protocol):
    """One tool, shared by all episodes of a run; `call` runs many times at once."""

    @property
    def spec(self) -> ToolSpec: ...

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Raises ToolError; anything else it raises is a fault of the tool and becomes FAILED."""
        ...

    async def close(self) -> None:
        """Frees what the tool holds (connections, processes); called once, at the end of the run."""
        ...
