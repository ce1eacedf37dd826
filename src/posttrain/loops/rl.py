"""The reinforcement-learning loop, synchronous, in one process.

Each step: roll out groups -> score -> assign credit -> update -> log -> evaluate -> checkpoint. The sampler runs the
policy's own module, so that new weights are in place the moment they are made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.config import RLConfig, config_yaml, load_config, plan_of
from posttrain.data import TaskStream
from posttrain.loops.build import Parts, eval_params, load_parts, make_collector, make_sampler, training_params
from posttrain.loops.collect import Collector, check_invalid_share, collect, usable
from posttrain.loops.credit import assign_credit
from posttrain.loops.evaluate import Evaluation, evaluate
from posttrain.loops.learner import Learner, make_learner, save_learner
from posttrain.loops.record import record_groups, record_rollout, record_updates
from posttrain.loops.update import Update, offending_episodes, update
from posttrain.packing import Batch
from posttrain.runs.checkpoint import Checkpoint, CheckpointStore, KeepBest
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import Metrics
from posttrain.runs.plan import Plan
from posttrain.runs.rng import rng_state, seed_everything, set_rng_state
from posttrain.runs.sinks import Sinks
from posttrain.runs.trajectories import write_trajectories
from posttrain.trajectory import Trajectory

log = logging.getLogger("posttrain")
Row = Mapping[str, float]


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything a run consists of; `step` counts finished steps."""

    config: RLConfig
    directory: RunDirectory
    store: CheckpointStore
    plan: Plan
    parts: Parts
    learner: Learner
    stream: TaskStream
    collector: Collector
    eval_collector: Collector
    sinks: Sinks
    step: int = 0
    measured: dict[str, float] = field(default_factory=dict)  # the last evaluation's metrics
    on_row: Callable[[int, Row], None] | None = None

    @property
    def sources(self) -> dict[str, str]:
        return {task.id: task.source for task in self.parts.train}

    def close(self) -> None:
        self.parts.close()
        self.sinks.close()
        self.directory.close()


def plan_only(config: RLConfig) -> Plan:
    """What `start` would execute; reads all data, loads no model, leaves nothing behind."""
    parts = load_parts(config)
    parts.close()
    return plan_of(config, len(parts.train))


def start(config: RLConfig, *, on_plan: Callable[[Plan], None] | None = None) -> Run:
    """A new run: reads all data, prints the plan, makes the directory, loads the model."""
    parts = load_parts(config)
    plan = plan_of(config, len(parts.train))
    if on_plan is not None:
        on_plan(plan)
    directory = RunDirectory.create(config.run.directory, config_yaml(config), plan.render())
    try:
        return _assemble(config, directory, parts, plan, checkpoint=None)
    except BaseException:
        directory.close()
        raise


def resume(path: Path, *, on_plan: Callable[[Plan], None] | None = None) -> Run:
    """The run at `path`, at its latest checkpoint; from the beginning when it was killed before the first one."""
    directory = RunDirectory.resume(path)
    try:
        config = load_config(RLConfig, directory.config_file)
        parts = load_parts(config)
        plan = plan_of(config, len(parts.train))
        if on_plan is not None:
            on_plan(plan)
        latest = _store(config, directory).latest()
        run = _assemble(config, directory, parts, plan, checkpoint=latest)
        directory.rewind(-1 if latest is None else run.step)  # -1: also the evaluation before the first step
    except BaseException:
        directory.close()
        raise
    return run


def train(run: Run) -> Run:
    """Runs all steps that are left. What is finished when this raises is kept and can be resumed."""
    with asyncio.Runner() as runner:
        if run.step == 0 and 0 in run.plan.eval_steps:
            metrics = Metrics()
            _evaluate(run, runner, metrics)
            _log(run, metrics)
        while run.step < run.config.run.steps:
            metrics = Metrics()
            with timed(metrics, "time/step"):
                train_step(run, runner, metrics)
                run.step += 1
                if run.step in run.plan.eval_steps:
                    _evaluate(run, runner, metrics)
            _log(run, metrics)
            if run.step in run.plan.checkpoint_steps:
                checkpoint(run)
        if run.parts.retriever is not None:
            runner.run(run.parts.retriever.close())
    assert run.learner.optimizer.steps_done == run.plan.optimizer_steps, "the plan is what is executed"
    return run


