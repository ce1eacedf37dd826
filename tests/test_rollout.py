import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cases.parts import CHAT_TEMPLATE, DownShelf, Shelf, byte_tokenizer, roll, spec, task
from pace import allowed
from posttrain.chat import Renderer
from posttrain.envs import Action, Observation, SearchEnv, SingleTurnEnv, Step
from posttrain.episodes import episode_of, episodes_of
from posttrain.packing import pack
from posttrain.rollout import Limits, rollout_episode, rollout_group, turn_seed
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.scripted import ScriptedCall, ScriptedSampler, made_up_logprob
from posttrain.task import Abstain, EpisodeInvalid, Invalid, Task
from posttrain.trajectory import CallStatus, Source, StopReason, TrajectoryError

SEARCH_THEN_ANSWER = ["<think>hm</think><search>tower</search>", "<think>so</think><answer>Paris</answer>"]


class Told:
    """An env that plays a list of steps."""

    def __init__(self, *steps: Any, first: Observation | None = None, max_turns: int = 9, stops: tuple = ()) -> None:
        self.steps, self.first = list(steps), first or Observation()
        self.max_turns, self.stop_strings = max_turns, stops
        self.actions: list[Action] = []
        self.closed = 0

    async def reset(self, task: Task) -> Observation:
        return self.first

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        step = self.steps[len(self.actions) - 1]
        if isinstance(step, BaseException):
            raise step
        return await step() if callable(step) else step

    async def close(self) -> None:
        self.closed += 1


async def forever() -> Step:
    await asyncio.sleep(20)
    raise AssertionError("slept out")


def pieces(trajectory: Any, renderer: Any) -> list[tuple[Source, str]]:
    return [(segment.source, segment.text) for segment in episode_of(trajectory, renderer).segments]


def test_a_search_episode_token_by_token() -> None:
    rollout = spec(SEARCH_THEN_ANSWER)
    (trajectory,) = roll(rollout)
    trajectory.check()
    assert pieces(trajectory, rollout.renderer) == [
        (Source.PROMPT, "Where is the tower?"),
        (Source.POLICY, SEARCH_THEN_ANSWER[0]),
        (Source.ENV, '\n\n<information>Doc 1(Title: "Tower") The tower is in Paris.</information>\n\n'),
        (Source.POLICY, SEARCH_THEN_ANSWER[1]),
    ]
    assert [turn.who for turn in trajectory.turns] == [Source.POLICY, Source.ENV, Source.POLICY]
    assert [turn.stop_reason for turn in trajectory.turns] == [StopReason.STOP_STRING, None, StopReason.STOP_STRING]
    assert [call.status for turn in trajectory.turns for call in turn.calls] == [CallStatus.OK, CallStatus.OK]
    assert trajectory.turns[0].end == trajectory.turns[1].start
    assert trajectory.rewards is None
    assert trajectory.outcome == Abstain("not scored")
    assert (trajectory.task_id, trajectory.group_id, trajectory.episode_id) == ("t1", "g", "g/0")


class Counting(Renderer):
    """Counts what it encodes and reads."""

    def __init__(self) -> None:
        super().__init__(byte_tokenizer())
        self.prompts, self.turns = 0, 0
        self.read: list[list[int]] = []

    def prompt(self, *args: Any) -> list[int]:
        self.prompts += 1
        return super().prompt(*args)

    def complete_text(self, ids: Any) -> str:
        self.turns += 1
        return super().complete_text(ids)

    def decode(self, ids: Any) -> str:
        self.read.append(list(ids))
        return super().decode(ids)


