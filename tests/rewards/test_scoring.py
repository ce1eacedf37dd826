"""Custom functions of every kind, in this process. P-numbers are the field's bug reports."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.rewards import RewardError, score, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.functions import RewardFunction
from posttrain.rewards.scoring import CustomReward, Mixture, Part
from posttrain.task import Abstain, Invalid, Score, Task
from posttrain.trajectory import CallStatus, Episode, ToolCall

from .episodes import episode, task

EIGHT = [episode(f"<answer>{number}</answer>") for number in range(8)]


def run(function, episodes=EIGHT, seconds=60.0):
    reward = CustomReward(RewardFunction(function), name="mine", seconds=seconds)
    return asyncio.run(score_group(reward, episodes, task("3")))


def number_of(ep) -> int:
    return int(ep.final_text.removeprefix("<answer>").removesuffix("</answer>"))


def test_outcomes_come_back_in_order():
    def slow_first(ep, task):
        time.sleep(0.05 if number_of(ep) == 0 else 0)
        return number_of(ep)

    assert run(slow_first) == [Score(float(number)) for number in range(8)]


def test_p72_a_reward_that_raises_on_one_of_eight_leaves_seven():
    def fails_on_five(ep, task):
        return {0: 1.0}.get(number_of(ep) - 5) or 1 / (number_of(ep) - 5)

    def raises_on_five(ep, task):
        return 1 / (number_of(ep) - 5)

    outcomes = run(raises_on_five)
    assert [isinstance(outcome, Score) for outcome in outcomes] == [True] * 5 + [False] + [True] * 2
    assert outcomes[5].reason == "reward_error"
    assert "ZeroDivisionError" in outcomes[5].detail
    assert "raises_on_five" in outcomes[5].detail
    assert all(isinstance(outcome, Score) for outcome in run(fails_on_five))


@pytest.mark.parametrize("count", [7, 9, 0])
def test_p76_a_batch_reward_with_a_wrong_count_is_an_error_naming_both(count):
    def wrong(episodes, task):
        return [0.0] * count

    with pytest.raises(RewardError, match=f"returned {count} values for 8 episodes"):
        run(wrong)


def test_a_batch_reward_sees_the_whole_group_once():
    calls = []

    def relative(episodes, task):
        calls.append(len(episodes))
        return (np.arange(len(episodes)) == 3).astype(np.float32)

    assert [outcome.value for outcome in run(relative)] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert calls == [8]


def test_a_batch_reward_may_mix_outcomes():
    def mixed(episodes, task):
        return [1, None, math.nan, Invalid("judge_down"), Abstain(), Score(0.5), "high", torch.tensor(2.0)]

    outcomes = run(mixed)
    assert outcomes[0] == Score(1.0)
    assert isinstance(outcomes[1], Abstain)
    assert outcomes[2].reason == "non_finite_reward"
    assert outcomes[3] == Invalid("judge_down")
    assert outcomes[5] == Score(0.5)
    assert outcomes[6].reason == "reward_error"
    assert outcomes[7] == Score(2.0)


def test_a_batch_reward_that_raises_makes_its_group_invalid():
    def broken(episodes, task):
        raise RuntimeError("judge is down")

    assert [outcome.reason for outcome in run(broken)] == ["reward_error"] * 8


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, Score(1.0)),
        (1, Score(1.0)),
        (np.float32(0.5), Score(0.5)),
        (np.array(0.5), Score(0.5)),
        (torch.tensor(0.5), Score(0.5)),
        (torch.tensor([0.5]), Score(0.5)),
        (Score(0.3, {"part": 0.3}), Score(0.3, {"part": 0.3})),
    ],
)
def test_p77_every_kind_of_number_is_a_score(returned, expected):
    assert run(lambda ep, task: returned, EIGHT[:1]) == [expected]


@pytest.mark.parametrize("returned", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
def test_p77_what_is_not_finite_is_invalid(returned):
    assert run(lambda ep, task: returned, EIGHT[:1])[0].reason == "non_finite_reward"


def test_p77_none_abstains():
    assert isinstance(run(lambda ep, task: None, EIGHT[:1])[0], Abstain)


@pytest.mark.parametrize("returned", ["1.0", [1.0], {"score": 1.0}, torch.zeros(2), np.zeros(3)])
def test_what_is_no_number_is_a_counted_error(returned):
    outcome = run(lambda ep, task: returned, EIGHT[:1])[0]
    assert outcome.reason == "reward_error"


def test_p78_async_functions_are_awaited():
    async def later(ep, task):
        await asyncio.sleep(0)
        return number_of(ep)

    class Judge:
        async def __call__(self, ep, task):
            return 1.0

    assert [outcome.value for outcome in run(later)] == list(range(8))
    assert [outcome.value for outcome in run(Judge(), EIGHT[:2])] == [1, 1]
    assert [outcome.value for outcome in run(lambda ep, task: later(ep, task))] == list(range(8))


def test_async_calls_of_a_group_run_at_the_same_time():
    barrier = asyncio.Barrier(8)

    async def all_together(ep, task):
        await barrier.wait()
        return 1.0

    assert all(outcome == Score(1.0) for outcome in run(all_together, seconds=20.0))


def test_a_hanging_async_reward_ends_at_its_deadline_alone():
    async def hangs_on_two(ep, task):
        if number_of(ep) == 2:
            await asyncio.sleep(3600)
        return 1.0

    outcomes = run(hangs_on_two, seconds=0.2)
    assert outcomes[2] == Invalid("reward_timeout", "reward mine took longer than 0.2 s")
    assert sum(isinstance(outcome, Score) for outcome in outcomes) == 7


def test_calls_of_a_group_that_block_run_at_the_same_time():
    barrier = threading.Barrier(8)

    def all_together(ep, task):
        barrier.wait(20)
        return 1.0

    assert run(all_together) == [Score(1.0)] * 8


def test_a_sync_reward_that_hangs_on_one_of_eight_leaves_seven():
    release = threading.Event()
    outcomes = run(lambda ep, task: release.wait(30) if number_of(ep) == 2 else 1.0, seconds=0.3)
    release.set()
    assert outcomes[2] == Invalid("reward_timeout", "reward mine took longer than 0.3 s")
    assert outcomes[:2] + outcomes[3:] == [Score(1.0)] * 7


async def awaits_what_is_cancelled(ep, task):
    inner = asyncio.ensure_future(asyncio.sleep(60))
    inner.cancel()
    await inner


def runs_what_is_cancelled(ep, task):
    asyncio.run(awaits_what_is_cancelled(ep, task))


@pytest.mark.parametrize("function", [awaits_what_is_cancelled, runs_what_is_cancelled])
def test_what_a_reward_cancels_itself_ends_its_sample_alone(function):
    outcomes = run(function)
    assert {(type(outcome), outcome.reason) for outcome in outcomes} == {(Invalid, "reward_error")}


def test_a_cancelled_group_is_not_judged():
    async def forever(ep, task):
        await asyncio.sleep(60)

    async def main():
        reward = CustomReward(RewardFunction(forever), name="mine", seconds=60)
        judging = asyncio.ensure_future(score_group(reward, EIGHT, task("3")))
        await asyncio.sleep(0.01)
        judging.cancel()
        await judging

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_a_system_that_gives_no_thread_ends_no_run():
    usual = threading.stack_size(1 << 47)  # more than there are addresses
    try:
        outcomes = run(lambda ep, task: 1.0)
    finally:
        threading.stack_size(usual)
    assert {(type(outcome), outcome.reason) for outcome in outcomes} == {(Invalid, "reward_error")}
    assert "can't start new thread" in outcomes[0].detail


def test_a_sync_reward_does_not_stop_the_event_loop():
    release = threading.Event()

    def blocks(ep, task):
        assert release.wait(20)
        return 1.0

    async def heartbeat():
        reward = CustomReward(RewardFunction(blocks), name="mine", seconds=20.0)
        scoring = asyncio.create_task(score(reward, EIGHT[0], task()))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not scoring.done()
        release.set()
        return await scoring

    assert asyncio.run(heartbeat()) == Score(1.0)


def test_a_hanging_sync_reward_in_this_process_still_meets_its_deadline():
    release = threading.Event()
    outcome = run(lambda ep, task: release.wait(30), EIGHT[:1], seconds=0.1)[0]
    release.set()
    assert outcome.reason == "reward_timeout"


@pytest.mark.parametrize(
    "error", [TimeoutError("mine"), StopIteration(), SystemExit(3), AssertionError(), MemoryError()]
)
def test_whatever_a_function_raises_is_a_reward_error(error):
    def sync(ep, task):
        raise error

    async def coroutine(ep, task):
        raise error

    assert run(sync, EIGHT[:1])[0].reason == "reward_error"
    assert run(coroutine, EIGHT[:1])[0].reason == "reward_error"


def test_an_empty_group_asks_nobody():
    def never(ep, task):
        raise AssertionError

    assert run(never, []) == []


@pytest.mark.parametrize("signature", ["lambda ep: 1.0", "lambda: 1.0", "lambda ep, task, strict: 1.0"])
def test_a_function_that_cannot_take_episode_and_task_is_refused_at_once(signature):
    with pytest.raises(RewardError, match=r"cannot be called as reward\(episode, task"):
        load_reward(eval(signature))


# ---------------------------------------------------------------- mixtures


def mixture(weights, functions, ep=EIGHT[0]):
    parts = {
        name: Part(CustomReward(RewardFunction(function), name=name, seconds=60.0), weights[name])
        for name, function in functions.items()
    }
    return asyncio.run(score(Mixture(parts), ep, task("0")))


def test_mixture_is_the_weighted_sum_with_components():
    outcome = mixture(
        {"a": 2.0, "b": -0.5},
        {"a": lambda ep, task: Score(0.5, {"fine": 1.0}), "b": lambda ep, task: 1.0},
    )
    assert outcome == Score(0.5, {"a": 0.5, "b": 1.0, "a/fine": 1.0})


def test_mixture_gives_the_weight_of_an_abstaining_part_to_the_others():
    outcome = mixture({"a": 3.0, "b": 1.0}, {"a": lambda ep, task: None, "b": lambda ep, task: 0.5})
    assert outcome == Score(2.0, {"b": 0.5})
    with_penalty = mixture({"a": 1.0, "b": -1.0}, {"a": lambda ep, task: None, "b": lambda ep, task: 0.5})
    assert with_penalty == Score(-1.0, {"b": 0.5})


def test_mixture_abstains_when_all_do():
    assert isinstance(mixture({"a": 1.0}, {"a": lambda ep, task: None}), Abstain)


def test_an_invalid_part_makes_the_mixture_invalid_and_is_named():
    outcome = mixture({"a": 1.0, "b": 0.1}, {"a": lambda ep, task: 1.0, "b": lambda ep, task: math.nan})
    assert outcome.reason == "non_finite_reward"
    assert "part b" in outcome.detail


def test_mixture_from_config_keeps_the_prediction():
    config = RewardConfig.model_validate(
        {"parts": {"exact": {"name": "em"}, "style": {"name": "format", "weight": 0.5}}}
    )
    outcome = asyncio.run(score(load_reward(config), EIGHT[0], task("0")))
    assert outcome.value == pytest.approx(1 + 0.5 * 0.8)
    assert outcome.prediction == "0"
    assert outcome.components["exact"] == 1
    assert outcome.components["exact/no_answer"] == 0
    assert outcome.components["style/valid_structure"] == 0


def test_an_invalid_part_may_be_left_out_and_is_counted():
    def down(ep, task):
        return Invalid("service_down") if number_of(ep) < 2 else 0.0

    def fine(ep, task):
        return Invalid("other") if number_of(ep) == 0 else 1.0

    parts = {
        "a": Part(CustomReward(RewardFunction(fine), name="a", seconds=9), 1.0),
        "b": Part(CustomReward(RewardFunction(down), name="b", seconds=9), 3.0),
    }
    mixture = Mixture(parts, leave_out_invalid=True)
    both, one, none = asyncio.run(score_group(mixture, [EIGHT[0], EIGHT[1], EIGHT[2]], task("3")))
    assert isinstance(both, Invalid)
    assert (one.value, one.components["b/invalid"], one.components["a/invalid"]) == (4.0, 1.0, 0.0)
    assert (none.value, none.components["b/invalid"]) == (1.0, 0.0)
    config = RewardConfig.model_validate({"parts": {"a": {"name": "em"}}, "invalid_parts": "leave_out"})
    assert load_reward(config).leave_out_invalid


def _rewrites(ep: Episode, task: Task) -> float:
    """As rewards of the field do with the row that they are given."""
    seen = len(task.extra["info"].setdefault("scores", []))
    task.extra["info"]["scores"].append(1)
    task.prompt[0].pop("content")
    seen += "query" not in ep.calls[0].arguments
    ep.calls[0].arguments.clear()
    return float(seen)


async def _rewrites_async(ep: Episode, task: Task) -> float:
    return _rewrites(ep, task)


def _rewrites_batch(episodes: list[Episode], task: Task) -> list[float]:
    first = _rewrites(episodes[0], task)
    return [first, *(0.0 for _ in episodes[1:])]


@pytest.mark.parametrize("function", [_rewrites, _rewrites_async, _rewrites_batch])
def test_a_reward_that_changes_what_it_is_given_changes_nothing_for_others(function):
    call = ToolCall(name="search", arguments={"query": {"text": "x"}}, status=CallStatus.OK)
    judged = [replace(each, calls=(call,)) for each in EIGHT]
    asked = replace(task("3"), extra={"info": {"id": 1}})
    reward = CustomReward(RewardFunction(function), name="mine", seconds=60.0)
    for _ in range(2):
        assert asyncio.run(score_group(reward, judged, asked)) == [Score(0.0)] * 8
    assert asked == replace(task("3"), extra={"info": {"id": 1}})
    assert call.arguments == {"query": {"text": "x"}}


def test_a_reward_that_changes_its_options_finds_them_as_they_were_in_the_next_call():
    def spends(ep, task, *, words):
        return float(len(words.pop() + "".join(words)))

    function = RewardFunction(spends, {"words": ["a", "b"]})
    assert [function.judge([each], task("3")) for each in EIGHT[:3]] == [[Score(2.0)]] * 3
