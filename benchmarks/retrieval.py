"""Retrieval: how well, how fast, how large. `python -m benchmarks.retrieval [quality load scale] [--json]`.

quality  recall and nDCG on the questions of rag_bench: BM25, and with --encoder (or --dense, an index made before) also
         dense and hybrid.
load     queries per second through `posttrain serve-search` in another process, in batches of 64 and one by one, every
         query another one; seconds of a request at the median and the 99th percentile.
scale    seconds and memory of a BM25 index of --passages made-up passages, and of a search in it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import numpy as np

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.command import build
from posttrain.retrieval.corpus import read_corpus
from posttrain.retrieval.dense import ExactVectors
from posttrain.retrieval.index import build_index, load_index
from posttrain.retrieval.protocol import Retriever

PARTS = ("quality", "load", "scale")
DATA = Path(os.environ.get("POSTTRAIN_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))


def questions(folder: Path) -> tuple[list[dict[str, Any]], dict[str, set[str]]]:
    """The questions for evaluation, and the ids of the gold passages by question."""
    gold: dict[str, set[str]] = defaultdict(set)
    for line in (folder / "qrels.txt").read_text().splitlines():
        query, _, passage, _ = line.split()
        gold[query].add(passage)
    rows = map(json.loads, (folder / "questions.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"].startswith("dev")], gold


def scores_of(retriever: Retriever, rows: list[dict[str, Any]], gold: dict[str, set[str]]) -> dict[str, Any]:
    """{data set: {recall@5, recall@10, ndcg@10}}, the mean over data sets, and seconds."""
    started = time.perf_counter()
    found = asyncio.run(retriever.retrieve([row["question"] for row in rows], 10))
    seconds = time.perf_counter() - started
    by_set: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row, passages in zip(rows, found, strict=True):
        wanted, ids = gold[row["id"]], [passage.id for passage in passages]
        gain = sum(1 / math.log2(rank + 2) for rank, key in enumerate(ids) if key in wanted)
        ideal = sum(1 / math.log2(rank + 2) for rank in range(min(10, len(wanted))))
        recall = [len(wanted & set(ids[:depth])) / len(wanted) for depth in (5, 10)]
        by_set[row["dataset"]].append((recall[0], recall[1], gain / ideal))
    names = ("recall@5", "recall@10", "ndcg@10")
    table = {
        name: dict(zip(names, map(mean, zip(*values, strict=True)), strict=True)) for name, values in by_set.items()
    }
    average = {name: mean(row[name] for row in table.values()) for name in names}
    return {**table, "average": average, "queries": len(rows), "seconds": round(seconds, 2)}


def quality(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = DATA / "rag_bench"
    rows, gold = questions(folder)
    passages = read_corpus(folder / "corpus.jsonl.gz")
    lexical = BM25Retriever.from_passages(passages)
    usual = BM25Retriever.from_passages(passages, k1=1.5, b=0.75)
    result = {"bm25": scores_of(lexical, rows, gold), "bm25 k1=1.5 b=0.75": scores_of(usual, rows, gold)}
    if arguments.encoder is None and arguments.dense is None:
        return result
    from posttrain.retrieval.dense_index import load_dense_index
    from posttrain.retrieval.encoder import EncoderConfig
    from posttrain.retrieval.hybrid import HybridRetriever

    dense_folder = arguments.dense or arguments.work / "rag_bench-dense"
    if not dense_folder.exists():
        build(folder / "corpus.jsonl.gz", dense_folder, "dense", arguments.encoder, ["encoder.dtype=bfloat16"])
    dense = load_dense_index(dense_folder, encoder=EncoderConfig(model=arguments.encoder))
    result["dense"] = scores_of(dense, rows, gold)
    result["hybrid"] = scores_of(HybridRetriever([lexical, dense]), rows, gold)
    return result


@contextmanager
def served(index: Path) -> Iterator[int]:
    """The port of a server in its own process."""
    command = [sys.executable, "-m", "posttrain", "serve-search", str(index), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if "running on" in line)
            port = re.search(r":(\d+) ", line)
            assert port is not None, line
            yield int(port[1])
        finally:
            process.send_signal(signal.SIGINT)


def ask(port: int, bodies: Sequence[bytes], seconds: list[float], failures: list[str]) -> None:
    """One client: its requests one after the other on one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.connect()
    for body in bodies:
        started = time.perf_counter()
        connection.request("POST", "/retrieve", body, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        seconds.append(time.perf_counter() - started)
        if response.status != 200:
            failures.append(answer[:200].decode())
    connection.close()


def measured(port: int, texts: list[str], *, batch: int, clients: int) -> dict[str, Any]:
    payloads = [
        json.dumps({"queries": texts[i : i + batch], "topk": 3, "return_scores": True}).encode()
        for i in range(0, len(texts), batch)
    ]
    seconds: list[float] = []
    failures: list[str] = []
    threads = [
        threading.Thread(target=ask, args=(port, payloads[number::clients], seconds, failures))
        for number in range(clients)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - started
    assert not failures, failures[0]
    return {
        "queries_per_second": round(len(texts) / wall),
        "queries_per_request": batch,
        "clients": clients,
        "requests": len(seconds),
        "p50_ms": round(1000 * median(seconds), 2),
        "p99_ms": round(1000 * quantiles(seconds, n=100)[98], 2),
    }


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = DATA / "rag_bench"
    index = arguments.work / "rag_bench-bm25"
    manifest = build_index(folder / "corpus.jsonl.gz", index, overwrite=True)
    asked = [json.loads(line)["question"] for line in (folder / "questions.jsonl").read_text().splitlines()]
    result: dict[str, Any] = {"passages": manifest["counts"]["passages"]}
    with served(index) as port:
        # "nothing17" is in no passage: it changes no answer, and no query is ever the same
        distinct = (f"{asked[n % len(asked)]} nothing{n}" for n in range(1 << 62))
        measured(port, [next(distinct) for _ in range(640)], batch=64, clients=2)  # warm up
        for name, count, batch, clients in (("batches", 64 * 500, 64, 4), ("singles", 6000, 1, 32)):
            texts = [next(distinct) for _ in range(count)]
            result[name] = measured(port, texts, batch=batch, clients=clients)
    return result


def write_made_up(path: Path, passages: int) -> None:
    """Passages of 20 to 100 words over a million words, frequent as words are (Zipf)."""
    rng = random.Random(0)
    words = [f"w{rank}" for rank in range(1_000_000)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    cumulative = [0.0]
    for weight in weights:
        cumulative.append(cumulative[-1] + weight)
    stock = rng.choices(words, cum_weights=cumulative[1:], k=4_000_000)
    with path.open("w") as stream:
        for number in range(passages):
            length = rng.randint(20, 100)
            start = rng.randrange(len(stock) - length)
            text = " ".join(stock[start : start + length])
            stream.write(f'{{"id": "{number}", "contents": "\\"t{number}\\"\\n{text}"}}\n')


def scale(arguments: argparse.Namespace) -> dict[str, Any]:
    corpus = arguments.work / f"made_up-{arguments.passages}.jsonl"
    if not corpus.exists():
        write_made_up(corpus, arguments.passages)
    index = arguments.work / "made_up-bm25"
    command = [sys.executable, "-m", "posttrain", "index", str(corpus), str(index), "--overwrite", "--json"]
    started = time.perf_counter()
    manifest = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    retriever = load_index(index, check_hashes=False)
    opened = time.perf_counter() - started
    rng = random.Random(1)
    asked = [" ".join(f"w{int(1000 * rng.paretovariate(0.8))}" for _ in range(8)) for _ in range(200)]
    started = time.perf_counter()
    retriever.search(asked, 10)
    return {
        "passages": manifest["counts"]["passages"],
        "corpus_mb": round(corpus.stat().st_size / 1e6),
        "index_mb": round(sum(file["bytes"] for file in manifest["files"].values()) / 1e6),
        "build_seconds": round(seconds, 1),
        "build_cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "build_peak_rss_mb": round(used.ru_maxrss / 1024),
        "open_seconds": round(opened, 2),
        "search_ms_per_query": round(1000 * (time.perf_counter() - started) / len(asked), 2),
        "vectors": vectors(arguments),
    }


def vectors(arguments: argparse.Namespace) -> dict[str, Any]:
    """Exact search over as many random vectors of 384 dimensions, in memory-mapped shards of half precision."""
    folder = arguments.work / "vectors"
    folder.mkdir(exist_ok=True)
    rng, size = np.random.default_rng(0), 8192
    for number, first in enumerate(range(0, arguments.passages, size)):
        rows = min(size, arguments.passages - first)
        np.save(folder / f"{number:05d}.npy", rng.standard_normal((rows, 384), dtype=np.float32).astype(np.float16))
    shards = [np.asarray(np.load(path, mmap_mode="r")) for path in sorted(folder.iterdir())]
    found = ExactVectors(shards)
    queries = rng.standard_normal((64, 384), dtype=np.float32)
    before = own_memory_mb()
    started, used = time.perf_counter(), time.process_time()
    found.search(queries, 100)
    return {
        "shards_mb": round(sum(shard.nbytes for shard in shards) / 1e6),
        "search_ms_per_query_in_64": round(1000 * (time.perf_counter() - started) / len(queries), 2),
        "search_cpu_ms_per_query_in_64": round(1000 * (time.process_time() - used) / len(queries), 2),
        "memory_of_search_mb": own_memory_mb() - before,  # without what the kernel keeps of the mapped files
    }


def own_memory_mb() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[0]) // 1024


def facts() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "machine": platform.machine()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS, help=f"of {', '.join(PARTS)}; all when left out")
    parser.add_argument("--encoder", help="a directory, a hub name, or pkg.mod:function that returns a directory")
    parser.add_argument("--dense", type=Path, help="a dense index of rag_bench's corpus")
    parser.add_argument("--passages", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path, help="folder for what is built; a temporary one when left out")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown part {unknown.pop()!r}; known: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as temporary:
        arguments.work = arguments.work or Path(temporary)
        arguments.work.mkdir(parents=True, exist_ok=True)
        measure = {"quality": quality, "load": load, "scale": scale}
        result = facts() | {part: measure[part](arguments) for part in arguments.parts}
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
