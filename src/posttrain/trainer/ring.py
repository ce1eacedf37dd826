"""Attention over rows that several ranks hold: ring attention (Liu et al. 2023).

Every rank keeps its queries. Keys and values go round, from each rank to the next, and what the queries see of the
block at hand is added to a running softmax. In the backward pass they go round once more, with their gradients.

    S = scaling * Q K^T over visible keys of a block,  L' = log(e^L + sum e^S),  O' = e^(L - L') O + e^(S - L') V
    P = e^(S - L) with the L of all blocks,  dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(dO * O)),
    dQ = scaling * dS K,  dK = scaling * dS^T Q

Scores are held for one tile of queries at a time. Written in plain products, for any device and dtype: exact, and on a
GPU slower than a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from posttrain.packing import Batch, families_of

QUERY_TILE = 128
NO_PIECE = -1


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks in a circle: each receives from the one before it and sends to the one after it."""

    rank: int
    size: int
    group: Any

    def around(self, *block: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """This rank's tensors, then those of the rank before it, and so on; the next are on their way meanwhile."""
        at_hand = tuple(tensor.contiguous() for tensor in block)
        for left in range(self.size - 1, -1, -1):
            passing = _Passing(self, at_hand) if left else None
            yield at_hand
            if passing is not None:
                at_hand = passing.received()

    def passed_on(self, *block: Tensor) -> tuple[Tensor, ...]:
        """What the rank before this one has given, while this one gives `block`."""
        return _Passing(self, block).received()


class _Passing:
    """Tensors on their way to the next rank, and others of the same shapes from the one before."""

    def __init__(self, ring: Ring, block: Sequence[Tensor]) -> None:
        self._sent = block  # alive until it is there
        self._incoming = tuple(torch.empty_like(tensor) for tensor in block)
        after, before = (
            dist.get_global_rank(ring.group, (ring.rank + step) % ring.size) for step in (1, ring.size - 1)
        )
        orders = [dist.P2POp(dist.isend, tensor, after, ring.group) for tensor in block]
        orders += [dist.P2POp(dist.irecv, tensor, before, ring.group) for tensor in self._incoming]
        self._works = dist.batch_isend_irecv(orders)

    def received(self) -> tuple[Tensor, ...]:
        for work in self._works:
            work.wait()
        return self._incoming


@dataclass(frozen=True, slots=True)
class Rows:
    """For R rows, what decides which of them attend to each other.

    A piece is a run of tokens: a whole segment, a prefix that several segments share, or the rest of such a segment.
    Padding rows are pieces of their own.
    """

    piece: Tensor  # [R] long
    before: Tensor  # [R] long: the piece that stands before it; NO_PIECE where none does
    position: Tensor  # [R] long, in the segment

    @classmethod
    def of(cls, batch: Batch, of_row: Tensor, rows: Tensor) -> Rows:
        """of_row: [R] tokens by row, rows: [T] rows by token; of several rows with a token only `rows` has the real."""
        piece, before = batch.segment_ids.clone(), torch.full_like(batch.segment_ids, NO_PIECE)
        number = torch.arange(len(of_row), device=of_row.device)
        real = rows[of_row] == number
        if int(real.sum()) < len(rows):  # several tokens have one row: the layout computes prefixes once
            _part_prefixes(batch, piece, before)
        return cls(torch.where(real, piece[of_row], NO_PIECE - 1 - number), before[of_row], batch.positions[of_row])

    def __len__(self) -> int:
        return len(self.piece)

    def __getitem__(self, index: Tensor | slice) -> Rows:
        return Rows(self.piece[index], self.before[index], self.position[index])

    def padded(self, count: int) -> Rows:
        """Up to `count` rows, by rows of no token."""
        extra = torch.arange(len(self), count, device=self.piece.device)
        nothing = torch.full_like(extra, NO_PIECE)
        return Rows(
            torch.cat([self.piece, NO_PIECE - 1 - extra]),
            torch.cat([self.before, nothing]),
            torch.cat([self.position, extra * 0]),
        )

    def sees(self, keys: Rows, window: int | None) -> Tensor:
        """[R, number of keys] bool; every row sees at least itself. window: as in `AttentionContext`."""
        distance = self.position[:, None] - keys.position
        visible = (self.piece[:, None] == keys.piece) | (self.before[:, None] == keys.piece)
        visible &= distance >= 0
        return visible if window is None else visible & (distance < window)


def _part_prefixes(batch: Batch, piece: Tensor, before: Tensor) -> None:
    """In place, [T]: the shared prefixes become pieces, and the rest of their segments stands behind them."""
    for number, family in enumerate(families_of(batch), start=batch.segment_count):
        if family.prefix:
            tokens = batch.tokens_of(family.segments).to(piece.device)
            shared = batch.positions[tokens] < family.prefix
            piece[tokens[shared]] = number
            before[tokens[~shared]] = number


@dataclass(frozen=True, slots=True)
class Tile:
    """Some neighbouring queries of this rank, and the span of a block's keys outside of which they see none."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class Course:
    """The plan of attention with one window size: the tiles to compute for each block of keys and values.

    Blocks are in the order in which they come round, this rank's own first.
    """

    ring: Ring
    own: Rows
    blocks: Sequence[Rows]  # in the order in which they come round
    tiles: Sequence[Sequence[Tile]]  # by block
    window: int | None

    @classmethod
    def over(cls, ring: Ring, rows: Sequence[Rows], window: int | None) -> Course:
        """rows: of every rank, equally many."""
        own, blocks = rows[ring.rank], [rows[(ring.rank - step) % ring.size] for step in range(ring.size)]
        queries = [slice(start, start + QUERY_TILE) for start in range(0, len(own), QUERY_TILE)]
        seen = [own[some].sees(block, window).any(0) for block in blocks for some in queries]
        count = torch.stack(seen).sum(1)
        first = torch.stack(seen).to(torch.uint8).argmax(1)
        last = len(own) - torch.stack(seen).flip(1).to(torch.uint8).argmax(1)
        found = torch.stack([count, first, last], dim=1).unflatten(0, (len(blocks), -1)).tolist()  # one wait for a GPU
        tiles = [
            [Tile(some, slice(low, high)) for some, (count, low, high) in zip(queries, spans, strict=True) if count]
            for spans in found
        ]
        return cls(ring, own, blocks, tiles, window)

    def hidden(self, step: int, tile: Tile) -> Tensor:
        """[queries, keys] bool: where a query of the tile must not look."""
        return ~self.own[tile.queries].sees(self.blocks[step][tile.keys], self.window)


@dataclass(slots=True)
class RingAttention:
    """An `AttentionContext` for the rows of one rank."""

    ring: Ring
    rows: Sequence[Rows]  # of every rank
    _courses: dict[int | None, Course] = field(default_factory=dict[int | None, Course])

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, R / U, D]
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [1, R / U, H, D]
        if softcap is not None or sinks is not None:
            raise NotImplementedError("ring attention lacks soft caps and sinks; SequenceGroup.fitted refuses them")
        if sliding_window not in self._courses:
            self._courses[sliding_window] = Course.over(self.ring, self.rows, sliding_window)
        out = _Attend.apply(query[0], key[0], value[0], self._courses[sliding_window], scaling)
        return out.transpose(0, 1)[None]  # type: ignore[union-attr]


class _Attend(torch.autograd.Function):
    """[H, r, D], [Hkv, r, D], [Hkv, r, D] -> [H, r, D]; see the module's docstring."""

    @staticmethod
    def forward(ctx: Any, query, key, value, course: Course, scaling: float) -> Tensor:
        q = query.unflatten(0, (len(key), -1))  # [Hkv, H / Hkv, r, D]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], value.shape[-1], dtype=wide)
        total = q.new_full(q.shape[:3], -torch.inf, dtype=wide)  # L
        for step, (k, v) in enumerate(course.ring.around(key, value)):
            for tile in course.tiles[step]:
                scores = _scores(q, k, tile, course.hidden(step, tile), scaling)
                _absorb(out[:, :, tile.queries], total[:, :, tile.queries], scores, v[:, tile.keys])
        out = out.flatten(0, 1).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.course, ctx.scaling = course, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, total = ctx.saved_tensors
        course, q = ctx.course, query.unflatten(0, (len(key), -1))
        d_out = grad.unflatten(0, (len(key), -1))
        along = (d_out.to(total.dtype) * out.view_as(d_out)).sum(-1)
        d_q, d_k, d_v = (
            torch.zeros_like(x, dtype=total.dtype, memory_format=torch.contiguous_format) for x in (q, key, value)
        )
        for step, (k, v) in enumerate(course.ring.around(key, value)):
            for tile in course.tiles[step]:
                scores = _scores(q, k, tile, course.hidden(step, tile), ctx.scaling)
                at = tile.queries
                weights = scores.sub_(total[:, :, at, None]).exp_()
                given = d_out[:, :, at]
                d_v[:, tile.keys] += _over_queries(weights, given)
                d_scores = _by_query(given, v[:, tile.keys].transpose(1, 2)).to(total.dtype)
                d_scores = d_scores.sub_(along[:, :, at, None]).mul_(weights).mul_(ctx.scaling)
                d_q[:, :, at] += _by_query(d_scores.to(k.dtype), k[:, tile.keys])
                d_k[:, tile.keys] += _over_queries(d_scores, q[:, :, at])
            d_k, d_v = course.ring.passed_on(d_k, d_v)  # with the block; after the last one they are home
        return d_q.flatten(0, 1).to(query.dtype), d_k.to(key.dtype), d_v.to(value.dtype), None, None


def _scores(q: Tensor, k: Tensor, tile: Tile, hidden: Tensor, scaling: float) -> Tensor:
    """[Hkv, group, queries, keys], float32 at least; -inf where hidden."""
    scores = _by_query(q[:, :, tile.queries], k[:, tile.keys].transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores.mul_(scaling).masked_fill_(hidden, -torch.inf)


def _absorb(out: Tensor, total: Tensor, scores: Tensor, v: Tensor) -> None:
    """In place: the running softmax `out` over keys whose e^S sum up to e^`total`, with those of `scores` added."""
    new = torch.logaddexp(total, scores.logsumexp(-1))
    weights = scores.sub_(new[..., None]).exp_()
    out.mul_((total - new).exp_()[..., None]).add_(_by_query(weights.to(v.dtype), v))
    total.copy_(new)


def _by_query(x: Tensor, y: Tensor) -> Tensor:
    """[Hkv, group, queries, a] and [Hkv, a, b] -> [Hkv, group, queries, b]"""
    return torch.bmm(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def _over_queries(x: Tensor, y: Tensor) -> Tensor:
    """[Hkv, group, queries, a] and [Hkv, group, queries, b] -> [Hkv, a, b], in the dtype of `y`."""
    return torch.bmm(x.flatten(1, 2).to(y.dtype).transpose(1, 2), y.flatten(1, 2))
