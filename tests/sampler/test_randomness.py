from __future__ import annotations

import torch

from posttrain.sampler.randomness import GOLDEN, mix, signed, stream_of, uniform, uniforms


def splitmix64(state: int, count: int) -> list[int]:
    """The reference generator, as published."""
    out = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_the_stream_is_splitmix64() -> None:
    # the first outputs for state 0 are the published test vector of the generator
    assert splitmix64(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF
    expected = [(bits >> 11) * 2.0**-53 for bits in splitmix64(mix(12345), 4)]
    assert [uniform(12345, i) for i in range(4)] == expected


def test_tensors_and_integers_agree_bit_by_bit() -> None:
    seeds = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**70 + 3]
    streams = torch.tensor([stream_of(s) for s in seeds])
    for index in (0, 1, 17, 100_000):
        got = uniforms(streams, torch.full((len(seeds),), index))
        assert got.dtype == torch.float64
        assert got.tolist() == [uniform(s, index) for s in seeds]


def test_signed_is_the_twos_complement_reading() -> None:
    assert [signed(x) for x in (0, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 2**63 - 1, -(2**63), -1]


def test_numbers_are_uniform_and_uncorrelated_across_seeds_and_indices() -> None:
    count = 200_000
    for seeds, indices in (
        (torch.full((count,), 7), torch.arange(count)),  # one sequence
        (torch.arange(count), torch.zeros(count, dtype=torch.long)),  # neighbouring seeds, first token
    ):
        streams = torch.tensor([stream_of(s) for s in seeds.tolist()])
        u = uniforms(streams, indices)
        assert 0 <= u.min() < 1e-4
        assert 1 - 1e-4 < u.max() < 1
        counts = torch.histc(u, bins=100, min=0, max=1)
        chi_squared = ((counts - count / 100) ** 2 / (count / 100)).sum()
        assert chi_squared < 160  # 99 degrees of freedom: mean 99, this is 4.3 sigma
        correlation = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
        assert abs(correlation) < 0.01
