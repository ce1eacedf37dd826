"""Triton kernel: one new token per sequence against the KV cache, which it also writes. One launch per layer.

    out_b = softmax(scale * q_b [K_leader[:shared], K_row[shared:position], k_new]) [V_leader .., V_row .., v_new]

Sequences whose first `shared` tokens are the same form teams: a program reads these keys once for the queries of a
whole team, and other programs read what each sequence has of its own. A long past is cut into parts besides. The last
program of a sequence waits for those of its other parts, all of them launched before it, and adds what they left.
Only bookkeeping tensors say where everything stands, so that a CUDA graph can replay the launch unchanged.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posttrain.sampler.cuda_launch import counters, shared_memory, stages, starts_early
from posttrain.sampler.decode_ahead import TEAM

BLOCK = 64  # keys at a time
SMALLEST_GROUP = 16  # queries of a key head, padded to what tensor cores take
PROGRAMS_WANTED = 256  # about two per multiprocessor of an H100
MOST_SPLITS = 32
MOST_REGISTERS = 128  # four programs of four warps on a multiprocessor
TEAM_SPLITS = 4  # parts of what a team shares
MOST_AT_ONCE = 8  # parts that are fetched together
TEAM_QUERIES = 128  # at most, with padding


def splits_for(sequences: int, key_heads: int, capacity: int) -> int:
    """In how many parts a past is read, a power of two: enough programs to fill the chip, none with less than two
    blocks to read."""
    wanted = -(-PROGRAMS_WANTED // (sequences * key_heads))
    most = max(1, min(wanted, capacity // (2 * BLOCK), MOST_SPLITS))
    return 1 << (most.bit_length() - 1)


def team_size(heads: int, key_heads: int) -> int:
    """How many sequences one program reads shared keys for; a power of two."""
    return max(1, min(TEAM, TEAM_QUERIES // triton.next_power_of_2(heads // key_heads)))


def decode_attention(
    query: Tensor,  # [H, B, D], the last dimension contiguous
    new: tuple[Tensor, Tensor],  # keys [Hkv, B, D], values [Hkv, B, Dv]
    layer: tuple[Tensor, Tensor],  # K [rows, Hkv, capacity, D], V [rows, Hkv, capacity, Dv], contiguous
    places: Tensor,  # [5, B] long: row, leader's row, tokens shared with it, tokens that a team reads, position
    teams: Tensor,  # [n, 2 + members] long: leader's row, tokens it shares (0: no team), columns or -1
    *,
    scaling: float,
    window: int | None,
    splits: int,
) -> Tensor:  # [B, H, Dv]
    """Stores the new keys and values at their positions and attends. Columns may repeat (padding of a batch)."""
    (new_key, new_value), (keys, values) = new, layer
    heads, count, dim = query.shape
    key_heads, value_dim = new_value.shape[0], new_value.shape[2]
    group, members = heads // key_heads, teams.shape[1] - 2
    out = torch.empty(count, heads, value_dim, dtype=query.dtype, device=query.device)
    parts = splits - 1 + TEAM_SPLITS
    partial = torch.empty(count, heads, parts, value_dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(count, heads, parts, dtype=torch.float32, device=query.device)
    early = starts_early(query.device)
    fits = stages(3 if dim <= 128 else 2, BLOCK * (dim + value_dim) * keys.itemsize, shared_memory(query.device))
    _attend[(len(teams) * TEAM_SPLITS + count * splits, key_heads)](
        query, new_key, new_value, keys, values, places, teams, out, partial, lse,
        counters(query.device, count * key_heads),
        *query.stride()[:2], *new_key.stride()[:2], *new_value.stride()[:2],
        places.stride(0), keys.shape[2], scaling, keys.shape[2] if window is None else window,
        len(teams) * TEAM_SPLITS, splits,
        TEAM_SPLITS=TEAM_SPLITS, CHUNK=MOST_AT_ONCE, WINDOW=window is not None,
        MEMBERS=members, MEMBER=max(triton.next_power_of_2(group), SMALLEST_GROUP // members), KEY_HEADS=key_heads,
        GROUP=group, GROUP_PAD=max(SMALLEST_GROUP, triton.next_power_of_2(group)),
        D=dim, D_PAD=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)),
        BLOCK=BLOCK, EARLY=early, launch_pdl=early,
        num_warps=4 if dim <= 128 else 8, num_stages=fits, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["team_programs", "splits"])  # which vary with the batch
def _attend(
    query, new_key, new_value, keys, values, places, teams, out, partial, lse, arrived,
    q_head, q_token, k_head, k_token, v_head, v_token, places_stride, capacity, scaling, window, team_programs, splits,
    TEAM_SPLITS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    MEMBERS: tl.constexpr, MEMBER: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Programs of teams come first: they have most to do."""
    program, head = tl.program_id(0), tl.program_id(1)
    if program < team_programs:
        _for_team(
            program, head, query, keys, values, places, teams, partial, lse, arrived,
            q_head, q_token, places_stride, capacity, scaling, window, splits, TEAM_SPLITS, WINDOW,
            MEMBERS, MEMBER, KEY_HEADS, GROUP, D, D_PAD, DV, DV_PAD, BLOCK, EARLY,
        )  # fmt: skip
    else:
        _for_sequence(
            program - team_programs, head, query, new_key, new_value, keys, values, places, out, partial, lse, arrived,
            q_head, q_token, k_head, k_token, v_head, v_token, places_stride, capacity, scaling, window, splits,
            TEAM_SPLITS, CHUNK, WINDOW, KEY_HEADS, GROUP, GROUP_PAD, D, D_PAD, DV, DV_PAD, BLOCK, EARLY,
        )  # fmt: skip


