"""Compiled decode steps give what torch's operations give."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch

import posttrain.sampler
import posttrain.trainer
from posttrain.numba_code import numba_code
from posttrain.sampler.compiled_decoder import FEWEST, Order, compiled_decoder
from posttrain.sampler.draw import DrawSettings, draw
from posttrain.sampler.lean_decoder import lean_decoder
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.randomness import stream_of, uniforms
from posttrain.sampler.requests import Request, SamplerError
from posttrain.sampler.shared_prefix import MOST_MEMBERS

from .tiny import PLAIN, Played, gap, play, policy, prompt, shaken, together

kernels = pytest.importorskip("posttrain.sampler.decode_numba", reason="numba is not installed")


def counting(sampler: NativeSampler, compiled: bool) -> list[int]:
    """The numbers of sequences of the compiled steps to come."""
    (engine,) = sampler.engines
    decoder = engine._compiled
    assert decoder is not None
    seen: list[int] = []
    if not compiled:
        engine._compiled = None
        return seen
    work = decoder.hidden_states
    decoder.hidden_states = lambda order: (seen.append(len(order.requests)), work(order))[1]  # type: ignore[method-assign]
    return seen


def played(sampler: NativeSampler, params: SamplingParams) -> list[Played]:
    """Groups of 12, 5 and 1 with prompts of their own, of which two begin alike, and a second turn."""
    prompts = [prompt(40), [*prompt(40)[:30], *prompt(9, seed=1)], prompt(5)]
    return together(
        *(
            play(sampler, prompts[group], params, seed=100 * group + i, observations=[prompt(3 + i, seed=i)])
            for group, size in enumerate((12, 5, 1))
            for i in range(size)
        )
    )


@pytest.mark.parametrize("name", list(PLAIN))
def test_it_samples_what_torch_samples(name: str) -> None:
    model = shaken(PLAIN[name]())
    params = SamplingParams(max_new_tokens=14)
    with_torch, compiled = NativeSampler(model), NativeSampler(model)
    counting(with_torch, compiled=False)
    steps = counting(compiled, compiled=True)
    expected, found = played(with_torch, params), played(compiled, params)
    assert len(steps) >= 20
    assert max(steps) == 18
    assert [p.sampled_ids for p in found] == [p.sampled_ids for p in expected]
    assert gap(model, found) < 1e-5
    for one, other in zip(found, expected, strict=True):
        for (_, a), (_, b) in zip(one.turns, other.turns, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_it_sees_weights_change_and_move() -> None:
    model = policy("qwen3")
    sampler = NativeSampler(model)
    steps = counting(sampler, compiled=True)
    params = SamplingParams(max_new_tokens=8)
    assert gap(model, played(sampler, params)) < 1e-5
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(0.9)
    model.version += 1
    assert gap(model, played(sampler, params)) < 1e-5
    for weight in model.module.parameters():
        weight.data = weight.data * 1.1
    model.version += 1
    assert gap(model, played(sampler, params)) < 1e-5
    assert len(steps) >= 3 * 10


def test_greedy_and_warm_rows_stand_side_by_side() -> None:
    model = policy("llama")
    params = [SamplingParams(max_new_tokens=10, temperature=t) for t in (0.0, 0.5, 1.0, 1.7)]
    results: list[list[list[int]]] = []
    for compiled in (False, True):
        sampler = NativeSampler(model)
        steps = counting(sampler, compiled)
        runs = together(*(play(sampler, prompt(9), params[i % 4], seed=i) for i in range(20)))
        results.append([run.sampled_ids[0] for run in runs])
        assert bool(steps) == compiled
    assert results[0] == results[1]


def test_few_or_truncated_requests_go_through_torch() -> None:
    model = policy("llama")
    sampler = NativeSampler(model, truncation="allow")
    steps = counting(sampler, compiled=True)
    decoder = sampler.engines[0]._compiled
    assert decoder is not None
    decoder.draw = None  # type: ignore[method-assign, assignment]
    together(*(play(sampler, prompt(9), SamplingParams(max_new_tokens=3), seed=i) for i in range(FEWEST - 1)))
    assert steps == []
    params = SamplingParams(max_new_tokens=3, top_k=2)
    runs = together(*(play(sampler, prompt(9), params, seed=i) for i in range(FEWEST)))
    assert steps == [FEWEST] * 2
    assert all(len(run.sampled_ids[0]) == 3 for run in runs)


def test_a_numba_that_does_not_load_is_told_and_torch_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = NativeSampler(policy("llama"))
    numba_code.cache_clear()
    for room, name in ((posttrain.sampler, "decode_numba"), (posttrain.trainer, "blas_numba")):
        monkeypatch.delitem(sys.modules, f"{room.__name__}.{name}")
        monkeypatch.delattr(room, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    steps = counting(sampler, compiled=True)
    runs = together(*(play(sampler, prompt(9), SamplingParams(max_new_tokens=3), seed=i) for i in range(FEWEST)))
    numba_code.cache_clear()
    assert steps == []
    assert all(len(run.sampled_ids[0]) == 3 for run in runs)
    (record,) = caplog.records
    assert "numba does not load" in record.message


def test_broken_weights_are_noticed() -> None:
    model = policy("llama")
    with torch.no_grad():
        model.module.get_input_embeddings().weight[:, 0] = math.nan  # type: ignore[operator, union-attr]
    sampler = NativeSampler(model)
    with pytest.raises(SamplerError, match="not finite"):
        together(*(play(sampler, prompt(9), SamplingParams(max_new_tokens=3), seed=i) for i in range(FEWEST)))


def test_several_threads_or_unknown_architectures_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NativeSampler(policy("gemma3")).engines[0]._compiled is None
    assert NativeSampler(policy("llama")).engines[0]._compiled is not None
    engine = NativeSampler(policy("llama")).engines[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert compiled_decoder(lean_decoder(engine.policy), engine.cache) is None


def request(ids: list[int]) -> Request:
    return Request(ids, len(ids) - 1, SamplingParams(max_new_tokens=1), 0, rule=None, limit=99)  # type: ignore[arg-type]


def test_those_that_begin_alike_stand_together_in_pieces_that_fit_the_cache() -> None:
    one = [request([1, 2, 3, i]) for i in range(MOST_MEMBERS + 2)]
    two = [request([7, 8, i]) for i in range(2)]
    alone = request([5, 5])
    order = Order.of([one[0], two[0], alone, *one[1:], two[1]], sharing=True)
    table = [tuple(row) for row in order.families.tolist()]
    assert [last - first for first, last, _ in table] == [MOST_MEMBERS, 2, 2, 1]
    assert [shared for *_, shared in table] == [3, 3, 2, 0]
    for first, last, shared in table:
        assert len({tuple(r.ids[:shared]) for r in order.requests[first:last]}) == 1
    assert {id(r) for r in order.requests} == {id(r) for r in (*one, *two, alone)}
    apart = Order.of([*one, alone], sharing=False)
    assert set(apart.families[:, 2].tolist()) == {0}


def test_exponentials_are_right_to_the_last_bits() -> None:
    x = np.linspace(-87, 0, 100_001).astype(np.float32)
    found = x.copy()
    total = kernels._exponentials(found, np.float32(0))
    expected = np.exp(x.astype(np.float64))
    assert np.abs(found / expected - 1).max() < 1e-5  # the argument itself has 24 bits
    near = x > -1
    assert np.abs(found[near] / expected[near] - 1).max() < 3e-7
    assert total == pytest.approx(expected.sum(), rel=1e-5)
    far = np.array([-1e30, -np.inf, -200, 0], np.float32)
    kernels._exponentials(far, np.float32(0))
    assert far.tolist() == [pytest.approx(0, abs=2e-38)] * 3 + [1.0]


def drawn(logits: torch.Tensor, temperatures: list[float], greedy: list[bool], streams: list[int]) -> tuple[Any, Any]:
    ids, logprobs = np.empty(len(logits), np.int64), np.empty(len(logits))
    kernels.draw_tokens(
        logits.numpy().copy(), np.array(temperatures, np.float32), np.array(greedy), np.array(streams),
        np.arange(len(logits)), ids, logprobs,
    )  # fmt: skip
    return torch.from_numpy(ids), torch.from_numpy(logprobs)


@pytest.mark.parametrize("size", [7, 512, 3001])
def test_tokens_are_drawn_as_torch_draws_them(size: int) -> None:
    logits = torch.randn(64, size, generator=torch.Generator().manual_seed(size)) * 3
    temperatures, greedy = [(0.5, 1.0, 1.3)[i % 3] for i in range(64)], [i % 5 == 0 for i in range(64)]
    streams = [stream_of(seed) for seed in range(64)]
    settings = DrawSettings(torch.tensor(temperatures)[:, None], torch.tensor(greedy))
    expected = draw(logits.clone(), uniforms(torch.tensor(streams), torch.arange(64)), settings)
    found = drawn(logits, temperatures, greedy, streams)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found[1], expected[1].double(), atol=2e-6)


def test_uniform_numbers_are_the_same_to_the_bit() -> None:
    streams = [stream_of(seed) for seed in (0, 1, -5, 2**63 - 1, 123456789)]
    for count in (0, 1, 1000):
        expected = uniforms(torch.tensor(streams), torch.full((5,), count)).tolist()
        assert [kernels._uniform(stream, count) for stream in streams] == expected


def test_logits_that_are_not_finite_have_no_log_prob() -> None:
    logits = torch.zeros(4, 5)
    logits[0, 3], logits[1, 0], logits[2, 2] = math.nan, math.inf, -math.inf
    _, logprobs = drawn(logits, [1.0] * 4, [False] * 4, [1] * 4)
    assert torch.isnan(logprobs).tolist() == [True, True, False, False]
    assert logprobs[2:].tolist() == pytest.approx([-math.log(4), -math.log(5)])