def test_a_prompt_is_encoded_and_read_once_for_a_group_and_a_turn_read_once() -> None:
    renderer = Counting()
    rollout = replace(spec(["one"], lambda task: SingleTurnEnv()), renderer=renderer)
    group = {"group_id": "g", "group_size": 3, "run_seed": 0, "step": 0}
    trajectories = asyncio.run(rollout_group(task(), rollout, **group))
    assert (renderer.prompts, renderer.turns) == (1, 3)
    renderer.read.clear()
    episodes = episodes_of([[trajectory] for trajectory in trajectories], renderer)
    prompt = trajectories[0].token_ids[: trajectories[0].turns[0].start]
    assert renderer.read == [prompt]
    assert renderer.turns == 3
    assert [episode.final_text for episode in episodes] == ["one"] * 3
    for trajectory in trajectories:
        trajectory.turns[0].text = None  # as one that was saved
    assert episodes == [episode_of(trajectory, renderer) for trajectory in trajectories]


def test_p01_p11_trained_tokens_are_exactly_what_the_sampler_returned() -> None:
    tokenizer = byte_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer.encode("ab") not in ([a, b],)
    rollout = spec([[a, b]], lambda task: SingleTurnEnv(), tokenizer=tokenizer, params=SamplingParams(max_new_tokens=2))
    (trajectory,) = roll(rollout)
    assert [t for t, s in zip(trajectory.token_ids, trajectory.source, strict=True) if s is Source.POLICY] == [a, b]
    seed = rollout.sampler.calls[0].seed
    assert trajectory.rollout_logprobs[-2:] == [made_up_logprob(seed, 0), made_up_logprob(seed, 1)]


def test_each_request_continues_the_ids_before_it() -> None:
    rollout = spec(SEARCH_THEN_ANSWER)
    (trajectory,) = roll(rollout)
    first, second = rollout.sampler.calls
    assert list(second.ids) == trajectory.token_ids[: len(second.ids)]
    assert second.ids[: len(first.ids)] == first.ids
    assert first.session == second.session == "g/0"
    assert rollout.sampler.released == ["g/0"]


def test_requests_carry_the_envs_stop_strings_and_the_models_stop_ids() -> None:
    rollout = spec(SEARCH_THEN_ANSWER, params=SamplingParams(max_new_tokens=50, temperature=0.5, stop_strings=("!",)))
    roll(rollout)
    params = rollout.sampler.calls[0].params
    assert params.stop_strings == ("</search>", "</answer>", "!")
    assert rollout.renderer.stop_ids <= params.stop_ids
    assert (params.temperature, params.max_new_tokens) == (0.5, 50)


def test_results_come_in_sample_order_whoever_ends_first() -> None:
    def delay(call: ScriptedCall) -> float:
        return 0.3 - 0.1 * int(str(call.session)[-1])  # a busy machine may begin the second a moment after the first

    tokenizer = byte_tokenizer()
    sampler = ScriptedSampler(["<answer>x</answer>"], tokenizer, delay=delay)
    rollout = spec(None, tokenizer=tokenizer, sampler=sampler)
    trajectories = roll(rollout, group_size=4)
    assert [t.episode_id for t in trajectories] == ["g/0", "g/1", "g/2", "g/3"]
    assert sampler.released == ["g/3", "g/2", "g/1", "g/0"]


@pytest.mark.alone
def test_episodes_of_a_group_run_side_by_side() -> None:
    tokenizer = byte_tokenizer()
    rollout = spec(None, tokenizer=tokenizer, sampler=ScriptedSampler(SEARCH_THEN_ANSWER, tokenizer, delay=0.05))
    started = time.perf_counter()
    roll(rollout, group_size=8)
    assert time.perf_counter() - started < 0.05 * 2 * 4


def test_seeds_are_stable_and_differ_in_every_argument() -> None:
    base = (1, 2, "task", 3, 4)
    assert turn_seed(*base) == 4451320081882798561
    others = [(9, 2, "task", 3, 4), (1, 9, "task", 3, 4), (1, 2, "x", 3, 4), (1, 2, "task", 9, 4), (1, 2, "task", 3, 9)]
    assert len({turn_seed(*arguments) for arguments in [base, *others]}) == 6