@triton.jit
def _for_team(
    program, head, query, keys, values, places, teams, partial, lse, arrived,
    q_head, q_token, places_stride, capacity, scaling, window, splits,
    TEAM_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    MEMBERS: tl.constexpr, MEMBER: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A part of what a team shares, for the queries of its members."""
    parts = splits - 1 + TEAM_SPLITS  # that others leave for the last of a sequence
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    table, split = teams + program // TEAM_SPLITS * (MEMBERS + 2), program % TEAM_SPLITS
    leader, shared = tl.load(table), tl.load(table + 1)
    row = tl.arange(0, MEMBERS * MEMBER)
    g, column = row % MEMBER, tl.load(table + 2 + row // MEMBER)
    valid = (g < GROUP) & (column >= 0)
    column = tl.maximum(column, 0)
    low = tl.zeros([MEMBERS * MEMBER], tl.int64)
    if WINDOW:
        low = tl.maximum(tl.load(places + 4 * places_stride + column) + 1 - window, 0)
    span = tl.cdiv(tl.cdiv(shared, TEAM_SPLITS), BLOCK) * BLOCK
    first = split * span
    last = tl.minimum(first + span, shared)
    heads = head * GROUP + g
    base = (leader * KEY_HEADS + head) * capacity
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if shared > 0:
        place = heads[:, None] * q_head + column[:, None] * q_token + d[None, :]
        q = tl.load(query + place, mask=valid[:, None] & (d[None, :] < D), other=0.0)
        top = tl.full([MEMBERS * MEMBER], float("-inf"), tl.float32)
        total = tl.zeros([MEMBERS * MEMBER], tl.float32)
        sums = tl.zeros([MEMBERS * MEMBER, DV_PAD], tl.float32)
        for start in range(first, last, BLOCK):
            token = start + tl.arange(0, BLOCK)
            there = token < last
            seen = there[None, :] & (token[None, :] >= low[:, None])
            k, v = _keys(keys, values, base + token, there, d, dv, D, DV)
            top, total, sums = _seen(q, k, v, seen, top, total, sums, scaling)
        part = (column * KEY_HEADS * GROUP + heads) * parts + splits - 1 + split
        _leave(partial, lse, part, valid, dv, top, total, sums, DV)
        tl.debug_barrier()
        columns = tl.load(table + 2 + tl.arange(0, MEMBERS))
        tl.atomic_add(arrived + columns * KEY_HEADS + head, 1, mask=columns >= 0, sem="release")


@triton.jit
def _for_sequence(
    program, head, query, new_key, new_value, keys, values, places, out, partial, lse, arrived,
    q_head, q_token, k_head, k_token, v_head, v_token, places_stride, capacity, scaling, window, splits,
    TEAM_SPLITS: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A part of what a sequence has of its own; the last part is the one with the new token."""
    parts = splits - 1 + TEAM_SPLITS  # that others leave for the last of a sequence
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    b, split = program // splits, program % splits
    row, leader = tl.load(places + b), tl.load(places + places_stride + b)
    shared, begin = tl.load(places + 2 * places_stride + b), tl.load(places + 3 * places_stride + b)
    position = tl.load(places + 4 * places_stride + b)
    g = tl.arange(0, GROUP_PAD)
    heads = head * GROUP + g
    low = tl.maximum(position + 1 - window, begin) if WINDOW else begin
    span = tl.cdiv(tl.cdiv(position - low, splits), BLOCK) * BLOCK
    first = low + split * span
    last = tl.minimum(first + span, position)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sums = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    q_there = (g[:, None] < GROUP) & (d[None, :] < D)
    q = tl.load(query + heads[:, None] * q_head + b * q_token + d[None, :], mask=q_there, other=0.0)
    new_k = tl.load(new_key + head * k_head + b * k_token + d, mask=d < D, other=0.0)
    new_v = tl.load(new_value + head * v_head + b * v_token + dv, mask=dv < DV, other=0.0)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = token < last
        place = (tl.where(token < shared, leader, row) * KEY_HEADS + head) * capacity + token
        k, v = _keys(keys, values, place, there, d, dv, D, DV)
        top, total, sums = _seen(q, k, v, there[None, :], top, total, sums, scaling)
    valid = g < GROUP
    number = b * KEY_HEADS * GROUP + heads
    counter = arrived + b * KEY_HEADS + head
    if split < splits - 1:
        _leave(partial, lse, number * parts + split, valid, dv, top, total, sums, DV)
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release")
    else:
        place = (row * KEY_HEADS + head) * capacity + position
        tl.store(keys + place * D + d, new_k, mask=d < D)
        tl.store(values + place * DV + dv, new_v, mask=dv < DV)
        top, total, sums = _with_new(q, new_k, new_v, top, total, sums, scaling)
        expected = splits - 1 + tl.where(begin > 0, TEAM_SPLITS, 0)
        if expected > 0:
            while tl.atomic_add(counter, 0, sem="acquire") < expected:
                pass
            tl.store(counter, 0)
            total, sums = _gathered(partial, lse, number, valid, dv, expected, top, total, sums, parts, CHUNK, DV)
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + number[:, None] * DV + dv[None, :], result, mask=valid[:, None] & (dv[None, :] < DV))


