"""The conversations of one episode, token by token.

A request is looked up by its messages: where they continue a recorded conversation, the tokens that are there are used
as they are and only what is new is encoded. A request that goes back to an earlier point, or comes while that point's
continuation is still being sampled, forks: the tokens up to the point become the prompt of a further trajectory. What
continues nothing (a rewritten history, another system prompt, a sub-agent) is rendered as a whole, in which a message
that the policy wrote stands as it was written. Every token that the policy sampled trains exactly once, in the
context in which it was sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.chat import ChatError, Renderer
from posttrain.endpoint.calls import CallForm, Pieces
from posttrain.endpoint.wire import CompletionRequest, Refusal, Reply
from posttrain.rollout import Ticket
from posttrain.sampler.protocol import Sampled
from posttrain.task import Message
from posttrain.trajectory import Source, StopReason, ToolCall, Trajectory, Turn


@dataclass(slots=True, eq=False)
class Thread:
    """One recorded token sequence. `claimed`: its continuation is being sampled."""

    trajectory: Trajectory
    session: str
    claimed: bool = False
    rewards: dict[int, float] = field(default_factory=dict[int, float])  # position -> reward


@dataclass(frozen=True, slots=True)
class Point:
    """A place behind what the policy wrote, from which a conversation can go on; `text`: of a bare completion."""

    thread: Thread
    end: int
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the policy sees of a request. thread: what it continues in place; None opens a further trajectory."""

    ids: list[int]
    pieces: Pieces  # what is not in the thread yet
    session: str  # the sampler's name for the token sequence
    reused: int = 0  # tokens taken as they were recorded
    thread: Thread | None = None

    def release(self) -> None:
        if self.thread is not None:
            self.thread.claimed = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A sampled answer: its tokens, seconds, tool-call records, and whether it trains."""

    sampled: Sampled
    seconds: float
    records: tuple[ToolCall, ...] = ()
    trains: bool = True


class Recording:
    """All conversations of one episode. `threads` are ordered by when the policy last wrote in them."""

    def __init__(self, ticket: Ticket, renderer: Renderer, form: CallForm) -> None:
        self._ticket = ticket
        self._renderer, self._form = renderer, form
        self.threads: list[Thread] = []
        self._points: dict[bytes, Point] = {}  # digest of a conversation up to a reply -> where it ends
        self._texts: list[Point] = []
        self._said: dict[str, str] = {}  # a reply in canonical form -> the text that the policy wrote
        self.sessions: list[str] = []
        self.turns = 0

    @property
    def tokens(self) -> int:
        """Of all conversations."""
        return sum(len(thread.trajectory) for thread in self.threads)

    def empty(self) -> Trajectory:
        ticket = self._ticket
        return Trajectory(task_id=ticket.task.id, group_id=ticket.group_id, episode_id=ticket.episode_id)

    def context(self, request: CompletionRequest, tools: Sequence[dict[str, Any]] | None) -> Context:
        """Finds what the request continues. The caller commits the context or releases it. Raises Refusal."""
        try:
            return self._chat_context(request, tools) if request.is_chat else self._text_context(request)
        except ChatError as error:
            raise Refusal(str(error), param="messages") from error

    def commit(self, context: Context, written: Written) -> Thread:
        """Writes down what was sampled; what the agent will be told is entered by `remember`."""
        thread = context.thread or Thread(self.empty(), context.session)
        trajectory, start = thread.trajectory, len(thread.trajectory)
        if context.thread is not None and context.pieces:
            trajectory.turns.append(Turn(who=Source.ENV, start=start, end=len(context.ids)))
        for ids, source in context.pieces:
            trajectory.add_context(ids, source)
        sampled, start = written.sampled, len(trajectory)
        if written.trains:
            trajectory.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
        else:
            trajectory.add_context(sampled.ids, Source.INJECTED)
        turn = Turn(who=Source.POLICY, start=start, end=len(trajectory), stop_reason=sampled.stop_reason)
        turn.seconds, turn.calls = written.seconds, written.records
        trajectory.turns.append(turn)
        thread.claimed = False
        if thread in self.threads:
            self.threads.remove(thread)
        self.threads.append(thread)
        self.turns += 1
        return thread

    def remember(self, request: CompletionRequest, tools: Any, thread: Thread, reply: Reply, text: str) -> None:
        """From here the conversation can be continued. text: what the policy wrote, as it wrote it."""
        end = len(thread.trajectory)
        if request.is_chat:
            said = canonical(reply.message)
            self._said[said] = text
            chain = digests(request.messages, tools)
            self._points[_link(chain[-1], said)] = Point(thread, end)
            return
        stopped = thread.trajectory.turns[-1].stop_reason is StopReason.STOP_ID  # the text does not show that id
        end -= stopped
        self._texts.append(Point(thread, end, request.prompt + text if isinstance(request.prompt, str) else None))

    def _fresh(self, ids: list[int], pieces: Pieces, reused: int = 0) -> Context:
        """The context of a further trajectory."""
        self.sessions.append(f"{self._ticket.episode_id}#{len(self.sessions)}")
        return Context(ids=ids, pieces=pieces, session=self.sessions[-1], reused=reused)

    def _chat_context(self, request: CompletionRequest, tools: Sequence[dict[str, Any]] | None) -> Context:
        messages = request.messages
        if messages[-1]["role"] == "assistant":
            raise Refusal("the last message is the assistant's own; there is nothing to answer", param="messages")
        chain = digests(messages, tools)
        for count in range(len(messages) - 1, 0, -1):
            point = self._points.get(chain[count])
            if point is not None:
                later = messages[count:]
                if any(message["role"] == "assistant" for message in later):
                    break  # somebody else's turn stands in between: render the whole
                return self._behind(point, _with_names(messages)[count:])
        ids = self._form.prompt([self._as_written(message) for message in _with_names(messages)], tools)
        return self._fresh(ids, [(ids, Source.PROMPT)])

    def _as_written(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        text = self._said.get(canonical(message))
        return message if text is None else {"role": "assistant", "content": text}

    def _behind(self, point: Point, messages: Sequence[Message]) -> Context:
        """The context of `messages` behind a recorded reply."""
        trajectory, renderer = point.thread.trajectory, self._renderer
        history, source = trajectory.token_ids[: point.end], trajectory.source[: point.end]
        closing = renderer.closing(history[-1])
        if closing:  # the turn is open
            last = next(turn for turn in trajectory.turns if turn.end == point.end and turn.who is Source.POLICY)
            results = self._form.results(messages, self._form.text(history[last.start :]))
            if results is not None:
                return self._onward(point, results)
        closed = [*source, *[Source.INJECTED] * len(closing)]
        forked = renderer.fork([*history, *closing], closed, messages)
        if forked is not None:
            return self._fresh(forked, [(forked, Source.PROMPT)], _common_start(forked, history))
        pieces = renderer.delta(messages, after=history[-1])
        return self._onward(point, [(closing, Source.INJECTED), *pieces] if closing else pieces)

    def _onward(self, point: Point, pieces: Pieces) -> Context:
        """In place where the recording ends at the point and nobody else goes on from there; otherwise a fork."""
        thread, pieces = point.thread, [piece for piece in pieces if piece[0]]
        history = thread.trajectory.token_ids[: point.end]
        ids = [*history, *(token for piece, _ in pieces for token in piece)]
        if point.end == len(thread.trajectory) and not thread.claimed:
            thread.claimed = True
            return Context(ids=ids, pieces=pieces, session=thread.session, reused=point.end, thread=thread)
        return self._fresh(ids, [(history, Source.PROMPT), *pieces], point.end)

    def _text_context(self, request: CompletionRequest) -> Context:
        if isinstance(request.prompt, str):
            return self._bare_text(request.prompt)
        prompt, found = list(request.prompt), None
        for point in self._texts:
            known = point.thread.trajectory.token_ids[: point.end]
            if prompt[: point.end] == known and (found is None or point.end >= found.end):
                found = point
        if found is None:
            return self._fresh(prompt, [(prompt, Source.PROMPT)])
        return self._onward(found, [(prompt[found.end :], Source.ENV)])

    def _bare_text(self, prompt: str) -> Context:
        known = [point for point in self._texts if point.text is not None and prompt.startswith(point.text)]
        if not known:
            ids = self._renderer.start(prompt)
            return self._fresh(ids, [(ids, Source.PROMPT)])
        point = max(reversed(known), key=lambda point: len(point.text or ""))  # of equally long ones the latest
        return self._onward(point, [(self._renderer.text(prompt[len(point.text or "") :]), Source.ENV)])


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Tool messages with the name of the tool, which OpenAI's form leaves to the id of the call."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message = {"name": names[message["tool_call_id"]], **message}
        named.append(message)
    return named


def canonical(message: Message) -> str:
    """One text for all forms that clients give to the same message: key order, white space around what the assistant
    said, spelling of the JSON of its arguments, ids of its calls."""
    if message["role"] != "assistant":
        return json.dumps(message, sort_keys=True, ensure_ascii=False)
    calls = [
        [call["function"]["name"], _canonical_json(call["function"]["arguments"])]
        for call in message.get("tool_calls", ())
    ]
    return json.dumps(["assistant", (message["content"] or "").strip(), calls], ensure_ascii=False)


def _canonical_json(text: str) -> str:
    try:
        return json.dumps(read_json(text), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return text


def digests(messages: Sequence[Message], tools: Any) -> list[bytes]:
    """[messages + 1] a digest for every beginning of a conversation under these tools."""
    chain = [_link(b"", json.dumps(tools or [], sort_keys=True))]
    for message in messages:
        chain.append(_link(chain[-1], canonical(message)))
    return chain


def _link(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _common_start(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