@given(st.integers(), st.integers(), st.text(), st.integers(0), st.integers(0))
def test_seeds_fit_63_bits(run_seed: int, step: int, task_id: str, sample: int, turn: int) -> None:
    assert 0 <= turn_seed(run_seed, step, task_id, sample, turn) < 2**63


def test_seeds_of_samples_and_turns_all_differ() -> None:
    rollout = spec(SEARCH_THEN_ANSWER)
    roll(rollout, group_size=3)
    roll(rollout, group_size=3, step=1)
    assert len({call.seed for call in rollout.sampler.calls}) == 12


def test_one_episode_alone_equals_the_same_episode_in_its_group() -> None:
    rollout = spec(SEARCH_THEN_ANSWER)
    group = roll(rollout, group_size=3)
    (alone,) = asyncio.run(rollout_episode(task(), rollout, group_id="g", sample=2, run_seed=7, step=0))
    assert alone.token_ids == group[2].token_ids
    assert alone.rollout_logprobs == group[2].rollout_logprobs


def test_the_prompt_is_rendered_once_per_group() -> None:
    rollout = spec(SEARCH_THEN_ANSWER)
    rendered: list[Any] = []

    class Counting(Renderer):
        def prompt(self, messages: Any, tools: Any = None) -> list[int]:
            rendered.append(messages)
            return super().prompt(messages, tools)

    roll(replace(rollout, renderer=Counting(byte_tokenizer())), group_size=8)
    assert len(rendered) == 1


def test_env_rewards_sit_at_the_last_token_of_their_action() -> None:
    steps = [Step(observation=Observation(text="o"), reward=0.25), Step(reward=1, done=True)]
    rollout = spec(["one", "two"], lambda task: Told(*steps))
    (trajectory,) = roll(rollout)
    ends = [turn.end - 1 for turn in trajectory.turns if turn.who is Source.POLICY]
    assert trajectory.rewards is not None
    assert [trajectory.rewards[end] for end in ends] == [0.25, 1.0]
    assert sum(trajectory.rewards) == 1.25
    assert episode_of(trajectory, rollout.renderer).env_reward == 1.25


def test_an_env_that_gives_no_reward_leaves_credit_unknown() -> None:
    (trajectory,) = roll(spec(["one"], lambda task: SingleTurnEnv()))
    assert trajectory.rewards is None
    assert pack([trajectory]).rewards.sum() == 0


def test_turns_left_open_in_a_thought_are_one_turn() -> None:
    script = ["<think>try <search>x</search>", " no</think><answer>y</answer>"]
    rollout = spec(script)
    (trajectory,) = roll(rollout)
    assert episode_of(trajectory, rollout.renderer).policy_texts == ("".join(script),)
    assert len(trajectory.turns) == 1
    assert trajectory.turns[0].stop_reason is StopReason.STOP_STRING
    first, second = rollout.sampler.calls
    assert second.params.max_new_tokens == first.params.max_new_tokens - len(script[0])


def test_an_endless_thought_ends_with_the_turn_budget() -> None:
    rollout = spec(lambda call: "<think><search>x</search>" if call.turn == 0 else "<search>y</search>",
                   limits=Limits(max_turn_tokens=60))  # fmt: skip
    trajectories = roll(rollout)
    policy = [turn for turn in trajectories[0].turns if turn.who is Source.POLICY]
    assert policy[0].end - policy[0].start == 60
    assert policy[0].stop_reason is StopReason.LENGTH


def test_info_of_steps_is_kept_for_people() -> None:
    (trajectory,) = roll(spec(["one"], lambda task: Told(Step(done=True, info={"board": "x|o"}))))
    assert trajectory.info["steps"] == [{"board": "x|o"}]


