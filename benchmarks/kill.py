"""Kills training runs hundreds of times and compares what is left with runs that nobody killed, byte by byte.

    python benchmarks/kill.py --kills 200

Half of the kills hit GRPO runs, half PPO runs with a critic, both at once and at random times; then one run of each is
killed at every kind of moment that `tests/invariants/killing.py` knows. Ends with a table (or `--json`); exit status 1
when any run ended differently.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from invariants.killing import (  # noqa: E402
    AT_EVERY_KIND,
    CONFIGS,
    OFTEN,
    Life,
    Remains,
    live,
    random_lives,
    remains,
)


def kill_often(base: Path, name: str, *, kills: int, seed: int) -> tuple[list[Life], Remains]:
    """The lives of one config, and what an uninterrupted run leaves."""
    base.mkdir()
    live(base / "warm", CONFIGS[name])  # not measured: the server imports
    started = time.monotonic()
    live(base / "whole", CONFIGS[name])
    longest = time.monotonic() - started
    lives = random_lives(base, CONFIGS[name], seed=f"{seed}/{name}", kills=kills, longest=longest)
    pointed = Life(base / "points").lead((*CONFIGS[name], *OFTEN), AT_EVERY_KIND)
    return [*lives, pointed], remains(base / "whole")


def report(name: str, lives: list[Life], expected: Remains) -> dict[str, object]:
    changed = {life.folder.name: found for life in lives if (found := remains(life.folder).differences(expected))}
    moments = Counter(kill.partition("(")[2].rstrip(")") for life in lives for kill in life.kills)
    return {
        "config": name,
        "runs": len(lives),
        "kills": sum(moments.values()),
        "different": changed,
        "moments": dict(sorted(moments.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    each = -(-args.kills // len(CONFIGS))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(CONFIGS)) as pool:
        jobs = {
            name: pool.submit(kill_often, Path(folder) / name, name, kills=each, seed=args.seed) for name in CONFIGS
        }
        reports = [report(name, *job.result()) for name, job in jobs.items()]
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps({"seconds": round(seconds), "cores": os.cpu_count(), "configs": reports}))
    else:
        for one in reports:
            print(
                f"{one['config']}: {one['kills']} kills in {one['runs']} runs, different: {one['different'] or 'none'}"
            )
            print(json.dumps(one["moments"], indent=2))
        print(f"{seconds:.0f} s")
    sys.exit(any(one["different"] for one in reports))


if __name__ == "__main__":
    main()
