"""Every row of every table inside the real loop, and what the loop does around them."""

from __future__ import annotations

import asyncio
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from loops.toy import metric_rows, toy_config, trained
from posttrain.algorithms import ADVANTAGES, AGGREGATES, CORRECTIONS, GROUP_ADVANTAGES, LOSSES, VALUE_TARGETS
from posttrain.config import ConfigError
from posttrain.loops import rl
from posttrain.loops.collect import Credit, attach_outcome, collect, usable
from posttrain.loops.credit import assign_credit, mini_batches
from posttrain.loops.data_parallel import forward_together
from posttrain.loops.fill import fill_step
from posttrain.loops.learner import Models
from posttrain.loops.update import update
from posttrain.packing import Batch, pack
from posttrain.task import Invalid, Score
from posttrain.trainer.ranks import ALONE
from posttrain.trajectory import Source, Trajectory

ONE = {"steps": 1}
CRITIC = {"critic": {"optimizer": {"lr": 1e-3}}}
CODE = '''
import zlib

def noise(episode, task):
    return zlib.crc32(episode.final_text.encode()) % 1000 / 1000

def always(episode, task):
    return 1.0

def never_for_one(episode, task):
    """Judges every sample but those of index 0: the greedy episode has no other."""
    return None if episode.episode_id.endswith("/greedy/0") else noise(episode, task)
'''


def options_of(advantage: str) -> dict:
    algorithm: dict = {"advantage": advantage}
    if advantage == "mt_grpo":
        algorithm |= {"turn_reward_coef": 1.0}
    if advantage == "pass_at_k":
        algorithm |= {"options": {"k": 2}}
    return {"algorithm": algorithm} | (CRITIC if advantage in VALUE_TARGETS else {})


