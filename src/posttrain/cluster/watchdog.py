"""Watches the other processes of a run, on a thread of rank 0: one without heartbeats is named and killed, and when
nothing moves the log says who waits for whom."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from posttrain.cluster.channel import Channel
from posttrain.cluster.pool import Pool
from posttrain.cluster.supervisor import request_kill
from posttrain.config import ClusterConfig

log = logging.getLogger("posttrain")
Waiting = Mapping[str, tuple[int, float]]  # name -> open requests, when the oldest was made; '': nobody has them


class Watchdog:
    """From `start` to `stop`. `ranks` are the channels to the other ranks, which have to be listened to.

    A rank that is silent is ended, which starts all ranks again from the last checkpoint; a sampler is replaced.
    """

    def __init__(self, settings: ClusterConfig, ranks: Sequence[Channel], pool: Pool | None) -> None:
        self._settings, self._ranks, self._pool = settings, ranks, pool
        self.waiting: Callable[[], Waiting] = dict  # requests of the rollout
        self.ordered: tuple[str, float] = ("start", time.monotonic())  # what rank 0 last told the others to do
        self._said = 0.0
        self._named: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self, now: float) -> None:
        """now: by the monotonic clock."""
        limit = self._settings.heartbeat_seconds
        for member in [] if self._pool is None else self._pool.members():
            if self._pool is not None and now - member.channel.heard > limit:
                self._pool.lose(member, _silence(member.channel, now, limit))
        for channel in self._ranks:
            if now - channel.heard > limit and channel.rank not in self._named:
                self._named.add(channel.rank)
                log.error("%s is lost (%s); it is ended", channel, _silence(channel, now, limit))
                request_kill(channel)
        moved = self._moved()
        if now - max(moved, self._said) > self._settings.stall_seconds:
            self._said = now
            said = [*self.report(now), *self._remedies(now)]
            log.warning("nothing has moved for %.0f s. %s", now - moved, "; ".join(said))

    def report(self, now: float) -> list[str]:
        """Who is there, what each does, and who has requests of the rollout."""
        requests = self.waiting()
        do, since = self.ordered
        lines = [f"rank 0 ordered {do} {now - since:.0f} s ago"]
        lines += [_about(channel, channel.doing, requests, now) for channel in self._ranks]
        there = {} if self._pool is None else {m.number: m for m in self._pool.members()}
        for number in range(self._settings.samplers):
            if (member := there.get(number)) is None:
                lines.append(f"sampler {number} has not called yet")
            else:
                lines.append(_about(member.channel, member.state.value, requests, now))
        if "" in requests:
            lines.append(f"{requests[''][0]} requests wait for a sampler")
        return lines

    def _remedies(self, now: float) -> list[str]:
        """For samplers that live and answer nothing: their engine may hang, or a turn may take that long."""
        late, waiting = now - self._settings.stall_seconds, self.waiting()
        remedies: list[str] = []
        for member in [] if self._pool is None else self._pool.members():
            if str(member) in waiting and waiting[str(member)][1] < late:
                host = str(member.channel.said.get("machine", "")).partition(" ")[0]
                kill = f"kill -9 {member.channel.process} on {host}"
                remedies.append(f"if {member} hangs, {kill}: it is replaced, and what it has is asked again")
        return remedies

    def _moved(self) -> float:
        channels = [*self._ranks, *([] if self._pool is None else [m.channel for m in self._pool.members()])]
        return max([self.ordered[1], *(channel.moved for channel in channels)])

    def _work(self) -> None:
        limit, looked = self._settings.heartbeat_seconds, time.monotonic()
        while not self._over.wait(min(1.0, limit / 4)):
            before, looked = looked, time.monotonic()
            if looked - before < limit / 2:  # else this process stood still, and has signs of life yet to read
                self.look(looked)


def _silence(channel: Channel, now: float, limit: float) -> str:
    return f"no sign of life for {now - channel.heard:.0f} s; cluster.heartbeat_seconds is {limit:g}"


def _about(channel: Channel, doing: str, requests: Waiting, now: float) -> str:
    text = f"{channel} (process {channel.process}) {doing}, last sign of life {now - channel.heard:.0f} s ago"
    if str(channel) not in requests:
        return text
    count, oldest = requests[str(channel)]
    return f"{text}, {count} requests, the oldest {now - oldest:.0f} s old"
