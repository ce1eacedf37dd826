"""Batches for trainer tests: ragged lengths, several turns with holes in the mask, segments of length 1 and 2."""

from __future__ import annotations

import torch

from posttrain.packing import Batch, pack
from posttrain.trajectory import Source, Trajectory

RAGGED = (1, 2, 23, 9, 24, 14, 2, 31)


def trajectory(length: int, seed: int, vocabulary: int = 61) -> Trajectory:
    """Prompt, then turns of 3 policy tokens and 2 tokens of the environment."""
    ids = torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    written = Trajectory(task_id=f"t{seed}", group_id=f"g{seed}", episode_id=f"e{seed}")
    written.add_context(ids[:1], Source.PROMPT)
    for start in range(1, length, 5):
        turn, observation = ids[start : start + 3], ids[start + 3 : start + 5]
        written.add_sampled(turn, [-1.0] * len(turn), 0)
        written.add_context(observation, Source.ENV)
    return written


def ragged_batch(lengths: tuple[int, ...] = RAGGED, vocabulary: int = 61) -> Batch:
    return pack([trajectory(length, seed, vocabulary) for seed, length in enumerate(lengths)])
