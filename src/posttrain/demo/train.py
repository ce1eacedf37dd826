"""The demo's run from start to numbers: evaluate, train, evaluate, evaluate once more without the search tool.

The run is that of `posttrain rl recipes/tiny_search.yaml`, number for number; what the demo measures besides changes
nothing in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.config import RLConfig, load_config
from posttrain.loops import rl
from posttrain.loops.build import env_maker, eval_params, make_collector
from posttrain.loops.evaluate import Evaluation, evaluate
from posttrain.runs.plan import Plan

RECIPE = Path(__file__).resolve().parent.parent / "assets" / "tiny_search.yaml"

OnRow = Callable[[int, Mapping[str, float]], None]
OnPlan = Callable[[Plan], None]


class DemoError(RuntimeError):
    """The demo cannot start as asked; says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished demo: the run, closed, and its evaluations on the questions of the unknown world."""

    run: rl.Run
    before: Evaluation
    before_sampled: Evaluation  # at temperature 1, as in training
    after: Evaluation
    search_off: Evaluation  # after training, every search comes back empty


def run_demo(
    seed: int, out: Path, overrides: Sequence[str] = (), *, on_plan: OnPlan | None = None, on_row: OnRow | None = None
) -> Trained:
    """Trains in `out`/run. Raises DemoError when there is a run already, ConfigError for a wrong override."""
    folder = out / "run"
    if folder.exists():
        raise DemoError(f"{out} already holds a demo; choose another --out, or delete it")
    ours = [f"run.seed={seed}", f"run.dir={folder}", "run.sinks=[]", "eval.at_start=true"]
    keys = {setting.partition("=")[0] for setting in ours}
    if taken := [override for override in overrides if override.partition("=")[0] in keys]:
        raise DemoError(f"the demo sets {taken[0].partition('=')[0]} itself (--seed, --out); leave it out")
    settings = [*ours, *overrides]
    run = rl.start(load_config(RLConfig, RECIPE, settings), on_plan=on_plan)
    seen: dict[int, Evaluation] = {}
    run.on_row, run.on_eval = on_row, seen.__setitem__
    try:
        before_sampled = evaluate_again(run, temperature=1.0)
        rl.train(run)
        search_off = evaluate_again(run, search_enabled=False)
    finally:
        run.close()
    return Trained(
        run=run,
        before=seen[0],
        before_sampled=before_sampled,
        after=seen[run.config.run.steps],
        search_off=search_off,
    )


def evaluate_again(run: rl.Run, *, temperature: float = 0.0, search_enabled: bool = True) -> Evaluation:
    """The run's own evaluation of the weights as they are, under other conditions; leaves no trace in the run."""
    assert run.parts.eval is not None
    env = run.config.env
    options = {**env.options, "search_enabled": search_enabled}
    config = run.config.model_copy(
        update={
            "env": env.model_copy(update={"options": options}),
            "eval": run.config.eval.model_copy(update={"temperature": temperature}),
        }
    )
    parts = replace(run.parts, envs={env.name: env_maker(env.name, config, run.parts.retriever)})
    collector = make_collector(config, parts, run.sampling.sampler, eval_params(config))
    run.sampling.sampler.reset()
    return asyncio.run(evaluate(run.parts.eval, collector, config.eval))
