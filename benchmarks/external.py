"""An unmodified agent of the OpenAI Agents SDK, trained through the endpoint: what it learns, and what HTTP costs.

    python benchmarks/external.py [--steps 12] [--seed 0] [--out runs/external]

Needs pip install 'posttrain[serve]' openai-agents. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from posttrain.config import RLConfig, load_config
from posttrain.loops import rl

ROOT = Path(__file__).resolve().parents[1]


def trained(steps: int, seed: int, out: Path, *overrides: str) -> dict[str, Any]:
    """Trains the recipe; reward before and after, and where the seconds went."""
    config = load_config(
        RLConfig,
        ROOT / "recipes" / "openai_agents.yaml",
        [
            f"run.steps={steps}",
            f"run.seed={seed}",
            f"run.dir={out}",
            f'env.options.agent="{ROOT / "recipes" / "openai_agents.py"}:agent"',
            *overrides,
        ],
    )
    started = time.perf_counter()
    run = rl.start(config)
    rows: dict[int, dict[str, float]] = {}
    run.on_row = lambda step, row: rows.__setitem__(step, dict(row))
    try:
        rl.train(run)
    finally:
        run.close()
    steps_done = [row for step, row in rows.items() if step]
    return {
        "steps": steps,
        "seed": seed,
        "eval_before": rows[0]["eval/reward"],
        "eval_after": rows[steps]["eval/reward"],
        "reward_by_step": [round(row["reward/mean"], 3) for row in steps_done],
        "invalid": sum(row["rollout/invalid"] for row in steps_done),
        "episodes": sum(row["rollout/episodes"] for row in steps_done),
        "calls_of_the_endpoint": round(sum(row["rollout/turns"] * row["rollout/episodes"] for row in steps_done)),
        "rollout_seconds": round(sum(row["time/rollout"] for row in steps_done), 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/external"))
    args = parser.parse_args()
    print(json.dumps(trained(args.steps, args.seed, args.out)))


if __name__ == "__main__":
    main()
