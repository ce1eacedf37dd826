"""Makes the small base model that the demo starts from: tokenizer, model, supervised training on demonstrations.

    python recipes/tiny_base.py --out src/posttrain/assets/tiny_search_base

The demonstrations are episodes of the very environment that RL uses later, played by a scripted demonstrator in ever
new worlds. In the end the demonstrator searches properly in only SEARCH_SHARE of them; otherwise it guesses, stops
half-way or asks for the wrong thing. So the base model can read and copy, but seldom chooses to search. No name of any
evaluation world occurs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from posttrain.algorithms.aggregates import token_mean
from posttrain.envs import tiny_world
from posttrain.envs.protocol import Action
from posttrain.envs.search import SearchEnv
from posttrain.packing import Batch, pack
from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.protocol import Passage
from posttrain.task import Task
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, StopReason, Trajectory

SEARCH_SHARE = 0.15
TOP_K, MAX_TURNS = 2, 3
BASE_SEED = 1_000_000  # far from the seeds of the demo's own worlds
CONTROL = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>")
TAGS = ("think", "search", "information", "answer")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [
    "Where",
    "was",
    "born",
    "Who",
    "does",
    "work",
    "for",
    "Which",
    "region",
    "is",
    "in",
    "the",
    "mayor",
    "of",
    "based",
    "founded",
    "employer",
    "birthplace",
    "seat",
    "founder",
    "and",
    "works",
    "by",
    "lies",
    "The",
    "Doc",
    "My",
    "previous",
    "action",
    "invalid",
    "If",
    "want",
    "to",
    "search",
    "should",
    "put",
    "query",
    "between",
    "final",
    "answer",
    "Let",
    "try",
    "again",
    "I",
    "know",
    "this",
    "need",
    "look",
    "it",
    "up",
    "find",
    "next",
    "found",
    "Works",
    "Guild",
    "Institute",
    "Press",
    "Title",
    "give",
    "me",
    "who",
    "not",
    "sure",
]


def vocabulary() -> list[tuple[str, float]]:
    """Pieces with scores for a Unigram tokenizer: words and syllables are cheap, characters dearer, bytes dearest."""
    syllables = [*tiny_world.SYLLABLES, *(s.capitalize() for s in tiny_world.SYLLABLES)]
    pieces = ["▁" + s.capitalize() for s in tiny_world.SYLLABLES] + syllables
    pieces += [f"▁{word}" for word in dict.fromkeys(WORDS)] + ["Where", "Who", "Which", "Doc", "My", "(Title:"]
    pieces += [f"{space}<{slash}{tag}>" for tag in TAGS for slash in ("", "/") for space in ("", "▁")]
    pieces += ["\n\n", '▁"', ")"]
    characters = ["▁", "\n", *(chr(c) for c in range(33, 127))]
    scored = [(piece, -10.0) for piece in dict.fromkeys(pieces)]
    known = {piece for piece, _ in scored}
    scored += [(c, -14.0) for c in characters if c not in known]
    scored += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    return [(piece, -50.0) for piece in CONTROL] + scored


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram(vocabulary(), unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(CONTROL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>", extra_special_tokens=list(CONTROL[2:])
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def think(text: str) -> str:
    return f"<think> {text} </think>"


def search(query: str) -> str:
    return f"{think('I need to look it up.')}<search> {query} </search>"


def answer(text: str, thought: str = "I found it.") -> str:
    return f"{think(thought)}<answer> {text} </answer>"


def demonstration(
    rng: random.Random, question: tiny_world.Question, world: tiny_world.World, share: float
) -> list[str]:
    """The demonstrator's turns for one question: proper search with probability `share`, else one of its bad habits."""
    guess = answer(rng.choice([*world.entities]), "I know this.")
    hops = [question.subject] if question.bridge is None else [question.subject, question.bridge]
    if rng.random() < share:
        return [*map(search, hops), answer(question.answer)]
    habits = {
        "guess": (80, [guess]),
        "stop half-way": (8, [search(hops[0]), answer(question.bridge or rng.choice([*world.entities]))]),
        "ask for something else": (6, [search(rng.choice([*world.entities])), guess]),
        "ask in vain": (6, [search("Who is the mayor"), guess]),
    }
    weights, turns = zip(*habits.values(), strict=True)
    return rng.choices(turns, weights)[0]


def play(
    rng: random.Random, world: tiny_world.World, retriever: BM25Retriever, share: float, tokenizer: Any
) -> Trajectory:
    """One demonstration, through the environment itself."""
    question = rng.choice(world.questions)
    task = Task(id=question.text, prompt=({"role": "user", "content": question.text},))
    trajectory = Trajectory(task_id=task.id, group_id=task.id, episode_id=f"{rng.getrandbits(64):x}")
    prompt = tokenizer.apply_chat_template(list(task.prompt), add_generation_prompt=True, return_dict=False)
    trajectory.add_context(prompt, Source.PROMPT)
    env = SearchEnv(retriever=retriever, top_k=TOP_K, max_turns=MAX_TURNS)
    asyncio.run(_take_turns(trajectory, demonstration(rng, question, world, share), env, tokenizer))
    return trajectory


