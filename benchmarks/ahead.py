"""What running ahead is worth: the tiny search agent with a search that takes its time, for several bounds.

    python benchmarks/ahead.py [--steps 20] [--bounds null 0 1 2] [--seconds 0.2 2.0] [--keep FOLDER]

A search takes between the two `--seconds`, drawn per query. Prints a row per bound and ends with one JSON line. The run
directories that are kept, FOLDER/BOUND, are what `benchmarks/schedule.py` simulates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config import RLConfig, load_config
from posttrain.envs import Action, Step
from posttrain.envs.search import SearchEnv
from posttrain.loops import rl
from posttrain.retrieval.protocol import Retriever

ROOT = Path(__file__).resolve().parents[1]


class SlowSearch(SearchEnv):
    """The same answers, later."""

    def __init__(
        self, *, retriever: Retriever, seconds: tuple[float, float], top_k: int = 2, max_turns: int = 3
    ) -> None:
        super().__init__(retriever=retriever, top_k=top_k, max_turns=max_turns)
        self._seconds = seconds

    async def step(self, action: Action) -> Step:
        step = await super().step(action)
        if step.observation is None or step.done:
            return step
        seconds = random.Random(action.text).uniform(*self._seconds)
        await asyncio.sleep(seconds)
        first, *others = step.calls
        return replace(step, calls=(replace(first, seconds=first.seconds + seconds), *others))


def trained(bound: str, steps: int, seconds: tuple[float, float], out: Path) -> dict[str, Any]:
    """Seconds a step (median, without the first two), what they went to, and what was learnt."""
    config = load_config(
        RLConfig,
        ROOT / "recipes" / "tiny_search.yaml",
        [
            f"run.steps={steps}",
            f"run.dir={out}",
            "run.sinks=[]",
            "eval.every=0",
            f'env.name="{Path(__file__).resolve()}:SlowSearch"',
            f"env.options.seconds={list(seconds)}",
            f"sampling.max_staleness={bound}",
        ],
    )
    run = rl.start(config)
    rows: dict[int, dict[str, float]] = {}
    run.on_row = lambda step, row: rows.__setitem__(step, dict(row))
    started = time.perf_counter()
    try:
        rl.train(run)
    finally:
        run.close()
    later = [rows[step] for step in range(3, steps + 1)]
    return {
        "max_staleness": bound,
        "seconds_a_step": round(statistics.median(row["time/step"] for row in later), 2),
        "waiting_for_rollouts": round(statistics.median(row["time/rollout"] for row in later), 2),
        "updating": round(statistics.median(row["time/update"] for row in later), 2),
        "staleness": round(statistics.mean(row["gap/staleness"] for row in later), 2),
        "em_before": rows[0]["eval/reward"],
        "em_after": rows[steps]["eval/reward"],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bounds", nargs="+", default=["null", "0", "1", "2"])
    parser.add_argument("--seconds", nargs=2, type=float, default=[0.2, 2.0])
    parser.add_argument("--keep", type=Path, help="a folder for the run directories; else they go")
    args = parser.parse_args()
    done: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for bound in args.bounds:
            done.append(trained(bound, args.steps, tuple(args.seconds), folder / bound))
            print(done[-1], flush=True)
    print(json.dumps({"searches_take": args.seconds, "rows": done}))


if __name__ == "__main__":
    main()
