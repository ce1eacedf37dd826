"""What a parser finds in a turn: attempts to call a tool, each with what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.trajectory import CallStatus, StopReason, ToolCall

# The sampler was stopped from outside: what it was writing may be half of what it meant.
CUT = frozenset(
    {StopReason.LENGTH, StopReason.ABORT, StopReason.CONTEXT_FULL, StopReason.DEADLINE, StopReason.MAX_TURNS}
)


MAX_CALLS = 512  # attempts in one turn that are looked at; the rest is refused as one


class Spec(Protocol):
    """A tool as the policy is told of it. `parameters` is the JSON schema of an object."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of the policy to call a tool: the text [start, end) of its turn.

    arguments: None where nothing could be read; texts are already values where the schema says so.
    detail: what is wrong, for the policy and for people; '' when status is OK. It may quote the policy.
    """

    name: str
    arguments: dict[str, Any] | None
    status: CallStatus
    detail: str
    start: int
    end: int

    def record(self, *, status: CallStatus | None = None, detail: str | None = None, seconds: float = 0.0) -> ToolCall:
        """As the trajectory stores it, with what became of it after parsing (a timeout, a spent budget)."""
        return ToolCall(
            name=self.name,
            arguments=self.arguments or {},
            status=status or self.status,
            detail=self.detail if detail is None else detail,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A call as a syntax reads it, before any schema is asked.

    body: a text that goes to the tool's main parameter; None where the syntax has named arguments only.
    positional: values without a name (pythonic calls).
    textual: the values of `arguments` are texts, to be read as the schema says.
    problem: why it is no call, as `status` (MALFORMED or EMPTY) says.
    unfinished: the turn ended inside it; if_not_cut: it did so only if it was cut, else the call is whole.
    """

    start: int
    end: int
    name: str = ""
    arguments: dict[str, Any] | None = None
    body: str | None = None
    positional: tuple[Any, ...] = ()
    textual: bool = False
    problem: str = ""
    status: CallStatus = CallStatus.MALFORMED
    unfinished: bool = False
    if_not_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A whole turn.

    content: what is neither thought nor call. in_thought, in_call: the text ends inside an open thought or a call that
    could still go on. After a stop string either says that the string stood inside something else (an attribute, a
    thought): let the policy go on writing. After a stop by length an open call is TRUNCATED.
    """

    attempts: list[Attempt]
    content: str
    in_thought: bool = False
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class Framed:
    """Text for the policy to read, in three parts: `head` and `tail` are markup and stay whole, `text` may be cut."""

    head: str
    text: str
    tail: str

    def __str__(self) -> str:
        return self.head + self.text + self.tail


class NotExpressible(ValueError):
    """A call that this syntax has no way to write."""


def shown(value: Any, limit: int = 80) -> str:
    """A short quotation of any value, on one line."""
    text = repr(value if not isinstance(value, str) else value[: limit + 1])
    return text if len(text) <= limit else text[: limit - 1] + "…"
