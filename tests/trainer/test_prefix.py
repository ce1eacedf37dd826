"""A group's common prefix computed once, against every segment computed whole: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from posttrain.packing import Batch, families_of, micro_batches, pack, segment_bins, select
from posttrain.trainer import policy as policy_module
from posttrain.trainer import prefix as prefix_module
from posttrain.trainer.causal import causal_attention
from posttrain.trainer.critic import Critic
from posttrain.trainer.policy import Policy
from posttrain.trainer.prefix import shared_layout, use_shared
from posttrain.trajectory import Source, Trajectory

from .models import tiny_policy

CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "llama_bias_mha", "qwen2", "qwen2_window", "qwen3", "gemma3", "mistral", "granite", "cohere"]
Group = tuple[int, list[list[tuple[int, Source]]]]  # prompt length, continuations as runs of (tokens, source)
W, E = Source.POLICY, Source.ENV


def grouped(groups: list[Group], *, apart: bool = False) -> Batch:
    """Random trajectories; those of a group begin with the same prompt. `apart`: groups are interleaved."""
    rng = torch.Generator().manual_seed(3)
    made: list[list[Trajectory]] = []
    for g, (prompt_length, continuations) in enumerate(groups):
        prompt = torch.randint(3, 61, (prompt_length,), generator=rng).tolist()
        made.append([])
        for n, runs in enumerate(continuations):
            trajectory = Trajectory(task_id=f"t{g}", group_id=f"g{g}", episode_id=f"g{g}/{n}")
            trajectory.add_context(prompt, Source.PROMPT)
            for count, source in runs:
                ids = torch.randint(3, 61, (count,), generator=rng).tolist()
                if source is W:
                    trajectory.add_sampled(ids, [-1.0] * count, 0)
                else:
                    trajectory.add_context(ids, source)
            made[-1].append(trajectory)
    order = [t for group in made for t in group]
    return pack(order[::2] + order[1::2] if apart else order)


RAGGED: list[Group] = [
    (21, [[(9, W)], [(3, W), (5, E), (4, W)], [(1, W)], [(30, W)]]),  # ragged, several turns, holes
    (12, [[(7, W)]]),  # a group of one
    (9, [[(2, W)] * 4, [(5, E), (6, W)]]),  # continuations that begin with the environment's words
    (4, [[(3, W)], [(5, W)]]),  # too short a prompt to share
    (70, [[(80, W)], [(3, W)], [(79, W)]]),  # longer than a block of queries
]


def both(
    policy: Policy, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(log-probs, entropies, gradient of every parameter) shared and plain."""

    def run() -> tuple[Tensor, ...]:
        logprobs, entropy = policy.logprobs_and_entropy(batch, 0.8)
        weights = torch.linspace(-1, 1, len(batch))
        loss = (weights * logprobs).sum() + 0.1 * (weights.flip(0) * entropy).sum()
        return logprobs, entropy, *torch.autograd.grad(loss, [p for _, p in policy.parameters()])

    shared = run()
    with monkeypatch.context() as patch:
        patch.setattr(policy_module, "use_shared", lambda *_: False)
        return shared, run()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("apart", [False, True], ids=["grouped", "interleaved"])
def test_shared_equals_plain(name: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = tiny_policy(name), grouped(RAGGED, apart=apart)
    assert shared_layout(batch, CPU) is not None
    for ours, plain in zip(*both(policy, batch, monkeypatch), strict=True):
        assert (ours - plain).abs().max() <= 1e-5 * max(1.0, plain.abs().max().item())


def test_a_prompt_is_computed_once() -> None:
    batch = grouped([(20, [[(5, W)]] * 4), (10, [[(5, W)]] * 2)])
    layout = shared_layout(batch, CPU)
    assert layout is not None
    assert len(layout.token_of_row) == 20 + 4 * 5 + 10 + 2 * 5
    assert torch.equal(batch.token_ids[layout.token_of_row][layout.row_of_token], batch.token_ids)
    assert torch.equal(batch.positions[layout.token_of_row][layout.row_of_token], batch.positions)


def test_equal_episodes_and_an_episode_that_begins_another() -> None:
    """What the policy wrote twice is shared as well, and a whole segment may be the prefix."""
    batch = grouped([(10, [[(6, W)], [(6, W)], [(9, W)]])])
    batch.token_ids = torch.cat(
        [batch.token_ids[:16], batch.token_ids[:16], batch.token_ids[:16], batch.token_ids[-3:]]
    )
    policy = tiny_policy("qwen3")
    layout = shared_layout(batch, CPU)
    assert layout is not None
    assert len(layout.token_of_row) == 16 + 3
    alone = torch.cat([policy.logprobs(select(batch, [s])) for s in range(3)])
    assert (policy.logprobs(batch) - alone).abs().max() < 1e-5


def test_nothing_shared_has_no_layout() -> None:
    assert shared_layout(grouped([(12, [[(4, W)]]), (12, [[(4, W)]])]), CPU) is None


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_take_the_plain_layout(name: str) -> None:
    policy = tiny_policy(name)
    assert not use_shared(policy.device, policy.dtype, policy.module)
    batch = grouped(RAGGED)
    alone = torch.cat([policy.logprobs(select(batch, [s])) for s in range(batch.segment_count)])
    assert (policy.logprobs(batch) - alone).abs().max() < 1e-4


def test_the_critic_shares_too(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = tiny_policy("llama"), grouped(RAGGED)
    critic = Critic(policy.decoder, torch.nn.Linear(32, 1))
    shared = critic.values(batch)
    monkeypatch.setattr(policy_module, "use_shared", lambda *_: False)
    torch.testing.assert_close(shared, critic.values(batch), rtol=1e-5, atol=1e-5)


def test_micro_batches_keep_groups_together() -> None:
    batch = grouped([(20, [[(5, W)]] * 4)] * 3)
    assert segment_bins(batch, 220) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7]]
    assert sorted(s for bin_ in segment_bins(batch, 60) for s in bin_) == list(range(12))
    assert all(sum(batch.lengths[s] for s in bin_) <= 60 for bin_ in segment_bins(batch, 60))
    assert len(segment_bins(grouped([(20, [[(5, W)]] * 4)]), 1000, at_least=2)) == 2


