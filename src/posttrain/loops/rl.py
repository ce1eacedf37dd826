"""The reinforcement-learning loop, synchronous unless `sampling.max_staleness` says otherwise (see `ahead.py`).

Each step: publish weights -> roll out groups -> score -> assign credit -> update -> log -> evaluate -> checkpoint. In
one process the native sampler runs the policy's own module, so that new weights are in place the moment they are made;
to vLLM they are transferred. On several ranks this loop runs on the first of them; the others are its workers (see
`cluster/worker_group.py`) and do with it what concerns the models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.cluster.worker_group import SINGLE_PROCESS, WorkerGroup
from posttrain.config import ConfigError, RLConfig, config_yaml, load_config, plan_of
from posttrain.data import DataError, TaskStream
from posttrain.loops.ahead import Ahead, Draw
from posttrain.loops.background import Background
from posttrain.loops.build import (
    Parts,
    check_search,
    eval_params,
    load_parts,
    make_collector,
    training_credit,
    training_params,
)
from posttrain.loops.collect import Collector, TooManyInvalid, check_invalid_share, usable
from posttrain.loops.credit import PackedStep, credited, kl_of_some
from posttrain.loops.evaluate import Evaluation, evaluate
from posttrain.loops.fill import Filled, accepted_groups, fill_step, mean_scores, record_filter
from posttrain.loops.learner import Learner, Models, staged
from posttrain.loops.record import (
    record_credit,
    record_groups,
    record_progress,
    record_rewards,
    record_rollout,
    record_tools,
    record_updates,
)
from posttrain.loops.room import check_room
from posttrain.loops.samplers import Sampling
from posttrain.loops.saver import Saver
from posttrain.loops.update import Update, mean_kl, offending_episodes, update
from posttrain.packing import Batch
from posttrain.rewards.scoring import load_states, states
from posttrain.runs.checkpoint import Checkpoint, CheckpointStore, KeepBest
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import Metrics
from posttrain.runs.plan import Plan
from posttrain.runs.rng import rng_state, set_rng_state
from posttrain.runs.sinks import Sinks, check_sinks
from posttrain.runs.trajectories import write_trajectories
from posttrain.sampler.native import NativeSampler
from posttrain.trajectory import Trajectory

log = logging.getLogger("posttrain")
Row = Mapping[str, float]
Runner = asyncio.Runner | Background


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
    sampling: Sampling
    workers: WorkerGroup
    saver: Saver
    sinks: Sinks
    log_file: logging.Handler
    ahead: Ahead | None = None  # who rolls out in an asynchronous run
    step: int = 0
    measured: dict[str, float] = field(default_factory=dict)  # the last evaluation's metrics
    on_row: Callable[[int, Row], None] | None = None
    on_eval: Callable[[int, Evaluation], None] | None = None

    @property
    def finished(self) -> bool:
        return self.step >= self.config.run.steps

    @property
    def sources(self) -> dict[str, str]:
        return {task.id: task.source for task in self.parts.train}

    @property
    def envs(self) -> dict[str, str] | None:
        """Task id -> name of its env; None where all have the same."""
        usual = self.config.env.name
        return {task.id: task.env or usual for task in self.parts.train} if len(self.parts.envs) > 1 else None

    def close(self) -> None:
        self.sampling.close()
        self.parts.close()
        self.sinks.close()
        log.removeHandler(self.log_file)
        self.log_file.close()
        self.directory.close()


def plan_only(config: RLConfig) -> Plan:
    """What `start` would execute; reads all data, loads no model, leaves nothing behind."""
    parts = load_parts(config)
    parts.close()
    return plan_of(config, len(parts.train))


def start(
    config: RLConfig, *, on_plan: Callable[[Plan], None] | None = None, workers: WorkerGroup = SINGLE_PROCESS
) -> Run:
    """A new run: reads all data, prints the plan, makes the directory, loads the model.

    Raises the error of the room that finds something wrong; then nothing is left running, and no run in the directory.
    """
    with ExitStack() as undo:
        parts, plan = _prepare(config, on_plan, workers, undo)
        directory = RunDirectory.create(config.run.directory, config_yaml(config), plan.render())
        undo.callback(directory.abandon)
        sinks = _sinks(config, directory, None, undo)
        run = _assemble(config, directory, parts, plan, checkpoint=None, workers=workers, sinks=sinks)
        undo.pop_all()
    return run


def resume(path: Path, *, on_plan: Callable[[Plan], None] | None = None, workers: WorkerGroup = SINGLE_PROCESS) -> Run:
    """The run at `path`, at its latest checkpoint; from the beginning when it was killed before the first one.

    A run that is finished comes back finished: `Run.finished` says so, and `train` does nothing more.
    """
    with ExitStack() as undo:
        directory = RunDirectory.resume(path)
        undo.callback(directory.close)
        config = load_config(RLConfig, directory.config_file)
        latest = _store(config, directory).latest()
        if latest is not None and latest.step > config.run.steps:
            fix = "raise it, or set it back"
            raise ConfigError(
                [f"{path / 'config.yaml'}: run.steps is {config.run.steps}, and {latest.step} steps are done; {fix}"]
            )
        parts, plan = _prepare(config, on_plan, workers, undo)
        sinks = _sinks(config, directory, latest, undo)
        run = _assemble(config, directory, parts, plan, checkpoint=latest, workers=workers, sinks=sinks)
        directory.rewind(-1 if latest is None else run.step)  # -1: also the evaluation before the first step
        undo.pop_all()
    return run


def _prepare(
    config: RLConfig, on_plan: Callable[[Plan], None] | None, workers: WorkerGroup, undo: ExitStack
) -> tuple[Parts, Plan]:
    """Everything that can be found wrong before a model loads. undo: closes the parts unless the run comes about."""
    parts = load_parts(config)
    undo.callback(parts.close)
    plan = plan_of(config, len(parts.train))
    if on_plan is not None:
        on_plan(plan)
    check_sinks(config.run.sinks)
    check_room(config, workers.ranks)
    check_search(parts)
    return parts, plan


def config_of(path: Path) -> RLConfig:
    """That of the run at `path`. Raises RunError when there is none."""
    return load_config(RLConfig, RunDirectory.config_in(path))


def train(run: Run) -> Run:
    """Runs all steps that are left. What is finished when this raises is kept and can be resumed."""
    with asyncio.Runner() if run.ahead is None else Background() as runner:
        if isinstance(runner, Background):
            run.sampling.renew_while_held(runner.soon)
            if run.workers.pool is not None:
                run.workers.pool.soon = runner.soon
        try:
            if run.step == 0 and 0 in run.plan.eval_steps:
                _log(run, _evaluate(run, runner, Metrics()))
            while not run.finished:
                _do_step(run, runner)
        finally:
            run.saver.wait()
            runner.run(run.parts.release())
    assert run.learner.optimizer.steps_done == run.plan.optimizer_steps, "the plan is what is executed"
    return run


def _do_step(run: Run, runner: Runner) -> None:
    """A step, and what is due after it."""
    metrics = Metrics()
    with timed(metrics, "time/step"):
        train_step(run, runner, metrics)
        run.step += 1
        if run.step in run.plan.eval_steps:
            _evaluate(run, runner, metrics)
    _log(run, metrics)
    if run.step in run.plan.checkpoint_steps:
        checkpoint(run, runner)


def train_step(run: Run, runner: Runner, metrics: Metrics) -> None:
    """Tasks in, new weights out."""
    learner, batch, kl = run.learner, None, None

    # 1. publish weights and roll out: task -> group of scored trajectories
    with timed(metrics, "time/rollout"):
        trajectories = _roll_out(run, runner, metrics)
    kept = accepted_groups(usable(trajectories), run.config.algorithm)
    record_rollout(metrics, trajectories, kept, run.sources, run.envs)
    _stop_if_broken(run, trajectories)

    # 2. assign credit: rewards -> advantages
    packed = PackedStep.of(kept) if kept else None
    run.workers.order("learn", packed, run.step + 1, learner.kl_coef)
    if packed is not None:
        with timed(metrics, "time/logprobs"):
            batch = credited(packed, learner)
        record_groups(metrics, batch, kept)
        record_credit(metrics, batch, learner.policy.version)
        if learner.kl_is_only_measured:
            kl = kl_of_some(batch, learner)
        keep_advantages(kept, batch)
    else:
        log.warning("step %d: no usable episode, no update", run.step + 1)

    # 3. update: epochs, mini-batches, micro-batches
    with timed(metrics, "time/update"):
        updates = update(learner, batch, step=run.step + 1)
    record_updates(metrics, updates, run.config.algorithm, learner.kl_coef)
    if (kl := kl or mean_kl(batch, updates)) is not None:
        metrics.record("ref/kl", kl[0], count=kl[1])
        learner.adapt_kl_coef(kl[0], len({t.episode_id for t in kept}))
    record_progress(metrics, learner, run.stream)
    record_rewards(metrics, run.parts.rewards)
    _dump_non_finite(run, updates, kept)
    _keep_trajectories(run, trajectories)


def _roll_out(run: Run, runner: Runner, metrics: Metrics) -> list[Trajectory]:
    publish(run, runner, metrics)
    step = run.step + 1
    if run.ahead is None:
        filled = runner.run(roll_out(run, step, run.stream.next))
    else:
        assert isinstance(runner, Background)
        run.ahead.start_all(runner, done=run.step, version=run.learner.policy.version)
        filled = run.ahead.take(step, runner)
    run.sampling.rest()
    record_filter(metrics, filled, run.config.algorithm)
    runner.run(_report(run, filled))
    return filled.trajectories


async def _report(run: Run, filled: Filled) -> None:
    """Tells the stream the mean scores. Runs on the event loop, where steps that run ahead draw from the stream."""
    run.stream.report(mean_scores(filled.trajectories))


async def roll_out(run: Run, step: int, draw: Draw) -> Filled:
    batch = run.config.batch
    sizes = {"prompts": batch.prompts_per_step, "group_size": batch.samples_per_prompt}
    return await fill_step(draw, run.collector, run.config.algorithm, **sizes, step=step)


def publish(run: Run, runner: Runner, metrics: Metrics | None = None) -> None:
    """Gives the sampler the current weights and empties its caches, so that a resumed run samples what it would have.

    A sampler that runs the policy's own module has the weights already; for it only the caches are dropped. In an
    asynchronous run requests may be open, and the sampler sees by the version which caches it must drop:
    * samplers in processes of their own get the weights from this thread, while their requests go on;
    * an engine in this process gets them on the event loop that uses it, and this thread waits;
    * the native sampler reads the replica, which is overwritten between two of its forwards.
    """
    run.workers.order("publish")
    if run.ahead is not None and run.workers.pool is not None:
        asyncio.run(run.sampling.refresh(metrics))
    elif run.ahead is None or run.sampling.publisher is not None:
        run.learner.publish()
        runner.run(run.sampling.refresh(metrics))
    else:
        runner.run(_publish_between_forwards(run, run.ahead))


async def _publish_between_forwards(run: Run, ahead: Ahead) -> None:
    sampler = run.sampling.sampler
    assert isinstance(sampler, NativeSampler)
    with sampler.paused():
        run.learner.publish()
    if ahead.idle:
        sampler.reset()


def _stop_if_broken(run: Run, trajectories: list[Trajectory]) -> None:
    """Raises TooManyInvalid, with the episodes of the step on disk for whoever looks for the cause."""
    try:
        check_invalid_share(trajectories, run.config.run.max_invalid_share)
    except TooManyInvalid:
        _keep_trajectories(run, trajectories)
        raise


def _keep_trajectories(run: Run, trajectories: list[Trajectory]) -> None:
    texts = [run.parts.renderer.decode(t.token_ids) for t in trajectories]
    write_trajectories(run.directory.trajectories, run.step + 1, trajectories, texts)


def keep_advantages(trajectories: list[Trajectory], batch: Batch) -> None:
    """Puts every token's advantage on its trajectory as the stream `advantages`, for the trajectory file."""
    assert batch.advantages is not None
    for trajectory, advantages in zip(trajectories, batch.advantages.split(batch.lengths), strict=True):
        trajectory.streams["advantages"] = advantages.tolist()


