"""Ring attention: values and gradients are those of attention on one rank, for any layout and any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.fleet import on_ranks
from posttrain.packing import Batch, pack
from posttrain.trainer.attention import layout_of
from posttrain.trainer.loading import ModelError
from posttrain.trainer.policy import Policy
from posttrain.trainer.prefix import shared_layout
from posttrain.trainer.ranks import TrainerConfig, join_ranks, leave_ranks
from posttrain.trainer.ring import Rows
from posttrain.trainer.sequence import SequenceGroup, balanced
from posttrain.trainer.sharding import whole
from posttrain.trajectory import Source, Trajectory

from .batches import ragged_batch
from .models import tiny_config, tiny_policy

CPU = torch.device("cpu")


def family(prefix: int, *lengths: int) -> Batch:
    """Segments of one group that share their first `prefix` tokens, and one that stands alone."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(3, 61, (count,), generator=generator).tolist()

    shared, made = some(prefix), []
    for number, length in enumerate(lengths):
        written = Trajectory(task_id="t", group_id="g", episode_id=f"e{number}")
        written.add_context(shared, Source.PROMPT)
        written.add_sampled([3 + number, *some(length)], [-1.0] * (length + 1), 0)
        made.append(written)
    alone = Trajectory(task_id="u", group_id="h", episode_id="alone")
    alone.add_context(some(2), Source.PROMPT)
    alone.add_sampled(some(7), [-1.0] * 7, 0)
    return pack([*made, alone])


BATCHES = {
    "ragged": ragged_batch(),
    "families": family(19, 4, 11, 30),
    "one segment": ragged_batch((300,)),  # more ranks than segments, more queries than a tile
    "one row": ragged_batch((2,)),
}


def agree(names: tuple[str, ...], kind: str, device: str = "cpu") -> None:
    ranks = join_ranks(torch.device(device))
    torch.set_num_threads(1)
    config = TrainerConfig(ranks=ranks.size, sequence_parallel=ranks.size, sequence_parallel_kind=kind)  # type: ignore[arg-type]
    group = SequenceGroup.of(ranks, config)
    for name in names:
        alone, together = (Policy.random(tiny_config(name), seed=0, device=device) for _ in range(2))
        together.shard(ranks, config, group)
        assert together.sequence is not None
        assert together.sequence.kind == "ring"
        for title, batch in BATCHES.items():
            found: list[list[Tensor]] = []
            for policy in (alone, together):
                logprobs, entropy = policy.logprobs_and_entropy(batch)
                (logprobs - 0.3 * entropy).sum().backward()
                gradients = [whole(p.grad) for _, p in policy.parameters() if p.grad is not None]
                found.append([logprobs.detach(), entropy.detach(), *gradients])
                for _, parameter in policy.parameters():
                    parameter.grad = None
            assert len(found[0]) == len(found[1]) > 30
            for one, other in zip(*found, strict=True):
                close = 1e-5 * max(1.0, float(one.abs().max()))
                torch.testing.assert_close(other, one, atol=close, rtol=0, msg=lambda t: f"{name}, {title}: {t}")  # noqa: B023
    leave_ranks()


@pytest.mark.parametrize(
    ("count", "names", "kind"),
    [(2, ("gemma3",), "ring"), (3, ("qwen3", "mistral"), "auto"), (5, ("gemma3",), "auto")],
    ids=["asked for", "heads do not divide", "more ranks than heads"],
)
def test_a_ring_attends_as_one_rank_does(tmp_path: Path, count: int, names: tuple[str, ...], kind: str) -> None:
    """Grouped queries, sliding windows, prefixes computed once."""
    on_ranks(count, tmp_path / "log", agree, names, kind)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus(tmp_path: Path) -> None:
    on_ranks(2, tmp_path / "log", agree, ("qwen3", "gemma3"), "ring", "cuda")


def seen_by_tokens(batch: Batch) -> Tensor:
    """[T, T] bool by the definition: causal, within a segment."""
    same = batch.segment_ids[:, None] == batch.segment_ids
    return same & (batch.positions[:, None] >= batch.positions)


@pytest.mark.parametrize("title", sorted(BATCHES))
def test_rows_see_what_their_tokens_see(title: str) -> None:
    batch = BATCHES[title]
    plain = layout_of(batch.lengths, CPU)
    rows = Rows.of(batch, plain.token_of_row, plain.row_of_token)
    visible = rows.sees(rows, None)[plain.row_of_token][:, plain.row_of_token]
    assert torch.equal(visible, seen_by_tokens(batch))
    windowed = rows.sees(rows, 3)[plain.row_of_token][:, plain.row_of_token]
    assert torch.equal(windowed, seen_by_tokens(batch) & (batch.positions[:, None] - batch.positions < 3))


def test_rows_of_a_shared_prefix_are_seen_by_all_that_go_on_from_it() -> None:
    """| p p .. | a a .. | b b .. |: a continuation sees the prefix and itself, and the prefix sees nobody else."""
    batch = BATCHES["families"]
    layout = shared_layout(batch, CPU)
    assert layout is not None
    rows = Rows.of(batch, layout.token_of_row, layout.row_of_token)
    assert len(rows) < len(batch)
    for segment in range(batch.segment_count):
        at = layout.row_of_token[batch.segment_ids == segment]
        assert torch.equal(rows.sees(rows, None)[at][:, at], torch.ones(len(at), len(at)).tril().bool())
        others = torch.ones(len(rows)).bool()
        others[at] = False
        assert not rows.sees(rows, None)[at][:, others].any()


def test_rows_of_no_token_see_themselves_alone() -> None:
    batch = ragged_batch((3, 5))
    layout = layout_of(batch.lengths, CPU)
    rows = Rows.of(batch, layout.token_of_row, layout.row_of_token).padded(14)
    padding = torch.ones(14).bool()
    padding[layout.row_of_token] = False
    assert int(padding.sum()) == 6  # two of the layout, four behind it
    assert torch.equal(rows.sees(rows, None)[padding], torch.eye(14).bool()[padding])
    assert torch.equal(rows.sees(rows, None)[:, padding], torch.eye(14).bool()[:, padding])


def test_stretches_from_the_front_and_from_the_back() -> None:
    order, place = balanced(2, 4, CPU)
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert place[order].tolist() == list(range(8))
    causal = torch.ones(24, 24).tril()[balanced(3, 8, CPU)[0]]
    assert causal.sum(1).view(3, 8).sum(1).tolist() == [100.0, 100.0, 100.0]  # keys seen, by rank


def test_the_kind_follows_from_the_heads() -> None:
    """Four heads and two key heads."""
    module = tiny_policy("qwen3").module
    kinds = {size: SequenceGroup(0, size, None).fitted(module).kind for size in (2, 3, 4, 8)}
    assert kinds == {2: "ulysses", 3: "ring", 4: "ulysses", 8: "ring"}
    assert SequenceGroup(0, 2, None, kind="ring").fitted(module).kind == "ring"
    assert SequenceGroup(0, 4, None, parts=2).fitted(module).kind == "ring"  # two heads on each rank
    with pytest.raises(
        ModelError, match=r"= 3 cannot share out 4 heads and 2 key heads .*sequence_parallel_kind: ring"
    ):
        SequenceGroup(0, 3, None, kind="ulysses").fitted(module)
    with pytest.raises(ModelError, match="Gemma2ForCausalLM caps its attention scores"):
        SequenceGroup(0, 3, None).fitted(tiny_policy("gemma2").module)
    with pytest.raises(ModelError, match="attention sinks"):
        SequenceGroup(0, 2, None).fitted(tiny_policy("gpt_oss").module)
