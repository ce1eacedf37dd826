import asyncio
import json

import pytest

from posttrain.deadline import DeadlinePassed, ends_in, within
from posttrain.envs import ENVS, SingleTurnEnv, coerce_text
from posttrain.envs.protocol import Action, Observation
from posttrain.task import Task
from posttrain.trajectory import StopReason


@pytest.mark.parametrize("name", ENVS)
def test_every_row_of_the_table_is_an_env(name: str) -> None:
    for method in ("reset", "step", "close"):
        assert asyncio.iscoroutinefunction(getattr(ENVS[name], method))


def test_one_stop_string_in_place_of_several_is_not_taken_apart() -> None:
    with pytest.raises(TypeError, match="each character would stop; write a list of it"):
        SingleTurnEnv(stop_strings="</answer>")  # type: ignore[arg-type]


def test_single_turn_ends_after_one_action() -> None:
    async def run() -> None:
        env = SingleTurnEnv(stop_strings=["</answer>"])
        assert await env.reset(Task(id="t", prompt=())) == Observation()
        step = await env.step(Action(text="x", stop_reason=StopReason.LENGTH))
        assert (step.done, step.observation, step.reward) == (True, None, None)
        assert (env.stop_strings, env.max_turns) == (("</answer>",), 1)
        await env.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain é", "plain é"),
        (None, ""),
        (b"caf\xc3\xa9", "café"),
        (b"\xff", "\ufffd"),
        (bytearray(b"ab"), "ab"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ([1, "x"], '[1, "x"]'),
        (3.5, "3.5"),
        (True, "true"),
        (ValueError("bad thing"), "ValueError: bad thing"),
        ("lone \ud800 half", "lone \ufffd\ufffd\ufffd half"),
    ],
)
def test_p58_any_tool_output_becomes_text(value: object, text: str) -> None:
    assert coerce_text(value) == text
    coerce_text(value).encode("utf-8")


def test_p58_values_json_does_not_know_are_shown_not_raised() -> None:
    shown = json.loads(coerce_text({"when": {1, 2}, "what": object}))
    assert set(shown) == {"when", "what"}


@pytest.mark.alone
def test_p54_code_that_swallows_its_cancellation_cannot_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.deadline.GRACE_SECONDS", 0.05)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async def run() -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        with pytest.raises(DeadlinePassed):
            await within(stubborn(), ends_in(0.02))
        assert clock() - started < 1.0
        release.set()
        await asyncio.sleep(0)

    asyncio.run(run())


def test_within_passes_results_and_exceptions() -> None:
    async def value() -> int:
        return 3

    async def broken() -> int:
        raise KeyError("x")

    async def run() -> None:
        assert await within(value(), None) == 3
        assert await within(value(), ends_in(5)) == 3
        with pytest.raises(KeyError):
            await within(broken(), ends_in(5))

    asyncio.run(run())


def test_code_that_is_cancelled_before_it_began_is_closed() -> None:
    async def never() -> None:
        raise AssertionError("began")

    call = never()

    async def run() -> None:
        waiting = asyncio.ensure_future(within(call, None))
        me = asyncio.current_task()
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() if task is not me])
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    assert call.cr_frame is None


def test_p54_code_past_its_deadline_or_no_longer_wanted_is_cancelled() -> None:
    cancelled: list[str] = []

    async def slow(name: str) -> None:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def run() -> None:
        with pytest.raises(DeadlinePassed):
            await within(slow("late"), ends_in(0.01))
        assert cancelled == ["late"]
        outer = asyncio.create_task(within(slow("unwanted"), None))
        await asyncio.sleep(0.01)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        await asyncio.sleep(0)
        assert cancelled == ["late", "unwanted"]

    asyncio.run(run())