def _evaluate(run: Run, runner: Runner, metrics: Metrics) -> Metrics:
    assert run.parts.eval is not None
    publish(run, runner, metrics)
    with timed(metrics, "time/eval"):
        done = runner.run(evaluate(run.parts.eval, run.eval_collector, run.config.eval))
    run.sampling.rest()
    done.record(metrics)
    if run.on_eval is not None:
        run.on_eval(run.step, done)
    run.measured = {key: value for key, value in metrics.reduce().items() if key.startswith("eval/")}
    return metrics


def checkpoint(run: Run, runner: Runner) -> None:
    """Commits everything that a bit-exact continuation needs."""
    run.directory.sync()
    if run.ahead is not None and run.learner.replica is not None:
        publish(run, runner)  # what is saved is the copy
    positions, write_ahead = runner.run(_positions(run))
    state = {
        "step": run.step,
        "policy_version": run.learner.policy.version,
        **positions,
        "rng": rng_state(),
        "measured": run.measured,
        "rewards": states(run.parts.rewards),
    }
    best = run.config.checkpoint.keep_best
    if best is not None and best not in run.measured:
        log.warning("checkpoint.keep_best: nothing was measured as %s, only %s", best, ", ".join(run.measured))
    run.saver.wait()
    step, draft = run.step, run.store.begin(run.step)
    write_ahead(draft)  # now: what it writes is trained on next
    run.workers.order("save", draft)
    write, metric = staged(run.learner, run.parts.tokenizer), None if best is None else run.measured.get(best)

    def work() -> None:
        write(draft)
        run.store.finish(draft, step, state, metric)

    run.saver.do(work)


