"""A few combinations learn a small task from scratch; benchmarks/learning.py runs all of them."""

from __future__ import annotations

import pytest
import torch

from posttrain.algorithms import ADVANTAGES, AGGREGATES, LOSSES

from .test_docs import script

learning = script("benchmarks/learning.py")
QUICK = [learning.CURATED[i] for i in (0, 3, 4, 8)]  # grpo, gae with a critic, gspo, turn_grpo


@pytest.mark.parametrize("combination", QUICK, ids="-".join)
def test_reward_rises_above_the_line(combination: tuple[str, str, str]):
    torch.set_num_threads(1)
    result = learning.learn(combination)
    assert result.learnt
    assert result.reward > learning.LINE
    assert result.seconds < 60


def test_slices_are_a_partition_of_the_product():
    parts = [learning.combinations(curated=False, part=f"{i}/7") for i in range(7)]
    everything = [combination for part in parts for combination in part]
    assert len(everything) == len(set(everything)) == len(ADVANTAGES) * len(LOSSES) * len(AGGREGATES)
    assert set(learning.CURATED) <= set(everything)


def test_the_table_names_what_did_not_learn():
    results = [
        learning.Result("grpo", "ppo_clip", "token_mean", True, 40, 0.6, 1.0),
        learning.Result("grpo", "ppo_clip", "sequence_mean", True, 60, 0.6, 1.0),
        learning.Result("grpo", "sapo", "token_mean", False, 300, 0.2, 1.0),
    ]
    (line,) = [line for line in learning.table(results).splitlines() if line.startswith("| grpo ")]
    assert "| 60 |" in line
    assert "| not with token_mean |" in line
