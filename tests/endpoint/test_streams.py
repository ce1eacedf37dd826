"""Answers told while they are sampled: what the openai SDK sees, when it sees it, and that it is never taken back."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from cases.parts import CHAT_TEMPLATE, byte_tokenizer
from chat.calls.toolsets import NOW, SEARCH, TOOLS
from endpoint.parts import LOOK, called, in_turn, play, user
from posttrain.chat import Renderer
from posttrain.chat.calls import SYNTAXES
from posttrain.endpoint.answer import Answer, Delta, GrowingText
from posttrain.endpoint.calls import CallForm
from posttrain.endpoint.wire import CompletionRequest
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled
from posttrain.sampler.scripted import ScriptedSampler
from posttrain.trajectory import StopReason
from sampler import tiny

openai = pytest.importorskip("openai")

ASKED = [user("Where is the tower?")]


def connect(base_url: str, api_key: str):
    """Without certificates, which take a moment to load."""
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=openai.DefaultAsyncHttpxClient(verify=False)
    )


class Gated(ScriptedSampler):
    """Stops before the token number `at` of a stream until somebody opens `gate`."""

    def __init__(self, script, at: int) -> None:
        super().__init__(script, byte_tokenizer(CHAT_TEMPLATE))
        self.at, self.told, self.gate, self.cancelled = at, 0, asyncio.Event(), asyncio.Event()

    async def stream(self, ids, params, hear, **named):
        sampled = await self.sample(ids, params, **named)
        try:
            for token, logprob in zip(sampled.ids, sampled.logprobs, strict=True):
                if self.told == self.at:
                    await self.gate.wait()
                self.told += 1
                hear(token, logprob)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return sampled


def test_the_first_words_are_read_before_the_last_are_sampled():
    sampler = Gated(["In Paris, by the river."], at=9)

    async def agent(task, base_url, api_key):
        async with connect(base_url, api_key) as client:
            stream = await client.chat.completions.create(model="m", messages=ASKED, stream=True)
            text = ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text == "In Paris,":
                    assert (sampler.told, sampler.gate.is_set()) == (9, False)
                    sampler.gate.set()
            agent.got = text

    played = play(agent, None, sampler=sampler)
    assert agent.got == "In Paris, by the river."
    assert played.written == [["In Paris, by the river.<|im_end|>"]]
    assert len(played.only.rollout_logprobs) == len(played.only.token_ids)


def test_a_call_is_told_when_it_is_complete_and_before_the_turn_ends():
    first = "Look. " + called("a")
    sampler = Gated([first + "\n" + called("b")], at=len(first))

    async def agent(task, base_url, api_key):
        async with connect(base_url, api_key) as client:
            stream = await client.chat.completions.create(model="m", messages=ASKED, tools=[LOOK], stream=True)
            agent.calls, agent.text = {}, ""
            async for chunk in stream:
                (choice,) = chunk.choices
                agent.text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    agent.calls[call.index] = agent.calls.get(call.index, "") + (call.function.arguments or "")
                    if call.index == 0 and agent.calls[0]:
                        assert not sampler.gate.is_set()
                        sampler.gate.set()
                agent.finish = choice.finish_reason

    play(agent, None, sampler=sampler)
    assert [json.loads(arguments) for arguments in agent.calls.values()] == [{"query": "a"}, {"query": "b"}]
    assert (agent.text.strip(), agent.finish) == ("Look.", "tool_calls")


def test_who_leaves_ends_the_sampling_and_nothing_of_it_trains():
    sampler = Gated(lambda call: "One, two, three." if call.session.endswith("#0") else "Again.", at=4)

    async def agent(task, base_url, api_key):
        async with connect(base_url, api_key) as client:
            stream = await client.chat.completions.create(model="m", messages=ASKED, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            await asyncio.wait_for(sampler.cancelled.wait(), 10)
            sampler.gate.set()
            await client.chat.completions.create(model="m", messages=ASKED)

    played = play(agent, None, sampler=sampler)
    assert played.written == [["Again.<|im_end|>"]]
    assert played.only.info["abandoned"] == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_the_policys_own_engine_tells_every_token_and_stops_for_who_leaves(workers: int):
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    sampler = NativeSampler(tiny.policy(), tokenizer, workers=workers)

    async def agent(task, base_url, api_key):
        async with connect(base_url, api_key) as client:
            request = {"model": "m", "messages": ASKED, "stream": True, "logprobs": True, "max_tokens": 40}
            whole = await client.chat.completions.create(**request)
            agent.chunks = [chunk async for chunk in whole]
            endless = await client.chat.completions.create(**request | {"max_tokens": 400})
            await anext(aiter(endless))
            await endless.close()
            for _ in range(10_000):
                await asyncio.sleep(0.001)
                if not any(engine.has_work for engine in sampler.engines):
                    break
            agent.generated = sampler.stats().tokens_generated

    played = play(agent, None, sampler=sampler)
    recorded = [lp for lp in played.only.rollout_logprobs if lp is not None]
    told = [token for chunk in agent.chunks for token in (chunk.choices[0].logprobs or _none).content]
    ended = played.only.turns[0].stop_reason is StopReason.STOP_ID
    assert [token.logprob for token in told] == recorded[: len(recorded) - ended]
    assert len(agent.chunks) > 5
    assert agent.generated < 40 + 400


class _none:
    content = ()


def test_stop_strings_never_leak_and_tokens_keep_them():
    async def agent(task, base_url, api_key):
        async with connect(base_url, api_key) as client:
            request = {"model": "m", "messages": ASKED, "stream": True, "stop": ["</answer>", "END"]}
            stream = await client.chat.completions.create(**request)
            agent.pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]

    played = play(
        agent, None, sampler=ScriptedSampler(in_turn("A </ans EN </answer> x"), byte_tokenizer(CHAT_TEMPLATE))
    )
    assert "".join(agent.pieces) == "A </ans EN "
    assert not any("</answer" in piece or piece.endswith(("<", "E")) for piece in agent.pieces)
    assert played.written == [["A </ans EN </answer>"]]


def test_bare_completions_are_told_with_their_tokens():
    async def agent(task, base_url, api_key):
        async with connect(base_url, api_key) as client:
            extra = {"return_token_ids": True}
            request = {"model": "m", "prompt": "Where?", "stream": True, "logprobs": 1, "stop": "\nObs"}
            agent.chunks = [chunk async for chunk in await client.completions.create(**request, extra_body=extra)]

    played = play(agent, in_turn("é: act\nObservation"))
    choices = [chunk.choices[0] for chunk in agent.chunks]
    assert "".join(choice.text for choice in choices) == "é: act"
    ids = [i for choice in choices for i in choice.model_extra.get("token_ids", ())]
    start = played.only.turns[0].start
    assert ids == played.only.token_ids[start:]
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(ids)


# Any text, cut anywhere: what is told adds up to what a whole reading gives -------------------------------------------

PARTS = (
    "Hello ", "\n", "  ", "<think>", "</think>", "[", "{", "<tool", "Action: ", "é", "🙂", "END", "EN", "ND", "<", ">",
    "</tool_call>", "<answer>x</answer>",
)  # fmt: skip


RENDERER = Renderer(byte_tokenizer(CHAT_TEMPLATE))
OFFERED = tuple(
    {"type": "function", "function": {"name": spec.name, "parameters": spec.parameters}} for spec in (SEARCH, NOW)
)


def made(text: str, syntax: str, *, hears: bool, separate: bool, in_thought: bool, one_call: bool):
    """(reading, what was told)"""
    told: list[Delta] = []
    messages = ({"role": "user", "content": "?"},)
    request = CompletionRequest(model="m", messages=messages, tools=OFFERED, stop=("END",), one_call=one_call)
    answer = Answer(
        request,
        CallForm(syntax, RENDERER),
        RENDERER,
        in_thought=in_thought,
        separate=separate,
        seed=1,
        tell=told.append,
    )
    cut = text.partition("END")[0] + "END" if "END" in text else text
    ids = RENDERER.tokenizer.encode(cut, add_special_tokens=False)
    for token in ids if hears else ():
        answer.hear(token, -1.0)
    stop = (StopReason.STOP_STRING, "END") if "END" in text else (StopReason.LENGTH, None)
    sampled = Sampled(ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), stop_reason=stop[0], stop=stop[1])
    return answer.finish(sampled), told


@pytest.mark.parametrize("syntax", sorted(SYNTAXES))
def test_what_is_told_adds_up_to_the_whole_reading(syntax: str):
    rng = random.Random(syntax)
    call = SYNTAXES[syntax].render([("search", {"query": "a"})], TOOLS)
    for _ in range(30):
        text = "".join(rng.choice((*PARTS, call, call[: rng.randrange(len(call))])) for _ in range(rng.randint(1, 8)))
        options = {name: rng.random() < 0.5 for name in ("separate", "in_thought", "one_call")}
        whole, _ = made(text, syntax, hears=False, **options)
        reading, told = made(text, syntax, hears=True, **options)
        assert reading == whole, text
        assert "".join(delta.content for delta in told) == (reading.content or ""), text
        assert "".join(delta.reasoning for delta in told) == (reading.reasoning or ""), text
        assert tuple(delta.call for delta in told if delta.call) == reading.calls, text
        assert "END" not in (reading.content or ""), text


@pytest.mark.parametrize(
    "text", ["plain words", "Grüße aus Köln 🙂🙂 und 東京", " leading", "a\n\n  b", "<|im_start|>x"]
)
def test_text_grows_to_what_is_decoded_at_once(text: str):
    renderer = Renderer(byte_tokenizer(CHAT_TEMPLATE))
    ids = renderer.text(text)
    growing = GrowingText(renderer, renderer.complete_text)
    assert "".join(growing.add(token) for token in ids) == renderer.complete_text(ids)
