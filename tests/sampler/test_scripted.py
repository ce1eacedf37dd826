from __future__ import annotations

import asyncio
import time

import pytest

from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.scripted import ScriptedCall, ScriptedSampler
from posttrain.trajectory import StopReason

from .contract import Case, SamplerContract
from .tiny import END, prompt, together, tokenizer


def params(**options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 50, "stop_ids": frozenset({END})} | options)


class TestContract(SamplerContract):
    def make(self) -> Case:
        sampler = ScriptedSampler(lambda call: f"{call.seed}: ab</s>\nand more", tokenizer())
        return Case(sampler=sampler, tokenizer=tokenizer(), prompt=prompt(5), end_id=END, stop_string="</s>")


def test_a_list_of_turns_is_replayed_per_session() -> None:
    sampler = ScriptedSampler(["one", "two"], tokenizer(), end_id=END)

    async def episode(session: str) -> list[str]:
        texts = []
        for _ in range(2):
            sampled = await sampler.sample([1], params(), seed=0, session=session)
            texts.append(tokenizer().decode(sampled.ids))
        return texts

    assert together(episode("a"), episode("b")) == [["one<end>", "two<end>"]] * 2
    with pytest.raises(IndexError, match="has 2 turns"):
        together(sampler.sample([1], params(), seed=0, session="a"))
    sampler.release("a")
    assert together(sampler.sample([1], params(), seed=0, session="a"))[0].ids[-1] == END


def test_a_function_sees_the_call() -> None:
    seen: list[ScriptedCall] = []

    def script(call: ScriptedCall) -> list[int]:
        seen.append(call)
        return [call.turn + 7, END]

    sampler = ScriptedSampler(script)
    first, second = (together(sampler.sample([4, 5], params(), seed=9, session="s"))[0] for _ in range(2))
    assert (first.ids, second.ids) == ([7, END], [8, END])
    assert (seen[0].ids, seen[0].seed, seen[1].turn) == ((4, 5), 9, 1)


def test_logprobs_are_exact_and_depend_on_seed_and_index_only() -> None:
    sampler = ScriptedSampler([[1, 2, 3, END]])
    one, again, other = (together(sampler.sample([0], params(), seed=s))[0].logprobs for s in (1, 1, 2))
    assert one == again != other
    assert all(-4 <= p < 0 and (p * 64).is_integer() for p in one)


def test_a_turn_that_runs_out_without_a_stop_is_an_error() -> None:
    sampler = ScriptedSampler(["text"], tokenizer())
    with pytest.raises(ValueError, match="ran out before any stop"):
        together(sampler.sample([1], SamplingParams(max_new_tokens=50), seed=0))


def test_text_without_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a tokenizer"):
        together(ScriptedSampler(["text"]).sample([1], params(), seed=0))


def test_version_is_stamped_as_it_was_when_the_turn_began() -> None:
    sampler = ScriptedSampler([[1, END]], version=4, delay=0.01)

    async def main() -> list[int]:
        turn = asyncio.create_task(sampler.sample([1], params(), seed=0))
        await asyncio.sleep(0)
        sampler.version = 5
        return (await turn).versions

    assert asyncio.run(main()) == [4, 4]


def test_a_slow_sampler_can_be_timed_out() -> None:
    sampler = ScriptedSampler([[1, END]], delay=lambda call: 30.0 if call.seed == 1 else 0.0)

    async def main() -> StopReason:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sampler.sample([1], params(), seed=1), timeout=0.05)
        return (await sampler.sample([1], params(), seed=0)).stop_reason

    start = time.monotonic()
    assert asyncio.run(main()) is StopReason.STOP_ID
    assert time.monotonic() - start < 10
