"""The last layer on the rows that are read, against all rows: values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from posttrain.packing import Batch
from posttrain.trainer.critic import Critic
from posttrain.trainer.last_layer import prepare_last_layer, renumbered, rows_read
from posttrain.trainer.policy import Policy

from .batches import ragged_batch
from .models import tiny_policy
from .test_prefix import ARCHITECTURES, RAGGED, E, W, grouped

LONG_PROMPT = [(40, [[(9, W)], [(3, W), (25, E), (4, W)]])]
LONG = [(20, [[(70, W), (200, E), (9, W)], [(5, W), (150, E), (60, W), (90, E), (2, W)], [(3, W), (272, E), (4, W)]])]


def outputs(policy: Policy, batch: Batch) -> tuple[Tensor, ...]:
    logprobs, entropy = policy.logprobs_and_entropy(batch, 0.8)
    weights = torch.linspace(-1, 1, len(batch))
    loss = (weights * logprobs).sum() + 0.1 * (weights.flip(0) * entropy).sum()
    return logprobs, entropy, *torch.autograd.grad(loss, [p for _, p in policy.parameters()])


def assert_both_agree(policy: Policy, batch: Batch) -> None:
    assert policy.narrows
    narrow = outputs(policy, batch)
    policy.narrows = False
    for ours, plain in zip(narrow, outputs(policy, batch), strict=True):
        assert (ours - plain).abs().max() <= 1e-5 * max(1.0, plain.abs().max().item())


@pytest.mark.parametrize("name", [*ARCHITECTURES, "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "groups", [RAGGED, LONG_PROMPT, LONG], ids=["ragged", "long prompt", "whole blocks of unread queries"]
)
def test_some_rows_equal_all_rows(name: str, groups) -> None:
    assert_both_agree(tiny_policy(name), grouped(groups))


def test_segments_of_one_and_two_tokens() -> None:
    assert_both_agree(tiny_policy("llama"), ragged_batch())


def test_with_gradient_checkpointing() -> None:
    policy = tiny_policy("qwen3")
    policy.checkpoint_activations()
    assert_both_agree(policy, grouped(LONG_PROMPT))


def test_adapters_of_the_last_layer_learn() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    assert_both_agree(Policy(peft.get_peft_model(tiny_policy("qwen3").module, config)), grouped(LONG_PROMPT))


def test_a_copy_has_its_own_layer() -> None:
    """The replaced forward belongs to its module, also in a copy."""
    policy = tiny_policy("qwen3")
    other = Policy(copy.deepcopy(policy.module))
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.zero_()
    batch = grouped(LONG_PROMPT)
    assert torch.equal(other.logprobs(batch), tiny_policy("qwen3").logprobs(batch))


def test_unread_rows_pass_through_no_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = tiny_policy("llama"), grouped(LONG_PROMPT)
    seen: list[int] = []
    policy.decoder.layers[-1].mlp.register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape[1]))
    policy.logprobs(batch)
    assert seen == [1 + 8 + 3 + 3]  # the prompt's last token; all but the last of a turn; before and within the second


def test_the_critic_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    critic = Critic(tiny_policy("llama").decoder, nn.Linear(32, 1))
    assert critic.narrows
    batch = grouped(LONG_PROMPT)
    narrow = critic.values(batch)
    critic.narrows = False
    torch.testing.assert_close(narrow, critic.values(batch), rtol=1e-5, atol=1e-5)


def test_a_layer_of_another_build_is_left_alone() -> None:
    """Here one that adds something of its own to every row by its place in the row of tokens."""
    policy = tiny_policy("llama")
    last = policy.decoder.layers[-1]
    del last.forward
    own = type(last).forward

    class Odd(type(last)):
        def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
            places = torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype)
            return own(self, hidden_states, *args, **kwargs) + places[None, :, None]

    last.__class__ = Odd
    assert not prepare_last_layer(policy.decoder)
    assert "forward" not in vars(last)


def test_rows_that_are_read() -> None:
    mask = torch.tensor([False, False, False, True, False])
    rows = torch.tensor([0, 1, 2, 3, 4])
    read = rows_read(rows, 5, mask)
    assert read is not None
    assert read.tolist() == [2]
    assert renumbered(rows, 5, read).tolist() == [-1, -1, 0, -1, -1]
    assert rows_read(rows, 5, torch.zeros(5, dtype=torch.bool)) is None
    assert rows_read(torch.tensor([0, 1]), 1, torch.tensor([False, True])) is None
