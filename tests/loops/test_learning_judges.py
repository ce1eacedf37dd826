"""Short runs through the public config whose rewards come from judges: the policy learns what they like.

The base model answers at once or asks for a search; a verdict server in a process of its own, a rubric that it grows,
and a reward model that was trained here like searches. Nothing in the runs knows that but the judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from loops.toy import metric_rows, rows, toy_config, trained, write_rows
from posttrain.rewards.model import encode
from posttrain.rewards.scoring import states
from posttrain.trainer.loading import model_path
from rewards.verdict_server import UNWISHED, WISHED, verdict_server

STEPS = 3
QUESTIONS = [f"Where was {name} born?" for name in ("Bapu Tila", "Vesi Luso", "Guma Koto", "Zepa Posi")]


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with verdict_server() as url:
        yield url


def run(folder: Path, reward: dict[str, Any], rubrics: list[dict[str, Any]] | None = None):
    """A finished run, and its mean rewards step by step."""
    more = {} if rubrics is None else {"rubrics": rubrics}
    write_rows(folder / "tasks.jsonl", rows(QUESTIONS, **more))
    source: dict[str, Any] = {"path": str(folder / "tasks.jsonl")}
    if rubrics is not None:
        source |= {"columns": {"ground_truth": "rubrics"}, "ground_truth_format": "opaque"}
    config = toy_config(
        folder,
        data={"train": [source]},
        run={"steps": STEPS},
        batch={"prompts_per_step": 4, "samples_per_prompt": 8},
        optimizer={"lr": 4e-4},
        limits={"max_turn_tokens": 16},
    )
    config = config.model_copy(update={"reward": type(config.reward).model_validate(reward)})
    done = trained(config)
    logged = metric_rows(done)
    assert all(row["rollout/invalid"] == 0 for row in logged.values()), "a busy judge is asked again"
    return done, [row["reward/mean"] for _, row in sorted(logged.items())]


def test_a_policy_learns_what_a_rubric_likes(tmp_path, judge):
    items = [{"description": WISHED, "weight": 1.0}, {"description": UNWISHED, "weight": -1.0}]
    options = {"url": judge, "model": "m", "reads": "final", "backoff_seconds": 0.01}
    done, means = run(tmp_path, {"name": "rubric", "options": options}, items)
    assert means[-1] > means[0] + 0.2, means
    logged = metric_rows(done)
    assert "reward/component/rubric" in logged[1]


def test_a_rubric_grows_and_what_it_found_is_learnt(tmp_path, judge):
    items = [{"description": "The response says anything at all.", "weight": 1.0}]
    options = {"url": judge, "model": "m", "reads": "final", "max_active": 2, "backoff_seconds": 0.01}
    done, means = run(tmp_path, {"name": "evolving_rubric", "options": options}, items)
    assert means[-1] > means[0] + 0.2, means
    (state,) = states(done.parts.rewards).values()
    found = {entry["rubric"]["description"] for kind in ("active", "retired")
             for entries in state["buffer"][kind].values() for entry in entries.values()}  # fmt: skip
    assert found == {WISHED, UNWISHED}
    assert state["generated"] == metric_rows(done)[STEPS]["rubric/generated"] >= 2


def taught(folder: Path) -> Path:
    """A reward model that has learnt to prefer searches to answers, from pairs."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny_search_base"))
    tokenizer.chat_template = None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_labels=1, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = ("Tusaba", "Zelu Works", "Gani Works", "Kobo", "Doli", "Tego Works")
    pairs = [(f"<search> {name} </search>", f"<answer> {name} </answer>") for name in names]
    ids = [
        [torch.tensor([encode(tokenizer, [{"role": "user", "content": q}, {"role": "assistant", "content": text}])])
         for text in pair]
        for pair, q in zip(pairs, QUESTIONS * 2, strict=False)
    ]  # fmt: skip
    for _ in range(8):
        for better, worse in ids:
            gap = model(input_ids=better).logits[0, 0] - model(input_ids=worse).logits[0, 0]
            loss = -torch.nn.functional.logsigmoid(gap)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_policy_learns_what_a_reward_model_likes(tmp_path):
    path = taught(tmp_path / "rm")
    options = {"path": str(path), "squash": True}
    _, means = run(tmp_path, {"name": "model", "options": options})
    assert means[-1] > means[0] + 0.1, means
    assert all(0 <= mean <= 1 for mean in means)
