"""One sampler made of those of all ranks: a rollout asks it as it would ask one.

Seeds belong to requests, so what is sampled does not depend on who samples it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.cluster.channel import Channel, RankLost
from posttrain.cluster.routing import Routing
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.requests import SamplerError, summed
from posttrain.trajectory import StopReason


@dataclass(slots=True)
class _Open:
    """Who waits for an answer, and where."""

    rank: int
    future: asyncio.Future[Sampled]
    loop: asyncio.AbstractEventLoop
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class SpreadSampler:
    """A `Sampler`; `local` is that of rank 0, `channels` lead to the others."""

    local: NativeSampler
    channels: tuple[Channel, ...]
    _open: dict[int, _Open] = field(default_factory=dict[int, _Open])
    _load: Counter[int] = field(default_factory=Counter[int])
    _routing: Routing[int] = field(default_factory=Routing[int])
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _lost: set[int] = field(default_factory=set[int])
    _counted: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])  # as each rank said last

    def __post_init__(self) -> None:
        for channel in self.channels:
            channel.listen(self._hears(channel))

    @property
    def version(self) -> int:
        return self.local.version

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Raises what the sampler of the rank raises, and RankLost when the rank is gone."""
        rank = self._routing.choose(ids, session, range(len(self.channels) + 1), lambda r: self._load[r])
        self._load[rank] += 1
        try:
            if rank == 0:
                return await self.local.sample(ids, params, seed=seed, session=session)
            asked = {"ids": list(ids), "params": plain(params), "seed": seed, "session": session}
            return await self._ask(self.channels[rank - 1], asked)
        finally:
            self._load[rank] -= 1

    def release(self, session: str) -> None:
        rank = self._routing.sessions.pop(session, 0)
        if rank == 0:
            self.local.release(session)
        else:
            self.channels[rank - 1].send({"do": "release", "session": session})

    def reset(self) -> None:
        """Only of this process: the other ranks empty theirs when they get new weights."""
        self.local.reset()
        self._routing.clear()

    def counters(self) -> dict[str, int]:
        """See `CountingSampler`: of all ranks, the others' as of their last answers."""
        return summed([self.local.counters(), *list(self._counted.values())])

    def waiting(self) -> dict[str, tuple[int, float]]:
        """Name -> (open requests, when the oldest was made) of every other rank that has some."""
        return counted((f"rank {asked.rank}", asked.since) for asked in list(self._open.values()))

    async def _ask(self, channel: Channel, asked: dict[str, Any]) -> Sampled:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        waiting = self._open[number] = _Open(channel.rank, loop.create_future(), loop)
        if channel.rank in self._lost:  # found out by the channel's thread, which settles only what is open then
            self._settle(number, RankLost(f"rank {channel.rank} is gone"))
        else:
            channel.send({"do": "sample", "id": number, **asked})
        try:
            return await waiting.future
        finally:
            if self._open.pop(number, None) is not None:  # cancelled
                channel.send({"do": "cancel", "id": number})

    def _hears(self, channel: Channel) -> Callable[[dict[str, Any] | None], None]:
        """Runs on the channel's thread."""

        def hear(said: dict[str, Any] | None) -> None:
            if said is None:
                self._lost.add(channel.rank)
                for number in [n for n, waiting in list(self._open.items()) if waiting.rank == channel.rank]:
                    self._settle(number, RankLost(f"rank {channel.rank} is gone"))
            else:
                self._counted[channel.rank] = said.get("counters") or self._counted.get(channel.rank, {})
                self._settle(said["id"], answer_in(said))

        return hear

    def _settle(self, number: int, answer: Sampled | Exception) -> None:
        waiting = self._open.pop(number, None)
        if waiting is not None and not waiting.loop.is_closed():
            waiting.loop.call_soon_threadsafe(give, waiting.future, answer)


def counted(open_since: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    """(name, when it was made) of requests -> name -> (how many, the oldest)"""
    found: dict[str, tuple[int, float]] = {}
    for name, since in open_since:
        count, oldest = found.get(name, (0, since))
        found[name] = (count + 1, min(oldest, since))
    return found


def answer_in(said: dict[str, Any]) -> Sampled | Exception:
    """What another process has answered to a request; ValueError stays one, every other error is the sampler's."""
    if "error" not in said:
        return sampled(said["sampled"])
    return (ValueError if said["kind"] == "ValueError" else SamplerError)(said["error"])


def give(future: asyncio.Future[Sampled], answer: Sampled | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def plain(params: SamplingParams) -> dict[str, Any]:
    """For JSON."""
    return asdict(params) | {"stop_ids": sorted(params.stop_ids)}


def params_of(said: dict[str, Any]) -> SamplingParams:
    sets: dict[str, Any] = {"stop_ids": frozenset(said["stop_ids"]), "stop_strings": tuple(said["stop_strings"])}
    return SamplingParams(**said | sets)


def sampled(said: dict[str, Any]) -> Sampled:
    said["stop_reason"] = StopReason(said["stop_reason"])
    return Sampled(**said)
