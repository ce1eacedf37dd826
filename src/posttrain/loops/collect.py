"""Tasks -> scored trajectories: roll out groups side by side, then judge each group as soon as it is complete.

One call of `collect`
  consumes      tasks, one group of episodes each
  waits for     the sampler, the envs and the rewards
  unblocked by  their answers, or by the deadlines of the limits and of the reward
  produces      the trajectories of all groups in the order of the tasks, each with its outcome and its rewards
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from posttrain.episodes import episode_of, episodes_of, written_turns
from posttrain.rewards import Reward, RewardError, score_group
from posttrain.rollout import RolloutSpec, rollout_group
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.trajectory import Source, Trajectory


class TooManyInvalid(RuntimeError):
    """More episodes broke than the run allows: training on would only hide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """How a task becomes scored trajectories. `rewards` holds the reward of every task by `Task.reward`."""

    spec: RolloutSpec
    rewards: Mapping[str | None, Reward]
    seed: int
    on_group: Callable[[], None] | None = None  # told when a group is complete, for a display
    credit: Credit = field(default_factory=lambda: Credit())


@dataclass(frozen=True, slots=True)
class Credit:
    """Which rewards an episode's tokens get, and with which weights.

    outcome: weight of the outcome's value, which is put at the last policy token.
    turns: weight of the rewards of turns, each at the last token of its turn: those in `Score.turns` where the reward
        function gives them, else those of the env's steps. 0 leaves the env's out (a reward function may count them
        itself, as `Episode.env_reward`) and makes `Score.turns` an error, because they would be lost. None = for
        evaluations, from which nothing is learnt: both are left out.
    greedy: every group gets one more episode, sampled at temperature 0, whose return is only a baseline (ReMax).
    """

    outcome: float = 1.0
    turns: float | None = None
    greedy: bool = False


async def collect(
    tasks: Sequence[Task],
    collector: Collector,
    *,
    group_size: int,
    step: int,
    earlier: Counter[str] | None = None,
) -> list[Trajectory]:
    """All trajectories of one step; two draws of one task are two groups, told apart by their place in the step.

    earlier: how often each task was drawn earlier in this step; updated in place.
    """
    earlier = Counter() if earlier is None else earlier
    groups = []
    for place, task in enumerate(tasks, start=earlier.total()):
        group = _Group(task, f"{step}/{place}/{task.id}", group_size, first_sample=group_size * earlier[task.id])
        groups.append(_collect_group(group, collector, step))
        earlier[task.id] += 1
    return [trajectory for group in await asyncio.gather(*groups) for trajectory in group]


@dataclass(frozen=True, slots=True)
class _Group:
    """A group to be rolled out, for one draw of a task from the stream."""

    task: Task
    group_id: str
    group_size: int
    first_sample: int


async def _collect_group(group: _Group, collector: Collector, step: int) -> list[Trajectory]:
    task = group.task
    trajectories = await rollout_group(
        task,
        collector.spec,
        group_id=group.group_id,
        group_size=group.group_size,
        run_seed=collector.seed,
        step=step,
        first_sample=group.first_sample,
    )
    for trajectory in trajectories:
        trajectory.info |= origin_of(task)
    by_episode = [list(parts) for _, parts in groupby(trajectories, key=lambda t: t.episode_id)]
    judged = [parts for parts in by_episode if not isinstance(parts[-1].outcome, Invalid)]
    episodes = episodes_of(judged, collector.spec.renderer)
    outcomes = await score_group(collector.rewards[task.reward], episodes, task)
    for parts, outcome in zip(judged, outcomes, strict=True):
        attach_outcome(parts, outcome, collector.credit)
    if collector.credit.greedy:
        await _attach_greedy(trajectories, group, collector, step)
    if collector.on_group is not None:
        collector.on_group()
    return trajectories


def origin_of(task: Task) -> dict[str, Any]:
    """Where an episode came from, for whoever reads the log: source, env where the row names one, further columns."""
    env = {} if task.env is None else {"env": task.env}
    return {"source": task.source, **env, **({"extra": dict(task.extra)} if task.extra else {})}