async def _positions(run: Run) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """(state of the task stream and of steps that run ahead, a function that writes the latter's trajectories)"""
    if run.ahead is None:
        return {"stream": run.stream.state_dict()}, lambda folder: None
    state, write = await run.ahead.state(lambda t: run.parts.renderer.decode(t.token_ids))
    return {"stream": run.stream.state_dict(), "ahead": state}, write


def _restore(run: Run, state: dict, folder: Path) -> None:
    try:
        changes = run.stream.load_state_dict(state["stream"], changed=run.config.data.changed)
    except DataError as error:
        raise DataError(f"{error} (in {run.directory.config_file})") from None
    for line in changes:
        log.warning("resuming over changed data: %s", line)
    run.step = state["step"]
    done, planned = run.learner.optimizer.steps_done, run.step * run.config.batch.optimizer_steps_per_step
    if done != planned:
        seen = f"{run.step} steps of this batch are {planned} updates, and the checkpoint has made {done}"
        fix = "put batch.epochs and batch.prompts_per_mini_batch back, or start a run from the checkpoint (model.path)"
        raise ConfigError([f"{run.directory.config_file}: {seen}; {fix}"])
    run.measured = state["measured"]
    load_states(run.parts.rewards, state.get("rewards", {}))
    if run.ahead is not None and "ahead" in state:
        run.ahead.restore(state["ahead"], folder, {task.id: task for task in run.parts.train})
    set_rng_state(state["rng"])