def finite(row: dict) -> bool:
    return all(math.isfinite(value) for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_every_advantage_takes_a_step(tmp_path: Path, advantage: str):
    row = metric_rows(trained(toy_config(tmp_path, code=CODE, run=ONE, **options_of(advantage))))[1]
    assert finite(row)
    assert row["train/policy_version"] == 1
    assert row["train/advantage_std"] > 0


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_takes_two_epochs(tmp_path: Path, loss: str):
    config = toy_config(tmp_path, code=CODE, run=ONE, algorithm={"loss": loss}, batch={"epochs": 2})
    row = metric_rows(trained(config))[1]
    assert finite(row)
    assert row["train/policy_version"] == 2
    assert row["train/grad_norm"] > 0


@pytest.fixture
def begun(tmp_path: Path):
    """A run before its first step and the trajectories of that step, for a config with any `algorithm` section."""
    runs: list[rl.Run] = []

    def begin(**sections) -> tuple[rl.Run, list[Trajectory]]:
        run = rl.start(toy_config(tmp_path, code=CODE, **sections))
        runs.append(run)
        found = collect(run.stream.next(2), run.collector, group_size=4, step=1)
        return run, usable(asyncio.run(found))

    yield begin
    for run in runs:
        run.close()


@pytest.mark.parametrize("aggregate", sorted(AGGREGATES))
@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_what_a_correction_rejects_leaves_the_denominators_too(begun, correction: str, aggregate: str):
    length = {"length": 5} if aggregate == "fixed_length" else {}
    run, trajectories = begun(algorithm={"correction": correction, "aggregate": aggregate, **length})
    run.learner.sampler_shares_weights = False
    for trajectory in trajectories[:2]:  # what another policy would have said
        trajectory.rollout_logprobs = [None if p is None else p - 3.0 for p in trajectory.rollout_logprobs]
    batch = assign_credit(trajectories, run.learner)
    touched = sum(t.policy_token_count for t in trajectories[:2])
    left_out = int((batch.streams["written"] & ~batch.loss_mask).sum())
    assert left_out == (0 if correction.startswith("truncated_is") else touched)
    factors = batch.streams["factors"]
    assert factors[~batch.loss_mask].abs().sum() == 0
    if not left_out:
        assert factors[batch.loss_mask][:touched].tolist() == pytest.approx([2.0] * touched)  # capped
    (mini,) = mini_batches(batch, run.learner, seed="0")
    counted = batch.loss_mask.sum() / (5 * 6 if left_out else 5 * 8)
    expected = {"fixed_length": float(counted), "sequence_sum_mean": float(counted) * 5}.get(aggregate, 1.0)
    assert float(mini.weights.sum()) == pytest.approx(expected, rel=1e-5)
    (done,) = update(run.learner, batch, step=1)
    assert done.loss is not None
    assert math.isfinite(done.loss)


def test_without_a_correction_the_mismatch_is_measured_all_the_same(tmp_path: Path):
    row = metric_rows(trained(toy_config(tmp_path, code=CODE, run=ONE)))[1]
    assert {"gap/mean", "gap/max", "gap/kl", "gap/k1", "gap/share_far", "gap/effective_sample_size"} <= row.keys()
    assert row["gap/share_far"] == 0
    assert "gap/correction" not in row


def test_bypass_takes_the_samplers_log_probs_as_old(begun):
    run, trajectories = begun(algorithm={"old_logprobs": "sampler"})
    run.learner.sampler_shares_weights = False
    run.learner.policy.version += 3
    batch = assign_credit(trajectories, run.learner)
    assert torch.equal(batch.old_logprobs[batch.loss_mask], batch.rollout_logprobs[batch.loss_mask])


def test_stale_tokens_weigh_less_and_too_stale_ones_do_not_train(begun):
    run, trajectories = begun(algorithm={"staleness_decay": 0.5, "max_staleness": 2})
    run.learner.policy.version = 3
    for trajectory, version in zip(trajectories, [0, 1, 2, 3, 3, 3, 3, 3], strict=True):
        trajectory.policy_versions = [v if v < 0 else version for v in trajectory.policy_versions]
    batch = assign_credit(trajectories, run.learner)
    factors = [float(batch.streams["factors"][batch.segment_ids == s].max()) for s in range(4)]
    assert factors == [0, 0.25, 0.5, 1]
    assert not bool(batch.loss_mask[batch.segment_ids == 0].any())


def test_a_batch_that_is_rejected_as_a_whole_passes_over(begun):
    run, trajectories = begun(algorithm={"max_staleness": 0, "kl_coef": 0.1})
    run.learner.policy.version = 1
    batch = assign_credit(trajectories, run.learner)
    (done,) = update(run.learner, batch, step=1)
    assert (done.report, done.parts) == (None, [])
    assert run.learner.policy.version == 1
    assert run.learner.optimizer.steps_done == 1


def test_p96_truncated_samples_stay_in_the_baseline_and_leave_the_loss(begun):
    run, trajectories = begun(algorithm={"shaping": {"mask_truncated": True}})
    cut = [t.turns[-1].stop_reason == "length" for t in trajectories]
    assert any(cut)
    trajectories[0].turns[-1].stop_reason = None  # at least one ended by itself
    batch = assign_credit(trajectories, run.learner)
    trains = [bool(batch.loss_mask[batch.segment_ids == s].any()) for s in range(len(cut))]
    assert trains == [True, *[not c for c in cut[1:]]]
    rewards = [sum(t.rewards or ()) for t in trajectories]
    group = [t.group_id == trajectories[0].group_id for t in trajectories]
    mean = sum(r for r, mine in zip(rewards, group, strict=True) if mine) / sum(group)
    first = float(batch.advantages[batch.loss_mask & (batch.segment_ids == 0)][0])
    assert (first > 0) == (rewards[0] > mean)
    (mini,) = mini_batches(batch, run.learner, seed="0")
    assert float(mini.weights.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        ({"truncated_factor": 0.5}, lambda r, cut, n: r / 2 if cut else r),
        ({"truncated_reward": -1.0}, lambda r, cut, n: -1.0 if cut else r),
        ({"overlong_length": 6, "overlong_buffer": 4}, lambda r, cut, n: r - min(max((n - 2) / 4, 0), 1)),
        ({"clip_low": 0.3, "clip_high": 0.6}, lambda r, cut, n: min(max(r, 0.3), 0.6)),
    ],
    ids=["factor", "reward", "overlong", "clip"],
)
def test_rewards_are_shaped_before_credit(begun, shaping: dict, expected):
    run, trajectories = begun(algorithm={"shaping": shaping})
    batch = assign_credit(trajectories, run.learner)
    for s, t in enumerate(trajectories):
        reward, cut = sum(t.rewards or ()), t.turns[-1].stop_reason == "length"
        got = float(batch.rewards[batch.segment_ids == s].sum())
        assert got == pytest.approx(expected(reward, cut, t.policy_token_count), abs=1e-6)


