"""Triton kernels: a decoder layer of the plainest architectures for the few rows of a decode step, in four launches and
one of attention.

    embed -> project (norm, query-key-value, rotary) -> [attention] -> add (output, residual) -> gate (norm, SwiGLU)
          -> add (down, residual) -> project of the next layer ...

A step is bound by launches and by one pass over the weights. So a kernel is there while the one before it still runs
(programmatic dependent launch), and only waits for its input. RMSNorm needs a whole row, of which no program has more
than a part: whoever makes a row of the residual stream leaves the sums of its squares by parts, and the row times the
norm's weight; whoever multiplies with it scales the result.

    y = rmsnorm(x) W^T = r * ((x * norm) W^T),   r = 1 / sqrt(mean(x^2) + eps)
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from posttrain.sampler.cuda_launch import counters, shared_memory, stages, starts_early


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: rows x columns of the result, `depth` of the inner dimension at a time, which is cut
    into `splits` parts for programs of their own."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    splits: int = 1


PROJECT = Tile(rows=64, columns=0, depth=128, stages=5)  # columns: half a head, twice
GATE = Tile(rows=128, columns=64, depth=128, warps=8, stages=3)
OUT = Tile(rows=64, columns=32, depth=128, stages=5)
DOWN = Tile(rows=64, columns=64, depth=128, splits=4)
MANY_ROWS = 512  # from here on the products themselves count, not their launches: prompts
LARGE = Tile(rows=128, columns=128, depth=64, warps=8)
MOST_PARTS = 64  # of a row of the residual stream


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream, as the kernels leave it."""

    x: Tensor  # [R, K]
    scaled: Tensor  # [R, K] x times the weight of the norm that comes next
    squares: Tensor  # [parts, R] float32: sums of x^2 over parts of a row


def embed(
    token_ids: Tensor,  # [R] long
    positions: Tensor,  # [R] long
    table: Tensor,  # [V, K]
    norm: Tensor,  # [K]
    rotary: tuple[Tensor, float],  # [D / 2] float32 frequencies, and what cosine and sine are multiplied by
) -> tuple[Stream, tuple[Tensor, Tensor]]:
    """Rows of the embedding table, and [R, D] each of `lean_decoder.turn_at`."""
    rows, width, half = len(token_ids), table.shape[1], len(rotary[0])
    x = torch.empty(rows, width, dtype=table.dtype, device=table.device)
    stream = Stream(x, torch.empty_like(x), torch.empty(1, rows, dtype=torch.float32, device=table.device))
    cosine = torch.empty(rows, 2 * half, dtype=table.dtype, device=table.device)
    turn = cosine, torch.empty_like(cosine)
    _embed[(rows,)](
        token_ids, positions, table, norm, *rotary, stream.x, stream.scaled, stream.squares, *turn, width,
        BLOCK=triton.next_power_of_2(width), HALF=half, EARLY=starts_early(x.device),
        launch_pdl=starts_early(x.device),
    )  # fmt: skip
    return stream, turn


def project(
    stream: Stream,
    product: tuple[Tensor, Tensor | None],  # [(H + 2 Hkv) D, K] weight of query, key, value; bias
    turn: tuple[Tensor, Tensor],  # [R, D] cosine, and the sine with the sign of its half
    head_norms: tuple[Tensor, Tensor] | None,  # [D] weights of the norms of queries and of keys
    heads: tuple[int, int],  # size of a head, heads of keys
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """[R, H, D], [R, Hkv, D], [R, Hkv, D]: queries and keys at their positions, and values."""
    (weight, bias), (size, key_heads) = product, heads
    rows, width = stream.x.shape
    every = len(weight) // size
    out = torch.empty(rows, every, size, dtype=weight.dtype, device=weight.device)
    tile = LARGE if rows > MANY_ROWS else _for_rows(PROJECT, rows)
    norms = (weight, weight) if head_norms is None else head_norms
    _project[(every, triton.cdiv(rows, tile.rows))](
        stream.scaled, stream.squares, weight, weight if bias is None else bias, *turn, *norms, out,
        rows, width, len(stream.squares), every - 2 * key_heads, every - key_heads, eps,
        PARTS_PAD=triton.next_power_of_2(len(stream.squares)), HALF=size // 2, BIAS=bias is not None,
        HEAD_NORMS=head_norms is not None, **_how(tile, size, weight, width),
    )  # fmt: skip
    return out.split([every - 2 * key_heads, key_heads, key_heads], dim=1)  # type: ignore[return-value]


def gate(stream: Stream, product: tuple[Tensor, Tensor | None], eps: float) -> Tensor:
    """[R, F] silu(gate) * up, for the weights of both, [2 F, K]."""
    weight, bias = product
    rows, width = stream.x.shape
    columns = len(weight) // 2
    out = torch.empty(rows, columns, dtype=weight.dtype, device=weight.device)
    tile = _for_rows(GATE, rows)
    _gate[(triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows))](
        stream.scaled, stream.squares, weight, weight if bias is None else bias, out,
        rows, width, columns, len(stream.squares), eps,
        PARTS_PAD=triton.next_power_of_2(len(stream.squares)), BN=tile.columns, BIAS=bias is not None,
        **_how(tile, 2 * tile.columns, weight, width),
    )  # fmt: skip
    return out


