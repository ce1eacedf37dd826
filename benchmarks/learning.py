"""Does every advantage x loss x aggregate learn? `python benchmarks/learning.py [--curated] [--slice 0/10]`.

The task is small enough for hundreds of runs: two turns of two tokens with a tool's token between them; a turn earns
the share of its tokens that repeat the prompt's symbol, the outcome is the mean of both turns. A random transformer of
one layer starts at 1/16. Everything but the rolling out is the real loop: credit, mini-batches, losses, optimizer. A
combination has learnt when the mean reward of three steps in a row is above LINE; it stops then.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config

from posttrain.algorithms import ADVANTAGES, AGGREGATES, LOSSES, VALUE_TARGETS
from posttrain.config import RLConfig, parse_config
from posttrain.loops.collect import Credit, attach_outcome
from posttrain.loops.credit import assign_credit
from posttrain.loops.learner import Learner
from posttrain.loops.update import update
from posttrain.packing import pack
from posttrain.task import Score
from posttrain.trainer.critic import Critic
from posttrain.trainer.optimizer import Optimizer
from posttrain.trainer.policy import Policy, decoder_of, packed_hidden_states
from posttrain.trajectory import Source, Trajectory

VOCABULARY, START, TOOL, SYMBOLS = 16, 1, 2, range(4, 12)
TURNS, TOKENS_PER_TURN, SAMPLES = 2, 2, 8
LINE, MAX_STEPS, IN_A_ROW = 0.5, 300, 3
MODEL = Qwen3Config(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=32, tie_word_embeddings=False,
)  # fmt: skip
CURATED = [
    ("grpo", "ppo_clip", "token_mean"),
    ("dr_grpo", "ppo_clip", "fixed_length"),
    ("rloo", "reinforce", "sequence_sum_mean"),
    ("gae", "ppo_dual_clip", "token_mean"),
    ("grpo", "gspo", "sequence_mean"),
    ("grpo", "cispo", "token_mean"),
    ("reinforce_pp", "ppo_clip", "token_mean"),
    ("remax", "reinforce", "sequence_mean"),
    ("turn_grpo", "sapo", "group_mean"),
    ("optimal_token_baseline", "gmpo", "sequence_mean"),
    ("maxrl", "kl_cov", "group_mean"),
    ("gpg", "gpg", "token_mean"),
]
Combination = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Result:
    """How far a combination came. steps: until the line was passed, or all of them."""

    advantage: str
    loss: str
    aggregate: str
    learnt: bool
    steps: int
    reward: float  # mean of the last three steps
    seconds: float


def config_of(combination: Combination) -> RLConfig:
    advantage, loss, aggregate = combination
    algorithm: dict = {"advantage": advantage, "loss": loss, "aggregate": aggregate}
    if aggregate == "fixed_length":
        algorithm["length"] = TURNS * TOKENS_PER_TURN
    if advantage in ("mt_grpo", "turn_grpo", "turn_gae"):
        algorithm |= {"turn_reward_coef": 1.0}
    if advantage == "pass_at_k":
        algorithm["options"] = {"k": 2, "pass_above": 0.3}
    sections: dict = {"critic": {"optimizer": {"lr": 1e-2}}} if advantage in VALUE_TARGETS else {}
    return parse_config(
        RLConfig,
        {
            "model": {"path": "tiny_search_base", "device": "cpu"},
            "data": {"train": "none.jsonl"},
            "algorithm": algorithm,
            "batch": {"prompts_per_step": len(SYMBOLS), "samples_per_prompt": SAMPLES, "cpu_workers": 1},
            "optimizer": {"lr": 3e-3},
            **sections,
        },
    )


def learner_of(config: RLConfig, seed: int) -> Learner:
    policy = Policy.random(MODEL, seed=seed)
    learner = Learner(config=config, policy=policy, optimizer=Optimizer(policy.parameters(), config.optimizer))
    if config.critic is not None:
        head = nn.Linear(MODEL.hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        learner.critic = Critic(decoder_of(Policy.random(MODEL, seed=seed + 1).module), head)
        learner.critic_optimizer = Optimizer(learner.critic.parameters(), config.critic.optimizer)
    return learner


@torch.no_grad()
def rollout(policy: Policy, symbols: Iterable[int], *, samples: int, generator: torch.Generator | None, step: int):
    """Two turns of every episode side by side; without a generator greedily."""
    made = [
        Trajectory(task_id=str(symbol), group_id=f"{step}/{symbol}", episode_id=f"{step}/{symbol}/{i}")
        for symbol in symbols
        for i in range(samples)
    ]
    for one in made:
        one.add_context([START, int(one.task_id)], Source.PROMPT)
    for turn in range(TURNS):
        for _ in range(TOKENS_PER_TURN):
            batch = pack(made)
            rows, hidden = packed_hidden_states(policy, batch)
            last = torch.tensor(batch.lengths).cumsum(0) - 1
            logprobs = policy.next_token_logits(hidden[rows[last]]).log_softmax(-1)
            chosen = (
                logprobs.argmax(-1)
                if generator is None
                else torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
            )
            for one, token, row in zip(made, chosen.tolist(), logprobs, strict=True):
                one.add_sampled([token], [float(row[token])], policy.version)
        if turn + 1 < TURNS:
            for one in made:
                one.add_context([TOOL], Source.ENV)
    return made


def judge(made: list[Trajectory], credit: Credit) -> list[float]:
    """Rewards on turns and the outcome of every episode; returns the outcomes."""
    outcomes = []
    for one in made:
        hits = [float(token == int(one.task_id)) for token in one.token_ids]
        written = [i for i, source in enumerate(one.source) if source is Source.POLICY]
        ends = written[TOKENS_PER_TURN - 1 :: TOKENS_PER_TURN]
        one.rewards = [0.0] * len(one)
        for end in ends:
            one.rewards[end] = sum(hits[end - TOKENS_PER_TURN + 1 : end + 1]) / TOKENS_PER_TURN / TURNS
        outcomes.append(sum(hits[i] for i in written) / len(written))
        attach_outcome([one], Score(outcomes[-1]), credit)
    return outcomes


def learn(combination: Combination, seed: int = 0) -> Result:
    began = time.monotonic()
    config = config_of(combination)
    learner, generator = learner_of(config, seed), torch.Generator().manual_seed(seed)
    credit = Credit(turns=config.algorithm.turn_reward_coef)
    rewards: list[float] = []
    for step in range(1, MAX_STEPS + 1):
        made = rollout(learner.policy, SYMBOLS, samples=SAMPLES, generator=generator, step=step)
        outcomes = judge(made, credit)
        rewards.append(sum(outcomes) / len(outcomes))
        if len(rewards) >= IN_A_ROW and min(rewards[-IN_A_ROW:]) > LINE:
            break
        if config.algorithm.needs_greedy:
            attach_greedy(learner.policy, made, credit, step)
        update(learner, assign_credit(made, learner), step=step)
    last = rewards[-IN_A_ROW:]
    seconds = round(time.monotonic() - began, 2)
    return Result(*combination, min(last) > LINE, len(rewards), round(sum(last) / len(last), 3), seconds)


def attach_greedy(policy: Policy, made: list[Trajectory], credit: Credit, step: int) -> None:
    greedy = rollout(policy, SYMBOLS, samples=1, generator=None, step=step)
    judge(greedy, credit)
    earned = {one.group_id: sum(one.rewards or ()) for one in greedy}
    for one in made:
        one.streams["greedy_returns"] = [earned[one.group_id]] * len(one)


def combinations(*, curated: bool, part: str) -> list[Combination]:
    """All of them, shuffled once and dealt to slices: "1/8" is the second of eight."""
    if curated:
        return CURATED
    every = list(product(sorted(ADVANTAGES), sorted(LOSSES), sorted(AGGREGATES)))
    random.Random(0).shuffle(every)
    number, count = map(int, part.split("/"))
    return every[number::count]


def table(results: list[Result]) -> str:
    """Steps to the line, advantages x losses: the slowest aggregate counts; a dash where none has run."""
    losses = sorted(LOSSES)
    lines = [f"| advantage | {' | '.join(losses)} |", f"|---|{'---|' * len(losses)}"]
    for advantage in sorted(ADVANTAGES):
        cells = []
        for loss in losses:
            found = [r for r in results if (r.advantage, r.loss) == (advantage, loss)]
            failed = [r.aggregate for r in found if not r.learnt]
            slowest = max((r.steps for r in found if r.learnt), default=None)
            cells.append(f"not with {', '.join(failed)}" if failed else "-" if slowest is None else str(slowest))
        lines.append(f"| {advantage} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--curated", action="store_true", help="a dozen combinations, each row of a table at least once"
    )
    parser.add_argument("--slice", default="0/1", help="NUMBER/COUNT of the full product")
    parser.add_argument("--only", default="", help='text in "advantage/loss/aggregate", e.g. /token_mean')
    parser.add_argument("--json", type=Path, help="adds results to this file, and leaves out what it has")
    parser.add_argument("--table", action="store_true", help="print the table of the file's results, run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = options.json is not None and options.json.is_file()
    results = [Result(**record) for record in json.loads(options.json.read_text())] if known else []
    done = {(r.advantage, r.loss, r.aggregate) for r in results}
    for combination in [] if options.table else combinations(curated=options.curated, part=options.slice):
        if combination in done or options.only not in "/".join(combination):
            continue
        first = learn(combination)
        results.append(first if first.learnt else learn(combination, seed=1))  # a second try, with another start
        print(results[-1], flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(r) for r in results], indent=0))
    failed = [r for r in results if not r.learnt]
    print(table(results))
    print(f"{len(results) - len(failed)} of {len(results)} learnt; slowest {max(r.seconds for r in results)} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
