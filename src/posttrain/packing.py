"""Trajectories -> one packed Batch, and slices of it. Padding-free: T tokens of S segments, one after another.

Knows nothing of models or of what rewards mean. A `Batch` has the field names of a `Trajectory`, as tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, compress, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.trajectory import Source, Trajectory


@dataclass(slots=True, kw_only=True)
class Batch:
    """T packed tokens of S segments; a segment is one trajectory. Optional fields are None until they are known."""

    token_ids: Tensor  # [T] long
    positions: Tensor  # [T] long, restarts at 0 in every segment
    segment_ids: Tensor  # [T] long, 0..S-1, non-decreasing
    loss_mask: Tensor  # [T] bool, True where the policy wrote the token; never at a segment's first token
    episode_index: Tensor  # [T] long, several segments may share an episode
    group_index: Tensor  # [T] long
    rollout_logprobs: Tensor  # [T] float32, NaN where not sampled
    policy_versions: Tensor  # [T] long, -1 where not sampled
    rewards: Tensor  # [T] float32
    lengths: list[int]  # [S]
    advantages: Tensor | None = None  # [T]
    weights: Tensor | None = None  # [T] loss weights, fixed for the whole mini-batch
    old_logprobs: Tensor | None = None  # [T]
    streams: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # further [T]
    host: Batch | None = None  # of a batch on a device, what it was copied from: nobody waits for the device to read it

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def segment_count(self) -> int:
        return len(self.lengths)

    def of_segment(self, values: Tensor) -> list[int]:
        """[S] the value at each segment's first token of a [T] tensor that is constant within segments."""
        firsts: list[int] = values[torch.tensor(_starts(self.lengths)[:-1])].tolist()  # type: ignore[reportUnknownMemberType]
        return firsts

    def tokens_of(self, segments: Sequence[int]) -> Tensor:
        """[sum of lengths] positions in the batch of the tokens of the given segments, in the given order."""
        spans = [torch.arange(start, end) for start, end in spans_of(self.lengths, segments)]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long)

    def to(self, device: torch.device | str, *, copy: bool = False) -> Batch:
        """The batch with all tensors on `device`. copy: new tensors even where they are on it already."""
        moved = _map_token_tensors(self, lambda tensor: tensor.to(device, copy=copy), self.lengths)
        if not moved.token_ids.is_cpu:
            moved.host = self if self.token_ids.is_cpu else self.host
        return moved

    def written(self) -> Tensor:
        """[P] long: where the loss mask is True, on the batch's device; of the mask as it came there."""
        mask = self.loss_mask if self.host is None else self.host.loss_mask
        return mask.nonzero()[:, 0].to(self.token_ids.device, non_blocking=True)