def add(stream: Stream, rows_in: Tensor, product: tuple[Tensor, Tensor | None], norm: Tensor, tile: Tile) -> Stream:
    """x + rows_in [R, F] weight^T, weight [K, F]; for the norm that comes next."""
    weight, bias = product
    rows, depth = rows_in.shape
    columns = len(weight)
    tile = LARGE if rows > MANY_ROWS else _for_rows(tile, rows)
    tile = replace(tile, columns=max(tile.columns, triton.next_power_of_2(columns // MOST_PARTS)))
    across, down = triton.cdiv(columns, tile.columns), triton.cdiv(rows, tile.rows)
    x = torch.empty_like(stream.x)
    made = Stream(x, torch.empty_like(x), torch.empty(across, rows, dtype=torch.float32, device=x.device))
    parts, arrived = x, x
    if tile.splits > 1:
        parts = torch.empty(tile.splits, rows, columns, dtype=torch.float32, device=x.device)
        arrived = counters(x.device, across * down)
    _add[(across, down, tile.splits)](
        rows_in, weight, weight if bias is None else bias, stream.x, norm, made.x, made.scaled, made.squares,
        parts, arrived, rows, columns, depth, _steps(depth, tile, weight),
        SPLITS=tile.splits, BN=tile.columns, BIAS=bias is not None, **_how(tile, tile.columns, weight, depth),
    )  # fmt: skip
    return made


def _steps(depth: int, tile: Tile, weight: Tensor) -> int:
    """Of the loop over the inner dimension, in each of its splits."""
    return triton.cdiv(depth, tile.splits * (tile.depth * 2 // weight.itemsize))


def _for_rows(tile: Tile, rows: int) -> Tile:
    """No more rows than there are."""
    return replace(tile, rows=min(tile.rows, max(16, triton.next_power_of_2(rows))))


def _how(tile: Tile, columns: int, weight: Tensor, depth: int) -> dict[str, int | bool]:
    """columns: of weights that a program reads at a time."""
    early, at_once = starts_early(weight.device), tile.depth * 2 // weight.itemsize
    stage = (tile.rows + columns) * at_once * weight.itemsize
    how = {"BM": tile.rows, "BK": at_once, "EVEN": depth % (at_once * tile.splits) == 0, "EARLY": early}
    return how | {
        "launch_pdl": early,
        "num_warps": tile.warps,
        "num_stages": stages(tile.stages, stage, shared_memory(weight.device)),
    }


@triton.jit
def _embed(
    token_ids, positions, table, norm, frequencies, factor, x, scaled, squares, cosine, sine, width,
    BLOCK: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    c, d = tl.arange(0, BLOCK), tl.arange(0, HALF)
    there = c < width
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(token_ids + row)
    value = tl.load(table + token * width + c, mask=there, other=0.0)
    wide = value.to(tl.float32)
    tl.store(x + row * width + c, value, mask=there)
    by = tl.load(norm + c, mask=there, other=0.0).to(tl.float32)
    tl.store(scaled + row * width + c, (wide * by).to(x.dtype.element_ty), mask=there)
    tl.store(squares + row, tl.sum(wide * wide, 0))
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + d)
    place = row * 2 * HALF + d
    across, along = (tl.cos(angle) * factor).to(x.dtype.element_ty), (tl.sin(angle) * factor).to(x.dtype.element_ty)
    tl.store(cosine + place, across)
    tl.store(cosine + place + HALF, across)
    tl.store(sine + place, -along)
    tl.store(sine + place + HALF, along)


@triton.jit
def _pair(z, weight, rows, one, two, K, BK: tl.constexpr, EVEN: tl.constexpr):
    """rows of z times the columns `one`, and times the columns `two`, of weight^T."""
    first = tl.zeros([rows.shape[0], one.shape[0]], tl.float32)
    second = tl.zeros([rows.shape[0], one.shape[0]], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = z + rows[:, None] * K + k[None, :]
        upper = weight + one[None, :] * K + k[:, None]
        lower = weight + two[None, :] * K + k[:, None]
        if EVEN:
            a, b, c = tl.load(left), tl.load(upper), tl.load(lower)
        else:
            a = tl.load(left, mask=k[None, :] < K, other=0.0)
            b = tl.load(upper, mask=k[:, None] < K, other=0.0)
            c = tl.load(lower, mask=k[:, None] < K, other=0.0)
        first = tl.dot(a, b, first, input_precision="ieee")
        second = tl.dot(a, c, second, input_precision="ieee")
    return first, second


@triton.jit
def _normed_pair(
    z, squares, weight, bias, rows, one, two, count, K, parts, eps,
    PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same of the stream's norm, with biases; z: the stream times the norm's weight."""
    part = tl.arange(0, PARTS_PAD)
    size = tl.load(squares + part[:, None] * count + rows[None, :], mask=part[:, None] < parts, other=0.0)
    first, second = _pair(z, weight, rows, one, two, K, BK, EVEN)
    by = tl.rsqrt(tl.sum(size, 0) / K + eps)[:, None]
    first, second = first * by, second * by
    if BIAS:
        first += tl.load(bias + one).to(tl.float32)[None, :]
        second += tl.load(bias + two).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _project(
    z, squares, weight, bias, cosine, sine, query_norm, key_norm, out,
    count, K, parts, queries, turned, eps,
    PARTS_PAD: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, HEAD_NORMS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head, by halves. Heads below `queries` are queries, below `turned` keys, then values."""
    head = tl.program_id(0)
    every = tl.num_programs(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(row, count - 1)
    d = tl.arange(0, HALF)
    one, two = head * 2 * HALF + d, head * 2 * HALF + HALF + d
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    place = rows[:, None] * 2 * HALF + d[None, :]
    c1, c2 = tl.load(cosine + place), tl.load(cosine + place + HALF)
    s1, s2 = tl.load(sine + place), tl.load(sine + place + HALF)
    first, second = _normed_pair(
        z, squares, weight, bias, rows, one, two, count, K, parts, eps, PARTS_PAD, BIAS, BK, EVEN
    )  # fmt: skip
    if head < turned:
        if HEAD_NORMS:
            norm = query_norm if head < queries else key_norm
            size = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
            by = tl.rsqrt(size + eps)[:, None]
            first = first * by * tl.load(norm + d).to(tl.float32)[None, :]
            second = second * by * tl.load(norm + HALF + d).to(tl.float32)[None, :]
        before = first
        first = before * c1.to(tl.float32) + second * s1.to(tl.float32)
        second = second * c2.to(tl.float32) + before * s2.to(tl.float32)
    place = (rows[:, None] * every + head) * 2 * HALF + d[None, :]
    there = (row < count)[:, None]
    tl.store(out + place, first.to(out.dtype.element_ty), mask=there)
    tl.store(out + place + HALF, second.to(out.dtype.element_ty), mask=there)


@triton.jit
def _gate(
    z, squares, weight, bias, out, count, K, columns, parts, eps,
    PARTS_PAD: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(row, count - 1)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    one = tl.minimum(column, columns - 1)
    two = one + columns
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    first, second = _normed_pair(
        z, squares, weight, bias, rows, one, two, count, K, parts, eps, PARTS_PAD, BIAS, BK, EVEN
    )  # fmt: skip
    result = first / (1.0 + tl.exp(-first)) * second
    there = (row < count)[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add(
    a, weight, bias, x, norm, new_x, scaled, squares, sums, arrived, count, columns, K, steps,
    SPLITS: tl.constexpr, BN: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the inner dimension; the last program to arrive adds the parts, in their order."""
    tile, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    rows = tl.minimum(row, count - 1)
    column = tile * BN + tl.arange(0, BN)
    cols = tl.minimum(column, columns - 1)
    begin = split * steps * BK
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([BM, BN], tl.float32)
    for step in range(steps):
        k = begin + step * BK + tl.arange(0, BK)
        left = a + rows[:, None] * K + k[None, :]
        right = weight + cols[None, :] * K + k[:, None]
        if EVEN:
            acc = tl.dot(tl.load(left), tl.load(right), acc, input_precision="ieee")
        else:
            left = tl.load(left, mask=k[None, :] < K, other=0.0)
            acc = tl.dot(left, tl.load(right, mask=k[:, None] < K, other=0.0), acc, input_precision="ieee")
    there = (row < count)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]  # not of clamped columns, which compilers take to be anywhere
    last = True
    if SPLITS > 1:
        tl.store(sums + split * count * columns + place, acc, mask=there)
        tl.debug_barrier()
        counter = arrived + tl.program_id(1) * tl.num_programs(0) + tile
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = tl.zeros([BM, BN], tl.float32)
            for number in tl.static_range(SPLITS):
                place_then = sums + number * count * columns + place
                acc += tl.load(place_then, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(counter, 0)
    if last:
        if BIAS:
            acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        total = (tl.load(x + place, mask=there, other=0.0).to(tl.float32) + acc).to(new_x.dtype.element_ty)
        wide = tl.where(there, total.to(tl.float32), 0.0)
        by = tl.load(norm + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(new_x + place, total, mask=there)
        tl.store(scaled + place, (wide * by).to(new_x.dtype.element_ty), mask=there)
        tl.store(squares + tile * count + row, tl.sum(wide * wide, 1), mask=row < count)
