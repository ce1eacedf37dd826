"""The policy's text in, attempts out: in pieces as it is sampled, or a whole turn at once.

Calls inside thoughts do not count. Calls count wherever else they stand, also in quotations and code fences: that is
what Search-R1, DR-Tulu and verl do. Only Llama's forms, which have no tags of their own, must begin the visible text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from posttrain.chat.calls.attempt import MAX_CALLS, Attempt, Found, Parsed
from posttrain.chat.calls.scan import Lookout, Scan, Wait
from posttrain.chat.calls.signature import Signatures, judge
from posttrain.chat.calls.syntax import THINK, Syntax
from posttrain.trajectory import CallStatus, StopReason


class CallParser:
    """One turn of the policy, fed in pieces: what is found does not depend on how it was cut.

    in_thought: the text begins inside a thought, because the prompt ended with `<think>`.
    thought: the tags of a thought; None counts calls inside thoughts as well.

    After MAX_CALLS attempts the rest of the turn is not read: it becomes one attempt, OVER_BUDGET.

    A `</think>` that closes nothing shows that the prompt had opened the thought: what stood before it is withdrawn.
    withdraws: False where it is known whether the prompt did, and nobody takes back what was told.
    """

    def __init__(
        self,
        syntax: Syntax,
        signatures: Signatures | None = None,
        *,
        in_thought: bool = False,
        thought: tuple[str, str] | None = THINK,
        withdraws: bool = True,
    ) -> None:
        self._syntax = syntax
        self._signatures = signatures
        self._thought = thought
        self._in_thought = in_thought and thought is not None
        self._withdraws = withdraws
        self._call_from: int | None = None  # where what may be a call begins, while it is read
        self._found: list[Found] = []
        self._told = 0  # of them, by `feed`
        self._hidden: list[tuple[int, int]] = []  # thoughts and calls
        self._refused_from: int | None = None
        self._pieces: list[str] = []
        self._scan = Scan()
        self._lookout = Lookout((*syntax.openers, *(thought or ())), any_case=syntax.any_case)
        self._openings = {text.lower() for text in syntax.openers}
        self._run = self._read_all()
        next(self._run)

    def feed(self, text: str) -> list[Attempt]:
        """The text goes on. Returns the calls that this piece completed, as they stand if nothing is withdrawn."""
        self._pieces.append(text)
        self._scan.push(text)
        next(self._run)
        new, self._told = self._found[self._told :], len(self._found)
        return [self._judged(found, None) for found in new]

    @property
    def settled(self) -> int:
        """So many characters are read: what follows cannot make a call of them, or of more than `feed` has told."""
        return self._scan.position if self._call_from is None else self._call_from

    def finish(self, stop_reason: StopReason | None = None) -> Parsed:
        """The turn is over. An open call is TRUNCATED if it was cut, MALFORMED if the policy ended it there."""
        self._scan.ended = True
        for _ in self._run:
            pass
        text = "".join(self._pieces)
        if self._refused_from is not None:
            problem = f"more than {MAX_CALLS} calls in one turn: the rest of it is not read"
            self._found.append(
                Found(start=self._refused_from, end=len(text), problem=problem, status=CallStatus.OVER_BUDGET)
            )
            self._hidden.append((self._refused_from, len(text)))
        return Parsed(
            attempts=[self._judged(found, stop_reason) for found in self._found],
            content=_without(text, self._hidden),
            in_thought=self._in_thought,
            in_call=bool(self._found) and self._found[-1].unfinished and not self._in_thought,
        )

    def _judged(self, found: Found, stop_reason: StopReason | None) -> Attempt:
        finish = self._syntax.finish
        final = finish is not None and not found.problem and found.name.lower() == finish.lower()
        if final and not (self._signatures and self._signatures.get(found.name, any_case=True)):
            answer = {} if found.body is None else {"answer": found.body}
            arguments = {**(found.arguments or {}), **answer}
            return judge(replace(found, name=finish or "", arguments=arguments, body=None), None, stop_reason)
        return judge(found, self._signatures, stop_reason, any_case=self._syntax.names_any_case)

    def _read_all(self) -> Wait[None]:
        yield  # the first text comes with `feed`
        scan, thought = self._scan, self._thought
        closing = Lookout(thought[1:] if thought else ())
        fresh, began, seen_thought = True, 0, self._in_thought or not self._withdraws
        while True:
            if self._in_thought and thought:
                if not (yield from scan.until(closing)):
                    self._hidden.append((began, scan.position))
                    return
                self._in_thought = False
                self._hidden.append((began, scan.position))
                scan.start_of_line()
            if fresh:
                yield from scan.skip()
                if self._syntax.anchored and (yield from scan.peek(1)) in ("{", "["):
                    yield from self._read("", scan.position)
            begins = scan.position
            opener = yield from scan.until(self._lookout)
            if not opener:
                return
            at = scan.position - len(opener)
            fresh = fresh and at == begins
            if thought and opener == thought[0]:
                self._in_thought, began, seen_thought = True, at, True
            elif thought and opener == thought[1]:
                if not seen_thought:
                    self._found.clear()
                    self._told = 0
                    self._hidden = [(0, scan.position)]
                    fresh, seen_thought = True, True
                    scan.start_of_line()
            elif opener.lower() in self._openings:
                yield from self._read(opener, at)
                fresh = False
            if self._refused_from is not None:
                while not scan.ended:
                    scan.at = len(scan.buffer)
                    yield
                return

    def _read(self, opener: str, start: int) -> Wait[None]:
        self._call_from = start
        found = yield from self._syntax.read(self._scan, opener, start)
        self._call_from = None
        self._found += found
        if found:
            self._hidden.append((start, self._scan.position))
        if len(self._found) > MAX_CALLS:
            self._refused_from = self._found[MAX_CALLS].start
            del self._found[MAX_CALLS:]


def _without(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text outside the spans, without blanks at its ends."""
    pieces: list[str] = []
    at = 0
    for start, end in sorted(spans):
        pieces.append(text[at:start])
        at = max(at, end)
    return "".join([*pieces, text[at:]]).strip()


def parse_turn(
    text: str,
    syntax: Syntax,
    signatures: Signatures | None = None,
    *,
    stop_reason: StopReason | None = None,
    in_thought: bool = False,
    thought: tuple[str, str] | None = THINK,
) -> Parsed:
    """A whole turn at once; see `CallParser`."""
    parser = CallParser(syntax, signatures, in_thought=in_thought, thought=thought)
    parser.feed(text)
    return parser.finish(stop_reason)


def parse(
    text: str,
    syntax: Syntax,
    signatures: Signatures | None = None,
    *,
    stop_reason: StopReason | None = None,
    in_thought: bool = False,
    thought: tuple[str, str] | None = THINK,
) -> list[Attempt]:
    """The calls of a turn, in order; see `CallParser`."""
    return parse_turn(
        text, syntax, signatures, stop_reason=stop_reason, in_thought=in_thought, thought=thought
    ).attempts


def over_budget(attempts: Sequence[Attempt], allowed: int, detail: str = "") -> list[Attempt]:
    """The attempts, of which only the first `allowed` calls that could run may; the others become OVER_BUDGET."""
    left = allowed
    made: list[Attempt] = []
    for attempt in attempts:
        if attempt.status is CallStatus.OK:
            left -= 1
            if left < 0:
                reason = detail or f"only {allowed} calls are allowed here"
                attempt = replace(attempt, status=CallStatus.OVER_BUDGET, detail=reason)
        made.append(attempt)
    return made
