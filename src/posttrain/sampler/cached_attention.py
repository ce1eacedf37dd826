"""The sampler's attention: new tokens of many sequences in one row, their past in the KV cache.

One forward holds decode rows (the one newest token of each of n sequences) followed by prefill chunks (several new
tokens of one sequence each). Decode rows read the first rows of the cache as a view; chunks that start a sequence need
no cache at all; the others gather their past, a bucket of similar lengths at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.sampler.kv_cache import KVCache, LayerShape
from posttrain.sampler.shared_prefix import Grouping, row_of
from posttrain.trainer.attention import exact_attention

SCORES_PER_BUCKET = 1 << 22  # query-key pairs of a bucket, per head: bounds the memory of its mask
NEGATIVE = float("-inf")


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` new tokens, at `offset` in the forward, of the sequence in `row`, which already holds `start`."""

    row: int
    start: int
    count: int
    offset: int


@dataclass(slots=True)
class CachedAttention:
    """Writes keys and values where they belong and attends; made anew for every forward."""

    cache: KVCache
    rows: Tensor  # [T] cache row of every new token
    positions: Tensor  # [T]
    decode_rows: list[int]  # ascending; their tokens are the first of the T
    decode_ends: list[int]  # tokens of each after this forward
    chunks: list[Chunk]
    shared: SharedKeys | None = None  # of the decode rows
    _decode: _DecodeRows | None = None
    _buckets: list[_Bucket] = field(default_factory=list["_Bucket"])
    _places: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __post_init__(self) -> None:
        if self.decode_rows:
            self._decode = _DecodeRows(self.decode_rows, self.decode_ends, self.rows.device, self.shared)
        self._buckets = [_Bucket(part, self.rows.device) for part in _bucketed(self.chunks)]

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, Hkv, T, D]
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        **extras: Any,
    ) -> Tensor:  # [1, T, H, D]
        heads = key.shape[1]
        if heads not in self._places:
            self._places[heads] = self.cache.places(self.rows, self.positions, heads)
        new = (key[0].transpose(0, 1), value[0].transpose(0, 1))  # [T, Hkv, D]
        self.cache.write(layer_idx, self._places[heads], *new)
        layer = self.cache.layer(layer_idx)
        how = _How(scaling, sliding_window, extras)
        rows = query[0].transpose(0, 1)  # [T, H, D]
        if self._decode is not None and not self._buckets:
            return self._decode.attend(layer_idx, rows, layer, how)[None]
        out = rows.new_empty(*rows.shape[:2], value.shape[-1])
        if self._decode is not None:
            count = len(self.decode_rows)
            out[:count] = self._decode.attend(layer_idx, rows[:count], layer, how)
        for bucket in self._buckets:
            out[bucket.tokens] = bucket.attend(rows, new, layer, how)
        return out[None]


@dataclass(slots=True)
class ShapeProbe:
    """Stands in for the attention once, to learn what every layer would cache."""

    shapes: dict[int, LayerShape] = field(default_factory=dict[int, LayerShape])

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.shapes[layer_idx] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _How:
    scaling: float
    window: int | None
    extras: dict[str, Any]  # softcap, sinks