def pack(trajectories: Sequence[Trajectory]) -> Batch:
    """Packs trajectories in the given order. Indices of episodes and groups follow first appearance.

    Raises ValueError for an empty list, for a trajectory without tokens, and for one whose first token was sampled
    (it has no context to be predicted from).
    """
    if not trajectories:
        raise ValueError("nothing to pack: the list of trajectories is empty")
    for trajectory in trajectories:
        if not len(trajectory):
            raise ValueError(f"episode {trajectory.episode_id} has a trajectory without tokens")
        if trajectory.source[0] is Source.POLICY:
            raise ValueError(f"episode {trajectory.episode_id}: the first token was sampled without any context")
    lengths = [len(trajectory) for trajectory in trajectories]
    episodes: dict[str, int] = {}
    groups: dict[str, int] = {}
    episode_index = [episodes.setdefault(t.episode_id, len(episodes)) for t in trajectories]
    group_index = [groups.setdefault(t.group_id, len(groups)) for t in trajectories]
    mask = np.frombuffer(b"".join(bytes(t.source) for t in trajectories), np.uint8) == Source.POLICY
    return Batch(
        token_ids=_joined((t.token_ids for t in trajectories), np.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        segment_ids=torch.as_tensor(np.repeat(np.arange(len(lengths)), lengths)),
        loss_mask=torch.as_tensor(mask),
        episode_index=torch.as_tensor(np.repeat(episode_index, lengths)),
        group_index=torch.as_tensor(np.repeat(group_index, lengths)),
        rollout_logprobs=_sampled((t.rollout_logprobs for t in trajectories), mask, np.float32, math.nan),
        policy_versions=_sampled((t.policy_versions for t in trajectories), mask, np.int64, -1),
        rewards=_joined((t.rewards or repeat(0.0, len(t)) for t in trajectories), np.float32),
        lengths=lengths,
        streams=_pack_streams(trajectories),
    )


def _joined(lists: Iterable[Iterable[float]], dtype: type[np.number[Any]]) -> Tensor:
    """[T] of many lists one after another; NumPy reads an iterator thirty times as fast as torch reads a list."""
    return torch.as_tensor(np.fromiter(chain.from_iterable(lists), dtype))


def _sampled(
    lists: Iterable[Sequence[Any]], mask: np.ndarray[Any, Any], dtype: type[np.number[Any]], elsewhere: float
) -> Tensor:
    """As `_joined`, but values are read only where the mask [T] is True; `elsewhere` stands at the other tokens."""
    values = np.full(len(mask), elsewhere, dtype)
    values[mask] = np.fromiter(compress(chain.from_iterable(lists), mask.tobytes()), dtype)
    return torch.as_tensor(values)


def _pack_streams(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    names = set(trajectories[0].streams)
    for trajectory in trajectories:
        if set(trajectory.streams) != names:
            raise ValueError(
                f"episode {trajectory.episode_id} has streams {sorted(trajectory.streams)}, others {sorted(names)}; "
                "attach a stream to every trajectory of a batch or to none"
            )
    return {
        name: torch.tensor([math.nan if x is None else x for t in trajectories for x in t.streams[name]])
        for name in sorted(names)
    }


def select(batch: Batch, segments: Sequence[int]) -> Batch:
    """The given whole segments, in the given order, with `segment_ids` renumbered from 0.

    `episode_index` and `group_index` keep their values of the full batch.
    """
    spans = spans_of(batch.lengths, segments) or [(0, 0)]
    lengths = [batch.lengths[s] for s in segments]
    taken = _map_token_tensors(batch, lambda tensor: _cut_out(tensor, spans), lengths)
    renumbered = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    return replace(taken, segment_ids=renumbered.to(batch.token_ids.device))


def _cut_out(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """The spans of a [T] tensor, concatenated; a single span is a view of it."""
    pieces = [tensor[start:end] for start, end in spans]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def spans_of(lengths: Sequence[int], segments: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of the tokens of the given segments, in the given order; neighbours together, as one span."""
    starts = _starts(lengths)
    spans: list[tuple[int, int]] = []
    for segment in segments:
        start, end = starts[segment], starts[segment + 1]
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


SHARE_AT_LEAST = 8  # tokens: a shorter common prefix costs more to keep apart than to compute again


@dataclass(frozen=True, slots=True)
class Family:
    """Segments of one group and how many first tokens all of them share; 0 where it is not worth sharing."""

    segments: tuple[int, ...]
    prefix: int

    def tokens(self, lengths: Sequence[int]) -> int:
        """How many tokens are computed when the prefix is computed once."""
        return sum(lengths[s] for s in self.segments) - (len(self.segments) - 1) * self.prefix


def families_of(batch: Batch) -> list[Family]:
    """The segments by group, groups in order of appearance, with their common prefixes."""
    batch = batch.host or batch
    members: dict[int, list[int]] = {}
    for segment, group in enumerate(batch.of_segment(batch.group_index)):
        members.setdefault(group, []).append(segment)
    starts = _starts(batch.lengths)
    ids = batch.token_ids.cpu()
    return [
        Family(tuple(group), _common_prefix(ids, [(starts[s], batch.lengths[s]) for s in group]))
        for group in members.values()
    ]


def _common_prefix(ids: Tensor, spans: Sequence[tuple[int, int]]) -> int:
    """How many first tokens the given (start, length) spans of `ids` share; 0 if fewer than SHARE_AT_LEAST."""
    shortest = min(length for _, length in spans)
    if len(spans) < 2 or shortest < SHARE_AT_LEAST:
        return 0
    heads = torch.stack([ids[start : start + shortest] for start, _ in spans])
    same = (heads == heads[0]).all(0)
    shared = int(same.cumprod(0).sum())
    return shared if shared >= SHARE_AT_LEAST else 0


def bins_of(lengths: Sequence[int], budget: int, *, at_least: int = 1) -> list[list[int]]:
    """Indices of `lengths` by bin: each bin's sum <= budget, at least `at_least` bins if there are so many lengths.

    As few bins as the sum asks for (more while one overflows), evenly filled; indices ascending within a bin.
    Raises ValueError when one length alone exceeds the budget.
    """
    longest, total = max(lengths), sum(lengths)
    if longest > budget:
        raise ValueError(
            f"a sequence of {longest} tokens does not fit tokens_per_micro_batch={budget}; "
            f"raise it to at least {longest} or lower the episode's token limit"
        )
    count = max(-(-total // budget), min(at_least, len(lengths)))
    while True:
        bins = _even_bins(lengths, count)
        if all(sum(lengths[i] for i in bin_) <= budget for bin_ in bins):
            return bins
        count += 1


def micro_batches(batch: Batch, tokens_per_micro_batch: int, *, at_least: int = 1, shared: bool = False) -> list[Batch]:
    """The batch split along `segment_bins`; memory and speed only, no result depends on it."""
    bins = segment_bins(batch, tokens_per_micro_batch, at_least=at_least, shared=shared)
    return [select(batch, bin_) for bin_ in bins]


def segment_bins(batch: Batch, budget: int, *, at_least: int = 1, shared: bool = False) -> list[list[int]]:
    """Whole segments by bin, along `bins_of`. A group stays together, so that its prefix is computed once; it is
    divided only when it exceeds the budget, or when there are fewer groups than `at_least`.

    shared: the model computes common prefixes once, so they count once against the budget.
    """
    families = families_of(batch)
    units: list[tuple[list[int], int]] = []  # segments, tokens
    for family in families:
        once = family.prefix if shared else 0
        own = [batch.lengths[s] - once for s in family.segments]
        pieces = max(-(-sum(own) // max(1, budget - once)), -(-at_least // len(families)))
        if not family.prefix or once + max(own) > budget:
            units += [([s], batch.lengths[s]) for s in family.segments]
            continue
        bins = [range(len(own))] if pieces == 1 else bins_of(own, budget - once, at_least=pieces)
        units += [([family.segments[i] for i in bin_], once + sum(own[i] for i in bin_)) for bin_ in bins]
    bins = bins_of([size for _, size in units], budget, at_least=at_least)
    return [sorted(s for u in bin_ for s in units[u][0]) for bin_ in bins]


def _even_bins(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Longest first, each into the bin with the fewest tokens; indices ascending within a bin, no bin empty."""
    filled = [(0, number) for number in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, number = heapq.heappop(filled)
        bins[number].append(index)
        heapq.heappush(filled, (tokens + lengths[index], number))
    return [sorted(bin_) for bin_ in bins if bin_]


def _starts(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _map_token_tensors(batch: Batch, change: Callable[[Tensor], Tensor], lengths: list[int]) -> Batch:
    """Applies `change` to every [T] tensor, streams included."""
    changed = {
        f.name: change(getattr(batch, f.name)) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)
    }
    streams = {name: change(stream) for name, stream in batch.streams.items()}
    return replace(batch, **changed, streams=streams, lengths=lengths, host=None)