def train_step(run: Run, runner: asyncio.Runner, metrics: Metrics) -> None:
    """Tasks in, new weights out."""
    config, learner, step = run.config, run.learner, run.step + 1

    # 1. roll out: task -> group of trajectories, scored
    tasks = run.stream.next(config.batch.prompts_per_step)
    with timed(metrics, "time/rollout"):
        group_size = config.batch.samples_per_prompt
        trajectories = runner.run(collect(tasks, run.collector, group_size=group_size, step=step))
    record_rollout(metrics, trajectories, run.sources)
    check_invalid_share(trajectories, config.run.max_invalid_share)
    kept = usable(trajectories)

    # 2. assign credit: rewards -> advantages; 3. update
    updates: list[Update] = []
    if kept:
        with timed(metrics, "time/logprobs"):
            batch = assign_credit(kept, learner)
        record_groups(metrics, batch, kept)
        with timed(metrics, "time/update"):
            updates = update(learner, batch, step=step)
        record_updates(metrics, updates, config.algorithm.kl_coef)
        keep_advantages(kept, batch)
    else:
        log.warning("step %d: no usable episode, no update", step)
        learner.optimizer.pass_over(config.batch.optimizer_steps_per_step)

    metrics.record("train/policy_version", learner.policy.version)
    metrics.record("train/optimizer_steps", learner.optimizer.steps_done)
    metrics.record("data/consumed", run.stream.drawn)
    _dump_non_finite(run, updates, kept)
    texts = [run.parts.renderer.decode(t.token_ids) for t in trajectories]
    write_trajectories(run.directory.trajectories, step, trajectories, texts)


def keep_advantages(trajectories: list[Trajectory], batch: Batch) -> None:
    """What was learnt from each token, for the trajectory file."""
    assert batch.advantages is not None
    for trajectory, advantages in zip(trajectories, batch.advantages.split(batch.lengths), strict=True):
        trajectory.streams["advantages"] = advantages.tolist()


def _evaluate(run: Run, runner: asyncio.Runner, metrics: Metrics) -> Evaluation:
    assert run.parts.eval is not None
    with timed(metrics, "time/eval"):
        done = runner.run(evaluate(run.parts.eval, run.eval_collector, run.config.eval))
    done.record(metrics)
    run.measured = {key: value for key, value in metrics.reduce().items() if key.startswith("eval/")}
    return done


def checkpoint(run: Run) -> None:
    """Commits everything that a bit-exact continuation needs."""
    run.directory.sync()
    state = {
        "step": run.step,
        "policy_version": run.learner.policy.version,
        "stream": run.stream.state_dict(),
        "rng": rng_state(),
        "measured": run.measured,
    }
    best = run.config.checkpoint.keep_best
    run.store.commit(
        run.step,
        lambda folder: save_learner(run.learner, folder, run.parts.tokenizer),
        state,
        metric=None if best is None else run.measured.get(best),
    )


def _restore(run: Run, state: dict) -> None:
    for line in run.stream.load_state_dict(state["stream"], changed=run.config.data.changed):
        log.warning("resuming over changed data: %s", line)
    run.step = state["step"]
    run.learner.policy.version = state["policy_version"]
    run.measured = state["measured"]
    set_rng_state(state["rng"])


def _assemble(
    config: RLConfig, directory: RunDirectory, parts: Parts, plan: Plan, *, checkpoint: Checkpoint | None
) -> Run:
    seed_everything(config.run.seed)
    learner = make_learner(config, plan.optimizer_steps, None if checkpoint is None else checkpoint.path)
    stream_seed = config.run.seed if config.data.seed is None else config.data.seed
    sampler = make_sampler(learner.policy, parts)
    run = Run(
        config=config,
        directory=directory,
        store=_store(config, directory),
        plan=plan,
        parts=parts,
        learner=learner,
        stream=TaskStream(parts.train, seed=stream_seed, shuffle=config.data.shuffle),
        collector=make_collector(config, parts, sampler, training_params(config)),
        eval_collector=make_collector(config, parts, sampler, eval_params(config)),
        sinks=Sinks(directory, config.run.sinks, first_step=0 if checkpoint is None else checkpoint.step + 1),
    )
    if checkpoint is not None:
        _restore(run, checkpoint.state())
    return run


def _store(config: RLConfig, directory: RunDirectory) -> CheckpointStore:
    best = config.checkpoint.keep_best
    keep_best = None if best is None else KeepBest(best, config.checkpoint.mode)
    return CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep, keep_best=keep_best)


def _log(run: Run, metrics: Metrics) -> None:
    row = metrics.reduce()
    run.sinks.write(run.step, row)
    if run.on_row is not None:
        run.on_row(run.step, row)


def _dump_non_finite(run: Run, updates: list[Update], kept: list[Trajectory]) -> None:
    """An update that was skipped for non-finite gradients leaves its suspects in the run directory."""
    names = list(dict.fromkeys(t.episode_id for t in kept))
    suspects = {
        names[index]
        for done in updates
        if done.report is not None and done.report.skipped
        for index in offending_episodes(done)
    }
    if not suspects:
        return
    folder = run.directory.path / "non_finite"
    folder.mkdir(exist_ok=True)
    write_trajectories(folder, run.step + 1, [t for t in kept if t.episode_id in suspects])
    log.error(
        "step %d: gradients were not finite, update skipped; %d suspects in %s", run.step + 1, len(suspects), folder
    )


@contextmanager
def timed(metrics: Metrics, key: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    metrics.record(key, time.perf_counter() - started)
