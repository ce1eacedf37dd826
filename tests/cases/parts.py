"""Small real parts for tests of whole episodes: a byte-level tokenizer, shelves to search, a scripted sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.chat import Renderer
from posttrain.envs import SearchEnv
from posttrain.episodes import episode_of
from posttrain.retrieval.protocol import Passage
from posttrain.rollout import Limits, RolloutSpec, rollout_group
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.scripted import ScriptedSampler
from posttrain.task import Task
from posttrain.trajectory import Trajectory

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(template: str | None = None, merges: Sequence[tuple[str, str]] = (("a", "b"),)) -> Any:
    """256 byte tokens, the given merges, three control tokens; the end of a turn is <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


class Shelf:
    """A retriever that finds the same passages for every query and remembers the queries."""

    def __init__(self, *contents: str) -> None:
        self.passages = [Passage(str(i), text, 1.0 / (i + 1)) for i, text in enumerate(contents)]
        self.queries: list[str] = []

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.queries.extend(queries)
        return [self.passages[:top_k] for _ in queries]

    async def close(self) -> None:
        return None


class DownShelf(Shelf):
    """A retriever whose server is gone."""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise ConnectionError("nobody answers on port 8000")


class SlowShelf(Shelf):
    """A retriever that never answers."""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        self.queries.extend(queries)
        await asyncio.sleep(20)
        raise AssertionError("slept out")


def task(question: str = "Where is the tower?", task_id: str = "t1") -> Task:
    return Task(id=task_id, prompt=({"role": "user", "content": question},), ground_truth=("Paris",))


def spec(
    script: Any,
    make_env: Callable[[Task], Any] | None = None,
    *,
    tokenizer: Any = None,
    limits: Limits | None = None,
    sampler: Any = None,
    params: SamplingParams | None = None,
) -> RolloutSpec:
    """A rollout over the byte tokenizer; the default env searches a shelf with one passage."""
    tokenizer = tokenizer or byte_tokenizer()
    shelf = Shelf('"Tower"\nThe tower is in Paris.')
    return RolloutSpec(
        make_env=make_env or (lambda task: SearchEnv(retriever=shelf, max_turns=2)),
        sampler=sampler or ScriptedSampler(script, tokenizer),
        renderer=Renderer(tokenizer),
        limits=limits or Limits(),
        params=params or SamplingParams(max_new_tokens=512),
    )


def roll(rollout: RolloutSpec, group_size: int = 1, the_task: Task | None = None, step: int = 0) -> list[Trajectory]:
    """Plays one group to its end. What turns remember of their text is what their tokens say."""
    played = asyncio.run(
        rollout_group(the_task or task(), rollout, group_id="g", group_size=group_size, run_seed=7, step=step)
    )
    for trajectory in played:
        afresh = replace(trajectory, turns=[replace(turn, text=None) for turn in trajectory.turns])
        assert episode_of(trajectory, rollout.renderer) == episode_of(afresh, rollout.renderer)
    return played
