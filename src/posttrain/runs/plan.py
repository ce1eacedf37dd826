"""The batch arithmetic of a run, known before anything loads; the loop asserts that it executes exactly this.

A *step* is one rollout of `prompts_per_step` tasks, `samples_per_prompt` episodes each, and the updates made from it.
An *optimizer step* is one update, made from one mini-batch; learning-rate schedules count these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from pydantic import PositiveInt, model_validator

from posttrain.runs.config_file import Section, key_error


class BatchConfig(Section):
    """How much is rolled out in a step, and how it is split into updates."""

    prompts_per_step: PositiveInt = 16
    samples_per_prompt: PositiveInt = 8
    prompts_per_mini_batch: PositiveInt | None = None  # None = all prompts of the step, one update per epoch
    epochs: PositiveInt = 1  # passes over the episodes of a step
    tokens_per_micro_batch: PositiveInt = 8192  # memory only: changes no result
    cpu_workers: PositiveInt = 2  # micro-batches worked on at once on a CPU; a GPU takes them one by one

    @property
    def mini_batch_prompts(self) -> int:
        return self.prompts_per_mini_batch or self.prompts_per_step

    @property
    def mini_batches(self) -> int:
        return self.prompts_per_step // self.mini_batch_prompts

    @property
    def optimizer_steps_per_step(self) -> int:
        return self.epochs * self.mini_batches

    @property
    def episodes_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.prompts_per_step % self.mini_batch_prompts:
            divisors = [str(n) for n in range(1, self.prompts_per_step + 1) if self.prompts_per_step % n == 0]
            raise key_error(
                "prompts_per_mini_batch",
                f"{self.mini_batch_prompts} does not divide prompts_per_step = {self.prompts_per_step}, so that the "
                f"last mini-batch would be smaller than the others; choose one of {', '.join(divisors)}",
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be executed. All counts are exact unless groups without signal are dropped: then a mini-batch that is
    left empty updates nothing, but still counts as its optimizer step in schedules and here."""

    steps: int
    prompts_per_step: int
    episodes_per_step: int
    mini_batches: int  # per epoch of a step
    epochs: int
    optimizer_steps_per_step: int
    optimizer_steps: int  # of the whole run
    prompts: int
    episodes: int
    train_tasks: int
    data_epochs: float  # times that each task is asked
    lr_first: float  # of the first optimizer step
    lr_peak: float
    lr_last: float  # of the last optimizer step
    checkpoint_steps: tuple[int, ...]
    eval_steps: tuple[int, ...]  # 0 = before the first step

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def render(self) -> str:
        """`plan.txt`."""
        per_group = self.episodes_per_step // self.prompts_per_step
        rows = [
            ("steps", f"{self.steps}"),
            ("episodes per step", f"{self.prompts_per_step} prompts x {per_group} samples = {self.episodes_per_step}"),
            ("episodes", f"{self.episodes} of {self.prompts} prompts"),
            ("tasks", f"{self.train_tasks} in the training data = {self.data_epochs:.2f} epochs over them"),
            ("updates per step", f"{self.epochs} epochs x {self.mini_batches} mini-batches"),
            ("optimizer steps", f"{self.steps} x {self.optimizer_steps_per_step} = {self.optimizer_steps}"),
            ("learning rate", f"first {self.lr_first:.3g}, peak {self.lr_peak:.3g}, last {self.lr_last:.3g}"),
            ("checkpoints", _listed(self.checkpoint_steps)),
            ("evaluations", _listed(self.eval_steps)),
        ]
        if self.train_tasks < self.prompts_per_step:
            rows.append(("note", "fewer tasks than prompts per step: a step asks some task more than once"))
        return "".join(f"{name:<18} {value}\n" for name, value in rows)


def _due(every: int, steps: int) -> tuple[int, ...]:
    """After which of the steps 1 to `steps` something happens: each `every` of them (0: none), and always the last."""
    regular = range(every, steps, every) if every > 0 else ()
    return (*regular, steps)


def make_plan(
    batch: BatchConfig,
    *,
    steps: int,
    train_tasks: int,
    lr_at: Callable[[int], float],
    warmup: int = 0,
    checkpoint_every: int,
    eval_every: int | None,
    eval_at_start: bool = True,
) -> Plan:
    """lr_at: learning rate of an optimizer step, numbered from 0, which rises up to step `warmup` and falls from there.
    eval_every: None = never, 0 = only after the last.

    Raises ValueError when there is nothing to train on.
    """
    if train_tasks < 1:
        raise ValueError("the training data holds no task; see data.files and data.filters")
    optimizer_steps = steps * batch.optimizer_steps_per_step
    last = optimizer_steps - 1
    evals = () if eval_every is None else _due(eval_every, steps)
    return Plan(
        steps=steps,
        prompts_per_step=batch.prompts_per_step,
        episodes_per_step=batch.episodes_per_step,
        mini_batches=batch.mini_batches,
        epochs=batch.epochs,
        optimizer_steps_per_step=batch.optimizer_steps_per_step,
        optimizer_steps=optimizer_steps,
        prompts=steps * batch.prompts_per_step,
        episodes=steps * batch.episodes_per_step,
        train_tasks=train_tasks,
        data_epochs=steps * batch.prompts_per_step / train_tasks,
        lr_first=lr_at(0),
        lr_peak=max(lr_at(update) for update in (0, warmup - 1, warmup, last) if 0 <= update <= last),
        lr_last=lr_at(last),
        checkpoint_steps=_due(checkpoint_every, steps),
        eval_steps=((0,) if evals and eval_at_start else ()) + evals,
    )


def _listed(steps: tuple[int, ...]) -> str:
    if not steps:
        return "none"
    names = [f"step {step}" if step else "before the first step" for step in steps]
    shown = names if len(names) <= 6 else [*names[:3], "...", *names[-2:]]
    return f"{len(steps)}: {', '.join(shown)}"
