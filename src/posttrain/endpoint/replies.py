"""What an episode answers -> OpenAI's JSON: one object, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.endpoint.answer import Delta
from posttrain.endpoint.wire import CompletionRequest, MadeCall, Reply

Tokens = Sequence[tuple[str, float]]


def completion(request: CompletionRequest, reply: Reply, created: int) -> dict[str, Any]:
    """The whole answer in one object."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reply.finish_reason}
    if request.is_chat:
        choice |= {"message": reply.message | {"refusal": None}, "logprobs": _logprobs(request, reply.tokens)}
    else:
        choice |= {"text": reply.content or "", "logprobs": _text_logprobs(request, reply.tokens, 0)}
        choice |= {} if reply.ids is None else {"token_ids": list(reply.ids)}
    kind = "chat.completion" if request.is_chat else "text_completion"
    return {**_head(request, kind, created), "id": _name(request, reply.id), "choices": [choice], "usage": reply.usage}


class Chunks:
    """The objects of one stream. name: of the answer, the same in all of them."""

    def __init__(self, request: CompletionRequest, name: str, created: int) -> None:
        kind = "chat.completion.chunk" if request.is_chat else "text_completion"
        self._request = request
        self._head = {**_head(request, kind, created), "id": _name(request, name)}
        self._usage = {"usage": None} if request.include_usage else {}
        self._begun = False
        self._calls = 0
        self._position = 0  # in the text, of the next token

    def of(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The chunks that say `delta`."""
        if not self._request.is_chat:
            logprobs = _text_logprobs(self._request, delta.tokens, self._position)
            self._position += sum(len(text) for text, _ in delta.tokens)
            ids = {"token_ids": list(delta.ids)} if self._request.token_ids else {}
            yield self._chunk({"text": delta.content, "logprobs": logprobs, **ids})
            return
        yield from self._opening(None if delta.call is not None else "")
        if delta.reasoning:
            yield self._chunk({"delta": {"reasoning_content": delta.reasoning}})
        if delta.content or delta.tokens:
            yield self._chunk({"delta": {"content": delta.content}, "logprobs": _logprobs(self._request, delta.tokens)})
        if delta.call is not None:
            yield from self._call(delta.call)

    def end(self, reply: Reply) -> Iterator[dict[str, Any]]:
        """Why it ended, and one more that says what it cost if that was asked."""
        if self._request.is_chat:
            yield from self._opening("")
        last = {"delta": {}} if self._request.is_chat else {"text": ""}
        yield self._chunk(last | {"finish_reason": reply.finish_reason})
        if self._request.include_usage:
            yield {**self._head, "choices": [], "usage": reply.usage}

    def _opening(self, content: str | None) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield self._chunk({"delta": {"role": "assistant", "content": content}})

    def _call(self, call: MadeCall) -> Iterator[dict[str, Any]]:
        index, self._calls = self._calls, self._calls + 1
        opened = call.as_json() | {"function": {"name": call.name, "arguments": ""}}
        yield self._chunk({"delta": {"tool_calls": [{"index": index, **opened}]}})
        yield self._chunk({"delta": {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}})

    def _chunk(self, said: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **said}
        return {**self._head, "choices": [choice], **self._usage}


def _head(request: CompletionRequest, kind: str, created: int) -> dict[str, Any]:
    return {"object": kind, "created": created, "model": request.model}


def _name(request: CompletionRequest, name: str) -> str:
    return f"{'chatcmpl' if request.is_chat else 'cmpl'}-{name}"


def _logprobs(request: CompletionRequest, tokens: Tokens) -> dict[str, Any] | None:
    if not request.logprobs:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in tokens
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(request: CompletionRequest, tokens: Tokens, position: int) -> dict[str, Any] | None:
    """position: in the text, of the first token."""
    if not request.logprobs:
        return None
    offsets: list[int] = []
    for text, _ in tokens:
        offsets.append(position)
        position += len(text)
    return {
        "tokens": [text for text, _ in tokens],
        "token_logprobs": [logprob for _, logprob in tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
