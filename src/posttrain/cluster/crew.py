"""The ranks of a run besides the first: what rank 0 can ask of them, and how they do it.

    order     rank 0 does at the same time                 a rank of the crew does
    begin     loads its models                             loads its models, of the same config and checkpoint
    publish   copies the weights to its sampler            the same, and empties its sampler
    sample    other things                                 answers one request of the rollout
    learn     assigns credit and updates                   the same, on its share of the micro-batches
    save      gathers the shards and writes                helps to gather
    stop      ends                                         ends

Orders come over a line of its own, so that a rank can wait for hours; collectives are only for what all do at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.cluster.line import Exchange, Line
from posttrain.cluster.sampler import SpreadSampler, params_of
from posttrain.loops.build import load_tokenizer
from posttrain.loops.credit import Lesson, credited, kl_of_some
from posttrain.loops.learner import Learner, Models, staged
from posttrain.loops.samplers import sampler_of_rank
from posttrain.loops.saver import Saver
from posttrain.loops.update import update
from posttrain.sampler.native import NativeSampler
from posttrain.trainer.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Crew:
    """As rank 0 sees it; a run on one process has NOBODY."""

    ranks: Ranks = ALONE
    lines: tuple[Line, ...] = ()

    @classmethod
    def muster(cls, ranks: Ranks) -> Crew:
        """On rank 0: waits for the others to call."""
        exchange = Exchange(os.environ["MASTER_ADDR"])
        ranks.share((exchange.address, exchange.secret))
        return cls(ranks, exchange.answer(ranks.size - 1))

    def order(self, do: str, *what: Any) -> None:
        """`what` is given to every rank as it is here."""
        for line in self.lines:
            line.send({"do": do})
        if self.lines and what:
            self.ranks.share(what)

    def sampler(self, local: NativeSampler) -> NativeSampler | SpreadSampler:
        return SpreadSampler(local, self.lines) if self.lines else local

    def close(self) -> None:
        for line in self.lines:
            line.close()


NOBODY = Crew()


class LeaderLost(RuntimeError):
    """Rank 0 has ended without saying so."""


def follow(ranks: Ranks) -> None:
    """What every rank but the first does, until rank 0 says stop. Raises LeaderLost when rank 0 ends otherwise."""
    address, secret = ranks.receive()
    line = Line.call(address, secret, ranks.rank)
    first = line.receive()
    if first is None:
        raise LeaderLost
    if first["do"] == "stop":
        return
    models: Models = ranks.receive()[0]
    learner = models.load(ranks)
    sampler = sampler_of_rank(learner, load_tokenizer(learner.config.model.path))
    asyncio.run(_Follower(learner, sampler, line).serve())


class _Follower:
    def __init__(self, learner: Learner, sampler: NativeSampler, line: Line) -> None:
        self.learner = learner
        self.sampler = sampler
        self.line = line
        self.saver = Saver(background=learner.config.checkpoint.background)
        self._answering: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        orders: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.line.listen(lambda said: loop.call_soon_threadsafe(orders.put_nowait, said))
        while (order := await orders.get()) is not None:
            match order["do"]:
                case "sample":
                    self._answering[order["id"]] = asyncio.create_task(self._answer(order))
                case "cancel":
                    if (task := self._answering.get(order["id"])) is not None:
                        task.cancel()
                case "release":
                    self.sampler.release(order["session"])
                case "stop":
                    self.saver.wait()
                    return
                case do:
                    await asyncio.gather(*self._answering.values(), return_exceptions=True)  # cancelled, not yet gone
                    self._obey(do)
        raise LeaderLost

    def _obey(self, do: str) -> None:
        learner = self.learner
        match do:
            case "publish":
                learner.publish()
                self.sampler.reset()
            case "save":
                self.saver.wait()
                (draft,) = learner.ranks.receive()
                write = staged(learner)
                self.saver.do(lambda: write(draft))
            case "learn":
                lesson, step, learner.kl_coef = learner.ranks.receive()
                learn(learner, lesson, step)
            case _:
                raise ValueError(f"rank 0 orders {do!r}, which is not known here: do all ranks run the same version?")

    async def _answer(self, order: Mapping[str, Any]) -> None:
        number = order["id"]
        how = {"seed": order["seed"], "session": order["session"]}
        try:
            done = await self.sampler.sample(order["ids"], params_of(order["params"]), **how)
            self.line.send({"id": number, "sampled": asdict(done)})
        except Exception as error:  # raised again where it was asked
            self.line.send({"id": number, "error": str(error), "kind": type(error).__name__})
        finally:
            del self._answering[number]


def learn(learner: Learner, lesson: Lesson | None, step: int) -> None:
    """The second and third part of `rl.train_step`, without looking at what comes of it."""
    batch = None if lesson is None else credited(lesson, learner)
    if batch is not None and learner.kl_is_only_measured:
        kl_of_some(batch, learner)
    update(learner, batch, step=step)
