"""Looks after the other processes of a run, on a thread of rank 0: who is silent is named and ended, and when nothing
moves the log says who is waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from posttrain.cluster.beside import wish
from posttrain.cluster.line import Line
from posttrain.cluster.pool import Pool
from posttrain.config import ClusterConfig

log = logging.getLogger("posttrain")
Waiting = Mapping[str, tuple[int, float]]  # name -> open requests, when the oldest was made; '': nobody has them


class Watch:
    """From `start` to `stop`. `ranks` are the lines to the other ranks, which have to be listened to.

    A rank that is silent is ended, which starts all ranks again from the last checkpoint; a sampler is replaced.
    """

    def __init__(self, settings: ClusterConfig, ranks: Sequence[Line], pool: Pool | None) -> None:
        self._settings, self._ranks, self._pool = settings, ranks, pool
        self.waiting: Callable[[], Waiting] = dict  # requests of the rollout
        self.ordered: tuple[str, float] = ("start", time.monotonic())  # what rank 0 last told the others to do
        self._said = 0.0
        self._named: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)

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
            if self._pool is not None and now - member.line.heard > limit:
                self._pool.lose(member, _silence(member.line, now, limit))
        for line in self._ranks:
            if now - line.heard > limit and line.rank not in self._named:
                self._named.add(line.rank)
                log.error("%s is lost (%s); it is ended", line, _silence(line, now, limit))
                wish(line)
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
        lines += [_about(line, line.doing, requests, now) for line in self._ranks]
        there = {} if self._pool is None else {m.number: m for m in self._pool.members()}
        for number in range(self._settings.samplers):
            if (member := there.get(number)) is None:
                lines.append(f"sampler {number} has not called yet")
            else:
                lines.append(_about(member.line, member.state.value, requests, now))
        if "" in requests:
            lines.append(f"{requests[''][0]} requests wait for a sampler")
        return lines

    def _remedies(self, now: float) -> list[str]:
        """For samplers that live and answer nothing: their engine may hang, or a turn may take that long."""
        late, waiting = now - self._settings.stall_seconds, self.waiting()
        remedies: list[str] = []
        for member in [] if self._pool is None else self._pool.members():
            if str(member) in waiting and waiting[str(member)][1] < late:
                host = str(member.line.said.get("machine", "")).partition(" ")[0]
                kill = f"kill -9 {member.line.process} on {host}"
                remedies.append(f"if {member} hangs, {kill}: it is replaced, and what it has is asked again")
        return remedies

    def _moved(self) -> float:
        lines = [*self._ranks, *([] if self._pool is None else [m.line for m in self._pool.members()])]
        return max([self.ordered[1], *(line.moved for line in lines)])

    def _work(self) -> None:
        limit, looked = self._settings.heartbeat_seconds, time.monotonic()
        while not self._over.wait(min(1.0, limit / 4)):
            before, looked = looked, time.monotonic()
            if looked - before < limit / 2:  # else this process stood still, and has signs of life yet to read
                self.look(looked)


def _silence(line: Line, now: float, limit: float) -> str:
    return f"no sign of life for {now - line.heard:.0f} s; cluster.heartbeat_seconds is {limit:g}"


def _about(line: Line, doing: str, requests: Waiting, now: float) -> str:
    text = f"{line} (process {line.process}) {doing}, last sign of life {now - line.heard:.0f} s ago"
    if str(line) not in requests:
        return text
    count, oldest = requests[str(line)]
    return f"{text}, {count} requests, the oldest {now - oldest:.0f} s old"
