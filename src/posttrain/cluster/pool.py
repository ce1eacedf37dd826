"""The samplers of a run that are processes of their own, as rank 0 sees them.

    called    its process has started and called rank 0
    loading   it was told which model to load
    ready     it has loaded the model
    serving   it has the weights of now, and its probe was right: it gets requests
    asleep    it has given up the memory of its GPU; new weights, or an order, wake it. Before and after that it goes to
              sleep, or wakes up: it was ordered to, and has not said yet that it has
    lost      its connection broke, or it gave no sign of life; whoever starts processes is asked to start another one

Whoever is lost does not come back: what starts in its place calls as a new member of the same number.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from posttrain.cluster.channel import Channel, ChannelServer, RankLost
from posttrain.cluster.supervisor import CALLS, SECRET, request_kill
from posttrain.config import ClusterConfig
from posttrain.sampler.own_copy import NO_WEIGHTS
from posttrain.sampler.requests import SamplerError

log = logging.getLogger("posttrain")
Message = dict[str, Any]
LAST_SECONDS = 5.0  # for a sampler that was told to stop


class State(Enum):
    """See the module's docstring."""

    CALLED = "waits to be told its model"
    LOADING = "loads its model"
    READY = "waits for weights"
    SERVING = "serves"
    FALLS_ASLEEP = "goes to sleep"
    ASLEEP = "sleeps"
    WAKES = "wakes up"
    LOST = "is lost"


@dataclass(slots=True, eq=False)
class Member:
    """A sampler's process, at the other end of `channel`."""

    channel: Channel
    state: State = State.CALLED
    version: int = NO_WEIGHTS

    @property
    def number(self) -> int:
        return self.channel.rank

    @property
    def there(self) -> bool:
        return self.state is not State.LOST

    def __str__(self) -> str:
        return str(self.channel)


@dataclass(slots=True, eq=False)
class Pool:
    """Its members may come and go at any time; every method may be called from any thread.

    request_kill: asks for the end of the process behind a channel, which is then replaced. soon: has something done by
    the thread that trains, once it waits for rollouts; None where these run on that very thread's event loop.
    """

    server: ChannelServer
    settings: ClusterConfig
    request_kill: Callable[[Channel], None]
    on_lost: Callable[[Member], None] = lambda member: None
    on_ready: Callable[[], None] = lambda: None
    on_answer: Callable[[Member, Message], None] = lambda member, said: None
    soon: Callable[[Callable[[], None]], None] | None = None
    restarts: int = 0  # members that came in the place of a lost one
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    _members: dict[int, Member] = field(default_factory=dict[int, Member])
    _begin: Message | None = None
    _replies: dict[int, tuple[Member, Future[Message]]] = field(
        default_factory=dict[int, tuple[Member, "Future[Message]"]]
    )
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    def listen(cls, settings: ClusterConfig) -> Pool:
        """Answers samplers from now on, where the launcher has told them to call."""
        host, _, port = os.environ[CALLS].rpartition(":")
        secret = os.environ.pop(SECRET)  # tools and agents that start here need not know
        server = ChannelServer(host, int(port), secret)
        pool = cls(server, settings, request_kill)
        server.keep_answering("sampler", pool.admit)
        return pool

    @property
    def count(self) -> int:
        return self.settings.samplers

    def members(self, *states: State) -> list[Member]:
        """In these states; all that are there if none is given. By number."""
        with self.changed:
            there = [member for _, member in sorted(self._members.items()) if member.there]
        return [member for member in there if not states or member.state in states]

    def begin(self, message: Message | None) -> Message | None:
        """What every member is told first, so that it loads its model; None: nothing, for now. Returns what it was."""
        with self.changed:  # whoever calls later is told by `admit`
            before, self._begin = self._begin, message
            if message is None:
                return before
            there = self.members(State.CALLED)
            for member in there:
                member.state = State.LOADING
        for member in there:
            self.tell(member, message)
        return before

    def admit(self, channel: Channel) -> None:
        """Somebody calls. One who was there under this number before is lost."""
        with self.changed:
            before, member = self._members.get(channel.rank), Member(channel)
        if before is not None:
            self.lose(before, "another process calls in its place")
            self.restarts += 1
            log.warning("%s is there again", member)
        with self.changed:
            self._members[channel.rank] = member
            if (begin := self._begin) is not None:
                member.state = State.LOADING
            self.changed.notify_all()
        channel.listen(lambda said: self._hear(member, said))
        if begin is not None:
            self.tell(member, begin)

    def tell(self, member: Member, message: Message) -> bool:
        """Whether it could be said; else the member is lost."""
        try:
            member.channel.send(message)
        except RankLost as error:
            self.lose(member, str(error))
            return False
        return True

    def ask(self, member: Member, message: Message) -> Future[Message]:
        """Its reply; RankLost when it goes without one, SamplerError for what it failed of."""
        number, answer = next(self._numbers), Future[Message]()
        with self.changed:
            self._replies[number] = (member, answer)
        if not member.there or not self.tell(member, message | {"reply": number}):
            self._settle(number, RankLost(f"{member} is lost"))
        return answer

    def lose(self, member: Member, why: str) -> None:
        """Once for every member."""
        with self.changed:
            if not member.there:
                return
            member.state = State.LOST
            waiting = [number for number, (who, _) in self._replies.items() if who is member]
            self.changed.notify_all()
        member.channel.close()
        log.warning("%s is lost (%s)", member, why)
        self.request_kill(member.channel)
        for number in waiting:
            self._settle(number, RankLost(f"{member} is lost ({why})"))
        self.on_lost(member)

    def put(self, member: Member, state: State) -> None:
        """Into another state, unless it is lost."""
        with self.changed:
            if member.there:
                member.state = state
                self.changed.notify_all()

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        """Until it is so; looked at whenever a member's state changes. Whoever started the processes ends the run when
        it can never be so."""
        with self.changed:
            self.changed.wait_for(wanted)

    def close(self) -> None:
        """Tells all to stop, and waits for those that may hold memory of this process until they have let go of it."""
        self.server.close()
        there, idle = self.members(), self.members(State.CALLED, State.LOADING)
        for member in there:
            member.state = State.LOST  # its channel will break now, and nobody is to mind
            with suppress(RankLost):
                member.channel.send({"do": "stop"})
        until = time.monotonic() + LAST_SECONDS
        for member in there:
            if member not in idle:
                member.channel.wait_for_end(until - time.monotonic())
            member.channel.close(until - time.monotonic())

    def _hear(self, member: Member, said: Mapping[str, Any] | None) -> None:
        """Runs on the channel's thread."""
        if said is None:
            return self.lose(member, "its connection broke")
        if "ready" in said:
            self.put(member, State.READY)
            return self.on_ready()
        if "reply" in said:
            error = SamplerError(f"{member}: {said['error']}") if "error" in said else None
            return self._settle(said["reply"], error or dict(said))
        return self.on_answer(member, dict(said))

    def _settle(self, number: int, outcome: Message | Exception) -> None:
        with self.changed:
            _, answer = self._replies.pop(number, (None, None))
        if answer is None:
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