def test_max_turns_of_the_limits_ends_the_episode_without_the_last_observation() -> None:
    steps = [Step(observation=Observation(text="more"))] * 5
    (trajectory,) = roll(spec(lambda call: "go", lambda task: Told(*steps), limits=Limits(max_turns=2)))
    assert [turn.who for turn in trajectory.turns] == [Source.POLICY, Source.ENV, Source.POLICY, Source.POLICY]
    assert trajectory.turns[-1].stop_reason is StopReason.MAX_TURNS
    assert trajectory.turns[-1].start == trajectory.turns[-1].end == len(trajectory)
    assert trajectory.source[-1] is Source.POLICY


def test_the_first_observation_may_be_text_or_messages() -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    first = Observation(text="You stand in a hall.", messages=({"role": "user", "content": "Look!"},))
    rollout = spec(["x"], lambda task: Told(Step(done=True), first=first), tokenizer=tokenizer)
    (trajectory,) = roll(rollout)
    prompt, hall, _ = pieces(trajectory, rollout.renderer)
    assert prompt[0] is Source.PROMPT
    assert prompt[1].index("tower") < prompt[1].index("Look!")
    assert hall == (Source.ENV, "You stand in a hall.")


def test_a_prompt_over_the_limit_is_invalid_and_never_cut() -> None:
    rollout = spec(SEARCH_THEN_ANSWER, limits=Limits(max_prompt_tokens=5))
    (trajectory,) = roll(rollout)
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "prompt_too_long"
    assert len(trajectory) == len("Where is the tower?")
    assert rollout.sampler.calls == []


@pytest.mark.parametrize("env_calls", ["make_env", "reset", "step"])
def test_an_exception_in_the_env_makes_the_episode_invalid_with_its_traceback(env_calls: str) -> None:
    class Broken(Told):
        async def reset(self, task: Task) -> Observation:
            if env_calls == "reset":
                raise KeyError("lost_key")
            return Observation()

    env = Broken(KeyError("lost_key"))

    def make_env(task: Task) -> Told:
        if env_calls == "make_env":
            raise KeyError("lost_key")
        return env

    rollout = spec(["one"], make_env)
    (trajectory,) = roll(rollout)
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "env_error"
    assert "lost_key" in trajectory.outcome.detail
    assert "Traceback" in trajectory.info["traceback"]
    assert trajectory.rewards is None
    assert env.closed == (env_calls != "make_env")
    assert rollout.sampler.released == ["g/0"]


@pytest.mark.parametrize("answer", [None, "text", {"done": True}])
def test_an_answer_that_is_no_step_is_an_env_error_that_shows_it(answer: object) -> None:
    (trajectory,) = roll(spec(["one"], lambda task: Told(answer)))
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "env_error"
    assert repr(answer) in trajectory.outcome.detail


def test_an_env_that_is_not_async_or_takes_other_arguments_is_an_env_error() -> None:
    class Sync(Told):
        def reset(self, task: Task) -> Observation:  # type: ignore[override]
            return Observation()

    class Other(Told):
        async def step(self, action: Action, more: int) -> Step:  # type: ignore[override]
            return Step(done=True)

    for env, said in ((Sync(), "write `async def reset`"), (Other(), "more")):
        (trajectory,) = roll(spec(["one"], lambda task, env=env: env))
        assert isinstance(trajectory.outcome, Invalid)
        assert trajectory.outcome.reason == "env_error"
        assert said in trajectory.outcome.detail


def _of_wrong_types(given: dict[str, Any]) -> Any:
    async def step() -> Step:
        return Step(**given)

    return step


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"observation": "text"}, "Step.observation is an Observation(text=...) or None, got 'text'"),
        ({"calls": None}, "Step.calls is a list"),
        ({"calls": [{"name": "search"}]}, "Step.calls is a list"),
        ({"done": "no"}, "Step.done is True or False, got 'no'"),
        ({"info": "abc"}, "Step.info is a mapping"),
    ],
)
def test_a_step_of_wrong_types_is_an_env_error_and_no_end_of_the_run(given: dict[str, Any], said: str) -> None:
    (trajectory,) = roll(spec(["one"], lambda task: Told(_of_wrong_types(given))))
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "env_error"
    assert said in trajectory.outcome.detail


