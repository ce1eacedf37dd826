"""One whole RL step, rollout and update, side by side with peers: `python -m benchmarks.step --peer trl --device cpu`.

A peer runs in an environment of its own (see `benchmarks/peers/`), on the same model, the same prompts, the same
lengths and the same tool answers. Peers come one after the other; each lives at the same time as ours, on the same
device, and takes turns with it, round by round, so that whatever else the machine does falls on both. Medians are over
the rounds after the warm-up. A sampler (`--peer vllm`) is compared with our rollout alone. With `--json` the last line
is one object.
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

from benchmarks.work import USUAL, WORKS, Work

ROOT = Path(__file__).resolve().parents[1]
PEERS = {"trl": "benchmarks/peers/trl_step.py", "vllm": "benchmarks/peers/vllm_sampler.py"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # of the parent, whose parallelism is threads of its own
EPISODES_THAT_MAY_FIT = (32, 16, 8)  # TRL's micro-batches on a GPU, tried in this order
OWN_WARMUP = 2  # on a GPU, before a peer lives there
TRAINING_REPEATS = 5


class PeerEnded(RuntimeError):
    """A contender's process is gone; the message ends with what it said."""


class Peer:
    """A contender in another process: one question, one answer."""

    def __init__(self, python: str, script: str, folder: Path, work: Work, *further: str) -> None:
        # spinning OpenMP threads stall beside a busy neighbour; waiting ones lose nothing that shows on an idle machine
        environment = {k: v for k, v in os.environ.items() if k not in ONE_THREAD} | {"OMP_WAIT_POLICY": "PASSIVE"}
        command = [python, str(ROOT / script), "--model", str(folder), "--work", work.name, *further]
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
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise PeerEnded(f"the peer ended:\n{self._log.read()[-3000:]}")
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one work, in seconds; `ratio` is the peer's step over ours, and by parts (None: it does not train)."""

    work: str
    peer_version: str
    rounds: int
    tokens: int
    ours: dict[str, float]
    peer: dict[str, float]
    ratio: float | None
    rollout_ratio: float
    train_ratio: float | None


def start_ours(folder: Path, work: Work, options: argparse.Namespace) -> Any:
    from benchmarks.ours import Ours

    if options.device == "cpu":
        return Ours(folder, work)
    ours = Ours(
        folder,
        work,
        model={"device": "cuda", "dtype": "bfloat16"},
        batch={"tokens_per_micro_batch": options.micro_tokens},
        sampler={"kv_gib": options.kv_gib},
    )
    for round_ in range(OWN_WARMUP):
        mine = ours.step(round_)
        print(f"  {work.name} alone: {mine.rollout:.2f} + {mine.train:.2f} s", file=sys.stderr)
    return ours


def start_peer(name: str, folder: Path, work: Work, options: argparse.Namespace) -> tuple[Peer, dict[str, Any]]:
    """The peer and its first answer; TRL on a GPU with the largest micro-batch that fits beside ours."""
    python, device = options.peer_python.get(name, options.peer_python[""]), ("--device", options.device)
    fitting = EPISODES_THAT_MAY_FIT if name == "trl" and options.device == "cuda" else ()
    for episodes in fitting:
        try:
            peer = Peer(python, PEERS[name], folder, work, *device, "--micro", str(episodes))
            return peer, peer.ask(round=0) | {"micro_batch_tokens": episodes * (work.prompt_tokens + work.most_tokens)}
        except PeerEnded as error:
            if "out of memory" not in str(error) or episodes == fitting[-1]:
                raise
            print(f"  {name}: {episodes} episodes do not fit", file=sys.stderr)
    peer = Peer(python, PEERS[name], folder, work, *device)
    return peer, peer.ask(round=0)


