"""Which of the sequences being decoded begin with the same tokens, so that attention reads these once for all.

Found by comparing tokens, not by remembering who was copied from whom: rows that were prefilled apart, or that came
back from a tool, share as well, and any member can go at any time. Every row has all of its keys; sharing saves reading
them, not keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from posttrain.sampler.requests import Request
from posttrain.sampler.slots import common_prefix

WORTH_SHARING = 1024  # keys (of a head) that need not be read in a step; below it, sharing costs more than it saves
MOST_MEMBERS = 16  # of a piece of a family: small ones need little padding, large ones fit in the cache of a core
MOST_PADDING = 3  # places of a `Grouping` per row


@dataclass(frozen=True, slots=True)
class Family:
    """Requests, at least two of them, whose first `shared` tokens are the same and cached."""

    members: list[Request]
    shared: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """Requests, all of them, in groups whose first `tokens` tokens are the same and cached."""

    tokens: int
    members: list[list[Request]]

    @property
    def width(self) -> int:
        return max(map(len, self.members))


def families(requests: Sequence[Request]) -> list[Family]:
    """The families that save most reading: those of a common system prompt are cut into those of its questions where
    these share enough more. Every request has one token to forward."""
    ordered = sorted(requests, key=lambda r: r.ids)
    alike = [common_prefix(a.ids, b.ids, min(len(a.ids), len(b.ids)) - 1) for a, b in pairwise(ordered)]
    return [Family(ordered[a:b], shared) for a, b, shared in _cut(alike, 0, len(ordered))[1]]


def leaders(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """For every request: whose row holds its first tokens, too, and how many; (its own row, 0) if it shares none."""
    found = {id(r): (row_of(f.members[0]), f.shared) for f in families(requests) for r in f.members}
    return [found.get(id(r), (row_of(r), 0)) for r in requests]


def row_of(request: Request) -> int:
    assert request.slot is not None
    return request.slot.row


def grouping(requests: Sequence[Request]) -> Grouping | None:
    """One number of first tokens for all, the one that saves most reading; None if none saves enough."""
    found = families(requests)
    low = min(len(r.ids) for r in requests) - 1
    best: Grouping | None = None
    most = WORTH_SHARING
    for tokens in {min(family.shared, low) for family in found}:
        parts = [part for family in found if family.shared >= tokens for part in pieces(family.members)]
        saved = tokens * sum(len(part) - 1 for part in parts)
        if saved >= most:
            best, most = Grouping(tokens, parts), saved
    if best is None:
        return None
    together = {id(r) for part in best.members for r in part}
    every = Grouping(best.tokens, [*best.members, *([r] for r in requests if id(r) not in together)])
    return every if every.width * len(every.members) <= MOST_PADDING * len(requests) else None


def pieces(members: list[Request]) -> Iterator[list[Request]]:
    """At most MOST_MEMBERS each."""
    for start in range(0, len(members), MOST_MEMBERS):
        yield members[start : start + MOST_MEMBERS]


def _cut(alike: list[int], first: int, last: int) -> tuple[int, list[tuple[int, int, int]]]:
    """(keys saved, [(first, last, shared)]) for requests first..last in order; `alike[i]`: what i and i + 1 share."""
    if last - first < 2:
        return 0, []
    shared = min(alike[first : last - 1])
    whole = shared * (last - first - 1)
    edges = [i + 1 for i in range(first, last - 1) if alike[i] == shared]
    if len(edges) == last - first - 1:  # all alike
        return (whole, [(first, last, shared)]) if shared else (0, [])
    parts = [_cut(alike, a, b) for a, b in zip([first, *edges], [*edges, last], strict=True)]
    saved = sum(part[0] for part in parts)
    if whole > saved:
        return whole, [(first, last, shared)]
    return saved, [family for part in parts for family in part[1]]
