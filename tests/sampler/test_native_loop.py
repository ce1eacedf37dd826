"""The native sampler on the event loop: scheduling, cancellation, errors, loops that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.requests import SamplerError

from .test_native_cache import Spy
from .tiny import forwarder, gap, play, policy, prompt, steps, together


def params(tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)


async def deep(inner: Awaitable[None]) -> None:
    """An inline tool behind as many layers as an agent framework puts around it: each costs turns of the loop."""
    for _ in range(4):
        inner = asyncio.wait_for(asyncio.shield(asyncio.ensure_future(inner)), timeout=60)
    await asyncio.gather(inner)


async def nothing() -> None:
    return None


def sizes_of_a_rollout(tool: Callable[[int], Awaitable[None]]) -> list[int]:
    """The number of tokens of every forward, for eight episodes of three turns."""
    model = policy()
    sampler = NativeSampler(model)
    spy = Spy(sampler)

    async def episode(i: int) -> None:
        ids = prompt(20 + i % 3)
        for turn in range(3):
            sampled = await sampler.sample(ids, params(3 + i % 4), seed=10 * i + turn, session=str(i))
            await tool(i)
            ids = [*ids, *sampled.ids, *prompt(5)]
        sampler.release(str(i))

    together(*(episode(i) for i in range(8)))
    return spy.sizes


def test_every_inline_episode_asks_for_its_next_turn_before_the_next_forward() -> None:
    """The batches of a run, hence its rounding, hence a resumed run, must not hang on how deep a tool is nested."""
    direct = sizes_of_a_rollout(lambda i: nothing())
    nested = sizes_of_a_rollout(lambda i: deep(nothing()))
    uneven = sizes_of_a_rollout(lambda i: deep(nothing()) if i % 2 else nothing())
    assert direct == nested == uneven


def test_the_same_on_a_loop_that_hides_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = sizes_of_a_rollout(lambda i: nothing())
    monkeypatch.setattr(NativeSampler, "_ready_queue", lambda self: None)
    assert sizes_of_a_rollout(lambda i: nothing()) == direct
    assert sizes_of_a_rollout(lambda i: deep(nothing()) if i % 2 else nothing()) == direct


def test_a_sequence_in_a_tool_call_costs_nothing() -> None:
    model = policy()
    sampler = NativeSampler(model)
    spy = Spy(sampler)

    async def slow_tool() -> None:
        ids = prompt(20)
        first = await sampler.sample(ids, params(2), seed=0, session="slow")
        at = len(spy.sizes)
        await steps(sampler, at + 30)  # the tool takes as long as 30 forwards of the others
        assert set(spy.sizes[at : at + 30]) == {1}
        await sampler.sample([*ids, *first.ids, *prompt(5)], params(2), seed=1, session="slow")

    async def other() -> None:
        await sampler.sample(prompt(21), params(60), seed=5)

    together(slow_tool(), other())
    assert spy.tokens == 20 + 21 + 59 + 1 + (5 + 1) + 1


def test_tools_run_between_forwards() -> None:
    sampler = NativeSampler(policy())
    ticks = 0

    async def tool() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def main() -> None:
        ticking = asyncio.create_task(tool())
        await sampler.sample(prompt(9), params(20), seed=0)
        ticking.cancel()

    asyncio.run(main())
    assert ticks >= 20


def test_a_cancelled_turn_frees_its_row_at_once_and_the_rest_goes_on() -> None:
    model = policy()
    sampler = NativeSampler(model)

    async def main() -> Sampled:
        doomed = asyncio.create_task(sampler.sample(prompt(9), params(200), seed=0, session="doomed"))
        kept = asyncio.create_task(sampler.sample(prompt(9), params(40), seed=1))
        await steps(sampler, 10)
        assert sampler.engines[0].slots.busy_count == 2
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert sampler.engines[0].slots.busy_count == 1
        before = sampler.stats()
        sampled = await kept
        after = sampler.stats()
        assert after.rows - before.rows == after.steps - before.steps  # one row per forward
        return sampled

    sampled = asyncio.run(main())
    assert sampled.ids == together(NativeSampler(policy()).sample(prompt(9), params(40), seed=1))[0].ids


def test_cancelling_a_request_that_waits_for_a_row() -> None:
    sampler = NativeSampler(policy(), max_batch=1)

    async def main() -> int:
        first = asyncio.create_task(sampler.sample(prompt(9), params(30), seed=0))
        second = asyncio.create_task(sampler.sample(prompt(9), params(30), seed=1))
        await steps(sampler, 5)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        return len((await first).ids)

    assert asyncio.run(main()) == 30
    assert not sampler.engines[0].has_work


def test_releasing_a_session_while_it_is_sampled_does_not_disturb_it() -> None:
    sampler = NativeSampler(policy())

    async def main() -> Sampled:
        turn = asyncio.create_task(sampler.sample(prompt(9), params(30), seed=0, session="s"))
        await steps(sampler, 5)
        sampler.release("s")
        return await turn

    assert len(asyncio.run(main()).ids) == 30
    assert sampler.engines[0].slots.of_session("s") is None


def test_an_error_in_the_engine_reaches_every_caller_and_the_sampler_works_again() -> None:
    model = policy()
    sampler = NativeSampler(model, max_batch=2)
    forward, calls = forwarder(model).hidden_states, 0

    def failing(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("the device fell off")
        return forward(*arguments)  # type: ignore[arg-type]

    forwarder(model).hidden_states = failing  # type: ignore[method-assign]

    async def main() -> list[object]:
        turns = (sampler.sample(prompt(9), params(), seed=i, session=str(i)) for i in range(5))
        return await asyncio.wait_for(asyncio.gather(*turns, return_exceptions=True), timeout=30)

    for error in asyncio.run(main()):
        assert isinstance(error, SamplerError)
        assert "the device fell off" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    assert gap(model, together(*(play(sampler, prompt(9), params(), seed=i) for i in range(5)))) < 1e-5


def test_broken_weights_are_an_error_and_leave_nothing_behind() -> None:
    model = policy()
    sampler = NativeSampler(model)
    weight = next(model.module.parameters())
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(SamplerError, match="not finite"):
        together(sampler.sample(prompt(9), params(), seed=0))
    with torch.no_grad():
        weight.copy_(good)
    model.version += 1
    assert gap(model, together(*(play(sampler, prompt(9), params(), seed=i) for i in range(3)))) < 1e-5


def test_one_sampler_serves_one_event_loop_after_another() -> None:
    sampler = NativeSampler(policy())
    first = together(sampler.sample(prompt(9), params(), seed=0, session="s"))[0]
    again = together(sampler.sample(prompt(9), params(), seed=0, session="s"))[0]
    assert first.ids == again.ids


def test_a_loop_that_ended_in_the_middle_of_a_turn_leaves_the_sampler_usable() -> None:
    sampler = NativeSampler(policy())

    async def interrupted() -> None:
        turn = asyncio.create_task(sampler.sample(prompt(9), params(200), seed=0))
        await steps(sampler, 5)
        assert not turn.done()  # asyncio.run cancels it, and the engine's task, on the way out

    asyncio.run(interrupted())
    assert not sampler.engines[0].has_work
    assert len(together(sampler.sample(prompt(9), params(), seed=0))[0].ids) == 8


def test_a_loop_that_was_dropped_without_a_goodbye_leaves_the_sampler_usable() -> None:
    sampler = NativeSampler(policy())
    loop = asyncio.new_event_loop()
    turn = loop.create_task(sampler.sample(prompt(9), params(200), seed=0))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert not turn.done()
    expected = together(NativeSampler(policy()).sample(prompt(9), params(), seed=3))[0].ids
    assert together(sampler.sample(prompt(9), params(), seed=3))[0].ids == expected
    for task in asyncio.all_tasks(loop):  # tidy up: the forsaken tasks end, and touch nothing of the new loop's
        task.cancel()
    loop.run_until_complete(asyncio.gather(turn, return_exceptions=True))
    loop.close()
    assert together(sampler.sample(prompt(9), params(), seed=3))[0].ids == expected


def test_two_running_loops_are_refused() -> None:
    sampler = NativeSampler(policy())

    async def main() -> None:
        turn = asyncio.create_task(sampler.sample(prompt(9), params(50), seed=0))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another event loop"):
            await asyncio.to_thread(lambda: together(sampler.sample(prompt(9), params(), seed=0)))
        await turn

    asyncio.run(main())
    with pytest.raises(ValueError, match="max_batch"):
        NativeSampler(policy(), max_batch=8, tokens_per_step=4)
    with pytest.raises(ValueError, match="kv_gib"):
        NativeSampler(policy(), kv_gib=0)
