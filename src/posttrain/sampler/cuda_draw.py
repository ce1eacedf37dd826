"""Triton kernels: logits -> one token per row and its log-prob, by inverse CDF, in one pass over the logits.

The same draw as `draw.py` (same uniform numbers, same distribution), without a float32 copy of the logits: every chunk
of the vocabulary leaves its maximum and its mass, then one program per row finds the chunk and the token in it.
Advances the bookkeeping of the sequences, too, so that the next step can start before anyone has read this one.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.sampler.randomness import GOLDEN
from posttrain.trainer.fused import LogitsRule

CHUNK = 2048  # tokens of the vocabulary per program


def draw_and_advance(
    logits: Tensor,  # [B, V] of the head, any floating dtype, rows contiguous
    temperatures: Tensor,  # [B] float32; 0 = greedy
    state: Tensor,  # [4, B] long: position, token, stream, number of the next token in its turn; advanced by one token
    out: Tensor,  # [2, B] float64: token, log-prob
    rule: LogitsRule,
) -> None:
    count, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    tops = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(tops)
    firsts = torch.empty(count, chunks, dtype=torch.int32, device=logits.device)
    how = {"SOFTCAP": rule.softcap is not None, "CHUNK": CHUNK}
    numbers = (size, logits.stride(0), rule.scale, rule.softcap or 1.0)
    _measure[(count, chunks)](logits, temperatures, tops, masses, firsts, *numbers, **how, num_warps=4)
    width = triton.next_power_of_2(chunks)
    _pick[(count,)](
        logits, temperatures, tops, masses, firsts, state, out, state.stride(0), out.stride(0), *numbers,
        CHUNKS=chunks, WIDTH=width, GAMMA=signed_golden(), **how, num_warps=4,
    )  # fmt: skip


def signed_golden() -> int:
    return GOLDEN - (1 << 64)


@triton.jit
def _scaled(raw, temperature, scale, softcap, SOFTCAP: tl.constexpr):
    """The logits that are sampled from; greedy rows at temperature 1."""
    z = raw.to(tl.float32) * scale
    if SOFTCAP:
        z = z / softcap
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))  # tanh
    return z / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def _measure(
    logits, temperatures, tops, masses, firsts, size, stride, scale, softcap,
    SOFTCAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One (row, chunk): its maximum, where it stands, and the sum of exp(z - maximum)."""
    b, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = tl.load(logits + b.to(tl.int64) * stride + token, mask=token < size, other=float("-inf"))
    z = _scaled(raw, tl.load(temperatures + b), scale, softcap, SOFTCAP)
    z = tl.where(token < size, z, float("-inf"))
    top = tl.max(z, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    number = b * tl.num_programs(1) + chunk
    tl.store(tops + number, top)
    tl.store(masses + number, tl.sum(tl.exp(z - safe), 0))
    tl.store(firsts + number, tl.min(tl.where(z == top, token, size), 0))


@triton.jit
def _pick(
    logits, temperatures, tops, masses, firsts, state, out, state_stride, out_stride, size, stride, scale, softcap,
    CHUNKS: tl.constexpr, WIDTH: tl.constexpr, GAMMA: tl.constexpr, SOFTCAP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row: the chunk whose cumulative mass first exceeds uniform * total, then the token inside it."""
    b = tl.program_id(0)
    temperature = tl.load(temperatures + b)
    c = tl.arange(0, WIDTH)
    top_of = tl.load(tops + b * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    mass_of = tl.load(masses + b * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    top = tl.max(top_of, 0)
    mass = mass_of.to(tl.float64) * tl.exp((top_of - top).to(tl.float64))
    mass = tl.where(top_of == float("-inf"), 0.0, mass)
    cumulative = tl.cumsum(mass, 0)
    total = tl.sum(mass, 0)
    counter = tl.load(state + 3 * state_stride + b)
    uniform = _uniform(tl.load(state + 2 * state_stride + b), counter, GAMMA)
    target = tl.minimum(uniform * total, total * (1.0 - 2.220446049250313e-16))
    heaviest = tl.max(tl.where(mass > 0, c, 0), 0)  # rounding must not lead behind the last chunk with mass
    chunk = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), heaviest)
    before = tl.sum(tl.where(c < chunk, mass, 0.0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = tl.load(logits + b.to(tl.int64) * stride + token, mask=token < size, other=float("-inf"))
    z = tl.where(token < size, _scaled(raw, temperature, scale, softcap, SOFTCAP), float("-inf"))
    weight = tl.exp(z - top)
    inside = before + tl.cumsum(weight.to(tl.float64), 0)
    last = tl.max(tl.where(weight > 0, token, 0), 0)
    drawn = tl.minimum(chunk * CHUNK + tl.sum((inside <= target).to(tl.int32), 0), last)
    best = tl.min(tl.where(top_of == top, tl.load(firsts + b * CHUNKS + c, mask=c < CHUNKS, other=size), size), 0)
    drawn = tl.where(temperature == 0.0, best, drawn)
    chosen = tl.load(logits + b.to(tl.int64) * stride + drawn)
    logprob = (_scaled(chosen, temperature, scale, softcap, SOFTCAP) - top).to(tl.float64) - tl.log(total)
    tl.store(out + b, drawn.to(tl.float64))
    tl.store(out + out_stride + b, logprob)
    tl.store(state + b, tl.load(state + b) + 1)
    tl.store(state + state_stride + b, drawn.to(tl.int64))
    tl.store(state + 3 * state_stride + b, counter + 1)


@triton.jit
def _uniform(stream, counter, GAMMA: tl.constexpr):
    """`randomness.uniforms` of one pair: the top 53 bits of SplitMix64."""
    bits = stream + (counter + 1) * GAMMA
    bits = (bits ^ _shifted(bits, 30)) * -4658895280553007687
    bits = (bits ^ _shifted(bits, 27)) * -7723592293110705685
    bits = bits ^ _shifted(bits, 31)
    return _shifted(bits, 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _shifted(bits, BY: tl.constexpr):
    """A logical shift to the right of a signed number."""
    return (bits >> BY) & ((1 << (64 - BY)) - 1)
