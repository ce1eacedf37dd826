"""Env x Sampler -> trajectories: episodes of a group side by side, limits, failures, stop reasons.

Only `Trajectory.add_context` and `Trajectory.add_sampled` write tokens here, and model tokens are never re-encoded: a
turn costs one decode of its own tokens and one encoding of the text that is new. Does not score: the caller does, from
what `episodes.py` reads back. What the env itself gave is in `Trajectory.rewards`.

Loop contract of `rollout_group`: consumes a task; waits for the sampler and the envs; unblocked by their answers or by
the deadlines in `Limits`; produces the trajectories of all its episodes, in the order of their sample index, the failed
ones with an `Invalid` outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from posttrain.chat import ChatError
from posttrain.deadline import DeadlinePassed, ends_in, within
from posttrain.envs.budget import ObservationCutter, TextCodec
from posttrain.envs.protocol import Action, Env, Observation, Step, awaited, check_env
from posttrain.episodes import text_of
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.task import EpisodeInvalid, Invalid, Message, Score, Task, as_outcome
from posttrain.thought import THINK_OPEN
from posttrain.trajectory import Source, StopReason, Trajectory, TrajectoryError, Turn

T = TypeVar("T")
THINK_TAIL = 12  # tokens before a turn that are read to see whether the prompt opened a thought
CLOSE_SECONDS = 10.0  # what an env gets to free its things


class Limits(BaseModel):
    """What an episode may use. None = no limit. Every cut is stored on the turn, every passed deadline as `Invalid`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_prompt_tokens: int = Field(default=2048, ge=1)  # a longer prompt makes the episode Invalid("prompt_too_long")
    max_observation_tokens: int = Field(default=512, ge=1)  # each, markup included; foreign text is cut to fit
    max_turn_tokens: int = Field(default=512, ge=1)  # sampled tokens of one policy turn
    max_episode_tokens: int = Field(default=4096, ge=2)  # all tokens of a trajectory, prompt included
    max_turns: int | None = Field(default=None, ge=1)  # policy turns; the env's own limit holds too
    call_seconds: float | None = Field(default=120.0, gt=0)  # one call of the env (reset or step)
    turn_seconds: float | None = Field(default=600.0, gt=0)  # sampling one policy turn and the env's answer to it
    episode_seconds: float | None = Field(default=1800.0, gt=0)
    group_seconds: float | None = Field(default=None, gt=0)  # then episodes still running are given up as stragglers,
    quorum_episodes: int = Field(default=0, ge=0)  # but not before this many of the group have ended
    cut_marker: str = "...(truncated)"  # stands where foreign text was cut, inside the token budget


