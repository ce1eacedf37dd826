"""The GPU's layout of shared prefixes, with a plain attention in place of the GPU's kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.packing import Batch, families_of, select
from posttrain.trainer import policy as policy_module
from posttrain.trainer import prefix_varlen
from posttrain.trainer.prefix_varlen import varlen_layout

from .models import tiny_policy
from .test_prefix import E, W, grouped

CPU = torch.device("cpu")


def plain_attention(
    qkv: tuple[Tensor, Tensor, Tensor],
    ends: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    *,
    scaling: float,
    window: int | None,
    version: int,
) -> Tensor:
    """What `packed_flash_attention` says it does, a sequence at a time."""
    q, k, v = qkv
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = []
    for (q0, q1), (k0, k1) in zip(*(zip(e.tolist(), e.tolist()[1:], strict=False) for e in ends), strict=True):
        assert q1 - q0 <= longest[0]
        assert k1 - k0 <= longest[1]
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1]) * scaling
        behind = (torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)).to(q.device)
        hidden = (behind < 0) | (behind >= (window or k1))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v[k0:k1]))
    return torch.cat(out)


BATCHES = {
    "ragged groups": [(20, [[(5, W)], [(9, W)], [(1, W)]]), (11, [[(4, W)]]), (16, [[(2, W)], [(30, W)]])],
    "nothing shared": [(6, [[(5, W)]]), (9, [[(3, W)]])],
    "several turns": [(12, [[(3, W), (8, E), (4, W)], [(2, W), (5, E), (6, W)]])],
}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("batch", list(BATCHES))
def test_values_and_gradients_are_those_of_the_plain_layout(
    name: str, batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, packed = tiny_policy(name), grouped(BATCHES[batch])
    parameters = list(policy.module.parameters())
    weights = torch.linspace(-1, 1, len(packed))
    monkeypatch.setattr(policy_module, "use_shared", lambda *_: False)

    def run(batch: Batch) -> list[Tensor]:
        logprobs = policy.logprobs(batch)
        return [logprobs.detach(), *torch.autograd.grad((logprobs * weights).sum(), parameters)]

    plain = run(packed)
    monkeypatch.setattr(policy_module, "use_varlen", lambda *_: True)
    monkeypatch.setattr(prefix_varlen, "packed_flash_attention", plain_attention)
    for ours, reference in zip(run(packed), plain, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5 * max(1.0, reference.abs().max().item()), rtol=1e-4)


def test_a_row_that_several_tokens_share_is_computed_once() -> None:
    batch = grouped(BATCHES["ragged groups"])
    layout = varlen_layout(batch, CPU)
    assert len(layout.token_of_row) == len(batch) - 2 * 20 - 16
    assert torch.equal(layout.token_of_row[layout.row_of_token[: batch.lengths[0]]], torch.arange(batch.lengths[0]))
    assert layout.query_ends.diff().tolist() == [25, 9, 1, 15, 18, 30]
    assert layout.key_ends.diff().tolist() == batch.lengths
    assert torch.equal(batch.token_ids[layout.token_of_row[layout.row_of_token]], batch.token_ids)


def test_a_layout_is_made_without_reading_a_device() -> None:
    """From "meta" nothing can be read. What is selected there is not that copy on the host."""
    batch = grouped(BATCHES["ragged groups"])
    there = batch.to("meta").to("meta")
    assert families_of(there) == families_of(batch)
    ours, expected = varlen_layout(there, CPU), varlen_layout(batch, CPU)
    assert torch.equal(ours.row_of_token, expected.row_of_token)
    assert torch.equal(ours.tokens_of_shared, expected.tokens_of_shared)
    assert (there.written().device.type, len(there.written())) == ("meta", int(batch.loss_mask.sum()))
    assert select(there, [0]).host is None
    assert batch.to(CPU).host is None


@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_that_nobody_shares_are_the_tokens(tokens: int) -> None:
    batch = grouped([(tokens, [[]])])
    layout = varlen_layout(batch, CPU)
    rows = torch.randn(tokens, 3, requires_grad=True)
    assert torch.equal(layout.rows_to_tokens(rows), rows)
    (grad,) = torch.autograd.grad(layout.rows_to_tokens(rows * 2).sum(), rows)
    assert torch.equal(grad, torch.full_like(rows, 2))
    assert layout.shared_rows.shape == (2,), "compilers take 0 and 1 for special"
