"""Scores episodes: rewards of every kind behind one method, each under a deadline, failures as `Invalid`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from posttrain.deadline import NoThread, in_thread, in_threads
from posttrain.rewards.functions import FunctionSpec, RewardError, RewardFunction, reward_error
from posttrain.rewards.isolation import WorkerPool
from posttrain.task import Abstain, Invalid, Outcome, Score, Task
from posttrain.trajectory import Episode


class Reward(Protocol):
    """Judges the episodes of one task. Never raises for a sample that cannot be judged: that is `Invalid`."""

    @property
    def name(self) -> str: ...

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        """One outcome per episode, in order. Raises RewardError when the reward itself is unusable."""
        ...

    def close(self) -> None:
        """Ends what the reward started."""
        ...


class Stateful(Protocol):
    """A reward that learns while it judges. Its state is JSON and is kept in checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


def leaves(reward: Reward) -> Iterator[Reward]:
    """The reward itself, or, of one that is made of others (`inner`), all that do the judging, in order."""
    inner: Sequence[Reward] | None = getattr(reward, "inner", None)
    if inner is None:
        yield reward
        return
    for part in inner:
        yield from leaves(part)


def states(rewards: Mapping[str | None, Reward]) -> dict[str, Any]:
    """What the stateful rewards have learnt, under a name that is the same after a restart. See `load_states`."""
    return {key: reward.state_dict() for key, reward in _stateful(rewards).items()}


def load_states(rewards: Mapping[str | None, Reward], saved: Mapping[str, Any]) -> None:
    """Raises RewardError when the rewards are not those whose state was saved."""
    known = _stateful(rewards)
    if known.keys() != saved.keys():
        raise RewardError(f"the checkpoint holds the state of rewards {sorted(saved)}, the config has {sorted(known)}")
    for key, state in saved.items():
        known[key].load_state(state)


def _stateful(rewards: Mapping[str | None, Reward]) -> dict[str, Stateful]:
    ordered = sorted(rewards.items(), key=lambda item: item[0] or "")
    return {
        f"{name or 'default'}/{number}/{leaf.name}": cast("Stateful", leaf)
        for name, reward in ordered
        for number, leaf in enumerate(leaves(reward))
        if hasattr(leaf, "state_dict")
    }


def for_evaluation(reward: Reward) -> Reward:
    """The reward as evaluations use it: it learns nothing from them, and means the same before and after training."""
    frozen = getattr(reward, "for_evaluation", None)
    return reward if frozen is None else frozen()


def check_tasks(rewards: Mapping[str | None, Reward], tasks: Iterable[Task]) -> None:
    """Raises RewardError for the first task that its reward could never judge (`Reward.check_task`, where it has one).

    So a row with an unknown data source is found before anything starts, wherever it stands.
    """
    checks = {name: getattr(reward, "check_task", None) for name, reward in rewards.items()}
    for task in tasks:
        check = checks.get(task.reward)
        if check is not None:
            check(task)


async def score(reward: Reward, episode: Episode, task: Task) -> Outcome:
    return (await score_group(reward, [episode], task))[0]