async def _take_turns(trajectory: Trajectory, turns: list[str], env: SearchEnv, tokenizer: Any) -> None:
    for text in turns:
        ids = tokenizer.encode(text, add_special_tokens=False)
        trajectory.add_sampled(ids, [0.0] * len(ids), 0)  # the demonstrator is certain of every token
        seen = (await env.step(Action(text=text, stop_reason=StopReason.STOP_STRING))).observation
        if seen is not None:
            ids = tokenizer.encode(seen.head + seen.text + seen.tail, add_special_tokens=False)
            trajectory.add_context(ids, Source.ENV)


def demonstrations(job: tuple[int, int, float]) -> list[Trajectory]:
    """`count` demonstrations in a world of their own; `job` = (seed, count, share of proper searching)."""
    seed, count, share = job
    rng, tokenizer = random.Random(f"demonstrations/{seed}"), build_tokenizer()
    world = tiny_world.generate(BASE_SEED + seed, "train")
    retriever = BM25Retriever.from_passages(Passage(row["id"], row["contents"]) for row in world.passages())
    return [play(rng, world, retriever, share, tokenizer) for _ in range(count)]


def share_at(progress: float) -> float:
    """First only proper searching, so that reading and copying are learnt soon; then down to SEARCH_SHARE."""
    return 1.0 if progress < 0.8 else SEARCH_SHARE


def ahead(pool: ProcessPoolExecutor, jobs: Iterable[Any], depth: int) -> Iterator[list[Trajectory]]:
    """Results in order, with at most `depth` jobs in flight."""
    jobs = iter(jobs)
    waiting = deque(pool.submit(demonstrations, job) for job in islice(jobs, depth))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(pool.submit(demonstrations, job) for job in islice(jobs, 1))


def negative_log_likelihood(policy: Policy, batch: Batch) -> torch.Tensor:
    weights = token_mean(batch.loss_mask, batch.episode_index).to(policy.device)
    return -(policy.logprobs(batch) * weights).sum()


def train(policy: Policy, *, steps: int, batch_size: int, workers: int, lr: float) -> None:
    config = OptimizerConfig(
        lr=lr, warmup_optimizer_steps=steps // 20, schedule="cosine", betas=(0.9, 0.98), weight_decay=0.01
    )
    optimizer = Optimizer(policy.parameters(), config, steps)
    jobs = ((step, batch_size, share_at(step / steps)) for step in range(steps))
    started = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for step, trajectories in enumerate(ahead(pool, jobs, 4 * workers)):
            loss = negative_log_likelihood(policy, pack(trajectories))
            loss.backward()
            report = optimizer.step()
            if step % 50 == 0 or step == steps - 1:
                seconds = time.perf_counter() - started
                print(f"step {step:5d}  loss {loss.item():.4f}  lr {report.lr:.2e}  {seconds:.0f} s", flush=True)


@torch.no_grad()
def skill(policy: Policy, seed: int = 7, count: int = 256) -> dict[str, float]:
    """Probability of a whole proper turn, by turn, in a world of the evaluation names: can it read and copy?"""
    rng, tokenizer = random.Random(seed), build_tokenizer()
    world = tiny_world.generate(seed, "eval")
    retriever = BM25Retriever.from_passages(Passage(row["id"], row["contents"]) for row in world.passages())
    shown = [play(rng, world, retriever, 1.0, tokenizer) for _ in range(count)]
    batch = pack(shown)
    logprobs = policy.logprobs(batch).cpu()
    turn = torch.cat(
        [
            torch.cumsum(batch.loss_mask[s].int().diff(prepend=torch.zeros(1, dtype=torch.int)).clamp(min=0), 0)
            for s in [batch.segment_ids == k for k in range(batch.segment_count)]
        ]
    )
    out = {}
    for number in (1, 2, 3):
        inside = batch.loss_mask & (turn == number)
        sums = torch.zeros(count).index_add(0, batch.segment_ids[inside], logprobs[inside])
        present = torch.zeros(count).index_add(0, batch.segment_ids[inside], torch.ones(int(inside.sum()))) > 0
        out[f"turn {number}"] = float(sums[present].exp().mean())
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=256, help="demonstrations per optimizer step")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    policy = Policy.random(model_config(len(tokenizer)), seed=0, device=args.device)
    train(policy, steps=args.steps, batch_size=args.batch_size, workers=args.workers, lr=args.lr)
    print(skill(policy))
    policy.save(args.out, tokenizer)


def model_config(vocabulary_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


if __name__ == "__main__":
    main()