@triton.jit
def _keys(keys, values, place, there, d, dv, D: tl.constexpr, DV: tl.constexpr):
    """A block of keys [D, tokens] and of values [tokens, Dv]."""
    k = tl.load(keys + place[None, :] * D + d[:, None], mask=there[None, :] & (d[:, None] < D), other=0.0)
    v = tl.load(values + place[:, None] * DV + dv[None, :], mask=there[:, None] & (dv[None, :] < DV), other=0.0)
    return k, v


@triton.jit
def _seen(q, k, v, there, top, total, sums, scaling):
    """One more block of keys in a running softmax; queries that have seen none yet stay at -inf."""
    scores = tl.dot(q, k, input_precision="ieee") * scaling
    scores = tl.where(there, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(top - safe)
    sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def _with_new(q, new_k, new_v, top, total, sums, scaling):
    """The new token in a running softmax: every query sees it, so that no denominator stays 0."""
    score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scaling
    higher = tl.maximum(top, score)
    weight = tl.exp(score - higher)
    shrink = tl.exp(top - higher)
    sums = sums * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)[None, :]
    return higher, total * shrink + weight, sums


@triton.jit
def _leave(partial, lse, part, valid, dv, top, total, sums, DV: tl.constexpr):
    """A part for whoever merges, normalised, with the logarithm of its denominator."""
    some = total > 0
    normal = sums / tl.where(some, total, 1.0)[:, None]
    tl.store(partial + part[:, None] * DV + dv[None, :], normal, mask=valid[:, None] & (dv[None, :] < DV))
    sizes = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + part, sizes, mask=valid)


@triton.jit
def _gathered(
    partial, lse, number, valid, dv, expected, top, total, sums, parts, CHUNK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Denominator and sums with the first `expected` parts of the queries `number`, too, which others have left."""
    for start in range(0, expected, CHUNK):
        part = start + tl.arange(0, CHUNK)
        place = number[:, None] * parts + part[None, :]
        known = valid[:, None] & (part[None, :] < expected)
        sizes = tl.load(lse + place, mask=known, other=float("-inf"), cache_modifier=".cg")
        there = known[:, :, None] & (dv[None, None, :] < DV)
        left = tl.load(
            partial + place[:, :, None] * DV + dv[None, None, :], mask=there, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(top, tl.max(sizes, 1))
        weights = tl.exp(sizes - higher[:, None])
        shrink = tl.exp(top - higher)
        sums = sums * shrink[:, None] + tl.sum(left * weights[:, :, None], 1)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return total, sums