def _sinks(config: RLConfig, directory: RunDirectory, checkpoint: Checkpoint | None, undo: ExitStack) -> Sinks:
    """Opened before a model loads: one may lack a login. undo: closes them unless the run comes about."""
    sinks = Sinks(directory, config.run.sinks, first_step=0 if checkpoint is None else checkpoint.step + 1)
    undo.callback(sinks.close)
    return sinks


def _assemble(
    config: RLConfig,
    directory: RunDirectory,
    parts: Parts,
    plan: Plan,
    *,
    checkpoint: Checkpoint | None,
    workers: WorkerGroup,
    sinks: Sinks,
) -> Run:
    models = Models(config, plan.optimizer_steps)
    if checkpoint is not None:
        models = replace(models, checkpoint=checkpoint.path, version=checkpoint.state()["policy_version"])
    workers.order("begin", models)
    learner = models.load(workers.ranks)
    stream_seed = config.run.seed if config.data.seed is None else config.data.seed
    sampling = workers.sampling(learner, parts.tokenizer)
    run = Run(
        config=config,
        directory=directory,
        store=_store(config, directory),
        plan=plan,
        parts=parts,
        learner=learner,
        sampling=sampling,
        workers=workers,
        saver=Saver(background=config.checkpoint.background),
        stream=TaskStream(
            parts.train, seed=stream_seed, shuffle=config.data.shuffle, curriculum=config.data.curriculum
        ),
        collector=replace(
            make_collector(config, parts, sampling.sampler, training_params(config), evaluates=False),
            credit=training_credit(config),
        ),
        eval_collector=make_collector(config, parts, sampling.sampler, eval_params(config)),
        sinks=sinks,
        log_file=directory.log_handler(),
    )
    log.addHandler(run.log_file)
    if (staleness := config.sampling.max_staleness) is not None:
        run.ahead = Ahead(
            max_staleness=staleness,
            steps=config.run.steps,
            stream=run.stream,
            roll_out=partial(roll_out, run),
        )
    if checkpoint is not None:
        _restore(run, checkpoint.state(), checkpoint.path)
    return run


def _store(config: RLConfig, directory: RunDirectory) -> CheckpointStore:
    best = config.checkpoint.keep_best
    keep_best = None if best is None else KeepBest(best, config.checkpoint.mode)
    return CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep, keep_best=keep_best)


def _log(run: Run, metrics: Metrics) -> None:
    """Ends a row: with what tools and sampler have done since the last one."""
    record_tools(metrics, run.parts.tools)
    run.sampling.record(metrics)
    row = metrics.reduce()
    run.sinks.write(run.step, row)
    if run.on_row is not None:
        run.on_row(run.step, row)


def _dump_non_finite(run: Run, updates: list[Update], kept: list[Trajectory]) -> None:
    """Writes the episodes behind an update that was skipped for non-finite gradients to `non_finite/` of the run."""
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