class SharedKeys:
    """The first `tokens` keys and values of decode rows, packed once per group of rows that share them.

    The rows of a group stand side by side as if they were one row with many queries, so that their scores are a dense
    product. Groups are padded to `width` rows by repeating one of theirs.
    """

    def __init__(self, grouping: Grouping, rows: Sequence[int], device: torch.device) -> None:
        self.tokens = grouping.tokens
        members = sorted((sorted(m, key=row_of) for m in grouping.members), key=lambda m: row_of(m[0]))
        self.prefixes = [m[0].ids[: self.tokens] for m in members]
        self._width = grouping.width
        order = [row_of(r) for m in members for r in (*m, *[m[0]] * (self._width - len(m)))]
        where = {row: place for place, row in reversed(list(enumerate(order)))}
        span = max(rows) + 1
        self._regular = order == list(range(span))
        self._leaders = torch.tensor([row_of(m[0]) for m in members], device=device)
        self._order = torch.tensor(order, device=device)
        self._where = torch.tensor([where.get(row, 0) for row in range(span)], device=device)  # any for an unused row
        self._packed: dict[int, tuple[Tensor, Tensor]] = {}

    def adopt(self, other: SharedKeys) -> None:
        """Takes over what `other` has packed, if it is the same."""
        if other.prefixes == self.prefixes:
            self._packed = other._packed

    def of_layer(self, layer_idx: int, layer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(keys [groups * heads, tokens, D], values)"""
        found = self._packed.get(layer_idx)
        if found is None:
            keys, values = (x[:, :, : self.tokens].index_select(0, self._leaders).flatten(0, 1) for x in layer)
            found = self._packed[layer_idx] = (keys, values)
        return found

    def by_group(self, rows: Tensor) -> Tensor:
        """[span, heads, g, n] -> [groups * heads, width * g, n]"""
        if not self._regular:
            rows = rows.index_select(0, self._order)
        grouped = rows.view(-1, self._width, *rows.shape[1:]).transpose(1, 2)
        return grouped.reshape(-1, self._width * rows.shape[2], rows.shape[3])

    def by_row(self, groups: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """[groups * heads, width * g, n] -> the same numbers and `like` [span, heads, g, n] in one shape."""
        heads, g = like.shape[1:3]
        parts = groups.view(-1, heads, self._width, g, groups.shape[2]).transpose(1, 2)
        if self._regular:
            return parts, like.view(-1, self._width, *like.shape[1:])
        return parts.flatten(0, 1).index_select(0, self._where), like


class _DecodeRows:
    """One query per sequence against its whole past."""

    def __init__(
        self, rows: list[int], ends: list[int], device: torch.device, shared: SharedKeys | None = None
    ) -> None:
        self._span = rows[-1] + 1  # rows 0..span-1 are read; the few among them that are not decoded are thrown away
        self._full = self._span == len(rows)
        self._longest, self._shortest = max(ends), min(ends)
        both = torch.tensor([rows, ends], device=device)
        self._rows = both[0]
        ends_of_row = both[1] if self._full else both.new_ones(self._span).index_copy_(0, both[0], both[1])
        self._ends = ends_of_row[:, None]  # [span, 1]
        self._masks: dict[tuple[int | None, int, int], tuple[int, Tensor]] = {}
        self._shared = shared

    def attend(self, layer_idx: int, query: Tensor, layer: tuple[Tensor, Tensor], how: _How) -> Tensor:
        """[n, H, D] -> [n, H, Dv]"""
        keys, values = layer
        if not self._full:
            query = query.new_zeros(self._span, *query.shape[1:]).index_copy_(0, self._rows, query)
        heads, capacity = keys.shape[1:3]
        window = how.window if how.window is not None and how.window < self._longest else None
        plain = not how.extras and query.dtype == torch.float32  # written out: twice or thrice as fast as SDPA here
        shared = self._shared if plain and window is None else None
        low, mask = self._visible(window, heads, query.dtype, 0 if shared is None else shared.tokens)
        q = query.reshape(self._span * heads, -1, query.shape[-1])  # queries that share a key head stand together
        k = keys.view(-1, capacity, keys.shape[-1])[: len(q), low : self._longest]
        v = values.view(-1, capacity, values.shape[-1])[: len(q), low : self._longest]
        if how.extras:
            out = self._exact(query, k, v, mask, how)
        elif shared is not None:
            out = _behind_shared(q, (k, v), mask, shared, shared.of_layer(layer_idx, layer), how.scaling)
        elif plain:
            scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=how.scaling)
            out = torch.bmm(scores.softmax(-1), v)
        else:
            out = F.scaled_dot_product_attention(
                q[:, None], k[:, None], v[:, None], attn_mask=mask[:, None], scale=how.scaling
            )
        out = out.reshape(self._span, -1, v.shape[-1])
        return out if self._full else out.index_select(0, self._rows)

    def _exact(self, query: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: _How) -> Tensor:
        k4, v4, mask4 = (x.reshape(self._span, -1, *x.shape[1:]) for x in (k, v, mask))
        return exact_attention(query[:, :, None], k4, v4, mask4[:, :1] == 0, scaling=how.scaling, **how.extras)

    def _visible(self, window: int | None, heads: int, dtype: torch.dtype, first: int) -> tuple[int, Tensor]:
        """(first column read, [span * heads, 1, columns] 0 or -inf); columns before `first` are somebody else's."""
        found = self._masks.get((window, heads, first))
        if found is None:
            low = first if window is None else max(first, self._shortest - window)
            columns = torch.arange(low, self._longest, device=self._ends.device)
            visible = columns < self._ends
            if window is not None:
                visible &= columns >= self._ends - window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, NEGATIVE)
            found = self._masks[window, heads, first] = (low, mask.repeat_interleave(heads, dim=0)[:, None])
        return found