@pytest.mark.parametrize("key", ["messages", "history"])
@pytest.mark.parametrize("given", ["hi", {"role": "user"}, [{"content": "x"}], [1]])
def test_messages_that_are_none_are_refused_where_they_are_made(key: str, given: Any) -> None:
    with pytest.raises(TypeError, match=rf"Observation.{key} is a list of messages"):
        Observation(**{key: given})


def test_lists_and_numpys_truth_do_as_well() -> None:
    step = Step(observation=Observation(messages=[{"role": "user", "content": "x"}]), calls=[], done=np.bool_(True))  # type: ignore[arg-type]
    assert step == Step(observation=Observation(messages=({"role": "user", "content": "x"},)), done=True)
    assert step.done is True


async def _exits() -> Step:
    raise SystemExit(4)


async def _awaits_what_was_cancelled() -> Step:
    job = asyncio.ensure_future(asyncio.sleep(20))
    job.cancel()
    await job
    raise AssertionError("went on")


@pytest.mark.parametrize(
    ("step", "said"),
    [(_exits, "it called sys.exit(4)"), (_awaits_what_was_cancelled, "what it waited for was cancelled")],
)
def test_an_env_that_ends_itself_ends_its_episode_only(step: Any, said: str) -> None:
    (trajectory,) = roll(spec(["one"], lambda task: Told(step)))
    assert trajectory.outcome == Invalid("env_error", f"RuntimeError: {said}")


def test_an_observation_that_cannot_be_rendered_is_an_env_error() -> None:
    parts = ({"role": "user", "content": [{"type": "image", "image": "x.png"}]},)
    (trajectory,) = roll(spec(["one"], lambda task: Told(Step(observation=Observation(messages=parts)))))
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "env_error"
    assert "cannot be rendered" in trajectory.outcome.detail


@pytest.mark.parametrize(("reward", "reason"), [(float("nan"), "non_finite_reward"), ("1.0", "env_error")])
def test_an_env_reward_that_is_no_number_is_invalid(reward: Any, reason: str) -> None:
    (trajectory,) = roll(spec(["one"], lambda task: Told(Step(reward=reward, done=True))))
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == reason
    assert trajectory.rewards is None


def test_a_failing_close_is_noted_and_changes_nothing() -> None:
    class Sticky(Told):
        async def close(self) -> None:
            raise OSError("door stuck")

    (trajectory,) = roll(spec(["one"], lambda task: Sticky(Step(done=True))))
    assert isinstance(trajectory.outcome, Abstain)
    assert "door stuck" in trajectory.info["close_error"]


class Wrapped:
    """A scripted sampler with a fault."""

    def __init__(self, fault: Any) -> None:
        self.inner, self.fault, self.version = ScriptedSampler(SEARCH_THEN_ANSWER, byte_tokenizer()), fault, 0

    async def sample(self, ids: Any, params: Any, *, seed: int, session: str | None = None) -> Sampled:
        return self.fault(await self.inner.sample(ids, params, seed=seed, session=session))

    def release(self, session: str) -> None:
        self.inner.release(session)


def test_a_sampler_that_breaks_its_contract_stops_the_run_and_frees_everything() -> None:
    closed: list[int] = []

    class Env(Told):
        async def close(self) -> None:
            closed.append(1)

    sampler = Wrapped(lambda sampled: replace(sampled, logprobs=sampled.logprobs[:-1]))
    with pytest.raises(TrajectoryError, match="align"):
        roll(spec(None, lambda task: Env(Step(done=True)), sampler=sampler), group_size=3)
    assert len(closed) == len(sampler.inner.released) == 3


