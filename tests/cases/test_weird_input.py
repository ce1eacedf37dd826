"""Input that nobody should send: each is refused where it enters, or treated as it says; nothing else is harmed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from cases.parts import roll, spec, task
from posttrain.envs import Observation, Step
from posttrain.rewards import REWARDS, score
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rollout import Limits
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.task import Abstain, Invalid, Score, Task
from posttrain.trajectory import Episode, Segment, Source, StopReason, Trajectory, TrajectoryError
from sampler.tiny import END, VOCABULARY, policy, prompt, together, tokenizer

ANSWER = "<answer>Paris</answer>"
POLICY = policy()


def sampler(**options: Any) -> NativeSampler:
    return NativeSampler(POLICY, tokenizer(), **options)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 5, **options})


# ---------------------------------------------------------------- sampler


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty list of ids"),
        ([1, VOCABULARY, 2], f"has the id {VOCABULARY} and the model knows 0 to {VOCABULARY - 1}: is the tokenizer"),
        ([-1], "has the id -1"),
        (prompt(512), "512 tokens and the model's context is 512: no token fits"),
        (prompt(600), "600 tokens and the model's context is 512"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_and_harms_no_other(ids: list[int], message: str) -> None:
    engine = sampler()

    async def both() -> list[Any]:
        good = engine.sample(prompt(5), params(), seed=1)
        return await asyncio.gather(engine.sample(ids, params(), seed=2), good, return_exceptions=True)

    refused, good = asyncio.run(both())
    assert isinstance(refused, ValueError)
    assert message in str(refused)
    assert good.ids == asyncio.run(sampler().sample(prompt(5), params(), seed=1)).ids


@pytest.mark.parametrize("length", [511, 509])
def test_the_context_is_used_to_its_last_token(length: int) -> None:
    sampled = asyncio.run(sampler().sample(prompt(length), params(), seed=1))
    assert len(sampled.ids) == 512 - length
    assert sampled.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0, -0.5, 1e-40, 1e-5])
def test_temperatures_that_no_division_survives_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature must be 0 or in \[0.0001, inf\)"):
        params(temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e6])
def test_extreme_temperatures_sample_with_finite_log_probs(temperature: float) -> None:
    sampled = asyncio.run(sampler().sample(prompt(4), params(temperature=temperature), seed=3))
    assert all(math.isfinite(p) and p <= 0 for p in sampled.logprobs)
    if temperature == 1e-4:
        assert sampled.ids == asyncio.run(sampler().sample(prompt(4), params(temperature=0.0), seed=4)).ids


def test_stop_ids_in_the_prompt_stop_nothing_and_any_sampled_one_does() -> None:
    kept = asyncio.run(sampler().sample([END, 1, END], params(stop_ids=frozenset({END, 10**9, -5})), seed=1))
    assert (len(kept.ids), kept.stop_reason) == (5, StopReason.LENGTH)
    at_once = asyncio.run(sampler().sample([1], params(stop_ids=frozenset(range(VOCABULARY))), seed=1))
    assert (len(at_once.ids), at_once.stop_reason, at_once.stop) == (1, StopReason.STOP_ID, at_once.ids[0])


def test_a_stop_string_of_one_character_and_one_token() -> None:
    runs = [asyncio.run(sampler().sample(prompt(5), params(max_new_tokens=9), seed=seed)) for seed in range(8)]
    texts = [[tokenizer().decode([i]) for i in run.ids] for run in runs]
    seed, place = next((s, p) for s, text in enumerate(texts) for p in range(2, 9) if text[p].isascii())
    stop = texts[seed][place]
    first = next(p for p in range(9) if stop in texts[seed][p])
    sampled = asyncio.run(sampler().sample(prompt(5), params(max_new_tokens=9, stop_strings=(stop,)), seed=seed))
    assert (sampled.ids, sampled.stop_reason) == (runs[seed].ids[: first + 1], StopReason.STOP_STRING)
    assert sampled.stop == stop
    one = asyncio.run(sampler().sample(prompt(5), params(max_new_tokens=1), seed=seed))
    assert (one.ids, one.stop_reason) == (runs[seed].ids[:1], StopReason.LENGTH)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_thousand_requests_at_once_come_back_as_if_alone(workers: int) -> None:
    engine = sampler(workers=workers)
    many = together(*(engine.sample(prompt(3 + i % 7, seed=i % 50), params(), seed=i) for i in range(1000)))
    assert len(many) == 1000
    for i in (0, 499, 999):
        alone = asyncio.run(sampler().sample(prompt(3 + i % 7, seed=i % 50), params(), seed=i))
        assert many[i].ids == alone.ids


@pytest.mark.parametrize("workers", [1, 2])
def test_storms_of_cancellations_change_no_other_result_and_leave_nothing_behind(workers: int) -> None:
    count, rng, engine = 24, random.Random(0), sampler(workers=workers)
    alone = together(*(sampler().sample(prompt(5, seed=i), params(max_new_tokens=12), seed=i) for i in range(1)))
    alone += together(*(engine.sample(prompt(5, seed=i), params(max_new_tokens=12), seed=i) for i in range(1, count)))

    async def storm(number: int) -> None:
        jobs = [
            asyncio.create_task(
                engine.sample(prompt(5, seed=i), params(max_new_tokens=12), seed=i, session=f"{number}/{i}")
            )
            for i in range(count)
        ]
        for _ in range(rng.randrange(1, 60)):
            await asyncio.sleep(0)
        for job in rng.sample(jobs, count // 2):
            job.cancel()
        for i, sampled in enumerate(await asyncio.gather(*jobs, return_exceptions=True)):
            assert isinstance(sampled, asyncio.CancelledError) or sampled.ids == alone[i].ids
            engine.release(f"{number}/{i}")

    async def storms() -> None:
        for number in range(6):
            await storm(number)

    asyncio.run(storms())
    assert all(one.slots.busy_count == 0 for one in engine.engines)
    assert not any(one.has_work for one in engine.engines)
    engine.reset()


# ---------------------------------------------------------------- trajectories


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([-math.inf], "its probability cannot be 0"),
        ([math.inf], "cannot be positive"),
        ([math.nan], "its log-prob is missing"),
        ([None], "its log-prob is missing"),
        ([-1.0, -1.0], "must align"),
    ],
)
def test_a_sampled_token_needs_a_log_prob_that_can_be(logprobs: list[Any], message: str) -> None:
    trajectory = Trajectory(task_id="t", group_id="g", episode_id="e")
    trajectory.add_context([1], Source.PROMPT)
    with pytest.raises(TrajectoryError, match=message):
        trajectory.add_sampled([2], logprobs, 0)
    assert len(trajectory) == 1


# ---------------------------------------------------------------- rollouts


@pytest.mark.parametrize(
    "limits",
    [
        {"max_turn_tokens": 1},
        {"max_observation_tokens": 1},
        {"max_prompt_tokens": 1},
        {"max_episode_tokens": 2},
        {"max_turns": 1},
        {"turn_seconds": 1e-9},
        {"episode_seconds": 1e-9},
        {"group_seconds": 1e-9},
        {"cut_marker": "x" * 5000},
        {"cut_marker": ""},
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_limits_of_almost_nothing_end_episodes_in_order(limits: dict[str, Any]) -> None:
    script = ["<search>a</search>", *[ANSWER] * 5]
    trajectories = roll(spec(script, limits=Limits(**limits)), group_size=2)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        trajectory.check()
        for turn in trajectory.turns:
            assert turn.who is not Source.POLICY or turn.end - turn.start <= limits.get("max_turn_tokens", 512)
        assert isinstance(trajectory.outcome, Invalid) or trajectory.turns[-1].stop_reason is not None


class Odd:
    """An env with the given attributes and answers."""

    stop_strings: Any = ()
    max_turns: Any = 3

    def __init__(self, step: Any = None, reset: Any = None, **attributes: Any) -> None:
        self._step, self._reset = step, Observation() if reset is None else reset
        for name, value in attributes.items():
            setattr(self, name, value)

    async def reset(self, task: Task) -> Any:
        return self._reset

    async def step(self, action: Any) -> Any:
        return self._step

    async def close(self) -> None:
        return None


DONE = Step(done=True)


@pytest.mark.parametrize(
    ("make", "reason", "message"),
    [
        (lambda: Odd(DONE, stop_strings="</search>"), "env_error", "each character would stop; write ('</search>',)"),
        (lambda: Odd(DONE, stop_strings=("",)), "env_error", "texts of at least one character"),
        (lambda: Odd(DONE, stop_strings=(7,)), "env_error", "texts of at least one character, got (7,)"),
        (
            lambda: Odd(DONE, max_turns=None),
            "env_error",
            "Odd.max_turns must be a number of turns, 1 or more, got None",
        ),
        (lambda: Odd(DONE, max_turns=0), "env_error", "1 or more, got 0"),
        (lambda: Odd(None), "env_error", "expected Step, the env returned None"),
        (lambda: Odd({"done": True}), "env_error", "expected Step, the env returned {'done': True}"),
        (lambda: Odd(DONE, reset="text"), "env_error", "expected Observation, the env returned 'text'"),
        (lambda: Odd(Step(done=True, reward=math.nan)), "non_finite_reward", "nan"),
        (lambda: Odd(Step(done=True, reward="1")), "env_error", "got str: '1'"),  # type: ignore[arg-type]
        (lambda: 1 / 0, "env_error", "make_env: ZeroDivisionError"),
    ],
)
def test_an_env_that_breaks_its_contract_makes_invalid_episodes_that_say_how(
    make: Callable[[], Any], reason: str, message: str
) -> None:
    (trajectory,) = roll(spec([ANSWER, ANSWER, ANSWER], lambda task: make()))
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == reason
    assert message in trajectory.outcome.detail


@pytest.mark.parametrize("text", ["\x00\x1b[31m", "\u202e\u200b", "🏳️‍🌈" * 50, "\ud800 half a pair", "%s {0} {{x}} \\"])
def test_any_text_can_be_observed_and_asked(text: str) -> None:
    (trajectory,) = roll(spec(["a", "b", "c"], lambda task: Odd(Step(observation=Observation(text=text)))))
    assert isinstance(trajectory.outcome, Abstain)
    (trajectory,) = roll(spec([ANSWER], lambda task: Odd(DONE)), the_task=task(text))
    assert isinstance(trajectory.outcome, Abstain)


# ---------------------------------------------------------------- rewards

WEIRD = {
    "empty": "",
    "a million words": "<answer>" + "x " * 500_000 + "</answer>",
    "tags in tags": "<answer>" * 20_000 + "Paris" + "</answer>" * 20_000,
    "thoughts in thoughts": "<think>" * 20_000 + ANSWER,
    "nul": "<answer>Par\x00is</answer>",
    "half a pair": "<answer>\ud800</answer>",
    "open braces": "\\boxed{" * 20_000,
    "deep braces": "\\boxed{" + "{" * 20_000 + "}" * 20_000 + "}",
    "many digits": "#### " + "9" * 5000 + " \\boxed{" + "9" * 5000 + "}",
    "huge exponent": "#### 1e999999 \\boxed{1e999999}",
    "by zero": "\\boxed{\\frac{1}{0}}",
    "power tower": "#### 9^9^9^9 \\boxed{9^9^9^9}",
}


NUMERIC = {"gsm8k", "boxed", "number", "target_length"}  # what a task's accepted answer has to be for them
OF_FORM = {"citations", "dr_tulu_format", "overlong", "search_turns", "target_length", "words_of_answer"}
OPTIONS = {"overlong": {"max_tokens": 100, "buffer": 10}}


@pytest.mark.parametrize("name", sorted(set(REWARDS) - {"env"}))
@pytest.mark.parametrize("case", WEIRD)
def test_every_reward_judges_any_text_in_no_time(name: str, case: str) -> None:
    truth = "7" if name in NUMERIC else "Paris"
    asked = Task(id="t", prompt=({"role": "user", "content": "q"},), ground_truth=(truth,))
    segments = (Segment(Source.PROMPT, "q"), Segment(Source.POLICY, WEIRD[case]))
    reward = load_reward(RewardConfig(name=name, options=OPTIONS.get(name, {})))
    judging = score(reward, Episode(task_id="t", episode_id="e", segments=segments), asked)
    outcome = asyncio.run(asyncio.wait_for(judging, timeout=20))
    assert isinstance(outcome, Score)
    assert name in OF_FORM or outcome.value < 0.5, "none of these is the answer"
