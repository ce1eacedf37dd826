"""Which sequence owns which row of the KV cache, and whose cached prefix a new request can start from.

Plain bookkeeping, no tensors. A row is in one of four states: busy (a request is being continued), idle (its session
waits for a tool), left over (released, but its keys still serve as a prefix until the row is needed), empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Slot:
    """One row. The keys and values of `ids[:cached]` stand in it; `ids` may go on beyond (the request's own list)."""

    row: int
    ids: list[int] = field(default_factory=list[int])
    cached: int = 0
    session: str | None = None
    busy: bool = False
    used: int = 0  # tick of the last use


@dataclass(frozen=True, slots=True)
class Move:
    """Row `source` is to be copied to row `target`; a swap is two moves, all sources are read before any is written."""

    target: int
    source: int
    tokens: int


class SlotTable:
    """Rows 0..len-1. Rows are handed out, kept for sessions, taken back least recently used first."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []  # by row
        self._sessions: dict[str, Slot] = {}
        self._tick = 0

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def busy_count(self) -> int:
        return sum(slot.busy for slot in self.slots)

    def owns(self, slot: Slot) -> bool:
        """Whether the slot still stands for a row (it may have been given up when memory was made)."""
        return slot.row < len(self.slots) and self.slots[slot.row] is slot

    def of_session(self, session: str | None) -> Slot | None:
        """The idle row of a session, if it has one."""
        slot = self._sessions.get(session) if session is not None else None
        return None if slot is None or slot.busy else slot

    def acquire(self, limit: int) -> tuple[Slot, bool] | None:
        """(a row to start in, whether an idle session lost it); None when all `limit` rows are busy.

        Taken in this order: empty, left over, new, idle for the longest time.
        """
        spare = [slot for slot in self.slots if not slot.busy and slot.session is None]
        if spare:
            empty = next((slot for slot in spare if not slot.cached), None)
            return self._take(empty or min(spare, key=lambda s: s.used)), False
        if len(self.slots) < limit:
            self.slots.append(Slot(len(self.slots)))
            return self._take(self.slots[-1]), False
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            return None
        victim = min(idle, key=lambda s: s.used)
        self._forget(victim)
        return self._take(victim), True

    def occupy(self, slot: Slot, session: str | None, ids: list[int], cached: int) -> None:
        """A request continues in `slot`, whose first `cached` tokens are right for it."""
        self._forget(slot)
        slot.ids, slot.cached, slot.busy = ids, cached, True
        if session is not None:
            previous = self._sessions.pop(session, None)
            if previous is not None:
                previous.session = None
            slot.session = session
            self._sessions[session] = slot
        self.touch(slot)

    def leave(self, slot: Slot) -> None:
        """The request in `slot` is done; its tokens stay for the session, or as a left-over prefix."""
        slot.busy = False
        self.touch(slot)

    def release(self, session: str) -> None:
        """Forgets a session; a request still running keeps its row."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.session = None

    def invalidate(self) -> None:
        """Nothing cached is right any more (the weights changed). Busy rows stay busy, with nothing cached."""
        for slot in self.slots:
            slot.cached = 0
            if not slot.busy:
                self._forget(slot)
                slot.ids = []

    def touch(self, slot: Slot) -> None:
        self._tick += 1
        slot.used = self._tick

    def best_prefix(self, ids: Sequence[int], at_most: int) -> tuple[Slot, int] | None:
        """The row that shares the longest cached prefix with `ids` (never more than `at_most` tokens of it)."""
        best: tuple[Slot, int] | None = None
        for slot in self.slots:
            length = best[1] if best else 0
            bound = min(slot.cached, at_most)
            # only a strictly longer prefix is of interest: one comparison in C settles most rows
            if bound > length and slot.ids[length] == ids[length]:
                shared = common_prefix(slot.ids, ids, bound)
                if shared > length:
                    best = (slot, shared)
        return best

    def gather_busy(self, slack: int) -> list[Move]:
        """Brings busy rows to the front when more than `slack` other rows stand among them."""
        busy = [slot for slot in self.slots if slot.busy]
        if not busy or busy[-1].row + 1 <= len(busy) + slack:
            return []
        holes = [slot for slot in self.slots[: len(busy)] if not slot.busy]
        strays = busy[len(busy) - len(holes) :]
        return [move for hole, stray in zip(holes, strays, strict=True) for move in self._swap(hole, stray)]

    def shrink(self, limit: int) -> tuple[list[Move], int]:
        """Keeps at most `limit` rows: (moves to make, idle sessions that lost their row). Busy rows must fit."""
        order = [s for s in self.slots if s.busy]
        rest = [s for s in self.slots if not s.busy and s.cached]
        order += sorted(rest, key=lambda s: (s.session is None, -s.used))  # sessions before left-overs, newest first
        kept, lost = order[:limit], order[limit:]
        evicted = sum(slot.session is not None for slot in lost)
        for slot in self.slots:
            if slot not in kept:
                self._forget(slot)
                slot.ids, slot.cached = [], 0
        strays = [slot for slot in kept if slot.row >= limit]
        empty = [slot for slot in self.slots[:limit] if not slot.busy and not slot.cached]
        moves = [m for hole, stray in zip(empty, strays, strict=False) for m in self._swap(hole, stray)]
        del self.slots[limit:]
        return moves, evicted

    def _swap(self, a: Slot, b: Slot) -> Iterator[Move]:
        a.row, b.row = b.row, a.row
        self.slots[a.row], self.slots[b.row] = a, b
        if a.cached:
            yield Move(a.row, b.row, a.cached)
        if b.cached:
            yield Move(b.row, a.row, b.cached)

    def _take(self, slot: Slot) -> Slot:
        slot.ids, slot.cached = [], 0
        return slot

    def _forget(self, slot: Slot) -> None:
        if slot.session is not None:
            self._sessions.pop(slot.session, None)
            slot.session = None


def common_prefix(a: Sequence[int], b: Sequence[int], at_most: int) -> int:
    """How many first tokens two lists share, by bisection on slices (compared in C)."""
    high = min(at_most, len(a), len(b))
    if a[:high] == b[:high]:
        return high
    low = 0
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
