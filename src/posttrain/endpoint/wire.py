"""OpenAI's JSON -> what an episode is asked, and what it answers. Knows no tokens and no HTTP.

What cannot be honoured is refused by name: a parameter that is dropped in silence would train on something else than
the agent believes to have asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.task import Message

# Parameters that change nothing about what is sampled here, or wishes that no sampler can be held to.
NO_EFFECT = {
    "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "seed", "service_tier", "store", "stream", "stream_options", "tool_choice", "user",
    "verbosity",
}  # fmt: skip
READ = {
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "prompt",
    "return_token_ids",
    "stop",
    "stop_token_ids",
    "temperature",
    "tools",
    "top_k",
    "top_p",
}
RAW = {"return_token_ids", "stop_token_ids", "top_k"}  # vLLM's further parameters of /v1/completions

# Parameters that are fine as long as they ask for nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "web_search_options": (),
}
WHY = {
    "n": "call once per completion",
    "response_format": "decoding is not constrained; ask for the format in the prompt",
    "top_logprobs": "only the log-probs of sampled tokens are known",
    "functions": "this is the old form; use `tools`",
}
MAX_STOPS = 16


class Refusal(Exception):
    """A request that is not served; becomes OpenAI's error JSON."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param

    def as_json(self) -> dict[str, Any]:
        kind = {401: "authentication_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One request. Either `messages` (with `tools`) or `prompt`, text or token ids; None = not said."""

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ""
    tools: tuple[dict[str, Any], ...] = ()
    may_call: bool = True  # False: tool_choice is "none"
    one_call: bool = False  # parallel_tool_calls is false
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_ids: frozenset[int] | None = None  # instead of the model's own
    token_ids: bool = False  # the answer says which tokens were sampled, and the seed alone decides which
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCall:
    """A tool call of the policy, as the agent gets it; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy answered. `tokens`: text and log-prob of each token that it wrote."""

    id: str
    content: str | None
    calls: tuple[MadeCall, ...] = ()
    reasoning: str | None = None
    finish_reason: str = "stop"
    tokens: tuple[tuple[str, float], ...] = ()
    ids: tuple[int, ...] | None = None  # where they were asked for
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, reused as they were
    completion_tokens: int = 0

    @property
    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_json() for call in self.calls]
        return message

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def parse_chat(body: Any) -> CompletionRequest:
    """The body of POST /v1/chat/completions; raises Refusal."""
    _check_keys(body, absent={"prompt", "best_of", "echo", "suffix", *RAW})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list of at least one message", param="messages")
    choice = body.get("tool_choice")
    return CompletionRequest(
        messages=tuple(parse_message(message, number) for number, message in enumerate(messages)),
        tools=tuple(_tool(tool, number) for number, tool in enumerate(body.get("tools") or ())),
        may_call=choice != "none",
        one_call=body.get("parallel_tool_calls") is False,
        logprobs=_flag(body, "logprobs"),
        **_common(body),
    )


def parse_text(body: Any) -> CompletionRequest:
    """The body of POST /v1/completions; raises Refusal."""
    _check_keys(body, absent={"messages", "tools", "tool_choice", "max_completion_tokens", "response_format"})
    logprobs = body.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        raise Refusal(f"logprobs={logprobs}: {WHY['top_logprobs']}; send 0 or 1", param="logprobs")
    stop_ids = body.get("stop_token_ids")
    return CompletionRequest(
        prompt=_prompt(body.get("prompt")),
        logprobs=logprobs not in (None, False),
        token_ids=_flag(body, "return_token_ids"),
        stop_ids=None if stop_ids is None else frozenset(_ids(stop_ids, "stop_token_ids")),
        top_k=_integer(body, "top_k", at_least=0),
        **_common(body),
    )


def _check_keys(body: Any, *, absent: set[str]) -> None:
    if not isinstance(body, dict):
        raise Refusal(f"the body must be a JSON object, got {type(body).__name__}")
    for key, value in body.items():
        if value is None or (key in READ | NO_EFFECT and key not in absent):
            continue
        if key not in ONLY or key in absent:
            raise Refusal(f"unknown parameter: {key}", code="unknown_parameter", param=key)
        if value not in ONLY[key]:
            allowed = f"; only {json.dumps(ONLY[key][0])} is" if ONLY[key] else ""
            hint = f" ({WHY[key]})" if key in WHY else ""
            shown = json.dumps(value)[:80]
            raise Refusal(f"{key}={shown} is not supported{allowed}{hint}", code="unsupported_parameter", param=key)


def _common(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("stream_options") or {}
    limits = [_integer(body, key, at_least=1) for key in ("max_tokens", "max_completion_tokens")]
    return {
        "model": str(body.get("model") or "policy"),
        "stop": _stops(body.get("stop")),
        "max_tokens": min((limit for limit in limits if limit is not None), default=None),
        "temperature": _number(body, "temperature"),
        "top_p": _number(body, "top_p"),
        "seed": _integer(body, "seed"),
        "stream": _flag(body, "stream"),
        "include_usage": isinstance(options, dict) and bool(options.get("include_usage")),
    }


def parse_message(message: Any, number: int) -> Message:
    """A message in one form: text content, calls whose arguments are text, nothing that a template does not read."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(f"{where} must be an object with a role", param=where)
    role = "system" if message["role"] == "developer" else message["role"]
    if role not in ("system", "user", "assistant", "tool"):
        raise Refusal(f"{where}: the role {role!r} is not supported", param=f"{where}.role")
    parsed: Message = {"role": role, "content": _text(message.get("content"), where)}
    calls = message.get("tool_calls") or []
    if role == "assistant" and calls:
        parsed["tool_calls"] = [_call(call, where) for call in calls]
    elif parsed["content"] is None and role != "assistant":
        raise Refusal(f"{where} has no content", param=f"{where}.content")
    elif parsed["content"] is None:
        parsed["content"] = ""
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str) and role != "assistant":
            parsed[key] = message[key]
    return parsed


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{where}.content must be text or a list of parts", param=f"{where}.content")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kind) if kind in ("text", "refusal") else None
        if not isinstance(text, str):
            raise Refusal(f"{where}.content: only parts of type text are supported, got {kind!r}", param=where)
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f"{where}.tool_calls: a call needs a function with a name", param=f"{where}.tool_calls")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": text}}
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _tool(tool: Any, number: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(f"tools[{number}] must be {{'type': 'function', 'function': {{'name': ...}}}}", param="tools")
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        return _ids(prompt, "prompt")
    raise Refusal("prompt must be one text or one list of token ids, not empty", param="prompt")


def _ids(ids: Any, param: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise Refusal(f"{param} must be a list of token ids", param=param)
    return tuple(ids)


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops) or len(stops) > MAX_STOPS:
        raise Refusal(f"stop must be a text or a list of up to {MAX_STOPS} texts, none empty", param="stop")
    return tuple(dict.fromkeys(stops))


def _number(body: Mapping[str, Any], key: str) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise Refusal(f"{key} must be a number of at least 0, got {value!r:.80}", param=key)
    return float(value)


def _integer(body: Mapping[str, Any], key: str, at_least: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or (at_least is not None and value < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise Refusal(f"{key} must be a whole number{bound}, got {value!r:.80}", param=key)
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise Refusal(f"{key} must be true or false, got {value!r:.80}", param=key)
    return bool(value)
