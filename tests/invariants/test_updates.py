"""How a step is cut up, ordered or shortened changes no weight."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

from loops.toy import QUESTIONS, largest_change, metric_rows, toy_config, trained, weights
from posttrain.loops import rl
from posttrain.loops.collect import collect, usable
from posttrain.loops.credit import assign_credit, mini_batches, old_logprobs
from posttrain.loops.learner import Learner
from posttrain.loops.record import record_updates
from posttrain.loops.update import update
from posttrain.runs.metrics import Metrics
from posttrain.task import Score
from posttrain.trainer.optimizer import Optimizer, lr_at
from posttrain.trajectory import Trajectory

MIXED = {"batch": {"prompts_per_step": 4, "samples_per_prompt": 4}, "optimizer": {"lr": 1e-3, "eps": 1e-3}}


@pytest.fixture
def begun(tmp_path: Path):
    """A run before its first step, and the trajectories of that step. Closed afterwards."""
    run = rl.start(toy_config(tmp_path, sampling={"temperature": 0.8}, **MIXED))
    tasks = run.stream.next(4)
    trajectories = asyncio.run(collect(tasks, run.collector, group_size=4, step=1))
    yield run, trajectories
    run.close()


def gradients(learner: Learner, trajectories: list[Trajectory], monkeypatch: pytest.MonkeyPatch, **batch: int):
    """The gradients of every update of a step that changes nothing."""
    seen: list[torch.Tensor] = []

    def look(optimizer: Optimizer, step=Optimizer.step):
        seen.append(torch.cat([p.grad.flatten() for p in optimizer.named.values() if p.grad is not None]))
        optimizer.zero_grad()
        return type("Report", (), {"skipped": True, "grad_norm": 1.0, "lr": 0.0})

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", look)
        changed = learner.config.batch.model_copy(update=batch)
        patch.setattr(learner, "config", learner.config.model_copy(update={"batch": changed}))
        updates = update(learner, assign_credit(usable(trajectories), learner), step=1)
    return seen, updates


@pytest.mark.parametrize("split", [{"tokens_per_micro_batch": 130}, {"cpu_workers": 2}, {"cpu_workers": 3}], ids=str)
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
def test_p95_micro_batches_and_threads_change_no_gradient(begun, monkeypatch, split: dict[str, int], aggregate: str):
    run, trajectories = begun
    algorithm = run.config.algorithm.model_copy(update={"aggregate": aggregate})
    run.learner.config = run.config.model_copy(update={"algorithm": algorithm})
    (whole,), _ = gradients(run.learner, trajectories, monkeypatch, cpu_workers=1)
    (cut,), (done,) = gradients(run.learner, trajectories, monkeypatch, **split)
    assert len(done.parts) == split.get("cpu_workers", 2)  # of 130 tokens, shared prompts counted once
    assert float(whole.abs().max()) > 1e-3
    assert torch.allclose(whole, cut, atol=1e-6, rtol=0)


def test_p95_two_whole_steps_end_with_the_same_weights(tmp_path: Path):
    ends, metrics = [], []
    for number, batch in enumerate(({"cpu_workers": 1}, {"tokens_per_micro_batch": 128}, {"cpu_workers": 3})):
        folder = tmp_path / str(number)
        folder.mkdir()
        run = trained(toy_config(folder, batch=MIXED["batch"] | batch, optimizer=MIXED["optimizer"]))
        ends.append(weights(run))
        metrics.append(metric_rows(run)[2])
    for end, row in zip(ends[1:], metrics[1:], strict=True):
        assert largest_change(ends[0], end) < 1e-6
        assert row == {key: pytest.approx(value, abs=1e-4) for key, value in metrics[0].items()}


def test_p63_the_order_in_which_episodes_arrive_changes_nothing(begun, monkeypatch):
    run, trajectories = begun
    batch = {"prompts_per_mini_batch": 2, "cpu_workers": 1}
    expected, _ = gradients(run.learner, trajectories, monkeypatch, **batch)
    for seed in range(3):
        shuffled = random.Random(seed).sample(trajectories, len(trajectories))
        assert [t.episode_id for t in shuffled] != [t.episode_id for t in trajectories]
        found, _ = gradients(run.learner, shuffled, monkeypatch, **batch)
        assert len(found) == len(expected) == 2
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_groups_without_signal_may_be_left_out_of_the_update(begun, monkeypatch):
    run, trajectories = begun
    silent = {t.group_id for t in trajectories if t.group_id.startswith("1/0/")}
    for trajectory in trajectories:
        if trajectory.group_id in silent:
            trajectory.outcome = Score(0.95)
            trajectory.rewards = [0.0] * (len(trajectory) - 1) + [0.95]
    (left_out,), (few,) = gradients(run.learner, trajectories, monkeypatch)
    monkeypatch.setattr(Learner, "silent_groups_may_go", False)
    (kept,), (all_of_them,) = gradients(run.learner, trajectories, monkeypatch)
    assert sum(part.segment_count for part in few.parts) == 12
    assert sum(part.segment_count for part in all_of_them.parts) == 16
    assert torch.allclose(left_out, kept, atol=1e-7, rtol=0)


def test_reused_log_probs_are_those_of_a_forward(begun):
    """With a temperature that is not 1; and a sampler of other weights or versions is never believed."""
    run, trajectories = begun
    batch = assign_credit(usable(trajectories), run.learner)
    assert batch.old_logprobs is not None
    reused = torch.where(batch.loss_mask, batch.rollout_logprobs, 0.0)
    assert torch.equal(batch.old_logprobs, reused)
    run.learner.sampler_shares_weights = False
    computed = old_logprobs(batch, run.learner)
    assert not torch.equal(computed, reused)
    assert torch.allclose(computed, reused, atol=1e-5, rtol=0)
    run.learner.sampler_shares_weights = True
    run.learner.policy.version += 1
    assert torch.equal(old_logprobs(batch, run.learner), computed)


def test_p17_what_stands_at_masked_positions_never_reaches_a_gradient(begun, monkeypatch):
    run, trajectories = begun
    (clean,), _ = gradients(run.learner, trajectories, monkeypatch, cpu_workers=1)

    def poisoned(batch, learner):
        return torch.where(batch.loss_mask, batch.rollout_logprobs, torch.nan)

    monkeypatch.setattr("posttrain.loops.credit.old_logprobs", poisoned)
    (found,), (done,) = gradients(run.learner, trajectories, monkeypatch, cpu_workers=1)
    assert any(bool(part.old_logprobs.isnan().any()) for part in done.parts)
    assert torch.equal(clean, found)


def test_every_mini_batch_weighs_its_tokens_before_it_is_shortened(begun):
    run, trajectories = begun
    batch = assign_credit(usable(trajectories), run.learner)
    first = int(batch.group_index[0])
    batch.advantages = torch.where(batch.group_index == first, 0.0, batch.advantages)
    (mini,) = mini_batches(batch, run.learner, seed="0")
    assert first not in mini.group_index
    assert float(mini.weights.sum()) == pytest.approx(int(mini.loss_mask.sum()) / int(batch.loss_mask.sum()))


PLANNED = '''
import zlib

def by_question(episode, task):
    """Of four questions one is graded, one always right, one never to be judged, one broken."""
    if task.id.endswith("/1"):
        return 1.0
    if task.id.endswith("/2"):
        return None
    if task.id.endswith("/3"):
        return float("nan")
    return zlib.crc32(episode.final_text.encode()) % 1000 / 1000
'''


def test_p128_what_is_planned_is_what_is_executed(tmp_path: Path, monkeypatch):
    """4 questions, one each step: with signal, silent, abstained, invalid. 1 mini-batch x 3 epochs, and schedules."""
    config = toy_config(
        tmp_path,
        code=PLANNED,
        reward="by_question",
        run={"steps": 5, "max_invalid_share": 1.0},
        data={"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "train.jsonl"), "shuffle": False},
        batch={"prompts_per_step": 1, "epochs": 3},
        optimizer={"schedule": "cosine", "warmup_optimizer_steps": 4},
        eval={"every": 2, "max_tasks": 1},
        checkpoint={"every": 2, "keep": 9},
    )
    rates: list[float] = []

    def step(optimizer: Optimizer, real=Optimizer.step):
        rates.append(optimizer.lr)
        return real(optimizer)

    monkeypatch.setattr(Optimizer, "step", step)
    run = trained(config)
    table = metric_rows(run)
    assert run.plan.optimizer_steps == 15
    assert [table[s]["train/optimizer_steps"] for s in range(1, 6)] == [3, 6, 9, 12, 15]
    assert [table[s]["train/policy_version"] for s in range(1, 6)] == [3, 3, 3, 3, 6]
    assert [table[s]["train/skipped_updates"] for s in range(1, 6)] == [0, 3, 3, 3, 0]
    planned = [lr_at(config.optimizer, n, 15) for n in range(15)]
    assert rates == [*planned[:3], *planned[12:]]
    assert [table[s]["train/lr"] for s in range(1, 6)] == planned[2::3]
    assert tuple(s for s in table if "eval/reward" in table[s]) == run.plan.eval_steps == (0, 2, 4, 5)
    assert tuple(c.step for c in run.store.all()) == run.plan.checkpoint_steps == (2, 4, 5)
    assert table[3]["rollout/abstained"] == table[4]["rollout/invalid"] == 4
    assert len(QUESTIONS) == 4


def test_p128_mini_batches_times_epochs_are_updates(tmp_path: Path):
    """4 prompts, mini-batches of one, 3 epochs: 12 updates, although a prompt may be silent."""
    batch = {"prompts_per_step": 4, "prompts_per_mini_batch": 1, "epochs": 3}
    run = trained(toy_config(tmp_path, run={"steps": 1}, batch=batch))
    assert run.plan.optimizer_steps == run.learner.optimizer.steps_done == 12
    assert metric_rows(run)[1]["train/policy_version"] == 12


def test_metrics_do_not_depend_on_the_split(begun, monkeypatch):
    run, trajectories = begun
    found = []
    for split in ({"cpu_workers": 1}, {"tokens_per_micro_batch": 130}):
        _, updates = gradients(run.learner, trajectories, monkeypatch, **split)
        metrics = Metrics()
        record_updates(metrics, updates, run.config.algorithm)
        found.append(metrics.reduce())
    assert found[0] == {key: pytest.approx(value, abs=1e-5) for key, value in found[1].items()}
    assert {"train/clip_fraction", "train/entropy", "gap/max", "train/loss"} <= found[0].keys()