@pytest.mark.parametrize("by", ["batch", "group", "running"])
def test_rewards_are_normalised(begun, by: str):
    run, trajectories = begun(algorithm={"shaping": {"normalise": by}})
    batch = assign_credit(trajectories, run.learner)
    returns = torch.tensor([float(batch.rewards[batch.segment_ids == s].sum()) for s in range(8)])
    assert float(returns.mean()) == pytest.approx(0, abs=1e-6)
    if by != "group":
        assert float(returns.std()) == pytest.approx(1, abs=1e-4)
    assert run.learner.running.count == (8 if by == "running" else 0)


def test_an_entropy_bonus_keeps_groups_without_signal_and_raises_entropy(begun):
    run, trajectories = begun(algorithm={"entropy_coef": 10.0}, optimizer={"lr": 1e-2})
    assert not run.learner.silent_groups_may_go
    batch = assign_credit(trajectories, run.learner)
    means = []
    for _ in range(2):
        (done,) = update(run.learner, batch, step=1)
        means.append(float(torch.cat([p.streams["entropy"][p.loss_mask] for p in done.parts]).mean()))
    assert means[1] > means[0]


def test_the_kl_controller_moves_and_is_resumed(tmp_path: Path):
    kl = {"kl_coef": 0.1, "kl_target": 1e-9, "kl_horizon": 80.0, "kl_gradient": "k2", "kl_limit": 10.0}
    algorithm = kl | {"shaping": {"normalise": "running"}}
    run = trained(toy_config(tmp_path, code=CODE, algorithm=algorithm, checkpoint={"every": 1}))
    rows = metric_rows(run)
    assert rows[1]["ref/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 8 / 80))  # nothing has moved yet: KL 0
    assert rows[2]["ref/kl_coef"] == pytest.approx(rows[1]["ref/kl_coef"] * (1 + 0.2 * 8 / 80))
    latest = run.store.latest()
    assert latest is not None
    memory = json.loads((latest.path / "learner.json").read_text())
    assert memory["kl_coef"] == run.learner.kl_coef == rows[2]["ref/kl_coef"]
    assert memory["running"]["count"] == 16
    again = rl.resume(run.directory.path)
    assert (again.learner.kl_coef, again.learner.running) == (run.learner.kl_coef, run.learner.running)
    again.close()


def test_kl_in_the_reward_is_measured(tmp_path: Path):
    algorithm = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    rows = metric_rows(trained(toy_config(tmp_path, code=CODE, algorithm=algorithm)))
    assert rows[1]["ref/kl"] == pytest.approx(0, abs=1e-5)
    assert rows[2]["ref/kl"] != 0


def test_dynamic_sampling_ends_with_what_it_has(tmp_path: Path, caplog):
    algorithm = {"dynamic_sampling": {"max_rounds": 3}}
    run = trained(toy_config(tmp_path, code=CODE, reward="always", run=ONE, algorithm=algorithm))
    row = metric_rows(run)[1]
    assert "0 of 2 groups after 3 rounds" in caplog.text
    assert (row["filter/rounds"], row["filter/missing"], row["filter/accept_rate"]) == (3, 2, 0)
    assert (row["filter/too_easy"], row["filter/too_hard"]) == (1, 0)
    assert row["data/consumed"] == 6
    assert row["train/policy_version"] == 0
    assert run.learner.optimizer.steps_done == 1


def test_dynamic_sampling_draws_only_what_is_missing(begun):
    run, _ = begun(algorithm={"dynamic_sampling": {"low": 0.5, "high": 0.9, "max_rounds": 5}}, batch={})
    asked: list[int] = []

    def draw(count: int):
        asked.append(count)
        return run.stream.next(count)

    filling = fill_step(draw, run.collector, run.config.algorithm, prompts=3, group_size=2, step=1)
    filled = asyncio.run(filling)
    groups = list(dict.fromkeys(t.group_id for t in filled.trajectories))
    assert len(groups) == sum(asked)
    assert asked[0] == 3
    assert all(later <= earlier for earlier, later in pairwise(asked))
    assert filled.rounds == len(asked) <= 5
    assert len({t.episode_id for t in filled.trajectories}) == 2 * sum(asked)


def test_remax_gets_one_greedy_episode_per_group(begun):
    run, trajectories = begun(algorithm={"advantage": "remax"}, batch={"samples_per_prompt": 1})
    for trajectory in trajectories:
        (greedy,) = set(trajectory.streams["greedy_returns"])
        assert 0 <= greedy < 1
    batch = assign_credit(trajectories, run.learner)
    for s, t in enumerate(trajectories):
        expected = sum(t.rewards or ()) - t.streams["greedy_returns"][0]
        found = batch.advantages[batch.loss_mask & (batch.segment_ids == s)]
        assert found.tolist() == pytest.approx([expected] * len(found), abs=1e-5)


def test_a_greedy_episode_that_is_not_judged_is_no_baseline(tmp_path: Path):
    config = toy_config(tmp_path, code=CODE, reward="never_for_one", run=ONE, algorithm={"advantage": "remax"})
    row = metric_rows(trained(config))[1]
    assert row["remax/no_baseline"] == 2
    assert row["group/no_signal"] == 1
    assert finite(row)


def two_turns() -> Trajectory:
    made = Trajectory(task_id="t", group_id="g", episode_id="e")
    made.add_context([1], Source.PROMPT)
    made.add_sampled([2, 3], [-0.1, -0.1], 0)
    made.add_context([4], Source.ENV)
    made.add_sampled([5], [-0.1], 0)
    made.rewards = [0, 0, 0.5, 0, 0.25]
    return made


@pytest.mark.parametrize(
    ("credit", "rewards"),
    [
        (Credit(), [0, 0, 0, 0, 2]),
        (Credit(turns=1.0), [0, 0, 0.5, 0, 2.25]),
        (Credit(outcome=0.0, turns=2.0), [0, 0, 1, 0, 0.5]),
        (Credit(outcome=0.5), [0, 0, 0, 0, 1]),
    ],
    ids=str,
)
def test_rewards_of_turns_and_the_outcome_lie_where_they_were_earned(credit: Credit, rewards: list[float]):
    trajectory = two_turns()
    attach_outcome([trajectory], Score(2.0), credit)
    assert trajectory.rewards == rewards
    if credit.turns:
        assert trajectory.streams["outcome_rewards"] == [0, 0, 0, 0, 2.0 * credit.outcome]
    else:
        assert "outcome_rewards" not in trajectory.streams


def test_an_invalid_episode_has_no_outcome_to_place():
    trajectory = two_turns()
    attach_outcome([trajectory], Invalid("broken"), Credit(turns=1.0))
    assert trajectory.rewards == [0, 0, 0.5, 0, 0.25]
    assert isinstance(trajectory.outcome, Invalid)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"correction": "icepopp"}, "Did you mean 'icepop'"),
        ({"kl_gradient": "k22"}, "Did you mean 'k2'"),
        ({"kl_target": 1.0}, "there is no KL term to control"),
        ({"correction": "icepop", "old_logprobs": "sampler"}, "leaves nothing to correct"),
        ({"advantage": "mt_grpo"}, "mt_grpo adds the rewards of turns"),
        ({"advantage": "pass_at_k"}, "needs groups of more than k = 4"),
        ({"advantage": "turn_gae"}, "turn_gae needs values"),
        ({"options": {"is_hihg": 2.0}, "correction": "icepop"}, "no chosen function takes it"),
        ({"shaping": {"truncated_factor": 0.5, "truncated_reward": 0.0}}, "choose one of them"),
        ({"shaping": {"overlong_length": 10, "overlong_buffer": 20}}, "is longer than"),
        ({"shaping": {"clip_low": 1.0}}, "set clip_low and clip_high"),
        ({"shaping": {"clip_low": 1.0, "clip_high": 0.0}}, "does not lie below"),
        ({"dynamic_sampling": {"max_round": 3}}, "Did you mean 'algorithm.dynamic_sampling.max_rounds'"),
    ],
    ids=str,
)
def test_what_does_not_fit_together_is_found_in_the_config(tmp_path: Path, algorithm: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        toy_config(tmp_path, code=CODE, algorithm=algorithm)


@pytest.mark.parametrize("advantage", sorted(GROUP_ADVANTAGES))
def test_p88_a_group_of_one_is_refused_where_a_group_is_compared(tmp_path: Path, advantage: str):
    sections = options_of(advantage) | {"batch": {"samples_per_prompt": 1}}
    with pytest.raises(ConfigError, match="compares the episodes of one prompt"):
        toy_config(tmp_path, code=CODE, **sections)


def test_options_of_any_row_go_through(begun):
    options = {"is_high": 3.0, "tau_positive": 0.5, "singleton": "raw", "eps": 1e-3}
    run, _ = begun(algorithm={"correction": "truncated_is", "loss": "sapo", "options": options})
    algorithm = run.config.algorithm
    assert algorithm.options_of("correction") == {"is_high": 3.0}
    assert algorithm.options_of("loss") == {"tau_positive": 0.5}
    assert algorithm.options_of("advantage") == {"singleton": "raw", "eps": 1e-3}


def test_the_options_of_a_choice_reach_it(begun):
    run, trajectories = begun(algorithm={"loss": "kl_cov", "options": {"cov_share": 0.5, "cov_kl_coef": 2.0}})
    batch = assign_credit(trajectories, run.learner)
    (mini,) = mini_batches(batch, run.learner, seed="0")
    assert int(mini.streams["chosen"].sum()) == pytest.approx(int(batch.loss_mask.sum()) // 2, abs=2)
    assert not run.learner.silent_groups_may_go


def test_any_advantage_can_be_whitened(begun):
    run, trajectories = begun(algorithm={"whiten": True})
    batch = assign_credit(trajectories, run.learner)
    found = batch.advantages[batch.loss_mask]
    assert (float(found.mean()), float(found.std())) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-5))


