"""One uniform number per (seed, token index), the same on every device and in every batch.

Counter-based: nothing is carried from draw to draw, so what a sequence draws does not depend on its neighbours, on how
many samplers share the work, or on a restart in between.

    u(seed, i) = top 53 bits of mix(mix(seed) + (i + 1) * G),     G = 0x9E3779B97F4A7C15 (2^64 / golden ratio, odd)

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
variant 13 of Stafford): the i-th output of a SplitMix64 stream that starts at mix(seed).
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(value: int) -> int:
    """The 64-bit mixing function on a Python integer; a bijection of [0, 2^64)."""
    value &= _MASK
    for shift, factor in ROUNDS:
        value = ((value ^ (value >> shift)) * factor) & _MASK
    return value ^ (value >> 31)


def stream_of(seed: int) -> int:
    """The start of the stream of `seed`, as a signed 64-bit integer (what a long tensor holds)."""
    return signed(mix(seed))


def signed(value: int) -> int:
    """The two's-complement reading of a 64-bit pattern."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def uniforms(streams: Tensor, indices: Tensor) -> Tensor:
    """[n] float64 in [0, 1) for [n] long `streams` (see `stream_of`) and [n] long token indices from 0."""
    bits = streams + (indices + 1) * signed(GOLDEN)  # int64 products wrap around, as wanted
    for shift, factor in ROUNDS:
        bits = (bits ^ _shift_right(bits, shift)) * signed(factor)
    bits = bits ^ _shift_right(bits, 31)
    return _shift_right(bits, 11).double() * 2.0**-53


def uniform(seed: int, index: int) -> float:
    """`uniforms` for one pair of Python integers."""
    return (mix(mix(seed) + (index + 1) * GOLDEN) >> 11) * 2.0**-53


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """A logical shift: torch's own copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
