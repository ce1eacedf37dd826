"""Which forwards share a compilation, and that there may be as many kinds of them as a run has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from posttrain.packing import Batch
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampled, SamplingParams
from posttrain.trainer import critic as critic_module
from posttrain.trainer import flash_attention
from posttrain.trainer import policy as policy_module
from posttrain.trainer.compiling import compile_layers
from posttrain.trainer.critic import Critic
from posttrain.trainer.loading import LoraConfig, ModelConfig
from posttrain.trainer.lora import with_adapters
from posttrain.trainer.policy import Policy, base_below

from .models import SMALL, tiny_policy
from .test_prefix import E, W, grouped
from .test_prefix_varlen import BATCHES, plain_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # of what the compiler does
Forward = Callable[[Batch], Tensor]
T = TypeVar("T")
RAGGED = [
    *BATCHES.values(),
    [(9, [[(7, W)] * 2] * 3)] * 4,
    [(30, [[(5, W)]] * 8)],
    [(2, [[(3, W), (2, E), (1, W)]] * 3)],
]


def in_a_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


class WrittenOut:
    """Stands for the package of FlashAttention 4, which needs a GPU."""

    @staticmethod
    def _flash_attn_fwd(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        return attended(q, k, v, how), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

    @staticmethod
    def _flash_attn_bwd(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, lse: Tensor, **how: Any
    ) -> tuple[Tensor, ...]:
        def gradients() -> tuple[Tensor, ...]:
            qkv = tuple(x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(attended(*qkv, how), qkv, grad)

        return in_a_thread(gradients)  # in that of an operator nothing is recorded


def attended(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
    assert how["causal"]
    ends = how["cu_seqlens_q"], how["cu_seqlens_k"]
    longest = how["max_seqlen_q"], how["max_seqlen_k"]
    return plain_attention((q, k, v), ends, longest, scaling=how["softmax_scale"], window=None, version=4)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called once models are made: whoever computes has the layout and the operators of a GPU."""

    def attend_so() -> None:
        monkeypatch.setattr(policy_module, "use_shared", lambda *_: False)
        monkeypatch.setattr(policy_module, "use_varlen", lambda *_: True)
        monkeypatch.setattr(policy_module, "version_on", lambda _: 4)
        monkeypatch.setattr(flash_attention, "HEADS_OF_FOUR", (SMALL["head_dim"],))
        monkeypatch.setattr(flash_attention, "_four", lambda: WrittenOut)

    for module in (policy_module, critic_module):
        monkeypatch.setattr(module, "quicken_norms", lambda _: None)
        monkeypatch.setattr(module, "prepare_last_layer", lambda _: False)
    return attend_so


def computing() -> dict[str, tuple[nn.Module, Forward]]:
    """What a run computes with: layers, and a forward through them."""
    whole, frozen, recomputed = (tiny_policy("llama", num_hidden_layers=2) for _ in range(3))
    frozen.module.requires_grad_(False)
    recomputed.checkpoint_activations()
    adapted = Policy(with_adapters(tiny_policy("llama", num_hidden_layers=2).module, LoraConfig(rank=4), seed=0))
    base = base_below(adapted, ModelConfig(path="none", compile=False))
    decoder = tiny_policy("llama", num_hidden_layers=2).decoder
    critic = Critic(decoder, nn.Linear(SMALL["hidden_size"], 1))
    policies = {"whole": whole, "frozen": frozen, "recomputed": recomputed, "adapted": adapted, "below adapters": base}
    return {name: (p.module, p.logprobs) for name, p in policies.items()} | {"critic": (critic.module, critic.values)}


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_all_layers_and_lengths_share_a_compilation(name: str, as_on_a_gpu: Callable[[], None]) -> None:
    """The first batch has as many rows as tokens. Each is in a thread of its own, as some settings of compilers are."""
    counter = CompileCounterWithBackend("aot_eager")
    policy, plain = tiny_policy(name), tiny_policy(name)
    as_on_a_gpu()
    compile_layers(policy.module, counter)
    groups = [
        BATCHES["nothing shared"],
        *BATCHES.values(),
        [(9, [[(1, W)]])],
        [(9, [[(7, W)] * 2] * 3)] * 4,
        [(30, [[(5, W)]] * 8)],
    ]
    counts, gaps = [], []

    def learn(batch: Batch) -> None:
        for one in (policy, plain):
            one.module.zero_grad()
            one.logprobs(batch).sum().backward()
        pairs = zip(policy.module.parameters(), plain.module.parameters(), strict=True)
        gaps.append(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))  # type: ignore[operator]
        counts.append(counter.frame_count)

    for batch in map(grouped, groups):
        in_a_thread(partial(learn, batch))
    assert counts == counts[:1] * len(groups)
    assert max(gaps) < 1e-4


def test_ragged_batches_share_compilations(as_on_a_gpu: Callable[[], None]) -> None:
    """With gradients and without, whatever it is that trains. Decoders alike share them, whoever's they are."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    models, batches = computing(), [grouped(groups) for groups in RAGGED]
    as_on_a_gpu()

    def compute(forward: Forward, batch: Batch, *, grad: bool) -> int:
        with torch.set_grad_enabled(grad):
            out = forward(batch)
        if grad:
            out.sum().backward()
        return counter.frame_count

    for name, (module, forward) in models.items():
        compile_layers(module, counter)
        before = counter.frame_count
        trains = any(p.requires_grad for p in module.parameters())
        for grad in (True, False) if trains else (False,):
            counts = [in_a_thread(partial(compute, forward, batch, grad=grad)) for batch in batches]
            assert counts == counts[:1] * len(batches), (name, grad)
        assert (counter.frame_count == before) == (name in {"critic", "below adapters"}), name


@pytest.mark.usefixtures("as_on_a_gpu")  # its norms, not those for CPUs
def test_a_run_may_have_more_than_eight_kinds_of_forwards() -> None:
    """Layers with windows and without, trained and sampled, beside a frozen reference."""
    torch._dynamo.reset()
    policy, ref, replica = (tiny_policy("qwen2_window", num_hidden_layers=2) for _ in range(3))
    ref.module.requires_grad_(False)
    for model in (policy, ref, replica):
        compile_layers(model.module, "eager")
    batch = grouped(BATCHES["nothing shared"])

    def run() -> Sampled:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            policy.logprobs(batch).sum().backward()
            with torch.no_grad():
                policy.logprobs(batch)
                ref.logprobs(batch)
            return asyncio.run(NativeSampler(replica).sample([3, 4, 5], SamplingParams(max_new_tokens=2), seed=0))

    assert len(in_a_thread(run).ids) == 2


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_layers_are_compiled_on_a_cpu(name: str) -> None:
    """With norms of their own: torch 2.11 fails at those that are written out for CPUs."""
    torch._dynamo.reset()
    compiled, plain = tiny_policy(name), tiny_policy(name)
    compile_layers(compiled.module, "eager")
    assert not any(hasattr(part, "posttrain_rms") for layer in compiled.decoder.layers for part in layer.modules())
    batch = grouped(BATCHES["ragged groups"])
    for policy in (compiled, plain):
        policy.logprobs(batch).sum().backward()
    for ours, expected in zip(compiled.module.parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, atol=1e-4, rtol=1e-4)
