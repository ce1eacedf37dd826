"""Layouts, and packed attention against softmax written out per segment."""

from __future__ import annotations

from importlib import metadata
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posttrain.trainer import attention, flash_attention
from posttrain.trainer.attention import PackedAttention, layout_of, refuse_unsupported
from posttrain.trainer.flash_attention import use_varlen

from .models import tiny_policy
from .test_prefix_varlen import plain_attention

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=30))
def test_every_token_has_one_row_and_padding_is_bounded(lengths: list[int]) -> None:
    layout = layout_of(lengths, CPU)
    total, rows = sum(lengths), len(layout.token_of_row)
    assert torch.equal(layout.token_of_row[layout.row_of_token], torch.arange(total))
    assert rows == sum(bucket.count * bucket.length for bucket in layout.buckets)
    assert rows - total <= sum(max(3, length // 8) for length in lengths)
    for first, second in pairwise(layout.buckets):
        assert second.start == first.start + first.count * first.length
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    for start, length in zip(starts.tolist(), lengths, strict=True):
        rows_of_segment = layout.row_of_token[start : start + length]
        assert torch.equal(rows_of_segment, rows_of_segment[0] + torch.arange(length))


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None):
    """[H, L, D] each: one segment, one head at a time."""
    out = torch.zeros_like(q)
    groups = q.shape[0] // k.shape[0]
    for h in range(q.shape[0]):
        for t in range(q.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            scores = k[h // groups, first : t + 1] @ q[h, t] * 0.3
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            sink = torch.tensor([]) if sinks is None else sinks[h : h + 1]
            out[h, t] = torch.cat([scores, sink]).softmax(0)[: t + 1 - first] @ v[h // groups, first : t + 1]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_the_sum_written_out(
    window: int | None, softcap: float | None, with_sinks: bool, kv_heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 9, 7, 8]
    q = torch.randn(4, sum(lengths), 6, generator=generator)
    k, v = torch.randn(2, kv_heads, sum(lengths), 6, generator=generator)
    sinks = torch.randn(4, generator=generator) if with_sinks else None
    layout = layout_of(lengths, CPU)
    rows = layout.token_of_row
    ours = PackedAttention(layout).attend(
        0, q[None, :, rows], k[None, :, rows], v[None, :, rows], scaling=0.3, sliding_window=window,
        softcap=softcap, sinks=sinks,
    )  # fmt: skip
    parts = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
    expected = torch.cat([written_out(*part, window, softcap, sinks) for part in parts], dim=1)
    assert ours.shape == (1, len(rows), 4, 6)
    assert torch.allclose(ours[0, layout.row_of_token], expected.transpose(0, 1), atol=1e-5)


def test_what_would_change_the_result_is_refused() -> None:
    class Bidirectional(torch.nn.Module):
        is_causal = False

    with pytest.raises(NotImplementedError, match="not causal"):
        refuse_unsupported(Bidirectional(), None, {})
    with pytest.raises(NotImplementedError, match="position_bias"):
        refuse_unsupported(torch.nn.Identity(), None, {"position_bias": torch.zeros(1)})
    with pytest.raises(NotImplementedError, match="attention mask"):
        refuse_unsupported(torch.nn.Identity(), torch.zeros(1), {})


def test_transformers_knows_the_function_and_builds_no_mask_for_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[attention.NAME] is attention.attention_forward
    assert attention.NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_varlen_is_for_half_precision_on_cuda_without_soft_caps_and_sinks() -> None:
    llama = tiny_policy("llama").module
    assert not use_varlen(CPU, torch.bfloat16, llama)
    if flash_attention.varlen_attn is not None:
        cuda = torch.device("cuda")
        assert use_varlen(cuda, torch.bfloat16, llama)
        assert not use_varlen(cuda, torch.float32, llama)
        assert not use_varlen(cuda, torch.bfloat16, tiny_policy("gemma2").module)
        assert not use_varlen(cuda, torch.bfloat16, tiny_policy("gpt_oss").module)


@pytest.mark.parametrize(("installed", "version"), [("4.0.0b36", 4), ("4.1.0", 4), ("4.0.0b5", 2), (None, 2)])
def test_flash_attention_4_is_used_on_hopper_where_it_is_installed_and_new_enough(
    installed: str | None, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version_of(name: str) -> str:
        assert name == "flash-attn-4"
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(flash_attention, "is_hopper", lambda _: True)
    asked = flash_attention.version_on.__wrapped__  # without what it remembers
    assert asked(torch.device("cuda")) == version
    monkeypatch.setattr(flash_attention, "is_hopper", lambda _: False)
    assert asked(torch.device("cuda")) == 2


def test_no_device_but_a_gpu_is_a_hopper() -> None:
    assert not flash_attention.is_hopper(CPU)


class Interface:
    """What version 4's does, written out; its gradients lie in memory as what they are gradients of."""

    @staticmethod
    def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        ends, longest = (how["cu_seqlens_q"], how["cu_seqlens_k"]), (how["max_seqlen_q"], how["max_seqlen_k"])
        out = plain_attention((q, k, v), ends, longest, scaling=how["softmax_scale"], window=None, version=0)
        return out.contiguous(), torch.zeros(q.shape[1], len(q))

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, deterministic: bool, **how: Any
    ) -> list[Tensor]:
        made = [torch.empty_like(x) for x in (q, k, v)]
        scale, (q_ends, k_ends) = how["softmax_scale"], (how["cu_seqlens_q"].tolist(), how["cu_seqlens_k"].tolist())
        for queries, keys in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
            (qs, g), (ks, vs) = (x[slice(*queries)] for x in (q, grad)), (x[slice(*keys)] for x in (k, v))
            hidden = torch.ones(len(qs), len(ks), dtype=torch.bool).triu(len(ks) - len(qs) + 1)
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            of_weights = torch.einsum("qhd,khd->hqk", g, vs)
            of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
            made[0][slice(*queries)] = torch.einsum("hqk,khd->qhd", of_scores, ks)
            made[1][slice(*keys)] = torch.einsum("hqk,qhd->khd", of_scores, qs)
            made[2][slice(*keys)] = torch.einsum("hqk,qhd->khd", weights, g)
        return made


def test_version_4_is_an_operator_that_compilers_see_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_four", lambda: Interface)
    q, k, v = (  # not contiguous
        torch.randn(2, count, 8, generator=torch.Generator().manual_seed(count)).transpose(0, 1).requires_grad_()
        for count in (5, 7, 7)
    )
    ends = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 7], dtype=torch.int32)
    torch.library.opcheck(flash_attention.version_four, (q, k, v, *ends, [3, 4], 0.5))
    out, lse = flash_attention.version_four(q, k, v, *ends, [3, 4], 0.5)
    kept = [x.detach() for x in (q, k, v, out, lse, *ends)]
    torch.library.opcheck(flash_attention.version_four_backward, (torch.ones_like(out), kept, [3, 4], 0.5))
    plain = plain_attention((q, k, v), ends, (3, 4), scaling=0.5, window=None, version=0)
    for mine, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(plain.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
