"""Several engines on threads: the same answers, the same bookkeeping, and an event loop that stays awake."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import SamplerError

from .contract import Case, SamplerContract
from .test_native_cache import Spy
from .tiny import END, forwarder, gap, play, policy, prompt, steps, together, tokenizer


def params(tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)


class TestContract(SamplerContract):
    def make(self) -> Case:
        sampler = NativeSampler(policy(), tokenizer(), workers=2)
        return Case(sampler=sampler, tokenizer=tokenizer(), prompt=prompt(9), end_id=END, stop_string="a", reach=200)


def test_groups_stay_together_and_are_spread_evenly() -> None:
    model = policy()
    sampler = NativeSampler(model, workers=2)
    spy = Spy(sampler)
    observations = [prompt(5)]
    groups = [
        play(sampler, prompt(30 + g), params(4), seed=i, session=f"{g}-{i}", observations=observations)
        for g in range(4)
        for i in range(8)
    ]
    played = together(*groups)
    first, second = (engine.stats for engine in sampler.engines)
    assert (first.requests, second.requests) == (32, 32)
    prompts, turns = sum(30 + g for g in range(4)), 32 * (3 + 5 + 1 + 3)
    assert spy.tokens == sampler.stats().tokens_forwarded == prompts + turns
    assert sampler.stats().requests == 64
    assert gap(model, played) < 1e-5


def test_the_event_loop_runs_while_the_engines_step() -> None:
    model = policy()
    forward = forwarder(model).hidden_states

    def slow(*arguments: object) -> torch.Tensor:
        time.sleep(0.05)
        return forward(*arguments)  # type: ignore[arg-type]

    sampler = NativeSampler(model, workers=2)
    forwarder(model).hidden_states = slow  # type: ignore[method-assign]
    beats: list[float] = []

    async def heart() -> None:
        while True:
            beats.append(time.monotonic())
            await asyncio.sleep(0.002)

    async def main() -> None:
        beating = asyncio.create_task(heart())
        await asyncio.gather(*(sampler.sample(prompt(9 + i), params(4), seed=i) for i in range(2)))
        beating.cancel()

    asyncio.run(main())
    assert len(beats) > 4 * 3  # several beats within each of the four forwards


def test_what_comes_in_during_a_step_is_done_after_it() -> None:
    model = policy()
    sampler = NativeSampler(model, workers=2)

    async def main() -> list[int]:
        running = [
            asyncio.create_task(sampler.sample(prompt(9 + i), params(60), seed=i, session=str(i))) for i in range(4)
        ]
        await steps(sampler, 8)
        running[0].cancel()
        sampler.release("1")
        late = sampler.sample(prompt(20), params(5), seed=9)
        lengths = [len((await turn).ids) for turn in running[1:]]
        with pytest.raises(asyncio.CancelledError):
            await running[0]
        return [*lengths, len((await late).ids)]

    assert asyncio.run(main()) == [60, 60, 60, 5]
    assert not any(engine.has_work or engine.slots.busy_count for engine in sampler.engines)


def test_an_error_in_one_engine_reaches_the_callers_of_all() -> None:
    model = policy()
    sampler = NativeSampler(model, workers=2)
    forward = forwarder(model).hidden_states

    def failing(token_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        if 77 in token_ids.tolist():
            raise RuntimeError("the device fell off")
        return forward(token_ids, *rest)  # type: ignore[arg-type]

    forwarder(model).hidden_states = failing  # type: ignore[method-assign]

    async def main() -> list[object]:
        turns = (sampler.sample([77 if i == 3 else 5, i], params(), seed=i) for i in range(4))
        return await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), timeout=30)

    assert all(isinstance(error, SamplerError) for error in asyncio.run(main()))
    forwarder(model).hidden_states = forward  # type: ignore[method-assign]
    assert gap(model, together(*(play(sampler, prompt(9), params(), seed=i) for i in range(3)))) < 1e-5


def test_a_loop_that_ends_in_the_middle_of_a_step_leaves_no_thread_at_work() -> None:
    model = policy()
    sampler = NativeSampler(model, workers=2)

    async def interrupted() -> None:
        turns = [asyncio.create_task(sampler.sample(prompt(9 + i), params(200), seed=i)) for i in range(2)]
        await steps(sampler, 9)
        assert not any(turn.done() for turn in turns)

    asyncio.run(interrupted())
    assert not any(engine.has_work for engine in sampler.engines)
    assert gap(model, together(*(play(sampler, prompt(9), params(), seed=i) for i in range(3)))) < 1e-5


def sizes_beside_a_slow_neighbour(slow: int) -> list[list[int]]:
    """The tokens of every forward of each of two engines, one of which is slowed down; episodes are inline, and start
    a new prompt, without a session, after every second turn."""
    model = policy()
    sampler = NativeSampler(model, workers=2)
    sizes: list[list[int]] = [[], []]
    for number, engine in enumerate(sampler.engines):

        def forward(step, number=number, inner=engine._forward):
            if number == slow:
                time.sleep(0.003)
            sizes[number].append(len(step.decode) + sum(count for _, count in step.prefill))
            return inner(step)

        engine._forward = forward  # type: ignore[method-assign]

    async def episode(i: int) -> None:
        for turn in range(3):
            await play(sampler, prompt(20 + i % 4 + turn), params(3 + i % 5), seed=i, session=f"{i}/{turn}")
            await sampler.sample(prompt(30 + i, seed=turn), params(1 + i % 3), seed=i)

    together(*(episode(i) for i in range(12)))
    return sizes


def test_what_an_engine_does_does_not_hang_on_the_pace_of_the_other() -> None:
    """Or a resumed run would round differently."""
    found = [sizes_beside_a_slow_neighbour(slow) for slow in (2, 0, 1, 2)]
    assert all(sizes == found[0] for sizes in found)
    assert all(len(sizes) > 20 for sizes in found[0])


def test_an_engine_does_not_wait_for_a_slower_one() -> None:
    sampler = NativeSampler(policy(), workers=2)
    inner = sampler.engines[0]._forward

    def slow(step: object) -> torch.Tensor:
        time.sleep(0.05)
        return inner(step)  # type: ignore[arg-type]

    sampler.engines[0]._forward = slow  # type: ignore[method-assign, assignment]

    async def main() -> tuple[int, int]:
        turns = [asyncio.create_task(sampler.sample(prompt(9 + i), params(20), seed=i)) for i in range(2)]
        await turns[1]
        made = sampler.engines[0].stats.steps
        await turns[0]
        return made, sampler.engines[0].stats.steps

    made, in_all = asyncio.run(main())
    assert made < 10 < in_all == 20


def test_a_request_that_comes_while_the_engine_works_joins_before_its_next_forward() -> None:
    sampler = NativeSampler(policy(), workers=2)

    async def main() -> int:
        long = asyncio.create_task(sampler.sample(prompt(9), params(300), seed=0))
        other = asyncio.create_task(sampler.sample(prompt(8), params(300), seed=0))
        await steps(sampler, 6)
        await sampler.sample(prompt(9), params(2), seed=1)  # the prompt's engine is in the middle of the first
        assert not long.done()
        made = sampler.engines[0].stats.steps
        long.cancel()
        other.cancel()
        await asyncio.gather(long, other, return_exceptions=True)
        return made

    assert asyncio.run(main()) < 250
    assert not any(engine.has_work for engine in sampler.engines)
