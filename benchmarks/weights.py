"""What giving weights to samplers in processes of their own costs: a random model, by broadcast and by disk.

    python benchmarks/weights.py [--layers 14] [--samplers 1 2] [--times 5]

Prints a row per transport and number of samplers (median seconds, probe included, and GB/s of one copy), and ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from posttrain.cluster.asking import PoolSampler
from posttrain.cluster.beside import Samplers, calls_at
from posttrain.cluster.giving import PoolPublisher
from posttrain.cluster.launch import free_port
from posttrain.cluster.line import Exchange
from posttrain.cluster.pool import Pool, State
from posttrain.config import ClusterConfig, ModelConfig, SamplerConfig
from posttrain.loops.build import load_tokenizer
from posttrain.packing import Batch
from posttrain.trainer.policy import Policy
from posttrain.weights.gather import as_json

WIDTH = 768
COMMAND = [sys.executable, "-m", "posttrain", "sample-for-run"]


def random_model(folder: Path, layers: int) -> Policy:
    """In `folder`, with a tokenizer that nobody will miss."""
    tokenizer = load_tokenizer("tiny_search_base")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
    )
    policy = Policy.random(config, seed=0)
    policy.save(folder, tokenizer)
    return policy


@contextmanager
def samplers(count: int) -> Iterator[Pool]:
    """As a launcher would start them."""
    calls = calls_at("127.0.0.1", free_port())
    started = Samplers(count=count, command=COMMAND)
    address = calls["POSTTRAIN_CALLS"].rpartition(":")
    exchange = Exchange(address[0], int(address[2]), calls["POSTTRAIN_SECRET"])
    pool = Pool(exchange, ClusterConfig(samplers=count), lambda line: None)
    exchange.keep_answering("sampler", pool.admit)
    running = [subprocess.Popen(COMMAND, env=os.environ | calls | started.place(n, count)) for n in range(count)]
    try:
        yield pool
    finally:
        pool.close()
        for process in running:
            process.wait()


def measured(policy: Policy, model: Path, count: int, transport: str, times: int) -> dict[str, Any]:
    with samplers(count) as pool, tempfile.TemporaryDirectory() as folder:
        settings = SamplerConfig.model_validate({"transport": transport})

        @torch.no_grad()
        def logprobs(batch: Batch) -> torch.Tensor:
            return policy.logprobs(batch).cpu()

        publisher = PoolPublisher(
            policy=policy,
            pool=pool,
            sampler=PoolSampler(pool),
            settings=settings,
            order=lambda do, *what: None,
            logprobs=logprobs,
            folder=Path(folder) / "weights",
        )
        sections = {"model": ModelConfig(path=str(model)).model_dump(mode="json"), "sampler": settings.model_dump()}
        pool.begin({"do": "begin", **sections, "engines": 1, "manifest": as_json(publisher.manifest)})
        pool.wait_for(lambda: len(pool.members(State.READY)) == count)
        seconds = []
        for version in range(times + 1):
            policy.version = version
            started = time.perf_counter()
            asyncio.run(publisher.publish())
            seconds.append(time.perf_counter() - started)
        publisher.close()
    middle = statistics.median(seconds[1:])  # the first one also forms the group
    return {
        "transport": transport,
        "samplers": count,
        "mb": round(publisher.manifest.bytes / 1e6),
        "first_seconds": round(seconds[0], 2),
        "seconds": round(middle, 2),
        "gb_per_second": round(publisher.manifest.bytes / 1e9 / middle, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        policy = random_model(Path(folder), options.layers)
        for transport in ("broadcast", "disk"):
            for count in options.samplers:
                rows.append(measured(policy, Path(folder), count, transport, options.times))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