def _behind_shared(
    q: Tensor,  # [span * heads, g, D]
    own: tuple[Tensor, Tensor],  # keys and values behind the shared ones, [span * heads, columns, D]
    mask: Tensor,  # of the own ones
    shared: SharedKeys,
    packed: tuple[Tensor, Tensor],  # shared.of_layer
    scaling: float,
) -> Tensor:  # [span * heads, g, Dv]
    """One softmax over the scores of the shared keys, a product per group, and of the own ones, a product per row."""
    first, heads = shared.tokens, len(packed[0]) // len(shared.prefixes)
    q = q * scaling
    scores = q.new_empty(*q.shape[:2], first + mask.shape[2])
    scores[:, :, first:] = torch.baddbmm(mask, q, own[0].transpose(1, 2))  # in place it would go one by one
    by_row = scores.view(-1, heads, *scores.shape[1:])
    queries = shared.by_group(q.view(-1, heads, *q.shape[1:]))
    together, places = shared.by_row(torch.bmm(queries, packed[0].transpose(1, 2)), by_row[..., :first])
    places.copy_(together)
    weights = torch.softmax(scores, -1)
    out = torch.bmm(weights[:, :, first:], own[1])
    of_shared = torch.bmm(shared.by_group(weights.view_as(by_row)[..., :first]), packed[1])
    together, places = shared.by_row(of_shared, out.view(-1, heads, *out.shape[1:]))
    places.add_(together)
    return out


class _Bucket:
    """Chunks of similar lengths, padded on the right to the longest."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self._fresh = all(chunk.start == 0 for chunk in chunks)
        self._width = max(chunk.count for chunk in chunks)
        self._longest = max(chunk.start + chunk.count for chunk in chunks)
        # on the host, and then up: asking the device for a count would wait for it
        numbers = torch.tensor([[c.row, c.start, c.count, c.offset] for c in chunks])
        rows, starts, counts, offsets = numbers.T[:, :, None]  # [m, 1] each
        column = torch.arange(self._width)
        gather = (offsets + torch.minimum(column, counts - 1)).view(-1)  # a pad repeats its chunk's last token
        real = (column < counts).view(-1).nonzero()[:, 0]
        self._rows, self._starts = rows[:, 0].to(device), starts.to(device)
        self._gather, self._real = gather.to(device), real.to(device)
        self.tokens = gather[real].to(device)  # [sum of counts] where the results go
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, rows: Tensor, new: tuple[Tensor, Tensor], layer: tuple[Tensor, Tensor], how: _How) -> Tensor:
        """[sum of counts, H, Dv] from the forward's queries [T, H, D] and new keys and values [T, Hkv, D]."""
        q = self._padded(rows)
        if self._fresh:
            k, v = (self._padded(x) for x in new)
        else:
            k, v = (x[:, :, : self._longest].index_select(0, self._rows) for x in layer)
        window = how.window if how.window is not None and how.window < self._longest else None
        if how.extras:
            out = exact_attention(q, k, v, self._visible(window), scaling=how.scaling, **how.extras)
        else:
            causal = self._fresh and window is None
            mask = None if causal else self._visible(window)
            shared = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, scale=how.scaling, enable_gqa=shared
            )
        return out.transpose(1, 2).flatten(0, 1)[self._real]

    def _padded(self, tokens: Tensor) -> Tensor:
        """[T, h, D] -> [m, h, width, D]"""
        return tokens[self._gather].view(-1, self._width, *tokens.shape[1:]).transpose(1, 2)

    def _visible(self, window: int | None) -> Tensor:
        """[m, 1, width, longest] bool"""
        if window not in self._masks:
            query = (self._starts + torch.arange(self._width, device=self._rows.device))[:, None, :, None]
            distance = query - torch.arange(self._longest, device=self._rows.device)
            visible = distance >= 0
            self._masks[window] = visible if window is None else visible & (distance < window)
        return self._masks[window]


def _bucketed(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Fresh and continued chunks apart, counts within a factor of two, and no bucket with too many scores."""
    buckets: list[list[Chunk]] = []
    widest: dict[tuple[bool, int], list[Chunk]] = {}
    for chunk in sorted(chunks, key=lambda c: -c.count):
        kind = (chunk.start == 0, chunk.count.bit_length())
        bucket = widest.get(kind)
        if bucket is None or not _has_room(bucket, chunk):
            bucket = widest[kind] = []
            buckets.append(bucket)
        bucket.append(chunk)
    return buckets


def _has_room(bucket: list[Chunk], chunk: Chunk) -> bool:
    longest = max(chunk.start + chunk.count, *(c.start + c.count for c in bucket))
    return (len(bucket) + 1) * bucket[0].count * longest <= SCORES_PER_BUCKET
