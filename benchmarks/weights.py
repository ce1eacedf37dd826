"""What giving weights to samplers in processes of their own costs: a random model, through shared memory, by broadcast
and by disk.

    python benchmarks/weights.py [--layers 14] [--width 768] [--samplers 1 2] [--times 5] [--device cpu]
    python benchmarks/weights.py --device cuda --width 2048 --layers 28 --samplers 1               (two GPUs)
    python benchmarks/weights.py --device cuda --width 2048 --layers 28 --samplers 1 --colocated   (one GPU)

Prints a row per transport and number of samplers: median seconds with loading and probe, those of the transfer and
loading alone, and GB/s of one copy in the latter. Ends with one JSON line. The model is float32 on a CPU, bfloat16
on a GPU. There samplers have other GPUs than the trainer, unless they are colocated, and then there is no broadcast.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.tiny import write_model

from posttrain.cluster.channel import ChannelServer
from posttrain.cluster.pool import Pool, State
from posttrain.cluster.remote_sampler import PoolSampler
from posttrain.cluster.start import devices_for
from posttrain.cluster.supervisor import CALLS, SECRET, Samplers
from posttrain.cluster.weight_sender import PoolPublisher
from posttrain.config import ClusterConfig, ModelConfig, SamplerConfig
from posttrain.packing import Batch
from posttrain.trainer.policy import Policy
from posttrain.weights.gather import as_json

HEAD, VOCABULARY = 64, 512
TRANSPORTS = ("shared", "broadcast", "disk")
COMMAND = [sys.executable, "-m", "posttrain", "sample-for-run"]


def random_model(folder: Path, layers: int, width: int, device: str) -> Policy:
    """In `folder`, with a tokenizer that nobody will miss; drawn on the device, since one core takes a minute for a
    billion weights."""
    shape = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD // 2,
        "head_dim": HEAD,
    }
    return Policy.load(write_model(folder, shape, device), device)


@contextmanager
def samplers(cluster: ClusterConfig, device: str) -> Iterator[Pool]:
    """As a launcher would start them."""
    server, count = ChannelServer("127.0.0.1"), cluster.samplers
    calls = {CALLS: "{}:{}".format(*server.address), SECRET: server.secret}
    devices = devices_for(1, count, colocated=cluster.colocated) if device == "cuda" else ()
    started = Samplers(count=count, command=COMMAND, devices=devices)
    pool = Pool(server, cluster, lambda channel: None)
    server.keep_answering("sampler", pool.admit)
    running = [subprocess.Popen(COMMAND, env=os.environ | calls | started.place(n, count)) for n in range(count)]
    try:
        yield pool
    finally:
        pool.close()
        for process in running:
            process.wait()


def measured(policy: Policy, model: ModelConfig, cluster: ClusterConfig, transport: str, times: int) -> dict[str, Any]:
    with samplers(cluster, model.device) as pool, tempfile.TemporaryDirectory() as folder:
        settings = SamplerConfig.model_validate({"transport": transport, "options": {"kv_gib": 0.5}})

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
        sections = {"model": model.model_dump(mode="json"), "sampler": settings.model_dump()}
        pool.begin({"do": "begin", **sections, "engines": 1, "manifest": as_json(publisher.manifest)})
        pool.wait_for(lambda: len(pool.members(State.READY)) == pool.count)
        seconds, moving = [], []
        for version in range(times + 1):
            policy.version = version
            started = time.perf_counter()
            done = asyncio.run(publisher.publish())
            seconds.append(time.perf_counter() - started)
            moving.append(done.seconds)
        publisher.close()
    middle = statistics.median(moving[1:])  # the first one also forms the group, or opens the memory
    return {
        "transport": transport,
        "samplers": cluster.samplers,
        "mb": round(publisher.manifest.bytes / 1e6),
        "first_seconds": round(seconds[0], 2),
        "seconds": round(statistics.median(seconds[1:]), 3),
        "transfer_seconds": round(middle, 3),
        "gb_per_second": round(publisher.manifest.bytes / 1e9 / middle, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--samplers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--colocated", action="store_true")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        policy = random_model(Path(folder), options.layers, options.width, options.device)
        model = ModelConfig.model_validate({"path": folder, "device": options.device, "compile": False})
        for transport in options.transports:
            if options.colocated and transport == "broadcast":
                continue
            for count in options.samplers:
                cluster = ClusterConfig(samplers=count, colocated=options.colocated)
                rows.append(measured(policy, model, cluster, transport, options.times))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
