"""The schedule of a run, simulated: who waits for whom when rollouts run ahead of training by at most n steps.

The rules are those of `loops/ahead.py`. Step s begins to be rolled out once the weights of step s - 1 - n are
published; steps are trained in order, each when all its episodes are done; after each come new weights. n = 0 is the
synchronous loop. Discrete events, no thread, no clock: the same inputs give the same result.

An episode takes turns of sampling and of waiting for tools. All sequences that a sampler decodes at once get a token
per step of it, and a step of B sequences takes `step_seconds + B * sequence_seconds`; sequences beyond `slots` wait in
line. Where samplers and trainer share cores (a run on CPUs), all slow down alike when threads outnumber cores.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Turn:
    """A policy turn: tokens that are sampled, then seconds in which tools run (0 in the last turn)."""

    tokens: float
    tool_seconds: float = 0.0


Episode = tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Who works, and how fast."""

    samplers: int = 1
    slots: int = 256  # sequences that a sampler decodes at once
    step_seconds: float  # of a decode step of a sampler, whatever its batch
    sequence_seconds: float = 0.0  # and for each sequence in it
    publish_seconds: float = 0.0  # samplers and trainer stand still
    cores: float | None = None  # that samplers and trainer share; None: each has its own
    trainer_threads: float = 1.0

    def step(self, batch: int) -> float:
        return self.step_seconds + batch * self.sequence_seconds