class Played(Protocol):
    """An episode that is being played: by an env (`_EpisodeRun`), or by an agent (`posttrain.endpoint`)."""

    async def play(self) -> None:
        """Plays to the end or to the first failure; raises only for broken contracts and on cancellation."""
        ...

    def give_up(self, reason: str, detail: str) -> None:
        """Makes the episode `Invalid(reason, detail)` from outside, after `play` was cancelled."""
        ...

    def finished(self) -> list[Trajectory]:
        """The trajectories; called once, after `play` has ended or `give_up` was called."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Which episode is to be played: everything that its randomness depends on."""

    task: Task  # the episode's own: an env or an agent that changes it changes no other episode
    group_id: str
    sample: int
    run_seed: int
    step: int

    @property
    def episode_id(self) -> str:
        return f"{self.group_id}/{self.sample}"

    def seed(self, turn: int) -> int:
        return turn_seed(self.run_seed, self.step, self.task.id, self.sample, turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Everything a rollout needs besides the task. `make_env` is called once per episode.

    play_otherwise: who plays an episode that no env drives; None, or None for a ticket: `make_env` makes its env.
    """

    make_env: Callable[[Task], Env]
    sampler: Sampler
    renderer: TextCodec
    limits: Limits = field(default_factory=Limits)
    env_limits: Mapping[str, Limits] = field(default_factory=dict[str, Limits])  # instead, for tasks that name an env
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=512))
    play_otherwise: Callable[[Ticket, RolloutSpec], Played | None] | None = None

    def of(self, task: Task) -> RolloutSpec:
        """This spec with the limits of `task`'s env: `env_limits` where it has some of its own, else `limits`."""
        limits = self.limits if task.env is None else self.env_limits.get(task.env, self.limits)
        if limits is self.limits:
            return self
        return replace(self, limits=limits, params=replace(self.params, max_new_tokens=limits.max_turn_tokens))


def turn_seed(run_seed: int, step: int, task_id: str, sample: int, turn: int) -> int:
    """A 63-bit seed that depends on nothing but its arguments (no process, platform or batch)."""
    key = f"{run_seed}\x1f{step}\x1f{task_id}\x1f{sample}\x1f{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 1


async def rollout_group(
    task: Task,
    spec: RolloutSpec,
    *,
    group_id: str,
    group_size: int,
    run_seed: int,
    step: int,
    first_sample: int = 0,
) -> list[Trajectory]:
    """Rolls out `group_size` episodes of one task side by side; trajectories ordered by sample index.

    first_sample: index of the first episode; a second group of the same task in one step must not sample what the first
    one did, so it goes on where that one ended.

    A failed episode is in the result with an `Invalid` outcome and the tokens it had. An episode whose history was
    rewritten contributes several trajectories with one episode_id.
    Raises TrajectoryError when the sampler breaks its contract, and whatever the renderer raises.
    """
    spec = spec.of(task)
    shared = _Shared(task, spec)
    ids = {"group_id": group_id, "run_seed": run_seed, "step": step}
    tickets = [Ticket(task=task.own(), sample=i, **ids) for i in range(first_sample, first_sample + group_size)]
    runs = [_run_of(ticket, spec, shared) for ticket in tickets]
    jobs = [asyncio.create_task(run.play()) for run in runs]
    try:
        await _until_closed(jobs, spec.limits)
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    for run, job in zip(runs, jobs, strict=True):
        if job.cancelled():
            run.give_up("straggler", f"still running after group_seconds={spec.limits.group_seconds}")
    return [trajectory for run in runs for trajectory in run.finished()]


async def rollout_episode(
    task: Task, spec: RolloutSpec, *, group_id: str, sample: int, run_seed: int, step: int
) -> list[Trajectory]:
    """Rolls out one episode; see `rollout_group`. More than one trajectory only if the env rewrote its history."""
    spec = spec.of(task)
    ticket = Ticket(task=task.own(), group_id=group_id, sample=sample, run_seed=run_seed, step=step)
    run = _run_of(ticket, spec, _Shared(task, spec))
    await run.play()
    return run.finished()


def _run_of(ticket: Ticket, spec: RolloutSpec, shared: _Shared) -> Played:
    played = None if spec.play_otherwise is None else spec.play_otherwise(ticket, spec)
    return _EpisodeRun(ticket, spec, shared) if played is None else played


async def _until_closed(jobs: list[asyncio.Task[None]], limits: Limits) -> None:
    """Waits for all jobs; once `group_seconds` are over, only until `quorum_episodes` of them have ended."""
    clock = asyncio.get_running_loop().time
    closes = None if limits.group_seconds is None else clock() + limits.group_seconds
    pending = set(jobs)
    while pending:
        late = closes is not None and clock() >= closes
        if late and len(jobs) - len(pending) >= limits.quorum_episodes:
            return
        timeout = None if closes is None or late else closes - clock()
        done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()  # what is raised here is no episode's failure but a broken contract


class _Shared:
    """What the episodes of a group share: the ids of their prompts, and of the markup of their observations."""

    def __init__(self, task: Task, spec: RolloutSpec) -> None:
        limits, self._codec = spec.limits, spec.renderer
        self._task = task
        self._prompts: dict[str, list[int]] = {}
        self.cutter = ObservationCutter(
            spec.renderer, max_tokens=limits.max_observation_tokens, cut_marker=limits.cut_marker
        )

    def prompt(self, task: Task, observation: Observation, tools: Any) -> list[int]:
        """The ids of the prompt: the task's messages (or the env's `history`), then those that the env shows first.

        task: the episode's own. What its env wrote into the messages during `reset` is shown, to this episode.
        """
        first = observation.history or task.prompt
        key = repr((() if first == self._task.prompt else first, observation.messages, tools))
        if key not in self._prompts:
            self._prompts[key] = self._codec.prompt([*first, *observation.messages], tools)
        return self._prompts[key]


class _EpisodeRun:
    """One episode while it is played."""

    def __init__(self, ticket: Ticket, spec: RolloutSpec, shared: _Shared) -> None:
        self.task, self.spec, self.limits, self.codec = ticket.task, spec, spec.limits, spec.renderer
        self.ticket = ticket
        self.session = ticket.episode_id
        self.trajectories: list[Trajectory] = []
        self.invalid: Invalid | None = None
        self._shared = shared
        self._rewards: list[dict[int, float]] = []  # per trajectory: position -> reward
        self._requests = 0
        self._turn_ends: float | None = None
        self._episode_ends: float | None = None
        self._open([])

    @property
    def _now(self) -> Trajectory:
        return self.trajectories[-1]

    def _open(self, ids: Sequence[int]) -> None:
        """Begins a trajectory with its prompt."""
        trajectory = Trajectory(task_id=self.task.id, group_id=self.ticket.group_id, episode_id=self.session)
        trajectory.add_context(ids, Source.PROMPT)
        self.trajectories.append(trajectory)
        self._rewards.append({})

    async def play(self) -> None:
        """Plays to the end or to the first failure. Raises only for broken contracts and on cancellation."""
        env: Env | None = None
        try:
            self._episode_ends = ends_in(self.limits.episode_seconds)
            env = self._make_env()
            await self._play(env)
        except DeadlinePassed as passed:
            self.give_up("timeout", str(passed))
        except EpisodeInvalid as failure:
            self.invalid = Invalid(failure.reason, failure.detail)
            if failure.__cause__ is not None:
                self._now.info["traceback"] = "".join(traceback.format_exception(failure.__cause__))
        finally:
            try:
                self.spec.sampler.release(self.session)
            finally:
                if env is not None:
                    await self._close(env)

    def give_up(self, reason: str, detail: str) -> None:
        """Ends an episode whose time is over."""
        self.invalid = Invalid(reason, detail)
        self._end(StopReason.DEADLINE)

    def finished(self) -> list[Trajectory]:
        """The trajectories, closed: env rewards attached, outcome Invalid if the episode failed."""
        for trajectory, rewards in zip(self.trajectories, self._rewards, strict=True):
            if rewards:
                trajectory.rewards = [rewards.get(i, 0.0) for i in range(len(trajectory))]
            if self.invalid is not None:
                trajectory.outcome = self.invalid
        return self.trajectories

    async def _play(self, env: Env) -> None:
        observation = await self._call(env.reset, self.task, Observation)
        self._begin(env, observation)
        max_turns = min(env.max_turns, self.limits.max_turns or env.max_turns)
        for turn in range(max_turns):
            self._turn_ends = ends_in(self.limits.turn_seconds)
            if len(self._now) >= self.limits.max_episode_tokens:
                return self._end(StopReason.CONTEXT_FULL)
            step = await self._take_turn(env)
            if step.done:
                return None
            if turn + 1 < max_turns and step.observation is not None and not self._show(step.observation):
                return self._end(StopReason.CONTEXT_FULL)
        return self._end(StopReason.MAX_TURNS)

    def _begin(self, env: Env, observation: Observation) -> None:
        """Writes the prompt, then the text that the env shows first."""
        ids = self._shared.prompt(self.task, observation, getattr(env, "tools", None) or None)
        self._now.add_context(ids, Source.PROMPT)
        if len(ids) > self.limits.max_prompt_tokens:
            limit = f"max_prompt_tokens={self.limits.max_prompt_tokens}"
            raise EpisodeInvalid("prompt_too_long", f"the prompt has {len(ids)} tokens, {limit}")
        if observation.has_text and not self._show(replace(observation, messages=(), history=())):
            raise EpisodeInvalid("prompt_too_long", "prompt and first observation fill max_episode_tokens")

    async def _take_turn(self, env: Env) -> Step:
        """One policy turn and the env's answer; more than one request if the env says that the turn is not over."""
        trajectory = self._now
        turn = Turn(who=Source.POLICY, start=len(trajectory), end=len(trajectory))
        trajectory.turns.append(turn)
        while True:
            await self._sample_into(turn, env)
            step = await self._call(env.step, self._action(turn), Step)
            turn.calls += step.calls
            self._credit(step, turn)
            if step.info:
                trajectory.info.setdefault("steps", []).append(dict(step.info))
            unfinished = step.observation is None and not step.done and turn.stop_reason is StopReason.STOP_STRING
            if not unfinished:
                return step

    async def _sample_into(self, turn: Turn, env: Env) -> None:
        """Extends the turn by one request, or ends it by length when no token is left to it."""
        trajectory, limits, params = self._now, self.limits, self.spec.params
        room = min(
            limits.max_turn_tokens - (turn.end - turn.start),
            params.max_new_tokens - (turn.end - turn.start),
            limits.max_episode_tokens - len(trajectory),
        )
        if room <= 0:
            turn.stop_reason = StopReason.LENGTH
            return
        params = replace(
            params,
            max_new_tokens=room,
            stop_strings=tuple(dict.fromkeys((*env.stop_strings, *params.stop_strings))),
            stop_ids=params.stop_ids | self.codec.stop_ids,
        )
        seed = self.ticket.seed(self._requests)
        self._requests += 1
        started = time.perf_counter()
        sampled = await self._sample(params, seed)
        turn.seconds += time.perf_counter() - started
        trajectory.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
        turn.end, turn.stop_reason, turn.text = len(trajectory), sampled.stop_reason, None
        if sampled.stop_reason is StopReason.ABORT:
            raise EpisodeInvalid("sampler_abort", "the sampler gave the request up")
        if not 1 <= len(sampled.ids) <= room:
            raise TrajectoryError(f"asked for 1 to {room} tokens, the sampler returned {len(sampled.ids)}")

    async def _sample(self, params: SamplingParams, seed: int) -> Sampled:
        ends, name = self._nearest(None)
        try:
            async with asyncio.timeout_at(ends) as clock:
                return await self.spec.sampler.sample(self._now.token_ids, params, seed=seed, session=self.session)
        except TimeoutError as error:
            if clock.expired():
                raise DeadlinePassed(f"{name} passed while sampling") from None
            raise EpisodeInvalid("sampler_error", f"TimeoutError: {error}") from error
        except EpisodeInvalid:
            raise
        except Exception as error:
            raise EpisodeInvalid("sampler_error", f"{type(error).__name__}: {error}") from error

    def _action(self, turn: Turn) -> Action:
        assert turn.stop_reason is not None, "a turn handed to the env has been sampled"
        ids, start = self._now.token_ids, turn.start
        written_before = self._now.source[start - 1] in (Source.PROMPT, Source.TEMPLATE)
        opened = written_before and opens_thought(ids[max(0, start - THINK_TAIL) : start], self.codec)
        turn.text = text_of(ids[start : turn.end], turn.stop_reason, self.codec)
        return Action(text=turn.text, stop_reason=turn.stop_reason, in_thought=opened)

    def _credit(self, step: Step, turn: Turn) -> None:
        """Puts the env's reward at the last policy token of the action."""
        if step.reward is None:
            return
        try:
            outcome = as_outcome(step.reward)
        except (TypeError, ValueError, RuntimeError) as error:
            raise EpisodeInvalid("env_error", f"Step.reward: {error}") from error
        if isinstance(outcome, Invalid):
            raise EpisodeInvalid(outcome.reason, f"Step.reward: {outcome.detail}")
        if not isinstance(outcome, Score):
            return
        rewards = self._rewards[-1]
        rewards[turn.end - 1] = rewards.get(turn.end - 1, 0.0) + outcome.value

    def _show(self, observation: Observation) -> bool:
        """Appends what the env shows. False, with nothing appended, when no room for a token would be left."""
        try:
            return self._append(observation)
        except ChatError as error:
            raise EpisodeInvalid("env_error", f"the observation cannot be rendered: {error}") from error

    def _append(self, observation: Observation) -> bool:
        if observation.history:
            ids = self.codec.prompt([*observation.history, *observation.messages])
            if len(ids) >= self.limits.max_episode_tokens:
                return False
            self._open(ids)
            observation = replace(observation, messages=(), history=())
        if not observation.messages and not observation.has_text:
            return len(self._now) < self.limits.max_episode_tokens
        cut = self._shared.cutter.cut(observation)
        pieces = self._rendered(cut.messages) if cut.messages else []
        if cut.ids:
            pieces.append((cut.ids, Source.ENV))
        count = sum(len(ids) for ids, _ in pieces)
        start = len(self._now)
        turn = Turn(who=Source.ENV, start=start, end=start, tokens_cut=cut.tokens_cut, bytes_cut=cut.bytes_cut)
        self._now.turns.append(turn)
        if start + count >= self.limits.max_episode_tokens:
            turn.tokens_cut += count
            return False
        for ids, source in pieces:
            self._now.add_context(ids, source)
        turn.end = len(self._now)
        return True

    def _rendered(self, messages: Sequence[Message]) -> list[tuple[list[int], Source]]:
        """The chat template's continuation: the end of the policy's turn if it wrote none itself, then the messages.

        Where the template would forget earlier thinking (and the renderer follows it), a trajectory is opened whose
        prompt is the shortened history with the messages; nothing is left to append then.
        """
        trajectory = self._now
        last = trajectory.token_ids[-1] if trajectory.token_ids else None
        closing = self.codec.closing(last) if trajectory.source[-1] is Source.POLICY else []
        history = [*trajectory.token_ids, *closing]
        forked = self.codec.fork(history, [*trajectory.source, *[Source.INJECTED] * len(closing)], messages)
        if forked is not None and len(forked) < self.limits.max_episode_tokens:
            self._open(forked)
            return []
        pieces = self.codec.delta(messages, after=last)
        return [(closing, Source.INJECTED), *pieces] if closing else list(pieces)

    def _end(self, reason: StopReason) -> None:
        """Records why an episode ends that no sampled turn ended: as the stop reason of an empty policy turn."""
        turns, end = self._now.turns, len(self._now)
        if turns and turns[-1].who is Source.POLICY and turns[-1].stop_reason is None:
            turns[-1].stop_reason = reason
        else:
            turns.append(Turn(who=Source.POLICY, start=end, end=end, stop_reason=reason))

    def _make_env(self) -> Env:
        try:
            env = self.spec.make_env(self.task)
            check_env(env)
            return env
        except EpisodeInvalid:
            raise
        except Exception as error:
            raise EpisodeInvalid("env_error", f"make_env: {type(error).__name__}: {error}") from error

    async def _call(self, method: Callable[[Any], Awaitable[Any]], argument: Any, expected: type[T]) -> T:
        """Calls the env under the nearest deadline; its exceptions become EpisodeInvalid("env_error")."""
        ends, name = self._nearest(ends_in(self.limits.call_seconds))
        try:
            answer = await within(awaited(method, argument), ends)
        except DeadlinePassed:
            raise DeadlinePassed(f"{name} passed in the env") from None
        except EpisodeInvalid:
            raise
        except Exception as error:
            raise EpisodeInvalid("env_error", f"{type(error).__name__}: {error}") from error
        if not isinstance(answer, expected):
            raise EpisodeInvalid("env_error", f"expected {expected.__name__}, the env returned {answer!r:.200}")
        return answer

    def _nearest(self, call_ends: float | None) -> tuple[float | None, str]:
        """The deadline that comes first, by the event loop's clock, and the name of its limit."""
        named = (
            (call_ends, "call_seconds"),
            (self._turn_ends, "turn_seconds"),
            (self._episode_ends, "episode_seconds"),
        )
        return min(((ends, name) for ends, name in named if ends is not None), default=(None, ""))

    async def _close(self, env: Env) -> None:
        """Closes the env. A failure is noted in `info` and changes no outcome: the episode was played."""
        try:
            await within(awaited(env.close), ends_in(CLOSE_SECONDS))
        except (Exception, DeadlinePassed) as error:
            self._now.info["close_error"] = f"{type(error).__name__}: {error}"


def opens_thought(context: Sequence[int], codec: TextCodec) -> bool:
    """Whether a turn after these tokens begins inside a thought: they end with `<think>` and white space."""
    return codec.decode(context[-THINK_TAIL:]).rstrip().endswith(THINK_OPEN)