def measure(name: str, ours: Any, folder: Path, options: argparse.Namespace) -> tuple[Row, dict[str, Any]]:
    """Medians, and what the peer said about itself in its last answer."""
    work = ours.work
    if options.device == "cuda":
        import torch

        torch.cuda.empty_cache()  # what ours does not hold is the peer's
    peer, theirs = start_peer(name, folder, work, options)
    constants = {k: v for k, v in theirs.items() if k == "micro_batch_tokens"}
    results: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    for round_ in range(options.warmup + options.rounds):
        with held(options.lock):
            mine = ours.step(round_)
            theirs = peer.ask(round=round_) if round_ else theirs
        assert mine.tokens == theirs["tokens"], f"unequal work: {mine.tokens} and {theirs['tokens']} tokens"
        parts = f"{mine.rollout:.2f} + {mine.train:.2f} s, {name} {theirs['rollout']:.2f} + {theirs['train']:.2f} s"
        print(f"  {work.name} round {round_}: ours {parts}", file=sys.stderr)
        if round_ >= options.warmup:
            results["ours"].append({"step": mine.step, "rollout": mine.rollout, "train": mine.train})
            results["peer"].append(theirs)
    peer.close()
    a, b = ({key: median(r[key] for r in results[who]) for key in ("step", "rollout", "train")} for who in results)
    trains = b["train"] > 0
    row = Row(
        work=work.name,
        peer_version=peer.version,
        rounds=options.rounds,
        tokens=mine.tokens,
        ours=a,
        peer=b,
        ratio=b["step"] / a["step"] if trains else None,
        rollout_ratio=b["rollout"] / a["rollout"],
        train_ratio=b["train"] / a["train"] if trains else None,
    )
    return row, theirs | constants


def alone(ours: Any, options: argparse.Namespace) -> str:
    """Our own medians, for a machine without peers."""
    steps = [ours.step(round_) for round_ in range(options.warmup + options.rounds)][options.warmup :]
    rollout, train, step = (median(getattr(s, part) for s in steps) for part in ("rollout", "train", "step"))
    return f"{ours.work.name}: {step:.3f} s ({rollout:.3f} + {train:.3f}), median of {options.rounds}"


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


