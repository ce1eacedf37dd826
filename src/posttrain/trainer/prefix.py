"""The shared-prefix layout: a prompt and the continuations of its group as one packed row, the prompt computed once.

The segments of a group that begin with the same tokens share those tokens' rows, in the forward pass and in the
backward pass, where what reaches a shared row is the sum over the group. Continuations stand behind and see the
prefix's keys and their own. Values and gradients are those of the plain layout.

    plain    | p p p a a | p p p b b b | p p p c |        shared    | p p p | a a | b b b | c |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posttrain.packing import Batch, Family, families_of
from posttrain.trainer.attention import Bucket, Layout, PackedAttention, has_plain_scores, layout_of
from posttrain.trainer.causal import causal_attention
from posttrain.trainer.compiled_attention import Segment, Sight, compiled_attention, takes

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Continuations:
    """A bucket of continuations and the rows of the prefix that all of them stand behind."""

    bucket: Bucket
    prefix: slice


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Rows: first what stands alone (prefixes, and segments that share nothing), in buckets; then continuations."""

    alone: Layout
    continuations: tuple[Continuations, ...]
    token_of_row: Tensor  # [R] long: a token of the batch that the row holds
    row_of_token: Tensor  # [T] long: several tokens may have one row

    @property
    def segments(self) -> list[Segment]:
        """Padded as in the buckets."""
        segments = [segment for bucket in self.alone.buckets for segment in bucket.segments]
        row = len(self.alone.token_of_row)
        for part in self.continuations:
            for _ in range(part.bucket.count):
                segments.append((part.prefix.start, part.prefix.stop - part.prefix.start, row, part.bucket.length))
                row += part.bucket.length
        return segments


def use_shared(device: torch.device, dtype: torch.dtype, module: nn.Module) -> bool:
    """Whether `SharedPrefixAttention` can serve this model: else every segment is computed whole."""
    return device.type == "cpu" and dtype in {torch.float32, torch.float64} and has_plain_scores(module)


def shared_layout(batch: Batch, device: torch.device) -> SharedLayout | None:
    """None when no segments of a group share enough to be worth it."""
    families = families_of(batch)
    if not any(family.prefix for family in families):
        return None
    starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
    spans = [span for family in families for span in _alone(family, batch.lengths, starts)]
    row_of_token = torch.full((len(batch),), -1)
    alone, token_of_row = _lay_out(spans, row_of_token, first_row=0)
    continuations: list[Continuations] = []
    for family in (family for family in families if family.prefix):
        first = int(row_of_token[starts[family.segments[0]]])
        prefix = slice(first, first + family.prefix)
        for segment in family.segments:
            row_of_token[starts[segment] : starts[segment] + family.prefix] = torch.arange(prefix.start, prefix.stop)
        rest = [(starts[s] + family.prefix, starts[s + 1]) for s in family.segments if batch.lengths[s] > family.prefix]
        layout, tokens = _lay_out(rest, row_of_token, first_row=len(token_of_row))
        continuations += [Continuations(bucket, prefix) for bucket in layout.buckets]
        token_of_row = torch.cat([token_of_row, tokens])
    return SharedLayout(alone, tuple(continuations), token_of_row.to(device), row_of_token.to(device))


def _alone(family: Family, lengths: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int]]:
    """Spans of the batch's tokens that see only themselves: the prefix, or whole segments where there is none."""
    if family.prefix:
        start = starts[family.segments[0]]
        return [(start, start + family.prefix)]
    return [(starts[s], starts[s] + lengths[s]) for s in family.segments]


def _lay_out(spans: Sequence[tuple[int, int]], row_of_token: Tensor, *, first_row: int) -> tuple[Layout, Tensor]:
    """Buckets for spans of tokens, and the token of each new row; fills in `row_of_token`."""
    if not spans:
        return Layout((), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)), torch.zeros(
            0, dtype=torch.long
        )
    layout = layout_of([end - start for start, end in spans], CPU)
    tokens = torch.cat([torch.arange(start, end) for start, end in spans])
    row_of_token[tokens] = first_row + layout.row_of_token
    return layout, tokens[layout.token_of_row]


@dataclass(slots=True)
class SharedPrefixAttention:
    """What stands alone is attended as in the plain layout; a continuation sees its prefix and itself."""

    layout: SharedLayout
    _alone: PackedAttention
    _read: Tensor | None = None  # [R] bool: rows whose result is read; those of other continuations may be 0

    @classmethod
    def of(cls, layout: SharedLayout) -> SharedPrefixAttention:
        return cls(layout, PackedAttention(layout.alone))

    def reading(self, rows: Tensor) -> SharedPrefixAttention:
        """The same for a layer of whose output only these rows are read."""
        read = torch.zeros(len(self.layout.token_of_row), dtype=torch.bool)
        read[rows] = True
        return replace(self, _read=read)

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, R, D]
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [1, R, H, D]
        if softcap is not None or sinks is not None:
            raise NotImplementedError("a shared prefix lacks soft caps and sinks; use_shared tells when to use it")
        if takes(query):
            sight = Sight.of(self.layout.segments, scaling=scaling, window=sliding_window, read=self._read)
            return compiled_attention(query, key, value, sight)
        rows = [part.bucket.count * part.bucket.length for part in self.layout.continuations]
        sizes = [len(self.layout.alone.token_of_row), *rows]
        queries, keys, values = (x.split(sizes, dim=2) for x in (query, key, value))
        out = [
            self._alone.attend(
                layer_idx, queries[0], keys[0], values[0], scaling=scaling, sliding_window=sliding_window
            )
        ]
        read = [None] * (len(rows) + 1) if self._read is None else self._read.split(sizes)
        parts = zip(self.layout.continuations, queries[1:], keys[1:], values[1:], read[1:], strict=True)
        for part, q, k, v, part_read in parts:
            o = causal_attention(
                _unpacked(q, part.bucket),
                torch.cat([_shared(keys[0], part), _unpacked(k, part.bucket)], dim=2),
                torch.cat([_shared(values[0], part), _unpacked(v, part.bucket)], dim=2),
                scaling=scaling,
                window=sliding_window,
                read=None if part_read is None else part_read.view(part.bucket.count, part.bucket.length),
            )
            out.append(o.transpose(1, 2).reshape(1, -1, *o.shape[1:2], o.shape[3]))
        return torch.cat(out, dim=1)


def _unpacked(rows: Tensor, bucket: Bucket) -> Tensor:
    """[1, h, count * length, d] -> [count, h, length, d]"""
    return rows[0].unflatten(1, (bucket.count, bucket.length)).transpose(0, 1)


def _shared(alone: Tensor, part: Continuations) -> Tensor:
    """[1, h, rows, d] -> [count, h, prefix, d], a view; its gradient is the sum over the continuations."""
    return alone[:, :, part.prefix].expand(part.bucket.count, -1, -1, -1)
