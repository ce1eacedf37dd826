"""Tiny models and a tokenizer, made in-process, for the sampler's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from posttrain.packing import pack
from posttrain.sampler.lean_decoder import lean_decoder
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory
from posttrain.weights.publish import MAX_GAP_ON_GPU

MERGES = [("<", "/"), ("a", "b"), ("</", "s"), ("s", ">"), (">", "Ċ"), ("ab", "ab")]
VOCABULARY = 256 + len(MERGES) + 2
END, PAD = VOCABULARY - 2, VOCABULARY - 1

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
}
WIDE: dict[str, Any] = SIZES | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(head_dim=8, **SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **SIZES,
    ),
}
WIDE_CONFIGS: dict[str, Any] = {  # heads of 32, as engines with kernels of their own want them
    "llama": lambda: LlamaConfig(**WIDE),
    "qwen2": lambda: Qwen2Config(**WIDE),
    "qwen3": lambda: Qwen3Config(head_dim=32, **WIDE),
    "gemma3": lambda: Gemma3TextConfig(
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **WIDE,
    ),
    "tied": lambda: Qwen3Config(head_dim=32, tie_word_embeddings=True, **WIDE),
}

LONG_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama with biases and long rope": lambda: LlamaConfig(
        attention_bias=True, mlp_bias=True, rope_parameters=LONG_ROPE, **SIZES
    ),
    "mistral with a window": lambda: MistralConfig(sliding_window=7, head_dim=8, **SIZES),
    "qwen2 with windows in some layers": lambda: Qwen2Config(
        use_sliding_window=True, sliding_window=7, max_window_layers=1, **SIZES
    ),
    "qwen3": lambda: Qwen3Config(head_dim=16, **SIZES),
}


@cache
def tokenizer() -> Any:
    """256 bytes, six merges (tokens `</s`, `>\\n` and others that cross the edge of a stop string), <end>, <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    core = Tokenizer(models.BPE(vocab=pieces, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<end>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")


def policy(
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sharp: float = 6.0,
    configs: dict[str, Any] = CONFIGS,
) -> Policy:
    """Random weights, scaled up so that the distributions are far from uniform and depend on the whole context."""
    made = Policy.random(configs[family](), seed=seed, dtype=dtype)
    with torch.no_grad():
        for weight in made.module.parameters():
            if weight.dim() > 1:
                weight.mul_(sharp)
    return made


def shaken(config: Any) -> Policy:
    """Biases and norms, too, away from where they start."""
    made = Policy.random(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.module.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    return made


FLOAT32_GAP = MAX_GAP_ON_GPU if torch.cuda.is_available() else 1e-5  # between log-probs of two engines


def changed(model: Policy, factor: float) -> None:
    """Other weights, in place."""
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(factor)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY - 2, (length,), generator=generator).tolist()


@dataclass
class Played:
    """An episode of sampled turns with fixed observations in between."""

    ids: list[int]
    turns: list[tuple[int, Sampled]] = field(default_factory=list)  # (where it starts, what was sampled)

    @property
    def sampled_ids(self) -> list[list[int]]:
        return [sampled.ids for _, sampled in self.turns]

    def trajectory(self, name: str) -> Trajectory:
        made = Trajectory(task_id="t", group_id="g", episode_id=name)
        for start, sampled in self.turns:
            made.add_context(self.ids[len(made) : start], Source.PROMPT if not len(made) else Source.ENV)
            made.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
        return made


async def play(
    sampler: Sampler,
    ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    session: str | None = None,
    observations: Sequence[Sequence[int]] = (),
) -> Played:
    """A turn, then one more after each observation."""
    played = Played(list(ids))
    for turn in range(len(observations) + 1):
        sampled = await sampler.sample(played.ids, params, seed=seed * 100 + turn, session=session)
        played.turns.append((len(played.ids), sampled))
        played.ids += sampled.ids
        if turn < len(observations):
            played.ids += observations[turn]
    if session is not None:
        sampler.release(session)
    return played


def together(*episodes: Any) -> list[Any]:
    """Runs coroutines concurrently on a fresh event loop."""

    async def main() -> list[Any]:
        return list(await asyncio.gather(*episodes))

    return asyncio.run(main())


def gap(trainer: Policy, episodes: Sequence[Played], temperature: float = 1.0) -> float:
    """The largest difference between a sampled token's log-prob and the trainer's for it."""
    batch = pack([episode.trajectory(f"e{i}") for i, episode in enumerate(episodes)])
    with torch.no_grad():
        logprobs = trainer.logprobs(batch, temperature)
    mask = batch.loss_mask
    return (logprobs[mask].cpu() - batch.rollout_logprobs[mask]).abs().max().item()


def forwarder(trainer: Policy) -> Any:
    """Whose `hidden_states` the sampler's forwards go through."""
    return lean_decoder(trainer) or trainer


async def steps(sampler: Any, count: int) -> None:
    """Waits until the sampler has made that many forwards. Engines on threads wait for an interpreter that spins."""
    on_threads = len(getattr(sampler, "engines", ())) > 1
    while sampler.stats().steps < count:  # noqa: ASYNC110 - the engine has no event to wait for, by design
        await asyncio.sleep(0.001 if on_threads else 0)