@dataclass(frozen=True, slots=True)
class Work:
    """A training step: its episodes, and the seconds of training on them while nothing else uses the cores."""

    episodes: Sequence[Episode]
    train_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the steps after `warm_up`; seconds."""

    step_seconds: tuple[float, ...]
    trainer_idle: float  # share of the time
    samplers_idle: float  # share in which a sampler had nothing to decode
    staleness: float  # training steps between sampling and training, mean over tokens
    staleness_max: int

    @property
    def mean_step(self) -> float:
        return sum(self.step_seconds) / len(self.step_seconds)


def simulate(steps: Sequence[Work], machine: Machine, max_staleness: int, *, warm_up: int = 2) -> Outcome:
    """Runs all steps. Raises ValueError when there are not more of them than `warm_up`."""
    if len(steps) <= warm_up:
        raise ValueError(f"{len(steps)} steps, of which the first {warm_up} do not count: give more")
    return _Run(steps, machine, max_staleness).outcome(warm_up)


@dataclass(slots=True)
class _Playing:
    """An episode that is being rolled out."""

    step: int
    turns: Episode
    turn: int = 0
    version: int = 0  # of the weights when the turn began


@dataclass(slots=True)
class _Sampler:
    """A sampler. `tokens` counts its decode steps; `ends` says at which count each sequence in it is done."""

    tokens: float = 0.0
    ends: list[tuple[float, int, _Playing]] = field(default_factory=list[tuple[float, int, _Playing]])
    line: deque[_Playing] = field(default_factory=deque[_Playing])


class _Run:
    """The state of the simulation. Steps are numbered from 1, version k is that of the weights after step k."""

    def __init__(self, steps: Sequence[Work], machine: Machine, max_staleness: int) -> None:
        self.steps, self.machine, self.ahead = steps, machine, max_staleness
        self.now = 0.0
        self.version = self.started = 0
        self.samplers = [_Sampler() for _ in range(machine.samplers)]
        self.tools: list[tuple[float, int, _Playing, _Sampler]] = []
        self.open = [0] * (len(steps) + 1)  # episodes of a step that are not done
        self.training = 0.0  # seconds of work left in the step that is trained on
        self.count = 0
        self.ages: list[tuple[int, int, float]] = []  # step, version, tokens
        self.finished = [0.0]  # when each step was over
        self.waited: list[float] = []
        self.idle = 0.0  # seconds of all samplers
        self.idle_at: list[float] = [0.0]

    def outcome(self, warm_up: int) -> Outcome:
        for step in range(1, len(self.steps) + 1):
            self._train(step)
        first = self.finished[warm_up]
        took = [b - a for a, b in zip(self.finished[warm_up:], self.finished[warm_up + 1 :], strict=False)]
        span, waited = self.now - first, self.waited[warm_up:]
        ages = [(step - 1 - version, tokens) for step, version, tokens in self.ages if step > warm_up]
        total = sum(tokens for _, tokens in ages) or 1.0
        idle = (self.idle_at[-1] - self.idle_at[warm_up]) / (span * len(self.samplers))
        return Outcome(
            step_seconds=tuple(took),
            trainer_idle=sum(waited) / span,
            samplers_idle=idle,
            staleness=sum(age * tokens for age, tokens in ages) / total,
            staleness_max=max((age for age, _ in ages), default=0),
        )

    def _train(self, step: int) -> None:
        self.now += self.machine.publish_seconds if step > 1 else 0.0
        while self.started < min(step + self.ahead, len(self.steps)):
            self.started += 1
            self._start(self.started)
        since = self.now
        while self.open[step]:
            self._advance()
        self.waited.append(self.now - since)
        self.training = self.steps[step - 1].train_seconds
        while self.training > 0:
            self._advance()
        self.version = step
        self.finished.append(self.now)
        self.idle_at.append(self.idle)

    def _start(self, step: int) -> None:
        episodes = self.steps[step - 1].episodes
        self.open[step] = len(episodes)
        for number, turns in enumerate(episodes):
            self._ask(_Playing(step, turns), self.samplers[number % len(self.samplers)])

    def _ask(self, playing: _Playing, sampler: _Sampler) -> None:
        """Asks for the next turn of an episode: it is decoded at once, or waits in line for a slot."""
        if len(sampler.ends) >= self.machine.slots:
            sampler.line.append(playing)
            return
        playing.version = self.version
        self.count += 1
        heapq.heappush(sampler.ends, (sampler.tokens + playing.turns[playing.turn].tokens, self.count, playing))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Moves the time to the next event and handles it."""
        share = self._share()
        wait = self.tools[0][0] - self.now if self.tools else math.inf
        trainer = self.training / share if self.training > 0 else math.inf
        busy = [(sampler, share / self.machine.step(len(sampler.ends))) for sampler in self.samplers if sampler.ends]
        for sampler, rate in busy:
            wait = min(wait, (sampler.ends[0][0] - sampler.tokens) / rate)
        wait = max(0.0, min(wait, trainer))
        self.now += wait
        self.idle += wait * (len(self.samplers) - len(busy))
        for sampler, rate in busy:
            sampler.tokens += wait * rate
        self.training = 0.0 if wait == trainer else max(0.0, self.training - wait * share)
        self._end_turns()

    def _share(self) -> float:
        """The speed of samplers and trainer as a share of the one they have alone: 1, or less on too few cores."""
        if self.machine.cores is None:
            return 1.0
        threads = sum(bool(s.ends) for s in self.samplers) + (self.machine.trainer_threads if self.training > 0 else 0)
        return min(1.0, self.machine.cores / threads) if threads else 1.0

    def _end_turns(self) -> None:
        while self.tools and self.tools[0][0] <= self.now + 1e-12:
            *_, playing, sampler = heapq.heappop(self.tools)
            self._ask(playing, sampler)
        for sampler in self.samplers:
            while sampler.ends and sampler.ends[0][0] <= sampler.tokens + 1e-9:
                self._sampled(heapq.heappop(sampler.ends)[2], sampler)
                if sampler.line:
                    self._ask(sampler.line.popleft(), sampler)

    def _sampled(self, playing: _Playing, sampler: _Sampler) -> None:
        turn = playing.turns[playing.turn]
        self.ages.append((playing.step, playing.version, turn.tokens))
        playing.turn += 1
        if playing.turn == len(playing.turns):
            self.open[playing.step] -= 1
        elif turn.tool_seconds > 0:
            self.count += 1
            heapq.heappush(self.tools, (self.now + turn.tool_seconds, self.count, playing, sampler))
        else:
            self._ask(playing, sampler)
