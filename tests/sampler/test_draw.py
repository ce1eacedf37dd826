from __future__ import annotations

import pytest
import torch

from posttrain.sampler.draw import DrawSettings, draw, inverse_cdf


def logits_of(probs: list[float], rows: int) -> torch.Tensor:
    return torch.tensor(probs).log().repeat(rows, 1)


@pytest.mark.parametrize("size", [5, 200, 2048, 2049, 5000, 70_000])
def test_inverse_cdf_is_the_plain_one(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(8, size, generator=generator) ** 8
    weights[:, ::3] = 0.0
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64)
    index, total = inverse_cdf(weights, uniforms)
    cumulative = weights.double().cumsum(-1)
    assert torch.allclose(total, cumulative[:, -1], rtol=1e-6)
    for row in range(8):
        below = cumulative[row, index[row] - 1] if index[row] else 0.0
        target = uniforms[row] * cumulative[row, -1]
        slack = 1e-6 * cumulative[row, -1]
        assert below - slack <= target <= cumulative[row, index[row]] + slack
        assert weights[row, index[row]] > 0


@pytest.mark.parametrize("size", [7, 4099])
def test_an_id_without_probability_is_never_drawn_at_the_edges(size: int) -> None:
    weights = torch.zeros(4, size)
    weights[:, 2] = 1.0
    weights[:, 4] = 1e-3
    edges = torch.tensor([0.0, 2.0**-53, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    index, _ = inverse_cdf(weights, edges)
    assert index.tolist() == [2, 2, 4, 2]


def test_frequencies_and_logprobs_are_those_of_the_distribution() -> None:
    probs = [0.5, 0.25, 0.125, 0.125]
    count = 4096
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids, logprobs = draw(logits_of(probs, count), uniforms, DrawSettings())
    assert torch.bincount(ids).tolist() == [count // 2, count // 4, count // 8, count // 8]
    assert torch.allclose(logprobs, torch.tensor(probs).log()[ids])


def test_temperature_is_per_row_and_the_logprob_is_at_that_temperature() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([[0.5], [1.0], [1.5]])
    ids, logprobs = draw(logits.clone(), torch.full((3,), 0.4, dtype=torch.float64), DrawSettings(temperature))
    expected = (logits / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-6)


def test_greedy_rows_take_the_best_and_report_it_at_temperature_one() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    settings = DrawSettings(temperature=torch.ones(2, 1), greedy=torch.tensor([True, False]))
    ids, logprobs = draw(logits.clone(), torch.full((2,), 0.999, dtype=torch.float64), settings)
    assert ids[0] == logits[0].argmax()
    assert ids[1] != logits[1].argmax()
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0], atol=1e-6)


def test_truncated_draws_are_exact_and_renormalised() -> None:
    probs = [0.1, 0.4, 0.2, 0.3]
    uniforms = (torch.arange(700, dtype=torch.float64) + 0.5) / 700
    top_k = DrawSettings(top_k=torch.full((700, 1), 2))
    ids, logprobs = draw(logits_of(probs, 700), uniforms, top_k)
    assert torch.bincount(ids, minlength=4).tolist() == [0, 400, 0, 300]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.0, 4 / 7, 0.0, 3 / 7])[ids])
    top_p = DrawSettings(top_p=torch.full((700, 1), 0.65))  # 0.4 + 0.3 reaches it
    assert torch.equal(draw(logits_of(probs, 700), uniforms, top_p)[0], ids)
    tiny = DrawSettings(top_p=torch.full((700, 1), 1e-9))
    assert set(draw(logits_of(probs, 700), uniforms, tiny)[0].tolist()) == {1}


def test_truncation_is_per_row() -> None:
    settings = DrawSettings(top_k=torch.tensor([[1], [4]]), top_p=torch.ones(2, 1))
    ids, _ = draw(logits_of([0.4, 0.3, 0.2, 0.1], 2), torch.tensor([0.95, 0.95], dtype=torch.float64), settings)
    assert ids.tolist() == [0, 3]


def test_broken_logits_give_a_nan_logprob_and_an_index_in_range() -> None:
    for size in (10, 5000):
        logits = torch.zeros(2, size)
        logits[0, 3] = float("nan")
        ids, logprobs = draw(logits, torch.full((2,), 0.5, dtype=torch.float64), DrawSettings())
        assert 0 <= ids[0] < size
        assert logprobs.isnan().tolist() == [True, False]