def test_more_tokens_than_asked_for_are_refused() -> None:
    sampler = Wrapped(lambda sampled: sampled)
    sampler.sample = lambda ids, params, **rest: sampler.inner.sample(ids, replace(params, max_new_tokens=99), **rest)  # type: ignore[method-assign]
    with pytest.raises(TrajectoryError, match="asked for 1 to 5 tokens"):
        roll(spec(None, sampler=sampler, params=SamplingParams(max_new_tokens=5)))


def test_an_aborted_request_is_invalid_and_keeps_what_was_sampled() -> None:
    sampler = Wrapped(lambda sampled: replace(sampled, stop_reason=StopReason.ABORT))
    (trajectory,) = roll(spec(None, sampler=sampler))
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "sampler_abort"
    assert trajectory.policy_token_count > 0


def test_a_sampler_that_raises_is_an_invalid_episode_with_its_traceback() -> None:
    def fault(sampled: Sampled) -> Sampled:
        raise RuntimeError("engine core died")

    trajectories = roll(spec(None, sampler=Wrapped(fault)), group_size=2)
    assert [t.outcome.reason for t in trajectories if isinstance(t.outcome, Invalid)] == ["sampler_error"] * 2
    assert "engine core died" in trajectories[0].info["traceback"]


@pytest.mark.parametrize(
    "limits", [Limits(call_seconds=0.02), Limits(turn_seconds=0.02), Limits(episode_seconds=0.02)], ids=str
)
def test_p54_every_deadline_ends_a_hung_env_as_a_timeout(limits: Limits) -> None:
    env = Told(forever)
    rollout = spec(["one"], lambda task: env, limits=limits)
    (trajectory,) = roll(rollout)
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "timeout"
    assert "seconds passed in the env" in trajectory.outcome.detail
    assert trajectory.turns[-1].stop_reason is StopReason.DEADLINE
    assert trajectory.policy_token_count > 0
    assert env.closed == 1


def test_a_hung_sampler_ends_by_the_turns_deadline() -> None:
    tokenizer = byte_tokenizer()
    sampler = ScriptedSampler(["x"], tokenizer, delay=20)
    rollout = spec(None, tokenizer=tokenizer, sampler=sampler, limits=Limits(turn_seconds=0.02))
    (trajectory,) = roll(rollout)
    assert trajectory.outcome == Invalid("timeout", "turn_seconds passed while sampling")
    assert [turn.stop_reason for turn in trajectory.turns] == [StopReason.DEADLINE]
    assert sampler.released == ["g/0"]


def hang_from(first: int) -> Any:
    """make_env: samples are numbered as they come; those from `first` on hang."""
    made: list[Told] = []

    def make_env(task: Task) -> Told:
        made.append(Told(forever if len(made) >= first else Step(done=True)))
        return made[-1]

    return make_env


def test_p54_a_group_closes_at_its_deadline_and_the_others_are_unaffected() -> None:
    trajectories = roll(spec(["x"], hang_from(5), limits=Limits(group_seconds=0.05)), group_size=8)
    reasons = [t.outcome.reason if isinstance(t.outcome, Invalid) else None for t in trajectories]
    assert reasons == [None] * 5 + ["straggler"] * 3
    assert trajectories[-1].turns[-1].stop_reason is StopReason.DEADLINE
    assert trajectories[-1].policy_token_count > 0


def test_a_group_waits_for_its_quorum_past_the_deadline() -> None:
    def delay(call: ScriptedCall) -> float:
        return 0.1 if str(call.session).endswith("1") else 20 if str(call.session).endswith("2") else 0.0

    tokenizer = byte_tokenizer()
    sampler = ScriptedSampler(["<answer>x</answer>"], tokenizer, delay=delay)
    limits = Limits(group_seconds=0.01, quorum_episodes=2)
    trajectories = roll(spec(None, tokenizer=tokenizer, sampler=sampler, limits=limits), group_size=3)
    assert [isinstance(t.outcome, Invalid) for t in trajectories] == [False, False, True]