async def score_group(reward: Reward, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
    """One outcome per episode of a task's group, in order. Raises RewardError when the count is wrong."""
    if not episodes:
        return []
    outcomes = await reward.outcomes(episodes, task)
    if len(outcomes) != len(episodes):
        raise RewardError(f"reward {reward.name} returned {len(outcomes)} values for {len(episodes)} episodes")
    return [_with_all_turns(outcome, episode) for outcome, episode in zip(outcomes, episodes, strict=True)]


def _with_all_turns(outcome: Outcome, episode: Episode) -> Outcome:
    """A reward for another number of turns than there are cannot be given to any."""
    turns = outcome.turns if isinstance(outcome, Score) else None
    if turns is None or len(turns) == len(episode.policy_texts):
        return outcome
    detail = f"Score.turns has {len(turns)} rewards for the {len(episode.policy_texts)} turns of Episode.policy_texts"
    return Invalid("reward_error", detail)


@dataclass(frozen=True, slots=True)
class RuleReward:
    """A rule of this package: pure, fast and trusted, so it is called directly."""

    function: RewardFunction
    name: str

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        return [outcome for episode in episodes for outcome in self.function.judge([episode], task)]

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CustomReward:
    """A user's function in this process: async ones in the event loop, the others in threads.

    Each call gets copies of its own of task and episodes, as in a worker process: one that changes them changes nothing
    for other calls, the log, or later epochs. At the deadline the sample becomes Invalid("reward_timeout"). A coroutine
    is then cancelled; a thread cannot be ended and runs on (an isolated reward can).
    """

    function: RewardFunction
    name: str
    seconds: float

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        own = [episode.own() for episode in episodes]
        parts = [own] if self.function.is_batch else [[episode] for episode in own]
        if self.function.is_async:
            judged = await asyncio.gather(*(self._await(part, task) for part in parts))
        else:
            judged = await self._judge(parts, task)
        late = Invalid("reward_timeout", f"reward {self.name} took longer than {self.seconds} s")
        known = [[late] * len(part) if found is None else found for part, found in zip(parts, judged, strict=True)]
        return [outcome for found in known for outcome in found]

    def close(self) -> None:
        return None

    async def _judge(self, parts: Sequence[Sequence[Episode]], task: Task) -> Sequence[Sequence[Outcome] | None]:
        """None for what was not judged at the deadline."""
        try:
            return await in_threads([partial(self.function.judge, part, task.own()) for part in parts], self.seconds)
        except NoThread as error:
            return [[reward_error(error)] * len(part) for part in parts]

    async def _await(self, episodes: Sequence[Episode], task: Task) -> Sequence[Outcome] | None:
        """None at the deadline."""
        try:
            async with asyncio.timeout(self.seconds) as deadline:
                return self.function.outcomes(await self.function.call(episodes, task.own()), len(episodes))
        except RewardError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            return None if deadline.expired() else [reward_error(error)] * len(episodes)


def _is_cancelled() -> bool:
    """Whether somebody cancelled this very task: what a function awaits can be cancelled, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(frozen=True, slots=True)
class IsolatedReward:
    """A user's sync function in worker processes that are killed at the deadline."""

    pool: WorkerPool
    is_batch: bool
    name: str
    seconds: float

    @classmethod
    def start(cls, spec: FunctionSpec, *, name: str, seconds: float, workers: int, is_batch: bool) -> IsolatedReward:
        return cls(pool=WorkerPool(spec, size=workers), is_batch=is_batch, name=name, seconds=seconds)

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        return await _per_call(self.is_batch, episodes, lambda part: self._call(part, task))

    def close(self) -> None:
        self.pool.close()

    async def _call(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        return await in_thread(lambda: self.pool.evaluate(episodes, task, self.seconds))


@dataclass(frozen=True, slots=True)
class Part:
    """A reward in a mixture; a negative weight makes it a penalty."""

    reward: Reward
    weight: float


@dataclass(frozen=True, slots=True)
class Mixture:
    """The weighted sum of named parts.

    A part that abstains leaves its weight to the others: the weights of those that answered are scaled to the same
    total size. One Invalid part makes the sample Invalid, unless `leave_out_invalid` treats it as one that abstains
    (then only a sample whose every part is Invalid or abstains is not scored). When all abstain, so does the mixture.
    Rewards of turns are summed alike, over the parts that give some.
    Components are each part's value under its name, and the part's own components as "part/component".
    """

    parts: Mapping[str, Part]
    name: str = "mixture"
    leave_out_invalid: bool = False

    @property
    def inner(self) -> list[Reward]:
        return [part.reward for part in self.parts.values()]

    def for_evaluation(self) -> Mixture:
        return replace(self, parts={name: Part(for_evaluation(p.reward), p.weight) for name, p in self.parts.items()})

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        groups = await asyncio.gather(*(score_group(part.reward, episodes, task) for part in self.parts.values()))
        return self.mixed(groups)

    def mixed(self, groups: Sequence[Sequence[Outcome]]) -> list[Outcome]:
        """groups: one per part, in order, each with an outcome per episode."""
        return [self._mix(dict(zip(self.parts, judged, strict=True))) for judged in zip(*groups, strict=True)]

    def close(self) -> None:
        for part in self.parts.values():
            part.reward.close()

    def _mix(self, outcomes: Mapping[str, Outcome]) -> Outcome:
        broken = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Invalid)}
        if broken and not (self.leave_out_invalid and any(isinstance(o, Score) for o in outcomes.values())):
            name, outcome = next(iter(broken.items()))
            return Invalid(outcome.reason, f"part {name}: {outcome.detail}")
        scores = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Score)}
        answered = sum(abs(self.parts[name].weight) for name in scores)
        if not answered:
            return Abstain("no part of the mixture has an opinion")
        scale = sum(abs(part.weight) for part in self.parts.values()) / answered
        value = scale * sum(self.parts[name].weight * score.value for name, score in scores.items())
        predictions = (score.prediction for score in scores.values() if score.prediction is not None)
        missing = {f"{name}/invalid": float(name in broken) for name in self.parts if self.leave_out_invalid}
        turns = self._turns({name: score.turns for name, score in scores.items() if score.turns is not None}, scale)
        return Score(value, _components(scores) | missing, next(predictions, None), turns)

    def _turns(self, turns: Mapping[str, Sequence[float | None]], scale: float) -> list[float] | None:
        """The weighted sum of those parts that reward turns."""
        weights = [scale * self.parts[name].weight for name in turns]
        columns = zip(*turns.values(), strict=True)
        return [sum(w * (r or 0.0) for w, r in zip(weights, each, strict=True)) for each in columns] if turns else None


def _components(scores: Mapping[str, Score]) -> dict[str, float]:
    components = {name: score.value for name, score in scores.items()}
    for name, score in scores.items():
        for inner, value in score.components.items():
            components[f"{name}/{inner}"] = value
    return components


async def _per_call(
    is_batch: bool, episodes: Sequence[Episode], call: Callable[[Sequence[Episode]], Awaitable[list[Outcome]]]
) -> list[Outcome]:
    """One call for all episodes, or one call each, at the same time."""
    if is_batch:
        return await call(episodes)
    return [outcome for judged in await asyncio.gather(*(call([e]) for e in episodes)) for outcome in judged]
