"""A search episode over real passages with the real Qwen3 and Mistral tokenizers."""

import gzip
import itertools
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cases.parts import Shelf, roll, spec
from chat.makers import sentencepiece_tokenizer
from posttrain.envs import SearchEnv, search_prompt
from posttrain.episodes import episode_of
from posttrain.rollout import Limits
from posttrain.task import Task
from posttrain.trajectory import Source, StopReason

TASK = Task(id="t", prompt=({"role": "user", "content": search_prompt("who lives in the tower")},))
SCRIPT = ["<think>I should look.</think>\n<search> tower </search>", "<think>Seen.</think>\n<answer>Nobody</answer>"]


def qwen3(shared_data: Path) -> Any:
    with lzma.open(shared_data / "tokenizers" / "qwen3.tokenizer.json.xz") as file:
        backend = Tokenizer.from_str(file.read().decode())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (shared_data / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return tokenizer


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def tokenizer(request: pytest.FixtureRequest, shared_data: Path) -> Any:
    if request.param == "qwen3":
        return qwen3(shared_data)
    return sentencepiece_tokenizer(shared_data / "tokenizers" / "mistral_v3.tokenizer.model")


@pytest.fixture(scope="module")
def shelf(shared_data: Path) -> Shelf:
    with gzip.open(shared_data / "rag_bench" / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in itertools.islice(file, 40)]
    return Shelf(*(str(row.get("contents") or f"{row.get('title', '')}\n{row.get('text', '')}") for row in rows))


def test_a_search_episode_reads_as_search_r1_writes_it(tokenizer: Any, shelf: Shelf) -> None:
    limits = Limits(max_observation_tokens=3000, max_episode_tokens=6000)
    rollout = spec(SCRIPT, lambda task: SearchEnv(retriever=shelf, top_k=3), tokenizer=tokenizer, limits=limits)
    (trajectory,) = roll(rollout, the_task=TASK)
    trajectory.check()
    segments = episode_of(trajectory, rollout.renderer).segments
    assert [s.source for s in segments] == [Source.PROMPT, Source.POLICY, Source.ENV, Source.POLICY]
    assert [s.text for s in segments if s.source is Source.POLICY] == SCRIPT
    docs = "\n".join(
        f"Doc {i}(Title: {p.contents.partition(chr(10))[0]}) {p.contents.partition(chr(10))[2]}"
        for i, p in enumerate(shelf.passages[:3], start=1)
    )
    assert segments[2].text == f"\n\n<information>{docs.strip()}</information>\n\n"
    assert trajectory.turns[1].tokens_cut == trajectory.turns[1].bytes_cut == 0
    assert trajectory.turns[-1].stop_reason is StopReason.STOP_STRING


@pytest.mark.parametrize("budget", [40, 101, 256])
def test_p57_a_cut_observation_is_a_prefix_with_both_tags(tokenizer: Any, shelf: Shelf, budget: int) -> None:
    limits = Limits(max_observation_tokens=budget)
    rollout = spec(SCRIPT, lambda task: SearchEnv(retriever=shelf, top_k=9), tokenizer=tokenizer, limits=limits)
    (trajectory,) = roll(rollout, the_task=TASK)
    turn = trajectory.turns[1]
    assert budget - 3 <= turn.end - turn.start <= budget
    text = rollout.renderer.decode(trajectory.token_ids[turn.start : turn.end])
    assert text.startswith("\n\n<information>Doc 1(Title: ")
    assert text.endswith("...(truncated)</information>\n\n")
    assert turn.tokens_cut > 0
    assert turn.bytes_cut > 0
    assert not set(trajectory.token_ids[turn.start : turn.end]) & set(tokenizer.all_special_ids)