def test_cancelling_a_group_closes_every_env_and_session() -> None:
    envs: list[Told] = []

    def make_env(task: Task) -> Told:
        envs.append(Told(forever))
        return envs[-1]

    rollout = spec(["x"], make_env)

    async def run() -> None:
        job = asyncio.create_task(rollout_group(task(), rollout, group_id="g", group_size=3, run_seed=0, step=0))
        await asyncio.sleep(0.05)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(run())
    assert [env.closed for env in envs] == [1, 1, 1]
    assert sorted(rollout.sampler.released) == ["g/0", "g/1", "g/2"]


def test_limits_refuse_unknown_keys_and_impossible_values() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        Limits(max_tokens=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        Limits(turn_seconds=0)
    assert all(
        name.split("_")[-1] in ("tokens", "turns", "seconds", "episodes", "marker") for name in Limits.model_fields
    )


@pytest.mark.alone
def test_the_python_around_128_episodes_costs_little() -> None:
    script = [*["<think>" + "w" * 40 + "</think><search>tower</search>"] * 2, "<answer>Paris</answer>"]
    tokenizer = byte_tokenizer()
    sampler = ScriptedSampler(lambda call: script[call.turn % 3], tokenizer)
    rollout = spec(None, tokenizer=tokenizer, sampler=sampler)
    roll(rollout)  # builds the sampler's tables

    async def run() -> tuple[float, float]:
        started = time.process_time()
        groups = [
            rollout_group(task(task_id=f"t{g}"), rollout, group_id=f"g{g}", group_size=8, run_seed=0, step=0)
            for g in range(16)
        ]
        trajectories = [t for group in await asyncio.gather(*groups) for t in group]
        total = time.process_time() - started
        assert len(trajectories) == 128
        calls = sampler.calls[-384:]
        started = time.process_time()
        for call in calls:  # the same requests once more, for the sampler's own share
            await sampler.sample(call.ids, call.params, seed=call.seed, session=call.session)
        return total, time.process_time() - started

    beside = min(total - sampling for total, sampling in (asyncio.run(run()) for _ in range(3)))
    assert beside < allowed(0.15), f"{beside:.3f} s beside sampling; aimed at 0.15 s"


def test_p59_a_down_server_keeps_what_was_sampled() -> None:
    rollout = spec(SEARCH_THEN_ANSWER, lambda task: SearchEnv(retriever=DownShelf()))
    (trajectory,) = roll(rollout)
    assert isinstance(trajectory.outcome, Invalid)
    assert trajectory.outcome.reason == "tool_down"
    assert trajectory.policy_token_count == len(SEARCH_THEN_ANSWER[0])


def test_episode_invalid_of_an_env_keeps_its_reason() -> None:
    (trajectory,) = roll(spec(["x"], lambda task: Told(EpisodeInvalid("sandbox_lost", "vm 3"))))
    assert trajectory.outcome == Invalid("sandbox_lost", "vm 3")


def test_top_k_reaches_the_shelf() -> None:
    shelf = Shelf("A\na", "B\nb", "C\nc")
    rollout = spec(SEARCH_THEN_ANSWER, lambda task: SearchEnv(retriever=shelf, top_k=2))
    (trajectory,) = roll(rollout)
    assert "Doc 2(Title: B) b" in pieces(trajectory, rollout.renderer)[2][1]
    assert shelf.queries == ["tower"]


def test_p69_weights_that_arrive_within_a_turn_show_in_its_versions() -> None:
    def mixed(sampled: Sampled) -> Sampled:
        return replace(sampled, versions=[0] * 3 + [1] * (len(sampled.ids) - 3))

    (trajectory,) = roll(spec(None, sampler=Wrapped(mixed), params=SamplingParams(max_new_tokens=5)))
    turn = trajectory.turns[0]
    assert trajectory.policy_versions[turn.start : turn.end] == [0, 0, 0, 1, 1]


def test_a_timeout_of_the_samplers_own_is_not_taken_for_a_deadline() -> None:
    def fault(sampled: Sampled) -> Sampled:
        raise TimeoutError("engine handshake")

    (trajectory,) = roll(spec(None, sampler=Wrapped(fault)))
    assert trajectory.outcome == Invalid("sampler_error", "TimeoutError: engine handshake")


def test_an_env_may_put_its_own_history_in_place_of_the_tasks_prompt() -> None:
    first = Observation(history=({"role": "user", "content": "A board game."},), text="Your move.")
    rollout = spec(["x"], lambda task: Told(Step(done=True), first=first))
    (trajectory,) = roll(rollout)
    assert pieces(trajectory, rollout.renderer)[:2] == [(Source.PROMPT, "A board game."), (Source.ENV, "Your move.")]


def test_the_seconds_of_sampling_are_on_the_turn() -> None:
    tokenizer = byte_tokenizer()
    sampler = ScriptedSampler(["<answer>x</answer>"], tokenizer, delay=0.02)
    (trajectory,) = roll(spec(None, tokenizer=tokenizer, sampler=sampler))
    assert 0.015 < trajectory.turns[0].seconds < 5


def test_a_thought_opened_by_the_template_behind_a_message_counts_as_one() -> None:
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tokenizer = byte_tokenizer(template)
    shelf = Shelf("T\nx")
    script = ["so</think> no call", "now <search>no</search>", "</think><answer>x</answer>"]
    rollout = spec(script, lambda task: SearchEnv(retriever=shelf), tokenizer=tokenizer)
    (trajectory,) = roll(rollout)
    assert shelf.queries == []
    assert episode_of(trajectory, rollout.renderer).final_text == script[1] + script[2]


class Scribbler(Told):
    """An env that takes its task for its own, as many of the field do."""

    async def reset(self, task: Task) -> Observation:
        task.prompt[-1]["content"] += f" (hint {len(task.extra['notes'])})"
        task.extra["notes"].append("seen")
        task.extra["answers"] = task.extra.pop("gold")
        return Observation()


def test_an_env_that_changes_its_task_changes_it_for_its_own_episode_alone() -> None:
    asked = Task(id="t1", prompt=({"role": "user", "content": "Where?"},), extra={"notes": [], "gold": {"x": 1}})
    rollout = spec(["Paris"], lambda task: Scribbler(Step(done=True)))
    for epoch in range(2):
        group = {"group_id": f"{epoch}", "group_size": 3, "run_seed": 0, "step": epoch}
        for trajectory in asyncio.run(rollout_group(asked, rollout, **group)):
            assert pieces(trajectory, rollout.renderer)[0] == (Source.PROMPT, "Where? (hint 0)")
        (alone,) = asyncio.run(rollout_episode(asked, rollout, group_id="a", sample=0, run_seed=0, step=epoch))
        assert pieces(alone, rollout.renderer)[0] == (Source.PROMPT, "Where? (hint 0)")
    assert asked.prompt == ({"role": "user", "content": "Where?"},)
    assert asked.extra == {"notes": [], "gold": {"x": 1}}


def test_episodes_whose_envs_write_different_prompts_get_each_its_own() -> None:
    class Numbered(Told):
        made = 0

        async def reset(self, task: Task) -> Observation:
            Numbered.made += 1
            task.prompt[0]["content"] += str(Numbered.made)
            return Observation()

    rollout = spec(["x"], lambda task: Numbered(Step(done=True)))
    group = {"group_id": "g", "group_size": 3, "run_seed": 0, "step": 0}
    trajectories = asyncio.run(rollout_group(task(), rollout, **group))
    shown = [pieces(trajectory, rollout.renderer)[0][1] for trajectory in trajectories]
    assert shown == [f"Where is the tower?{number}" for number in (1, 2, 3)]
