"""Data parallelism: micro-batches spread over ranks, or teams of them; the result is that of one process.

Every rank holds the whole batch and computes its share of it. The weights of a sharded model are gathered by a
collective in every forward, so all ranks must run equally many: a rank with fewer micro-batches runs short ones besides
whose loss weights are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from posttrain.loops.learner import Learner
from posttrain.packing import Batch, segment_bins, select


def bins_for(batch: Batch, learner: Learner, *, at_least: int = 1) -> list[list[int]]:
    """Segments by micro-batch. Their number is a multiple of the number of teams, if there are enough segments."""
    budget, shared = learner.config.batch.tokens_per_micro_batch, learner.policy.computes_prefixes_once
    size = learner.data_parallel_size
    bins = segment_bins(batch, budget, at_least=max(at_least, size), shared=shared)
    short = -len(bins) % size
    return bins if not short else segment_bins(batch, budget, at_least=len(bins) + short, shared=shared)


def dealt(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Deals micro-batches with so many `tokens` each to `count` ranks: indices by rank, ascending.

    Their numbers differ by at most one; the longest go first, each to the rank with the fewest tokens so far.
    """
    most = -(-len(tokens) // count)
    hands: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        open_hands = [hand for hand in hands if len(hand) < most]
        min(open_hands, key=lambda hand: sum(tokens[i] for i in hand)).append(index)
    return [sorted(hand) for hand in hands]


@torch.no_grad()
def forward_together(forward: Callable[[Batch], Tensor], batch: Batch, learner: Learner) -> Tensor:
    """[T] of a forward without gradients, a micro-batch at a time, in the batch's order and on every rank."""
    bins = bins_for(batch, learner)
    ranks, out = learner.ranks, torch.zeros(len(batch))
    hands = dealt([sum(batch.lengths[s] for s in segments) for segments in bins], learner.data_parallel_size)
    mine = [bins[index] for index in hands[learner.data_parallel_rank]]
    parts = [select(batch, segments).to(learner.policy.device) for segments in mine]
    found = [forward(part) for part in parts]  # all are there before: a copy waits for what a GPU is at
    for _ in range(_idle(hands, learner.data_parallel_rank)):
        forward(_shortest(batch))
    for segments, values in zip(mine, found, strict=True):  # only now, for it waits for a GPU
        out[batch.tokens_of(segments)] = values.float().cpu()
    learner.free_gathered()
    return ranks.sum(out if learner.is_first_of_team else torch.zeros_like(out))


def descend_together(
    learner: Learner, loss_of: Callable[[Learner, Batch], Tensor], parts: Sequence[Batch], module: nn.Module
) -> float:
    """Forward and backward of every micro-batch, each on one team of ranks; returns the sum of all losses.

    Streams that `loss_of` adds to a micro-batch are then known to every rank. module: the model that learns.
    """
    ranks, losses = learner.ranks, torch.zeros(len(parts), dtype=torch.float64, device=learner.policy.device)
    hands = dealt([len(part) for part in parts], learner.data_parallel_size)
    mine = hands[learner.data_parallel_rank]
    given = set(parts[0].streams)
    done = [parts[index] for index in mine]
    idle = _idle(hands, learner.data_parallel_rank)
    for number, index in enumerate(mine):
        loss = loss_of(learner, parts[index])
        learner.before_backward(module, last=number + 1 == len(mine) + idle)
        loss.backward()
        losses[index] = loss.detach()
    for number in range(idle):
        nothing = _shortest(min(parts, key=len))
        nothing.weights = torch.zeros(len(nothing), device=nothing.token_ids.device)
        loss = loss_of(learner, nothing)
        learner.before_backward(module, last=number + 1 == idle)
        loss.backward()
        done.append(nothing)
    made = {name: stream.dtype for name, stream in sorted(done[0].streams.items()) if name not in given}
    for name, dtype in made.items():
        _share_stream(learner, parts, mine if learner.is_first_of_team else (), name, dtype)
    return float(ranks.sum(losses if learner.is_first_of_team else torch.zeros_like(losses)).sum())


def _idle(hands: Sequence[Sequence[int]], team: int) -> int:
    return max(len(hand) for hand in hands) - len(hands[team])


def _shortest(batch: Batch) -> Batch:
    """A batch of the shortest segment that has a policy token."""
    written = set(batch.segment_ids[batch.loss_mask].tolist()) or {0}
    return select(batch, [min(written, key=lambda s: batch.lengths[s])])


def _share_stream(learner: Learner, parts: Sequence[Batch], mine: Sequence[int], name: str, dtype: torch.dtype) -> None:
    """Gives every rank the stream `name` of all parts; before, each has it for its own parts (`mine`) only."""
    lengths = [len(part) for part in parts]
    values = [torch.zeros(length, dtype=dtype) for length in lengths]
    for index in mine:
        values[index] = parts[index].streams[name].cpu()
    everywhere = learner.ranks.sum(torch.cat(values)).split(lengths)
    for part, stream in zip(parts, everywhere, strict=True):
        part.streams[name] = stream.to(part.token_ids.device)
