"""Two processes with half of the segments each end with the gradient of one process with all of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cluster.fleet import on_ranks
from posttrain.algorithms import CHOICES, LOSSES
from posttrain.packing import Batch, pack

from .test_invariances import advantages_of, gradient, trajectory, weights_of

RANKS = 2


def mini_batch(loss: str, aggregate: str) -> Batch:
    """Credited and weighed as a whole, before any rank takes its share."""
    rng = random.Random(3)
    made = [one for one in (trajectory(rng, episode, episode % 3) for episode in range(12)) if len(one)]
    batch = pack(made)
    batch.advantages = advantages_of("grpo", batch)
    batch.weights = weights_of(aggregate, batch)
    if loss in CHOICES:
        batch.streams["chosen"] = CHOICES[loss](batch.rollout_logprobs, batch.advantages, batch.loss_mask)
    return batch


def work(folder: str) -> None:
    dist.init_process_group("gloo")  # as the environment says
    rank = dist.get_rank()
    torch.set_num_threads(1)
    found = {}
    for loss in LOSSES:
        for aggregate in ("token_mean", "sequence_mean"):
            batch = mini_batch(loss, aggregate)
            own = gradient(loss, batch, [[s] for s in range(batch.segment_count) if s % RANKS == rank])
            dist.all_reduce(own)
            found[loss, aggregate] = own
    if rank == 0:
        torch.save(found, Path(folder) / "gradients.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_the_number_of_ranks_changes_no_gradient(tmp_path: Path):
    on_ranks(RANKS, tmp_path / "log", work, str(tmp_path))
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert len(found) == 2 * len(LOSSES)
    for (loss, aggregate), summed in found.items():
        batch = mini_batch(loss, aggregate)
        alone = gradient(loss, batch, [list(range(batch.segment_count))])
        assert float(alone.abs().max()) > 1e-3
        torch.testing.assert_close(summed, alone, rtol=0, atol=1e-6)
