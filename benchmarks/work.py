"""The work that every contender does: sizes, prompts, forced lengths, tool answers. Standard library only, because
peers import it in environments of their own.

Everything random is a function of (round, sample, turn), so that two contenders do the same work in the same round.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

VOCABULARY = 2048  # of the small models
PAD, BOS, EOS = 0, 1, 2
ENDS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}

TINY: dict[str, Any] = {  # Qwen3, 3.7 million parameters
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    **ENDS,
}
HALF_B: dict[str, Any] = {  # the shape of Qwen2-0.5B: 494 million parameters, 358 of them in the layers
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    **ENDS,
}
ONE_AND_A_HALF_B = HALF_B | {  # the shape of Qwen2-1.5B: 1,544 million parameters
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
HALF_B_SHRUNKEN = HALF_B | {  # the same code on a machine without a GPU
    "vocab_size": VOCABULARY,
    "hidden_size": 448,
    "intermediate_size": 1216,
    "num_hidden_layers": 2,
}
MODELS = {"tiny": TINY, "0.5b": HALF_B, "1.5b": ONE_AND_A_HALF_B, "0.5b_shrunken": HALF_B_SHRUNKEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`prompts` x `samples` episodes of one step. A turn writes a number of tokens drawn from `turn_tokens`; after
    every turn but the last a tool answers `observation_tokens` after a time drawn from `latency_seconds`."""

    name: str
    model: str = "tiny"
    prompt_tokens: int
    turn_tokens: tuple[int, int]
    prompts: int = 8
    samples: int = 8
    tool_turns: int = 0
    observation_tokens: int = 0
    latency_seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def episodes(self) -> int:
        return self.prompts * self.samples

    @property
    def turns(self) -> int:
        return self.tool_turns + 1

    @property
    def most_tokens(self) -> int:
        """Of an episode, behind its prompt."""
        return self.turns * self.turn_tokens[1] + self.tool_turns * self.observation_tokens

    def prompt(self, round_: int, place: int) -> str:
        return self._text(f"prompt/{round_}/{place}", self.prompt_tokens)

    def prompt_ids(self, round_: int, place: int) -> list[int]:
        """What the tokenizer makes of `prompt`: word w17 is token 17."""
        return [int(word[1:]) for word in self.prompt(round_, place).split()]

    def length(self, round_: int, episode: int, turn: int) -> int:
        return random.Random(f"length/{round_}/{episode}/{turn}").randint(*self.turn_tokens)

    def observation(self, round_: int, episode: int, turn: int) -> str:
        return self._text(f"observation/{round_}/{episode}/{turn}", self.observation_tokens)

    def latency(self, round_: int, episode: int, turn: int) -> float:
        return random.Random(f"latency/{round_}/{episode}/{turn}").uniform(*self.latency_seconds)

    def _text(self, seed: str, tokens: int) -> str:
        return " ".join(random.Random(seed).choices(words(MODELS[self.model]["vocab_size"]), k=tokens))


@cache
def words(vocabulary: int) -> tuple[str, ...]:
    """One a token, but for pad, bos and eos."""
    return tuple(f"w{i}" for i in range(3, vocabulary))


WORKS = {
    work.name: work
    for work in (
        Work(name="64+64", prompt_tokens=64, turn_tokens=(64, 64)),
        Work(name="256+128", prompt_tokens=256, turn_tokens=(128, 128)),
        Work(
            name="multi_turn",
            prompt_tokens=64,
            turn_tokens=(16, 64),
            tool_turns=3,
            observation_tokens=200,
            latency_seconds=(0.05, 0.5),
        ),
        Work(name="h100", model="0.5b", prompt_tokens=512, turn_tokens=(256, 256), prompts=16),
        Work(name="h100_shrunken", model="0.5b_shrunken", prompt_tokens=64, turn_tokens=(32, 32), prompts=2),
    )
}
USUAL = {"cpu": ("64+64", "256+128", "multi_turn"), "cuda": ("h100",)}  # works by device