def facts(device: str = "cpu") -> dict[str, str]:
    """Where and of what the numbers are. POSTTRAIN_COMMIT names the commit of a tree that came without its history."""
    import torch

    models = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    gpu = "no GPU"
    if device == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        gpu = f"{torch.cuda.get_device_name()}, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
    return {
        "machine": f"{os.cpu_count()} cores {models[0] if models else platform.processor()}, {gpu}",
        "commit": os.environ.get("POSTTRAIN_COMMIT") or _output("git", "rev-parse", "--short=9", "HEAD") or "unknown",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except FileNotFoundError:
        return ""


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def table(rows: Sequence[Row], where: dict[str, str]) -> str:
    lines = [
        f"{where['machine']}; commit {where['commit']}; {where['date']}; torch {where['torch']}",
        "| work | ours s (rollout + train) | peer s (rollout + train) | ratio | rollout | train |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        a, b = row.ours, row.peer
        whole, rollout, train = (
            "" if ratio is None else f"{ratio:.2f}" for ratio in (row.ratio, row.rollout_ratio, row.train_ratio)
        )
        lines.append(
            f"| {row.work} | {a['step']:.2f} ({a['rollout']:.2f} + {a['train']:.2f}) "
            f"| {row.peer_version} {b['step']:.2f} ({b['rollout']:.2f} + {b['train']:.2f}) "
            f"| {whole} | {rollout} | {train} |"
        )
    return "\n".join(lines)


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """By work: the step's; for works of a GPU `NAME_step` and `NAME_rollout`; a sampler's `NAME_rollout_vllm`."""
    found: dict[str, float] = {}
    for row in rows:
        if row.ratio is None:
            found[f"{row.work}_rollout_vllm"] = row.rollout_ratio
        elif row.work in USUAL["cpu"]:
            found[row.work] = row.ratio
        else:
            found |= {f"{row.work}_step": row.ratio, f"{row.work}_rollout": row.rollout_ratio}
    return {key: round(ratio, 3) for key, ratio in found.items()}


def training_report(ours: Any, theirs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """FLOP/s and memory of our training part, beside the peer's peak."""
    from benchmarks.training_part import measure_training

    fastest = measure_training(ours, options.micro_tokens, TRAINING_REPEATS)
    memory = fastest
    if options.memory_tokens != options.micro_tokens:
        memory = measure_training(ours, options.memory_tokens, 1)
    said = {key: theirs[key] for key in ("train_peak_bytes", "micro_batch_tokens") if key in theirs}
    return {
        "training": fastest.as_dict(),
        "memory": memory.as_dict() | {f"peer_{key}": value for key, value in said.items()},
    }


def training_lines(report: dict[str, Any]) -> str:
    training, memory, gib = report["training"], report["memory"], 2**30
    verdict = "never held" if memory["logits_were_never_held"] else "HELD, or smaller than a chunk"
    logits = f"tokens x vocabulary ({memory['tokens_x_vocabulary_bytes']:,} bytes in bfloat16)"
    lines = [
        f"training part at {training['micro_tokens']} tokens a micro-batch: {training['seconds']:.3f} s, "
        f"{training['computed_tokens']} of {training['all_tokens']} tokens computed, "
        f"{training['loss_positions']} loss positions, {training['flops'] / 1e12:.1f} TFLOP: "
        f"{training['train_tflops']:.1f} TFLOP/s, {100 * training['share_of_bf16_peak']:.1f} % of "
        f"{training['bf16_peak_tflops']:.1f}",
        f"memory at {memory['micro_tokens']} tokens a micro-batch: {memory['held_bytes'] / gib:.2f} GiB held "
        f"+ {memory['update_bytes'] / gib:.2f} GiB for the update; largest allocation "
        f"{memory['largest_bytes']:,} bytes; {logits}: {verdict}",
    ]
    if memory.get("peer_train_peak_bytes"):
        lines.append(
            f"peer's training peak: {memory['peer_train_peak_bytes'] / gib:.2f} GiB in all, at "
            f"{memory['peer_micro_batch_tokens']} tokens a micro-batch"
        )
    return "\n".join(lines)


def speeds(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Sampled tokens per second of our rollout and of our whole step, by work; of the last row of each."""
    return {
        row.work: {"rollout": row.tokens / row.ours["rollout"], "step": row.tokens / row.ours["step"]} for row in rows
    }


def interpreters(given: Sequence[str]) -> dict[str, str]:
    """PATH is for all peers, NAME=PATH for one of them."""
    found = {"": os.environ.get("POSTTRAIN_PEER_PYTHON", "python")}
    for text in given:
        name, equals, path = text.rpartition("=")
        if equals and name not in PEERS:
            raise SystemExit(f"--peer-python {text}: no peer is called {name}; there are {', '.join(PEERS)}")
        found[name] = path
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=PEERS, help="may be given twice; default: trl")
    parser.add_argument("--peer-python", action="append", default=[], help="interpreter: PATH, or NAME=PATH")
    parser.add_argument("--device", choices=USUAL, default="cpu")
    parser.add_argument("--work", action="append", choices=WORKS, help="default: all of the device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--micro-tokens", type=int, default=16384, help="of ours, on a GPU")
    parser.add_argument("--memory-tokens", type=int, default=16384, help="the micro-batch whose memory is reported")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="our sampler's cache, on a GPU")
    parser.add_argument("--training", action="store_true", help="also FLOP/s and memory; always on a GPU")
    parser.add_argument("--no-peer", action="store_true", help="ours alone: its steps, FLOP/s and memory")
    parser.add_argument("--lock", help="a file to lock during every round")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args(arguments)
    options.peer = [] if options.no_peer else options.peer or ["trl"]
    options.peer_python = interpreters(options.peer_python)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    from benchmarks.tiny import write_model

    rows: list[Row] = []
    report: dict[str, Any] = {}
    failures: list[str] = []
    for name in options.work or USUAL[options.device]:
        work, theirs = WORKS[name], {}
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), work.model, options.device)
            ours = start_ours(Path(folder), work, options)
            if not options.peer:
                print(alone(ours, options))
            for peer in options.peer:
                try:
                    row, said = measure(peer, ours, Path(folder), options)
                except PeerEnded as error:  # what the others gave is not thrown away
                    failures.append(f"{peer}: {error}")
                    print(failures[-1], file=sys.stderr)
                    continue
                rows.append(row)
                theirs = theirs or said
            if options.training or options.device == "cuda":
                report = training_report(ours, theirs, options)
    where = facts(options.device)
    if rows:
        print(table(rows, where))
    if report:
        print(training_lines(report))
    if options.json:
        peers = "; ".join(dict.fromkeys(row.peer_version for row in rows))
        record = {"ratios": ratios(rows), **where, "peer": peers, "rows": [asdict(row) for row in rows]}
        print(json.dumps(record | {"tokens_per_second": speeds(rows)} | report))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
