"""The loop learns what it is told to, with every switch of the algorithm doing what its name says."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loops.toy import REWARDS, largest_change, metric_rows, toy_config, trained, weights
from posttrain.loops import rl
from posttrain.loops.build import load_tokenizer
from posttrain.loops.collect import TooManyInvalid, collect, usable
from posttrain.loops.credit import assign_credit, kl_to_ref
from posttrain.loops.record import record_rollout
from posttrain.loops.update import update
from posttrain.packing import pack
from posttrain.runs.metrics import Metrics
from posttrain.runs.trajectories import read_trajectories
from posttrain.task import Score
from posttrain.trainer.loading import ModelError, model_path
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory

EQUAL = """
def equal(episode, task):
    return 0.95
"""
THIRD_TOKEN = '''
def need(episode, task):
    """Whether it says "I need ...", as it does in one of seven, instead of "I know ..."."""
    return float("need" in episode.final_text)
'''


def shifted(run: rl.Run) -> None:
    """Moves the policy a little away from the reference."""
    with torch.no_grad():
        for _, parameter in run.learner.policy.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    run.learner.policy.version += 1


def first_step(run: rl.Run):
    tasks = run.stream.next(run.config.batch.prompts_per_step)
    return asyncio.run(collect(tasks, run.collector, group_size=run.config.batch.samples_per_prompt, step=1))


@pytest.mark.parametrize("on_silent_groups", [True, False])
def test_p99_p90_the_kl_term_of_the_loss_moves_weights_also_of_silent_groups_unless_told_not_to(
    tmp_path: Path, on_silent_groups: bool
):
    algorithm = {"kl_coef": 0.1, "kl_on_silent_groups": on_silent_groups}
    run = rl.start(toy_config(tmp_path, code=EQUAL, reward="equal", algorithm=algorithm))
    shifted(run)
    before = weights(run)
    batch = assign_credit(usable(first_step(run)), run.learner)
    assert not batch.advantages.any()
    assert float(kl_to_ref(batch, run.learner).sum()) > 0
    (done,) = update(run.learner, batch, step=1)
    if on_silent_groups:
        assert done.report.grad_norm > 0
        assert largest_change(before, weights(run)) > 0
    else:
        assert done.report is None
        assert largest_change(before, weights(run)) == 0.0
    run.close()


def test_p90_the_share_that_only_the_kl_term_moves_is_a_metric(tmp_path: Path):
    run = trained(toy_config(tmp_path, code=EQUAL, reward="equal", algorithm={"kl_coef": 0.1}))
    row = metric_rows(run)[2]
    assert row["group/no_signal"] == row["ref/kl_only"] == 1.0
    assert row["train/kl_loss"] >= 0
    assert row["train/skipped_updates"] == 0


def test_kl_in_the_reward_changes_advantages_and_not_the_loss(tmp_path: Path):
    advantages = {}
    for place, coefficient in (("reward", 0.5), ("loss", 0.5), ("loss", 0.0)):
        folder = tmp_path / f"{place}{coefficient}"
        folder.mkdir()
        run = rl.start(
            toy_config(folder, algorithm={"kl_coef": coefficient, "kl_in": place, "kl_estimator": "k1", "std": "none"})
        )
        shifted(run)
        batch = assign_credit(usable(first_step(run)), run.learner)
        (done,) = update(run.learner, batch, step=1)
        advantages[place, coefficient] = batch.advantages
        assert any("kl" in part.streams for part in done.parts) == ((place, coefficient) == ("loss", 0.5))
        run.close()
    assert torch.equal(advantages["loss", 0.5], advantages["loss", 0.0])
    difference = advantages["reward", 0.5] - advantages["loss", 0.0]
    assert float(difference.abs().max()) > 1e-4


def test_ppo_learns_which_token_to_choose(tmp_path: Path):
    """The reward rises, values come to explain returns, the value loss falls."""
    run = trained(
        toy_config(
            tmp_path,
            code=THIRD_TOKEN,
            reward="need",
            run={"steps": 16},
            limits={"max_turn_tokens": 3},
            batch={"prompts_per_step": 4, "samples_per_prompt": 8, "epochs": 2},
            algorithm={"advantage": "gae", "lam": 0.95},
            optimizer={"lr": 3e-4},
            critic={"optimizer": {"lr": 3e-3}, "value_clip": None},
        )
    )
    table = [row for _, row in sorted(metric_rows(run).items())]

    def mean(key: str, rows: list[dict]) -> float:
        found = [row[key] for row in rows if key in row]
        return sum(found) / len(found)

    assert table[0]["reward/mean"] < 0.5
    assert mean("reward/mean", table[-3:]) > 0.9
    assert mean("critic/loss", table[-5:]) < mean("critic/loss", table[:5])
    assert any("critic/explained_variance" in row for row in table)
    assert abs(mean("critic/value_mean", table[-3:]) - mean("reward/mean", table[-3:])) < 0.3


def test_the_critic_warms_up_alone(tmp_path: Path):
    config = toy_config(
        tmp_path,
        run={"steps": 1},
        algorithm={"advantage": "gae"},
        critic={"warmup_steps": 1, "optimizer": {"lr": 1e-3}},
    )
    run = rl.start(config)
    before = weights(run)
    head = run.learner.critic.head.weight.detach().clone()
    rl.train(run)
    run.close()
    assert largest_change(before, weights(run)) == 0.0
    assert not torch.equal(head, run.learner.critic.head.weight)
    row = metric_rows(run)[1]
    assert row["train/policy_version"] == 0
    assert row["critic/loss"] > 0
    assert row["train/skipped_updates"] == row["train/optimizer_steps"] == 1


def test_p100_another_temperature_leaves_no_gap_between_sampler_and_trainer(tmp_path: Path):
    run = trained(toy_config(tmp_path, sampling={"temperature": 0.6}, batch={"epochs": 2, "prompts_per_mini_batch": 1}))
    for row in metric_rows(run).values():
        assert row["gap/max"] < 1e-4
        assert row["gap/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
        assert row["gap/staleness"] == 0.0


@pytest.mark.parametrize("value", [1.0, 0.1, 0.95])
def test_p84_p66_equal_rewards_everywhere_change_nothing_and_the_run_goes_on(tmp_path: Path, value: float):
    config = toy_config(tmp_path, code=EQUAL.replace("0.95", str(value)), reward="equal", run={"steps": 3})
    run = rl.start(config)
    before = weights(run)
    rl.train(run)
    run.close()
    assert run.step == 3
    assert largest_change(before, weights(run)) == 0.0
    for row in metric_rows(run).values():
        assert row["group/no_signal"] == 1.0
        assert row["train/skipped_updates"] == 1
        assert row["train/advantage_std"] == 0.0


def test_p88_a_group_of_one_trains_with_an_advantage_that_needs_no_group(tmp_path: Path):
    run = trained(toy_config(tmp_path, batch={"samples_per_prompt": 1}, algorithm={"advantage": "reinforce"}))
    assert metric_rows(run)[2]["group/size"] == 1.0
    assert run.learner.policy.version == 2


def test_p16_a_trajectory_without_a_token_of_the_policy_leaves_the_others_alone(tmp_path: Path):
    """An episode that wrote nothing trains nothing and is counted; an empty part of one that did is harmless."""
    run = rl.start(toy_config(tmp_path))
    trajectories = first_step(run)
    expected = assign_credit(usable(trajectories), run.learner)
    (alone,) = update(run.learner, expected, step=1)
    mute = Trajectory(task_id=trajectories[0].task_id, group_id=trajectories[0].group_id, episode_id="mute")
    part = Trajectory(
        task_id=mute.task_id, group_id=mute.group_id, episode_id=trajectories[0].episode_id, outcome=Score(0.5)
    )
    for extra in (mute, part):
        extra.add_context([2, 278, 3], Source.PROMPT)
    mute.outcome = Score(1.0)
    shown = [*trajectories, mute, part]
    kept = usable(shown)
    assert {t.episode_id for t in kept} == {t.episode_id for t in trajectories}
    metrics = Metrics()
    record_rollout(metrics, [*trajectories, mute], kept, run.sources)
    assert metrics.reduce()["rollout/dropped"] == 1
    batch = assign_credit(kept, run.learner)
    written = batch.advantages[batch.loss_mask]
    assert torch.equal(written, expected.advantages[expected.loss_mask])
    (together,) = update(run.learner, batch, step=1)
    assert together.loss == pytest.approx(alone.loss, abs=1e-2)
    assert math.isfinite(together.report.grad_norm)
    run.close()


BROKEN_LOSS = (
    REWARDS
    + '''
import torch
from posttrain.algorithms.losses import ppo_clip

def infinite_for_one(logprobs, old_logprobs, advantages, mask, episode_index):
    """The loss of the episode with the largest advantage overflows, in the first update."""
    loss = ppo_clip(logprobs, old_logprobs, advantages, mask, episode_index)
    if not CALLS:
        worst = int(episode_index[advantages.abs().argmax()])
        CALLS.append(worst)
        loss = torch.where(mask & (episode_index == worst), loss * torch.inf, loss)
    return loss

CALLS = []
'''
)


def test_a_gradient_that_is_not_finite_changes_nothing_dumps_its_suspects_and_the_run_goes_on(tmp_path: Path, caplog):
    config = toy_config(
        tmp_path,
        code=BROKEN_LOSS,
        batch={"cpu_workers": 1},
        algorithm={"loss": f"{tmp_path / 'functions.py'}:infinite_for_one"},
    )
    run = rl.start(config)
    before, after = weights(run), []
    run.on_row = lambda step, row: after.append(weights(run))
    with caplog.at_level(logging.ERROR, "posttrain"):
        rl.train(run)
    run.close()
    assert largest_change(before, after[0]) == 0.0
    assert largest_change(before, after[1]) > 0.0
    table = metric_rows(run)
    assert [table[step]["train/skipped_updates"] for step in (1, 2)] == [1, 0]
    (dump,) = (run.directory.path / "non_finite").iterdir()
    suspects = read_trajectories(dump)
    assert len({t.episode_id for t in suspects}) == 1
    assert "1 suspects" in caplog.text
    assert "gradients were not finite" in (run.directory.path / "log.txt").read_text()


def test_broken_weights_stop_the_run_with_the_cause(tmp_path: Path):
    """A NaN that comes into the weights while training."""
    run = rl.start(toy_config(tmp_path, run={"steps": 3}))

    def spoil(step: int, row: object) -> None:
        with torch.no_grad():
            run.learner.policy.parameters()[0][1][0, 0] = torch.nan

    run.on_row = spoil
    with pytest.raises(TooManyInvalid, match=r"(?s)8 of 8 episodes are invalid.*weights are broken"):
        rl.train(run)
    run.close()
    assert run.step == 1
    assert len(read_trajectories(run.directory.trajectories / "step-000002.parquet")) == 8


def test_broken_weights_in_the_model_are_found_before_the_run_begins(tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(model_path("tiny_search_base"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="nan"):
        rl.start(toy_config(tmp_path, model={"path": str(model)}))


def test_p121_a_checkpoint_is_the_model_in_memory_with_its_chat_template(tmp_path: Path):
    run = trained(toy_config(tmp_path))
    latest = run.store.latest()
    assert latest is not None
    loaded = Policy.load(latest.path, "cpu")
    batch = pack(read_trajectories(run.directory.trajectories / "step-000002.parquet"))
    assert torch.equal(loaded.logprobs(batch), run.learner.policy.logprobs(batch))
    ids = batch.token_ids[None, :20]
    with torch.no_grad():
        for policy in (run.learner.policy, loaded):
            policy.module.set_attn_implementation("sdpa")
        ours, theirs = (policy.module(input_ids=ids).logits for policy in (run.learner.policy, loaded))
    assert torch.equal(ours, theirs)
    before, after = load_tokenizer("tiny_search_base"), load_tokenizer(str(latest.path))
    assert after.chat_template == before.chat_template
    assert after.special_tokens_map == before.special_tokens_map
    assert after.get_vocab() == before.get_vocab()


def test_p130_a_run_needs_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    for extra in ("ray", "vllm", "faiss", "duckdb", "matplotlib", "tensorboard", "fastapi", "wandb", "gguf", "fastmcp"):
        monkeypatch.setitem(sys.modules, extra, None)
    run = trained(toy_config(tmp_path, run={"steps": 1}))
    assert run.finished
