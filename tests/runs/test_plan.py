"""The printed arithmetic is the executed arithmetic."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from posttrain.runs.plan import BatchConfig, Plan, make_plan
from posttrain.trainer.optimizer import OptimizerConfig, lr_at


def is_due(step: int, every: int, steps: int) -> bool:
    return step == steps or (every > 0 and step % every == 0)


def plan(batch: BatchConfig, *, steps: int = 10, tasks: int = 100, lr=lambda update: 1.0, **options) -> Plan:
    return make_plan(
        batch, steps=steps, train_tasks=tasks, lr_at=lr, **{"checkpoint_every": 5, "eval_every": None} | options
    )


def test_p128_64_prompts_8_samples_4_mini_batches_3_epochs():
    batch = BatchConfig(prompts_per_step=64, samples_per_prompt=8, prompts_per_mini_batch=16, epochs=3)
    optimizer = OptimizerConfig(lr=1e-3, schedule="linear", warmup_optimizer_steps=12, min_lr_ratio=0.1)
    result = plan(batch, steps=10, tasks=320, lr=lambda update: lr_at(optimizer, update, 120), warmup=12)
    assert (result.episodes_per_step, result.mini_batches, result.optimizer_steps_per_step) == (512, 4, 12)
    assert (result.optimizer_steps, result.prompts, result.episodes, result.data_epochs) == (120, 640, 5120, 2.0)
    assert result.lr_first == pytest.approx(1e-3 / 12)
    assert result.lr_peak == pytest.approx(1e-3)
    assert result.lr_last == pytest.approx(1e-4)


def test_p128_counts_equal_those_of_a_loop_that_executes_them():
    batch = BatchConfig(prompts_per_step=12, samples_per_prompt=3, prompts_per_mini_batch=4, epochs=2)
    result = plan(batch, steps=7, tasks=30, checkpoint_every=3, eval_every=2)
    updates = episodes = 0
    checkpoints: list[int] = []
    evals = [0]
    for step in range(1, 8):
        episodes += 12 * 3
        for _ in range(2):
            for _ in range(0, 12, 4):
                updates += 1
        checkpoints += [step] if is_due(step, 3, 7) else []
        evals += [step] if is_due(step, 2, 7) else []
    assert (result.optimizer_steps, result.episodes) == (updates, episodes)
    assert result.checkpoint_steps == tuple(checkpoints) == (3, 6, 7)
    assert result.eval_steps == tuple(evals) == (0, 2, 4, 6, 7)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 4, 5, 9])
def test_the_rates_are_those_of_all_updates(schedule: str, warmup: int):
    optimizer = OptimizerConfig(lr=1e-3, schedule=schedule, warmup_optimizer_steps=warmup, min_lr_ratio=0.1)
    for steps in (1, 2, 4, 6):
        rates = [lr_at(optimizer, update, steps) for update in range(steps)]
        result = plan(BatchConfig(), steps=steps, lr=rates.__getitem__, warmup=warmup)
        assert (result.lr_first, result.lr_peak, result.lr_last) == (rates[0], max(rates), rates[-1])


def test_a_plan_of_ten_million_steps_asks_for_few_rates():
    asked: list[int] = []
    result = plan(BatchConfig(), steps=10**7, lr=lambda update: asked.append(update) or 1.0, checkpoint_every=10**6)
    assert len(asked) < 10
    assert result.checkpoint_steps == tuple(range(10**6, 10**7 + 1, 10**6))


def test_every_zero_means_only_after_the_last_step():
    result = plan(BatchConfig(), steps=4, checkpoint_every=0, eval_every=0, eval_at_start=False)
    assert result.checkpoint_steps == result.eval_steps == (4,)
    assert plan(BatchConfig(), steps=4).eval_steps == ()


def test_mini_batches_must_divide_the_step_and_the_error_offers_what_does():
    with pytest.raises(
        ValidationError, match=r"5 does not divide prompts_per_step = 12.*choose one of 1, 2, 3, 4, 6, 12"
    ):
        BatchConfig(prompts_per_step=12, prompts_per_mini_batch=5)
    assert BatchConfig(prompts_per_step=12).mini_batches == 1


def test_no_tasks_is_an_error_and_few_tasks_a_note():
    with pytest.raises(ValueError, match="holds no task"):
        plan(BatchConfig(), tasks=0)
    assert "a step asks some task more than once" in plan(BatchConfig(prompts_per_step=16), tasks=3).render()
    assert "note" not in plan(BatchConfig(prompts_per_step=16), tasks=16).render()


def test_rendered_plan_tells_every_number():
    batch = BatchConfig(prompts_per_step=64, samples_per_prompt=8, prompts_per_mini_batch=16, epochs=3)
    assert plan(batch, steps=40, tasks=320, checkpoint_every=2, eval_every=20).render() == (
        "steps              40\n"
        "episodes per step  64 prompts x 8 samples = 512\n"
        "episodes           20480 of 2560 prompts\n"
        "tasks              320 in the training data = 8.00 epochs over them\n"
        "updates per step   3 epochs x 4 mini-batches\n"
        "optimizer steps    40 x 12 = 480\n"
        "learning rate      first 1, peak 1, last 1\n"
        "checkpoints        20: step 2, step 4, step 6, ..., step 38, step 40\n"
        "evaluations        3: before the first step, step 20, step 40\n"
    )