def test_a_shared_prefix_counts_once_against_the_budget() -> None:
    batch = grouped([(100, [[(5, W)]] * 8), (100, [[(7, W)]] * 8)])  # 140 and 156 tokens computed, 840 and 856 in all
    assert segment_bins(batch, 296, shared=True) == [list(range(16))]
    assert segment_bins(batch, 295, shared=True) == [list(range(8, 16)), list(range(8))]
    pieces = segment_bins(batch, 128, shared=True)
    assert sorted(s for piece in pieces for s in piece) == list(range(16))
    for piece in pieces:
        (family,) = families_of(select(batch, piece))
        assert family.tokens([batch.lengths[s] for s in piece]) <= 128
    with pytest.raises(ValueError, match="a sequence of 107 tokens"):
        segment_bins(batch, 104, shared=True)


def test_gradients_do_not_depend_on_micro_batches() -> None:
    policy, batch = tiny_policy("qwen3"), grouped(RAGGED)
    parameters = [p for _, p in policy.parameters()]

    def gradients(budget: int) -> list[Tensor]:
        parts = micro_batches(batch, budget)
        return [sum(g) for g in zip(*(torch.autograd.grad(policy.logprobs(p).sum(), parameters) for p in parts))]  # type: ignore[misc]  # noqa: B905

    for whole, parted in zip(gradients(10_000), gradients(160), strict=True):
        torch.testing.assert_close(whole, parted, rtol=1e-4, atol=1e-4)


def test_families_know_what_is_computed() -> None:
    batch = grouped([(20, [[(5, W)], [(7, W)]]), (12, [[(3, W)]])])
    families = families_of(batch)
    assert [f.segments for f in families] == [(0, 1), (2,)]
    assert [f.tokens(batch.lengths) for f in families] == [32, 15]


@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(("prefix", "length"), [(0, 1), (0, 150), (9, 4), (130, 70)])
def test_causal_attention_is_softmax_attention(prefix: int, length: int, window: int | None) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, tokens, 8, generator=rng, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((4, length), (2, prefix + length), (2, prefix + length))
    )
    behind = torch.arange(prefix, prefix + length)[:, None] - torch.arange(prefix + length)
    visible = (behind >= 0) & (behind < (window or 10**9))
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(~visible, -torch.inf)
    plain = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    ours = causal_attention(q, k, v, scaling=0.3, window=window)
    torch.testing.assert_close(ours, plain)
    seed = torch.randn(plain.shape, generator=rng, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), seed), torch.autograd.grad(plain, (q, k, v), seed), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_scores_are_divided_among_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block size gives the same numbers."""
    from posttrain.trainer import causal

    q, k = torch.randn(3, 4, 40, 8), torch.randn(3, 2, 50, 8)
    whole = causal_attention(q, k, k, scaling=0.5)
    monkeypatch.setattr(causal, "QUERY_BLOCK", 7)
    monkeypatch.setattr(causal, "SCORES_AT_ONCE", 1)
    torch.testing.assert_close(causal_attention(q, k, k, scaling=0.5), whole)


def test_sharing_is_worth_a_minimum() -> None:
    assert prefix_module.families_of(grouped([(7, [[(4, W)], [(3, W)]])]))[0].prefix == 0
