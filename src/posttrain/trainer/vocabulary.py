"""Vocabulary parallelism: embedding and head over T ranks, each with 1 / T of the vocabulary (Shoeybi et al. 2019).

A position's log-prob needs three numbers of every rank r, not its logits z (see `fused.py`):

    lse = log sum_r e^lse_r,    z_y of the rank that has y,    sum_v p_v z_v = sum_r e^(lse_r - lse) m_r

where lse_r and m_r are the log-sum-exp and the mean under the softmax of r's own logits. In the backward pass each rank
has the gradient of its part of the head, and a summand of that of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from posttrain.trainer.fused import (
    LogitsRule,
    Scaling,
    add_product,
    chunks,
    fused_logprobs,
    rows_per_chunk,
    scaled_logits,
)


def split_vocabulary(module: Any, mesh: DeviceMesh) -> None:
    """In place: this rank's part of the embedding and, where there is one, of the head; tied ones stay tied.

    Both stay whole when the ranks do not divide the vocabulary. Before the module is sharded.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if len(embedding.weight) % mesh.size():
        return
    tied = head is not None and head.weight is embedding.weight
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if head is not None and tied:
        head.weight = embedding.weight
    elif head is not None:
        part = distribute_tensor(head.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        head.weight = nn.Parameter(part, requires_grad=head.weight.requires_grad)


def head_logprobs(
    hidden: Tensor,  # [N, K]
    head: nn.Linear,
    targets: Tensor,  # [N] long
    *,
    temperature: float,
    rule: LogitsRule,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """`fused_logprobs` of a head that is whole, or of one whose ranks all ask for the same positions."""
    weight, bias = head.weight, head.bias
    how = {"temperature": temperature, "rule": rule, "with_entropy": with_entropy}
    if not isinstance(weight, DTensor):
        return fused_logprobs(hidden, weight, bias, targets, **how)
    team = Team.of(weight.device_mesh, weight.shape[0])
    own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return team_logprobs(hidden, weight.to_local(), own_bias, targets, team, **how)


def team_logprobs(
    hidden: Tensor,  # [N, K]
    weight: Tensor,  # [V / T, K] the part of this rank
    bias: Tensor | None,
    targets: Tensor,  # [N] long
    team: Team,
    *,
    temperature: float,
    rule: LogitsRule,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """`fused_logprobs` of a head whose ranks all ask for the same positions."""
    scaling = Scaling(temperature, rule, rows_per_chunk(hidden, team.size))
    logprobs, entropy = TeamLogprobs.apply(hidden, weight, bias, targets, scaling, team)  # type: ignore[misc]
    return logprobs, entropy if with_entropy else None


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks that divide a vocabulary into consecutive parts, and which part this rank has."""

    group: Any
    first: int
    size: int  # tokens of this rank

    @classmethod
    def of(cls, mesh: DeviceMesh, vocabulary: int) -> Team:
        size = vocabulary // mesh.size()
        return cls(mesh.get_group(), mesh.get_local_rank() * size, size)

    def own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """([N] bool: tokens that this rank has, [N] long: their places in its part, 0 for others)"""
        here = (targets >= self.first) & (targets < self.first + self.size)
        return here, torch.where(here, targets - self.first, 0)

    def all(self, values: Tensor) -> Tensor:
        """[number of ranks, ..]"""
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, values, group=self.group)
        return torch.stack(parts)


class TeamLogprobs(torch.autograd.Function):
    """([N] log-probs, [N] entropies), the same on every rank; the gradients that come back must be, too."""

    @staticmethod
    def forward(ctx: Any, hidden, weight, bias, targets, scaling: Scaling, team: Team):
        here, places = team.own(targets)
        own = hidden.new_zeros(3, len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for s in chunks(len(hidden), scaling.rows):
            z, _ = scaled_logits(hidden[s], weight, bias, scaling)
            own[0, s] = z.logsumexp(-1)
            own[1, s] = z.gather(-1, places[s, None])[:, 0] * here[s]
            own[2, s] = (z - own[0, s, None]).exp_().mul_(z).sum(-1)
        sums, of_target, means = team.all(own).unbind(1)
        lse = sums.logsumexp(0)
        entropy = lse - ((sums - lse).exp() * means).sum(0)
        ctx.save_for_backward(hidden, weight, bias, here, places, lse, entropy)
        ctx.scaling, ctx.team = scaling, team
        ctx.set_materialize_grads(False)
        return of_target.sum(0) - lse, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs, grad_entropy):  # type: ignore[override]
        hidden, weight, bias, here, places, lse, entropy = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden, dtype=lse.dtype)
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=lse.dtype) if ctx.needs_input_grad[2] else None
        grad = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        for s in chunks(len(hidden), ctx.scaling.rows):
            z, derivative = scaled_logits(hidden[s], weight, bias, ctx.scaling)
            logp = z - lse[s, None]
            p = logp.exp()
            d_z = p * -grad[s, None]
            d_z.scatter_add_(-1, places[s, None], (grad[s] * here[s])[:, None])
            if grad_entropy is not None:
                d_z -= logp.add_(entropy[s, None]).mul_(p).mul_(grad_entropy[s, None])
            d_z = d_z.mul_(derivative).to(hidden.dtype)
            d_hidden[s] = (d_z @ weight).to(lse.dtype)
            if d_weight is not None:
                add_product(d_weight, d_z.T, hidden[s])
            if d_bias is not None:
                d_bias += d_z.sum(0)
        dist.all_reduce(d_hidden, group=ctx.team.group)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None
