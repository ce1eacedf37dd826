"""An answer in the making: tokens in, out comes what the agent may be told of them.

Whole answers and streams are read the same way, so that a stream adds up to the whole answer: nothing is told that what
follows could take back. Text that may be the start of a stop string or of a call waits until it is known which it is; a
call is told when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from posttrain.chat import Renderer
from posttrain.chat.calls import Attempt, CallParser
from posttrain.endpoint.calls import CallForm, call_id
from posttrain.endpoint.wire import CompletionRequest, MadeCall
from posttrain.sampler.protocol import Sampled
from posttrain.thought import THINK_CLOSE, THINK_OPEN
from posttrain.trajectory import CallStatus, StopReason, ToolCall

REPLACEMENT = "\ufffd"  # what decoders show for an incomplete character
# The agent gets these: what is wrong with arguments it can say itself, as it would to any model.
PASSED_ON = (CallStatus.OK, CallStatus.BAD_ARGUMENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of an answer. `tokens`: text and log-prob of those that were sampled since the last one; `ids`: of
    these."""

    content: str = ""
    reasoning: str = ""
    call: MadeCall | None = None
    tokens: tuple[tuple[str, float], ...] = ()
    ids: tuple[int, ...] = ()


Tell = Callable[[Delta], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A whole answer as its agent got it. `text`: as the policy wrote it; `records`: every attempt to call a tool, with
    what became of it."""

    text: str
    content: str | None
    reasoning: str | None
    calls: tuple[MadeCall, ...]
    records: tuple[ToolCall, ...]


class GrowingText:
    """The text of ids that come one by one, at the same price each. read: ids -> text, without special tokens or with
    them, up to the last complete character."""

    def __init__(self, renderer: Renderer, read: Callable[[Sequence[int]], str]) -> None:
        self._raw, self._read = renderer.decode, read
        self._window: list[int] = []  # the last ids, from a place where a character begins
        self._told = 0  # of them

    def add(self, token: int) -> str:
        """What this id adds; '' while a character is incomplete."""
        if not self._read([token]) and not self._raw([token]).endswith(REPLACEMENT):
            return ""  # a special token
        self._window.append(token)
        if self._raw(self._window).endswith(REPLACEMENT):
            return ""
        # Decoders drop the blank in front of a first word, so each id is read behind the one before it.
        new = self._read(self._window)[len(self._read(self._window[: self._told])) :]
        self._window, self._told = self._window[self._told :], len(self._window) - self._told
        return new


class StopGuard:
    """Keeps text back that may belong to one of the stops, which no answer shows."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._kept = ""

    def feed(self, text: str) -> str:
        """What may be shown now."""
        self._kept += text
        found = [place for stop in self._stops if (place := self._kept.find(stop)) >= 0]
        sure = min(found) if found else len(self._kept) - _overlap(self._kept, self._stops)
        shown, self._kept = self._kept[:sure], self._kept[sure:]
        return shown

    def rest(self, stopped_by: str | None) -> str:
        """What may be shown at the end, where the stop was one of these or something else (None)."""
        shown, self._kept = self._kept, ""
        if stopped_by in self._stops and stopped_by in shown:
            return shown[: shown.rindex(stopped_by)]
        return shown  # a stop that is not in the text was part of a control token's name


@dataclass(slots=True)
class _Calls:
    """Text -> content and calls. What is no call of a known tool stays content, so that an agent need not fear it.

    parser: None takes all as content. only_one: the agent asked for one call at a time.
    """

    parser: CallParser | None
    only_one: bool
    seed: int
    records: list[ToolCall] = field(default_factory=list[ToolCall])
    calls: list[MadeCall] = field(default_factory=list[MadeCall])
    _text: str = ""
    _at: int = 0  # so much of the text is content or calls that were given out

    def feed(self, text: str) -> Iterator[str | MadeCall]:
        self._text += text
        if self.parser is None:
            yield text
            return
        attempts = self.parser.feed(text)
        yield from self._given(attempts, self.parser.settled)

    def rest(self, stop_reason: StopReason) -> Iterator[str | MadeCall]:
        """The end: what was kept back is a call, or was none."""
        if self.parser is not None:
            attempts = self.parser.finish(stop_reason).attempts[len(self.records) :]
            yield from self._given(attempts, len(self._text))

    def _given(self, attempts: Sequence[Attempt], settled: int) -> Iterator[str | MadeCall]:
        for attempt in attempts:
            passed = attempt.status in PASSED_ON and attempt.arguments is not None
            refused = passed and self.only_one and bool(self.calls)
            if refused:
                detail = "the agent asked for one call at a time"
                attempt = replace(attempt, status=CallStatus.OVER_BUDGET, detail=detail)
            self.records.append(attempt.record())
            if passed:
                yield self._text[self._at : attempt.start]
                self._at = attempt.end
            if passed and not refused:
                yield self._made(attempt)
        if settled > self._at:
            yield self._text[self._at : settled]
            self._at = settled

    def _made(self, attempt: Attempt) -> MadeCall:
        arguments = json.dumps(attempt.arguments or {}, ensure_ascii=False)
        self.calls.append(MadeCall(id=call_id(self.seed, len(self.calls)), name=attempt.name, arguments=arguments))
        return self.calls[-1]


_State = Literal["begins", "thought opens", "thought begins", "thought", "answer begins", "answer"]


class _Thoughts:
    """Content -> (reasoning, content): a thought at the beginning is moved out of it, without blanks at its ends."""

    def __init__(self, *, in_thought: bool) -> None:
        self._state: _State = "thought opens" if in_thought else "begins"
        self._kept = ""

    def feed(self, text: str) -> tuple[str, str]:
        self._kept += text
        if self._state in ("begins", "thought opens"):
            start = self._kept.lstrip()
            if not start or (start != THINK_OPEN and THINK_OPEN.startswith(start)):
                return "", ""
            opened = start.startswith(THINK_OPEN)
            if not opened and self._state == "begins":
                self._state = "answer"
            else:
                self._state, self._kept = "thought begins", start.removeprefix(THINK_OPEN)
        reasoning = self._thought() if self._state in ("thought begins", "thought") else ""
        if self._state == "answer begins":
            self._kept = self._kept.lstrip("\n")
            self._state = "answer" if self._kept else self._state
        if self._state != "answer":
            return reasoning, ""
        content, self._kept = self._kept, ""
        return reasoning, content

    def _thought(self) -> str:
        if self._state == "thought begins":
            self._kept = self._kept.lstrip()
            self._state = "thought" if self._kept else self._state
        thought, closing, after = self._kept.partition(THINK_CLOSE)
        if closing:
            self._state, self._kept = "answer begins", after
            return thought.rstrip()
        sure = len((self._kept[: len(self._kept) - _overlap(self._kept, (THINK_CLOSE,))]).rstrip())
        thought, self._kept = self._kept[:sure], self._kept[sure:]
        return thought

    def rest(self) -> tuple[str, str]:
        kept, self._kept = self._kept, ""
        thinking = self._state in ("thought opens", "thought begins", "thought")
        return (kept.rstrip(), "") if thinking else ("", kept)


class Answer:
    """One answer: `hear` its tokens while they are sampled (or not), then `finish` it.

    in_thought: the prompt opened a thought. separate: thoughts are no content. seed: of the sample, which names its
    calls. tell: who waits for deltas; None = nobody.
    """

    def __init__(
        self,
        request: CompletionRequest,
        form: CallForm,
        renderer: Renderer,
        *,
        in_thought: bool,
        separate: bool,
        seed: int,
        tell: Tell | None,
    ) -> None:
        self._request, self._renderer, self._tell = request, renderer, tell
        self._read = form.text if request.tools else renderer.complete_text
        self._growing = GrowingText(renderer, self._read)
        own = form.stop_strings if request.is_chat else ()  # they end a call, and are read with it
        self._guard = StopGuard([stop for stop in request.stop if stop not in own])
        calls = request.is_chat and request.may_call
        parser = form.parser(request.tools, in_thought=in_thought) if calls else None
        self._calls = _Calls(parser, request.one_call, seed)
        self._thoughts = _Thoughts(in_thought=in_thought) if separate and request.is_chat else None
        self._heard = ""  # the text of the tokens that were heard
        self._text = ""  # of it and more, what is sure not to be a stop
        self._content, self._reasoning = "", ""
        self._blank = ""  # content that is none if only calls follow
        self._tokens: list[tuple[int, float]] = []
        self._told = 0  # of the tokens

    def hear(self, token: int, logprob: float) -> None:
        """The next token. One that stops the turn by its id is no part of the text: only `finish` gets it."""
        self._tokens.append((token, logprob))
        new = self._growing.add(token)
        self._heard += new
        self._go_on(self._guard.feed(new))

    def finish(self, sampled: Sampled) -> Reading:
        """The end; tokens that were not heard come now."""
        by_id = sampled.stop_reason is StopReason.STOP_ID
        ids = sampled.ids[:-1] if by_id else sampled.ids
        whole = self._read(ids)
        self._tokens = list(zip(sampled.ids if self._request.token_ids else ids, sampled.logprobs, strict=False))
        rest = whole[len(self._heard) :] if whole.startswith(self._heard) else ""
        stop = str(sampled.stop) if sampled.stop_reason is StopReason.STOP_STRING else None
        self._go_on(self._guard.feed(rest) + self._guard.rest(stop))
        for piece in self._calls.rest(sampled.stop_reason):
            self._give(piece)
        if self._thoughts is not None:
            self._split(*self._thoughts.rest())
        calls = tuple(self._calls.calls)
        if self._blank and not calls:
            self._say(Delta(content=self._blank))
        if self._told < len(self._tokens) and (self._request.logprobs or self._request.token_ids):
            self._say(Delta(), empty=True)
        return Reading(
            text=self._text if self._request.is_chat else whole,
            content=None if calls and not self._content.strip() else self._content,
            reasoning=self._reasoning or None,
            calls=calls,
            records=tuple(self._calls.records),
        )

    def _go_on(self, text: str) -> None:
        self._text += text
        for piece in self._calls.feed(text) if text else ():
            self._give(piece)

    def _give(self, piece: str | MadeCall) -> None:
        if isinstance(piece, MadeCall):
            self._say(Delta(call=piece))
        else:
            self._split(*(("", piece) if self._thoughts is None else self._thoughts.feed(piece)))

    def _split(self, reasoning: str, content: str) -> None:
        self._reasoning += reasoning
        self._content += content
        if self._content.strip():
            content, self._blank = self._blank + content, ""
        else:
            content, self._blank = "", self._blank + content
        self._say(Delta(content=content, reasoning=reasoning))

    def _say(self, delta: Delta, *, empty: bool = False) -> None:
        """Tokens of which nothing can be shown yet go with the next delta."""
        if self._tell is None or (delta == Delta() and not empty):
            return
        new, self._told = self._tokens[self._told :], len(self._tokens)
        texts = [(self._renderer.decode([token]), logprob) for token, logprob in new] if self._request.logprobs else ()
        ids = [token for token, _ in new] if self._request.token_ids else ()
        self._tell(replace(delta, tokens=tuple(texts), ids=tuple(ids)))


def _overlap(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` with which one of the marks may have begun."""
    longest = max(map(len, marks), default=1) - 1
    return next(
        (n for n in range(min(longest, len(text)), 0, -1) if text.endswith(tuple(m[:n] for m in marks if len(m) > n))),
        0,
    )
