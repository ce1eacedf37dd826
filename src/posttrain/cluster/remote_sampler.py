"""Samplers in processes of their own, as one sampler that a rollout asks.

One `sample` call
  consumes      a prompt, its params and its seed
  waits for     a sampler that serves, and its answer
  unblocked by  the answer; when the sampler is lost first, by that of another one, or of the one that replaces it
  produces      one `Sampled`, whoever made it: seeds belong to requests, and an answer is taken only from the member
                that the request is with, so that no request is answered twice
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.cluster.channel import RankLost
from posttrain.cluster.pool import Member, Message, Pool, State
from posttrain.cluster.routing import Routing
from posttrain.cluster.sampler import answer_in, counted, give, plain
from posttrain.sampler.own_copy import NO_WEIGHTS
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.sampler.requests import SamplerError, summed


@dataclass(slots=True, eq=False)
class _Open:
    """A request, who waits for it, and who has it; None: nobody serves just now."""

    message: Message
    future: asyncio.Future[Sampled]
    loop: asyncio.AbstractEventLoop
    since: float
    member: Member | None = None


@dataclass(slots=True, eq=False)
class PoolSampler:
    """A `Sampler`. note: hears what all are ordered to do, before they are waited for."""

    pool: Pool
    note: Callable[[str], None] = lambda do: None
    given: int = NO_WEIGHTS  # the version that was given to all
    asked_again: int = 0  # requests whose sampler was lost
    loop: asyncio.AbstractEventLoop | None = None  # of the last request
    asleep: bool = False
    _begin: Message | None = None  # what whoever calls is told when nobody sleeps any more
    _open: dict[int, _Open] = field(default_factory=dict[int, _Open])
    _routing: Routing[Member] = field(default_factory=Routing[Member])
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    # counters as each said them with its last answer
    _counted: dict[Member, dict[str, int]] = field(default_factory=dict[Member, dict[str, int]])

    def __post_init__(self) -> None:
        self.pool.on_answer = self._take
        self.pool.on_lost = self._ask_again

    @property
    def version(self) -> int:
        """NO_WEIGHTS while somebody waits for weights, or will when it wakes."""
        lacking = [member for member in self.pool.members(State.ASLEEP) if member.version != self.given]
        return NO_WEIGHTS if lacking or self.pool.members(State.READY) else self.given

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        """Raises what the sampler raises, and SamplerError while all sleep."""
        if self.asleep:
            raise SamplerError("the samplers are asleep: wake them, or publish a policy to them")
        number, loop = next(self._numbers), asyncio.get_running_loop()
        message = {"do": "sample", "id": number, "ids": list(ids), "params": plain(params)}
        message |= {"seed": seed, "session": session}
        asked = self._open[number] = _Open(message, loop.create_future(), loop, time.monotonic())
        self.loop = loop
        self._place(asked, None)
        try:
            return await asked.future
        finally:
            if self._open.pop(number, None) is not None and asked.member is not None:  # cancelled
                self.pool.tell(asked.member, {"do": "cancel", "id": number})

    def release(self, session: str) -> None:
        member = self._routing.sessions.pop(session, None)
        if member is not None and member.there:
            self.pool.tell(member, {"do": "release", "session": session})

    def reset(self) -> None:
        """Drops every cache, unless requests are open: who gets new weights then drops what it cached of old ones."""
        self._routing.prompts.clear()
        if self._open:
            return
        self._routing.clear()
        for member in self.pool.members(State.SERVING):
            self.pool.tell(member, {"do": "reset"})

    def sleep(self, level: int) -> None:
        """All give the memory of their GPUs to the ranks; see `VllmSampler.sleep`. Waits until they have, and before
        that for those that load their model just now; who calls later loads none until the others wake. When they
        sleep already, nothing is done.

        Raises SamplerError when requests are open, or when one of them cannot sleep.
        """
        if self.asleep:
            return
        if self._open:
            raise SamplerError(f"{len(self._open)} requests are open; samplers sleep between rollouts")
        self.note("sleep")
        self.asleep, self._begin = True, self.pool.begin(None)
        self.pool.wait_for(lambda: not self.pool.members(State.LOADING))
        there = self.pool.members(State.READY, State.SERVING)
        for member in self._obeyed(there, {"do": "sleep", "level": level}, State.FALLS_ASLEEP):
            if level == 2:
                member.version = NO_WEIGHTS
            self.pool.put(member, State.ASLEEP)

    def wake(self, version: int | None = None) -> None:
        """If they sleep, who has kept the weights of `version` (None: the last that was given) serves again, and the
        others wait for weights, which wake them. Raises SamplerError when one of them cannot wake."""
        if not self.asleep:
            return
        self.note("wake")
        wanted = self.given if version is None else version
        kept: list[Member] = []
        for member in self.pool.members(State.ASLEEP):
            if member.version == wanted:
                kept.append(member)
            else:
                self.pool.put(member, State.READY)
        for member in self._obeyed(kept, {"do": "wake"}, State.WAKES):
            self.serve(member)
        self.asleep = False
        self.pool.begin(self._begin)

    def serve(self, member: Member) -> None:
        """From now on it gets requests: first those that nobody has."""
        self.pool.put(member, State.SERVING)
        for asked in [asked for asked in list(self._open.values()) if asked.member is None]:
            self._place(asked, None)

    def withdraw(self, member: Member) -> None:
        """It gets no more requests until it serves again; those that it has go to others."""
        self.pool.put(member, State.READY)
        for number in [number for number, asked in list(self._open.items()) if asked.member is member]:
            self.pool.tell(member, {"do": "cancel", "id": number})
        self._ask_again(member)

    def fail(self, error: Exception) -> None:
        """Nobody is left waiting."""
        for number in list(self._open):
            self._settle(number, error)

    def counters(self) -> dict[str, int]:
        """See `CountingSampler`: of all members, also those that are lost, as of their last answers."""
        return summed(list(self._counted.values()))

    def waiting(self) -> dict[str, tuple[int, float]]:
        """Name -> (open requests, when the oldest was made) of every member that has some; '' where nobody has them."""
        return counted((str(asked.member or ""), asked.since) for asked in list(self._open.values()))

    def _obeyed(self, members: Sequence[Member], order: Message, meanwhile: State) -> list[Member]:
        """Who has done it: others were lost, and are replaced. Raises SamplerError for what one of them failed of."""
        for member in members:
            self.pool.put(member, meanwhile)
        done: list[Member] = []
        for member, answer in [(member, self.pool.ask(member, order)) for member in members]:
            try:
                answer.result()
                done.append(member)
            except RankLost:
                continue
            except SamplerError as error:
                raise SamplerError(
                    f"the order to {order['do']} failed ({error}); if the GPU has no room, lower "
                    "gpu_memory_utilization or kv_cache_memory_bytes of sampler.options, whichever is set; without "
                    "sampler.sleep there is no such order"
                ) from error
        return done

    def _place(self, asked: _Open, before: Member | None) -> None:
        """Where it was with `before`, it goes to who serves now; another thread may have seen to it already."""
        with self.pool.changed:  # so that a member is lost before it is chosen, or after it is known to be
            if asked.member is not before:
                return
            member = asked.member = self._home(asked.message)
        if member is not None:
            self.pool.tell(member, asked.message)

    def _home(self, message: Message) -> Member | None:
        serving = self.pool.members(State.SERVING)
        if not serving:
            return None
        load = Counter(id(asked.member) for asked in list(self._open.values()))
        return self._routing.choose(message["ids"], message["session"], serving, lambda member: load[id(member)])

    def _ask_again(self, lost: Member) -> None:
        """What it had goes to others, or waits for the next that serves."""
        for asked in [asked for asked in list(self._open.values()) if asked.member is lost]:
            self.asked_again += 1
            self._place(asked, lost)

    def _take(self, member: Member, said: Message) -> None:
        """An answer, on the thread of the member's channel."""
        self._counted[member] = said.get("counters") or self._counted.get(member, {})
        asked = self._open.get(said["id"])
        if asked is None or asked.member is not member:
            return
        self._settle(said["id"], answer_in(said))

    def _settle(self, number: int, answer: Sampled | Exception) -> None:
        asked = self._open.pop(number, None)
        if asked is not None and not asked.loop.is_closed():
            asked.loop.call_soon_threadsafe(give, asked.future, answer)
