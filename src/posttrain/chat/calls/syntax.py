"""What every tool-call syntax is, and what all of them share: prompts, examples, corrections, results."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.chat.calls.attempt import Attempt, Found, Framed, NotExpressible
from posttrain.chat.calls.describe import describe, example_arguments
from posttrain.chat.calls.json_text import dumps, flaw
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signature, Signatures
from posttrain.thought import THINK_CLOSE, THINK_OPEN
from posttrain.trajectory import CallStatus

Call = tuple[str, Mapping[str, Any]]  # (tool, arguments)

THINK = (THINK_OPEN, THINK_CLOSE)
NO_TOOLS = Signatures(())


class Syntax(ABC):
    """One way to write tool calls.

    openers: literals at which `read` is asked for a call; any_case: in any case of letters.
    anchored: `read` is also asked, with opener '', at the first visible character of a turn.
    stop_strings: a turn ends at the first of these. stop_tokens: control tokens that end a turn, by their text.
    in_turn: results follow as text inside the policy's turn; otherwise they are messages of the role `tool`.
    names_any_case: a tool may be called in another case of letters.
    finish: the name of an action that ends the episode, known without a schema; its text is the argument `answer`.
    reserved: matches the first character of every mark that environment text must not hold whole. frame: the same for
        complaints, which name the marks of calls on purpose.
    """

    name: str
    openers: Sequence[str] = ()
    any_case = False
    anchored = False
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    in_turn = False
    names_any_case = False
    finish: str | None = None
    result_head = ""
    result_tail = ""
    reserved: re.Pattern[str]
    frame: re.Pattern[str] | None = None

    @abstractmethod
    def read(self, scan: Scan, opener: str, start: int) -> Wait[list[Found]]:
        """Reads what follows an opener that began at `start`; nothing when it begins no call."""

    @abstractmethod
    def render(self, calls: Sequence[Call], signatures: Signatures = NO_TOOLS) -> str:
        """The text that parses back to these calls. Raises NotExpressible."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Literals that a prompt must name for the policy to know this syntax."""
        return tuple(self.openers)

    @property
    def lookout(self) -> Lookout:
        """The openers, as the parser looks for them."""
        return Lookout(self.openers, any_case=self.any_case)

    def example(self, signature: Signature, signatures: Signatures) -> str:
        """A right call of a tool; '' when this syntax cannot write one."""
        try:
            return self.render([(signature.name, example_arguments(signature))], signatures)
        except NotExpressible:
            return ""

    def instructions(self, signatures: Signatures) -> str:
        """The tools and how to call them, for prompts of models whose chat template does not describe tools."""
        tools = "\n\n".join(describe(signature, self.example(signature, signatures)) for signature in signatures)
        return f"You may call these tools:\n\n{tools}\n\n{self.how_results_come()}"

    def how_results_come(self) -> str:
        """The sentence that ends the instructions."""
        head, tail = self.result_head.strip(), self.result_tail.strip()
        between = f" between {head} and {tail}" if head and tail else f" behind {head}" if head else ""
        return f"Write a call exactly as in the examples. The result comes back{between}."

    def neutralise(self, text: str) -> str:
        """Environment text in which none of this syntax's own marks is left whole."""
        return _broken_up(self.reserved, text)

    def result(self, tool: str, text: str, *, turn: str = "") -> Framed:
        """A tool's result as text for the policy. turn: what the policy wrote, where the frame depends on it."""
        return Framed(self.head(tool, turn), self.neutralise(text), self.result_tail)

    def head(self, tool: str, turn: str) -> str:
        """What stands in front of a result."""
        return self.result_head

    def correction(self, attempt: Attempt, signatures: Signatures | None = None, *, turn: str = "") -> Framed:
        """What the policy reads when a call was not run: what was wrong, and a right example in this syntax."""
        wrong = _NOT_RUN.get(attempt.status, "This call was not run")
        example = self._example_for(attempt, signatures)
        head = f"{self.head(attempt.name, turn)}{wrong}{': ' if attempt.detail else '.'}"
        return Framed(head, self.complaint(attempt), example + self.result_tail)

    def complaint(self, attempt: Attempt) -> str:
        """What was wrong, unable to close its frame."""
        return _broken_up(self.frame or self.reserved, attempt.detail)

    def _example_for(self, attempt: Attempt, signatures: Signatures | None) -> str:
        if not signatures or attempt.status is CallStatus.OVER_BUDGET:
            return ""
        named = signatures.get(attempt.name, any_case=self.names_any_case)
        example = self.example(named or next(iter(signatures)), signatures)
        return f"\nA right call looks like this:\n{example}" if example else ""


_ESCAPES = {"<": "&lt;", "[": "&#91;"}
_NOT_RUN = {
    CallStatus.MALFORMED: "This call was not run, because it is malformed",
    CallStatus.EMPTY: "This call was not run, because it is empty",
    CallStatus.UNKNOWN_TOOL: "This call was not run, because its tool does not exist",
    CallStatus.BAD_ARGUMENTS: "This call was not run, because its arguments are wrong",
    CallStatus.TRUNCATED: "This call was not run, because it was cut",
    CallStatus.OVER_BUDGET: "This call was not run, because no calls are left",
    CallStatus.TIMEOUT: "This call took too long and was given up",
    CallStatus.FAILED: "This call failed",
}


def _broken_up(marks: re.Pattern[str], text: str) -> str:
    return marks.sub(lambda found: _ESCAPES.get(found[0], "> " + found[0]), text)


def reserved_tags(*names: str, brackets: Sequence[str] = (), literals: Sequence[str] = ()) -> re.Pattern[str]:
    """Matches the first character of every opening or closing tag of these names, and of the literals."""
    parts = [rf"<(?=/?[ \t]{{0,8}}(?:{'|'.join(map(re.escape, names))})(?![\w-]))"]
    parts += [rf"\[(?=/?(?:{'|'.join(map(re.escape, brackets))})\])"] if brackets else []
    parts += [rf"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in literals]
    return re.compile("|".join(parts), re.IGNORECASE)


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that JSON can carry; NotExpressible otherwise."""
    made = dict(arguments)
    if problem := flaw(made):
        raise NotExpressible(f"these arguments are no JSON: {problem}")
    try:
        dumps(made)
    except (TypeError, ValueError) as error:
        raise NotExpressible(f"these arguments are no JSON: {error}") from None
    return made