def test_micro_batches_are_on_the_device_before_the_first_is_computed(begun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the copy of the second one would wait until the first has been computed."""
    run, trajectories = begun(limits={"max_episode_tokens": 64}, batch={"tokens_per_micro_batch": 64})
    events: list[str] = []
    move = Batch.to

    def to(batch: Batch, device: torch.device) -> Batch:
        events.append("moved")
        return move(batch, device)

    def forward(part: Batch) -> torch.Tensor:
        events.append("computed")
        return part.token_ids.float()

    monkeypatch.setattr(Batch, "to", to)
    batch = pack(trajectories)
    found = forward_together(forward, batch, run.learner)
    count = events.count("computed")
    assert count > 1
    assert events == ["moved"] * count + ["computed"] * count
    assert torch.equal(found, batch.token_ids.float())


@pytest.mark.filterwarnings("ignore")  # of what the compiler imports
@pytest.mark.parametrize("asked", [True, False])
def test_a_critic_is_compiled_where_the_policy_is(tmp_path: Path, asked: bool) -> None:
    config = toy_config(tmp_path, model={"device": "cpu", "compile": asked}, **options_of("gae"))
    learner = Models(config, 2).load(ALONE)
    assert learner.critic is not None
    for model in (learner.policy, learner.critic):
        assert any(part._compiled_call_impl is not None for part in model.module.modules()) == asked
