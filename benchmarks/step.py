"""One whole RL step, rollout and update, side by side with a peer: `python -m benchmarks.step --peer trl --device cpu`.

The peer runs in an environment of its own (see `benchmarks/peers/`), on the same model, the same prompts, the same
lengths and the same tool answers. Both live at the same time and take turns, round by round, so that whatever else the
machine does falls on both; medians are over the rounds after the warm-up. With `--json` the last line is one object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.work import WORKS, Work

ROOT = Path(__file__).resolve().parents[1]
PEERS = {"trl": "benchmarks/peers/trl_step.py"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of the parent, whose parallelism is threads of its own


class Peer:
    """A contender in another process: one question, one answer."""

    def __init__(self, python: str, script: str, folder: Path, work: Work) -> None:
        # spinning OpenMP threads stall beside a busy neighbour; waiting ones lose nothing that shows on an idle machine
        environment = {k: v for k, v in os.environ.items() if k not in ONE_THREAD} | {"OMP_WAIT_POLICY": "PASSIVE"}
        command = [python, str(ROOT / script), "--model", str(folder), "--work", work.name]
        pipe = subprocess.PIPE
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._log, text=True, cwd=ROOT, env=environment
        )
        self.version = self._read()["version"]

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"the peer ended:\n{self._log.read()[-3000:]}")
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one work, in seconds; `ratio` is the peer's step over ours, also by parts."""

    work: str
    rounds: int
    ours: dict[str, float]
    peer: dict[str, float]
    ratio: float
    rollout_ratio: float
    train_ratio: float


def measure(work: Work, folder: Path, options: argparse.Namespace) -> tuple[Row, str]:
    from benchmarks.ours import Ours

    peer = Peer(options.peer_python, PEERS[options.peer], folder, work)
    ours = Ours(folder, work)
    results: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for round_ in range(options.warmup + options.rounds):
        with held(options.lock):
            mine = ours.step(round_)
            theirs = peer.ask(round=round_)
        assert mine.tokens == theirs["tokens"], f"unequal work: {mine.tokens} and {theirs['tokens']} tokens"
        print(f"  {work.name} round {round_}: ours {mine.step:.2f} s, peer {theirs['step']:.2f} s", file=sys.stderr)
        if round_ >= options.warmup:
            results["ours"].append({"step": mine.step, "rollout": mine.rollout, "train": mine.train})
            results["peer"].append(theirs)
    peer.close()
    a, b = ({key: median(r[key] for r in results[who]) for key in ("step", "rollout", "train")} for who in results)
    row = Row(
        work.name, options.rounds, a, b, b["step"] / a["step"], b["rollout"] / a["rollout"], b["train"] / a["train"]
    )
    return row, peer.version


@contextmanager
def held(lock: str | None) -> Iterator[None]:
    """Takes a file lock for a round, on machines that several people measure on."""
    if lock is None:
        yield
        return
    import fcntl

    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def facts() -> dict[str, str]:
    """Where and of what the numbers are."""
    commit = subprocess.run(["git", "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    models = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    import torch

    return {
        "machine": f"{os.cpu_count()} cores {models[0] if models else platform.processor()}, no GPU",
        "commit": commit.stdout.strip() or "unknown",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(rows: Sequence[Row], where: dict[str, str], peer: str) -> str:
    lines = [
        f"{where['machine']}; commit {where['commit']}; {where['date']}; torch {where['torch']}; {peer}",
        f"| work | ours s (rollout + train) | {peer} s (rollout + train) | ratio | rollout | train |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        a, b = row.ours, row.peer
        lines.append(
            f"| {row.work} | {a['step']:.2f} ({a['rollout']:.2f} + {a['train']:.2f}) "
            f"| {b['step']:.2f} ({b['rollout']:.2f} + {b['train']:.2f}) "
            f"| **{row.ratio:.2f}** | {row.rollout_ratio:.2f} | {row.train_ratio:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="trl")
    parser.add_argument(
        "--peer-python", default=os.environ.get("POSTTRAIN_PEER_PYTHON", "python"), help="its interpreter"
    )
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--work", action="append", choices=WORKS, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--lock", help="a file to lock during every round")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args(arguments)

    from benchmarks.tiny import write_tiny

    rows: list[Row] = []
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder))
        for name in options.work or WORKS:
            row, version = measure(WORKS[name], Path(folder), options)
            rows.append(row)
    where = facts()
    print(table(rows, where, version))
    if options.json:
        ratios = {row.work: round(row.ratio, 3) for row in rows}
        print(json.dumps({"ratios": ratios, **where, "peer": version, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