async def _attach_greedy(trajectories: Sequence[Trajectory], group: _Group, collector: Collector, step: int) -> None:
    """Rolls out one more episode of the task at temperature 0, the baseline of ReMax.

    Its return goes to every token of the group as the stream `greedy_returns`; NaN where it could not be judged.
    """
    greedy = replace(collector.spec, params=replace(collector.spec.params, temperature=0.0))
    found = await rollout_group(
        group.task, greedy, group_id=f"{group.group_id}/greedy", group_size=1, run_seed=collector.seed, step=step
    )
    earned = math.nan
    if not isinstance(found[-1].outcome, Invalid):
        episode = episode_of(found, collector.spec.renderer)
        (outcome,) = await score_group(collector.rewards[group.task.reward], [episode], group.task)
        attach_outcome(found, outcome, collector.credit)
        if isinstance(outcome, Score):
            earned = sum(reward for t in found for reward in t.rewards or ())
    for trajectory in trajectories:
        trajectory.streams["greedy_returns"] = [earned] * len(trajectory)


def attach_outcome(parts: Sequence[Trajectory], outcome: Outcome, credit: Credit | None = None) -> None:
    """Stores the outcome on every trajectory of an episode, and its value at the episode's last policy token.

    With rewards of turns, the outcome's part of all rewards is kept as the stream `outcome_rewards`.
    Raises RewardError for rewards of turns that nothing weighs.
    """
    credit = credit or Credit()
    if isinstance(outcome, Score) and outcome.turns is not None:
        if credit.turns == 0:
            raise RewardError(
                "the reward function gives rewards of turns (Score.turns), and algorithm.turn_reward_coef is 0, so "
                "they would be lost: set it to their weight (1 = as given), or return a Score without turns"
            )
        _put_turn_rewards(parts, outcome.turns)
    for trajectory in parts:
        trajectory.outcome = outcome
        given = trajectory.rewards or [0.0] * len(trajectory)
        trajectory.rewards = [credit.turns * reward for reward in given] if credit.turns else [0.0] * len(trajectory)
        if credit.turns:
            trajectory.streams["outcome_rewards"] = [0.0] * len(trajectory)
    if not isinstance(outcome, Score):
        return
    for trajectory in reversed(parts):
        last = next((i for i in reversed(range(len(trajectory))) if trajectory.source[i] is Source.POLICY), None)
        if last is not None:
            assert trajectory.rewards is not None
            trajectory.rewards[last] += credit.outcome * outcome.value
            if credit.turns:
                trajectory.streams["outcome_rewards"][last] = credit.outcome * outcome.value
            return


def _put_turn_rewards(parts: Sequence[Trajectory], turns: Sequence[float | None]) -> None:
    """Each at the last token of its turn, instead of what the env gave."""
    for trajectory in parts:
        trajectory.rewards = [0.0] * len(trajectory)
    for (trajectory, turn), reward in zip(written_turns(parts), turns, strict=True):
        assert trajectory.rewards is not None
        trajectory.rewards[turn.end - 1] = reward or 0.0


def usable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that may enter a baseline and train: scored, with at least one token of the policy in the episode.

    In the order of their names, so that nothing depends on the order in which they arrived.
    """
    written = {t.episode_id for t in trajectories if t.policy_token_count}
    kept = [t for t in trajectories if isinstance(t.outcome, Score) and t.episode_id in written]
    return sorted(kept, key=lambda t: (t.group_id, t.episode_id))


def check_invalid_share(trajectories: Sequence[Trajectory], limit: float) -> None:
    """Raises TooManyInvalid, with the most frequent reason and one sample, when over `limit` of the episodes broke."""
    outcomes = {t.episode_id: t.outcome for t in trajectories}
    broken = {episode: o for episode, o in outcomes.items() if isinstance(o, Invalid)}
    if len(broken) <= limit * len(outcomes):
        return
    counts: dict[str, int] = {}
    for outcome in broken.values():
        counts[outcome.reason] = counts.get(outcome.reason, 0) + 1
    reason = max(counts, key=lambda key: counts[key])
    episode, sample = next((e, o) for e, o in broken.items() if o.reason == reason)
    traces = [t.info["traceback"] for t in trajectories if t.episode_id == episode and "traceback" in t.info]
    raise TooManyInvalid(
        f"{len(broken)} of {len(outcomes)} episodes are invalid, more than run.max_invalid_share = {limit} allows "
        f"({', '.join(f'{key}: {count}' for key, count in sorted(counts.items()))}). "
        f"The first with {reason!r}: episode {episode}: {sample.detail}\n" + "\n".join(traces)
    )
