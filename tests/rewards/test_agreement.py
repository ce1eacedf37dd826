"""Agreement of judges, by hand and on real labels."""

from __future__ import annotations

import gzip
import json
import math

import pytest

from posttrain.rewards.agreement import agreement, pearson


def test_by_hand():
    found = agreement([1, 1, 0, 0, None], [1, 0, 0, 0, 1])
    assert (found.count, found.accuracy) == (4, 0.75)
    assert found.kappa == pytest.approx((0.75 - 0.5) / 0.5)
    assert found.confusion == {(1, 1): 1, (1, 0): 1, (0, 0): 2}


def test_edges():
    assert math.isnan(agreement([], []).accuracy)
    assert math.isnan(agreement([1, 1], [1, 1]).kappa)
    assert agreement([1, 0], [0, 1]).kappa == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="argument 2"):
        agreement([1], [1, 2])


def test_pearson():
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert math.isnan(pearson([1, 1], [1, 2]))
    with pytest.raises(ValueError, match="cannot be compared"):
        pearson([1], [1, 2])


def labels(path, key):
    with gzip.open(path, "rt") as file:
        return {(row["query_index"], row["sample_index"]): row[key] for row in map(json.loads, file)}


@pytest.mark.parametrize(("judge", "accuracy", "kappa"), [("GPT-5.2", 0.815, 0.56), ("Qwen3-8B", 0.685, 0.201)])
def test_real_judges_against_people(shared_data, judge, accuracy, kappa):
    folder = shared_data / "agent_trajectories"
    truth = labels(folder / "searchr1_hotpotqa_200.jsonl.gz", "final_label")
    said = labels(folder / f"judge_{judge}.jsonl.gz", "final_label")
    assert truth.keys() == said.keys()
    pairs = [(truth[key], said[key]) for key in sorted(truth) if said[key] is not None]
    found = agreement(*zip(*pairs, strict=True))
    assert (found.count, round(found.accuracy, 3), round(found.kappa, 3)) == (200, accuracy, kappa)
