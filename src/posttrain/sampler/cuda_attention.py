"""Triton kernel: one new token per sequence against the KV cache, which it also writes. One launch per layer.

    out_b = softmax(scale * q_b [K_leader[:shared], K_row[shared:position], k_new]) [V_leader .., V_row .., v_new]

Sequences whose first `shared` tokens are the same read them from one row (the leader's), which then stays in the L2
cache instead of being fetched once per sequence. A long past is cut into `splits` parts, which a second kernel merges.
Only bookkeeping tensors say where everything stands, so that a CUDA graph can replay the launch unchanged.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys at a time
SMALLEST_GROUP = 16  # queries of a key head, padded to what tensor cores take
PROGRAMS_WANTED = 256  # about two per multiprocessor of an H100
MOST_SPLITS = 32


def splits_for(sequences: int, key_heads: int, capacity: int) -> int:
    """In how many parts a past is read: enough programs to fill the chip, none with less than two blocks to read."""
    wanted = -(-PROGRAMS_WANTED // (sequences * key_heads))
    return max(1, min(wanted, capacity // (2 * BLOCK), MOST_SPLITS))


def decode_attention(
    query: Tensor,  # [H, B, D], the last dimension contiguous
    new_key: Tensor,  # [Hkv, B, D]
    new_value: Tensor,  # [Hkv, B, Dv]
    layer: tuple[Tensor, Tensor],  # K [rows, Hkv, capacity, D], V [rows, Hkv, capacity, Dv], contiguous
    places: Tensor,  # [4, B] long: row, leader's row, tokens shared with the leader, position of the new token
    *,
    scaling: float,
    window: int | None,
    splits: int,
) -> Tensor:  # [B, H, Dv]
    """Stores the new keys and values at their positions and attends. Columns may repeat (padding of a batch)."""
    keys, values = layer
    heads, count, dim = query.shape
    key_heads, value_dim = new_value.shape[0], new_value.shape[2]
    out = torch.empty(count, heads, value_dim, dtype=query.dtype, device=query.device)
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(count, heads, splits, value_dim, dtype=torch.float32, device=query.device)
        lse = torch.empty(count, heads, splits, dtype=torch.float32, device=query.device)
    group = heads // key_heads
    _attend[(count, key_heads, splits)](
        query, new_key, new_value, keys, values, places, out, partial, lse,
        *query.stride()[:2], *new_key.stride()[:2], *new_value.stride()[:2],
        places.stride(0), keys.shape[2], scaling, keys.shape[2] if window is None else window, splits,
        KEY_HEADS=key_heads, GROUP=group, GROUP_PAD=max(SMALLEST_GROUP, triton.next_power_of_2(group)),
        D=dim, D_PAD=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK, WHOLE=splits == 1,
        num_warps=4 if dim <= 128 else 8, num_stages=3 if dim <= 128 else 2,
    )  # fmt: skip
    if splits > 1:
        pad = triton.next_power_of_2(value_dim)
        _merge[(count, heads)](partial, lse, out, splits, HEADS=heads, DV=value_dim, DV_PAD=pad, MOST=MOST_SPLITS)
    return out


@triton.jit
def _attend(
    query, new_key, new_value, keys, values, places, out, partial, lse,
    q_head, q_token, k_head, k_token, v_head, v_token, places_stride, capacity, scaling, window, splits,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One (sequence, key head, split): all queries of the group, the keys of the split."""
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, leader = tl.load(places + b), tl.load(places + places_stride + b)
    shared, position = tl.load(places + 2 * places_stride + b), tl.load(places + 3 * places_stride + b)
    g, d, dv = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    heads = head * GROUP + g
    q_there = (g[:, None] < GROUP) & (d[None, :] < D)
    q = tl.load(query + heads[:, None] * q_head + b * q_token + d[None, :], mask=q_there, other=0.0)
    low = tl.maximum(position + 1 - window, 0)
    span = tl.cdiv(tl.cdiv(position - low, splits), BLOCK) * BLOCK
    first = low + split * span
    last = tl.minimum(first + span, position)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < last
        place = (tl.where(token < shared, leader, row) * KEY_HEADS + head) * capacity + token
        k = tl.load(keys + place[None, :] * D + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        v = tl.load(values + place[:, None] * DV + dv[None, :], mask=there[:, None] & (dv[None, :] < DV), other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    if split == splits - 1:  # the new token itself, which nobody has to find in the cache
        place = (row * KEY_HEADS + head) * capacity + position
        k = tl.load(new_key + head * k_head + b * k_token + d, mask=d < D, other=0.0)
        v = tl.load(new_value + head * v_head + b * v_token + dv, mask=dv < DV, other=0.0)
        tl.store(keys + place * D + d, k, mask=d < D)
        tl.store(values + place * DV + dv, v, mask=dv < DV)
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scaling
        higher = tl.maximum(top, score)
        weight = tl.exp(score - higher)
        shrink = tl.exp(top - higher)
        sums = sums * shrink[:, None] + weight[:, None] * v.to(tl.float32)[None, :]
        total = total * shrink + weight
        top = higher
    out_there = (g[:, None] < GROUP) & (dv[None, :] < DV)
    number = b * KEY_HEADS * GROUP + heads
    if WHOLE:
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + number[:, None] * DV + dv[None, :], result, mask=out_there)
    else:
        some = total > 0
        normal = sums / tl.where(some, total, 1.0)[:, None]
        tl.store(partial + (number[:, None] * splits + split) * DV + dv[None, :], normal, mask=out_there)
        sizes = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
        tl.store(lse + number * splits + split, sizes, mask=g < GROUP)


@triton.jit
def _merge(
    partial, lse, out, splits, HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One (sequence, head): the parts, weighted by their share of the softmax's denominator."""
    number = tl.program_id(0) * HEADS + tl.program_id(1)
    part, dv = tl.arange(0, MOST), tl.arange(0, DV_PAD)
    sizes = tl.load(lse + number * splits + part, mask=part < splits, other=float("-inf"))
    weights = tl.exp(sizes - tl.max(sizes, 0))
    weights = weights / tl.sum(weights, 0)
    there = (part[:, None] < splits) & (dv[None, :] < DV)
    parts = tl.load(partial + (number * splits + part)[:, None] * DV + dv[None, :], mask=there, other=0.0)
    result = tl.sum(parts * weights[:, None], 0)
    tl.store(out + number * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)
