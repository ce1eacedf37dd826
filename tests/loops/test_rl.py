"""Whole runs: what stops them, what does not, and how they go on."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from loops.toy import QUESTIONS, REWARDS, metric_rows, rows, toy_config, trained, write_rows
from posttrain.algorithms.advantages import grpo
from posttrain.config import ConfigError, RLConfig, load_config, parse_config
from posttrain.data import DataError
from posttrain.loops import rl
from posttrain.loops.collect import TooManyInvalid, check_invalid_share
from posttrain.loops.record import record_rollout
from posttrain.packing import pack
from posttrain.rewards.config import RewardConfig
from posttrain.rewards.functions import RewardError
from posttrain.runs.checkpoint import CheckpointError
from posttrain.runs.directory import RunError
from posttrain.runs.metrics import Metrics
from posttrain.runs.trajectories import read_trajectories
from posttrain.task import Invalid, Score
from posttrain.trainer.loading import ModelError, model_path
from posttrain.trajectory import Source, Trajectory

COUNTED = """
SEEN = []

def {name}(episode, task):
    SEEN.append(episode)
    if {broken}:
        raise KeyError("no such golden patch")
    return len(SEEN) % 7 / 7
"""


class Killed(Exception):
    """Stands for a kill at the end of a step: nothing of the run's own is run any more."""


def killed_after(run: rl.Run, step: int) -> None:
    def kill(done: int, row: Any) -> None:
        if done == step:
            raise Killed

    run.on_row = kill
    with pytest.raises(Killed):
        rl.train(run)
    run.close()


def of_step(run: rl.Run, step: int) -> list[Trajectory]:
    return read_trajectories(run.directory.trajectories / f"step-{step:06d}.parquet")


# ---------------------------------------------------------------- episodes that break


@pytest.mark.parametrize("broken", [1, 3])
def test_p61_p72_broken_episodes_leave_a_group_with_a_baseline_of_its_own(tmp_path: Path, broken: int):
    code = COUNTED.format(name="breaks", broken=f"len(SEEN) <= {broken}")
    batch = {"prompts_per_step": 1, "samples_per_prompt": 8}
    run = trained(toy_config(tmp_path, code=code, reward="breaks", run={"steps": 1}, batch=batch))
    group = of_step(run, 1)
    good = [t for t in group if isinstance(t.outcome, Score)]
    assert len(good) == 8 - broken
    bare = pack(good)
    advantages = bare.streams.pop("advantages").float()
    alone = grpo(bare.rewards, bare.loss_mask, bare.episode_index, bare.group_index)
    assert float((advantages - alone).abs().max()) < 1e-6
    assert float(alone.abs().max()) > 0.1
    row = metric_rows(run)[1]
    assert row["rollout/invalid"] == row["rollout/invalid/reward_error"] == broken
    assert row["group/size"] == 8 - broken
    lost = [t for t in group if isinstance(t.outcome, Invalid)]
    assert all("no such golden patch" in t.outcome.detail and "advantages" not in t.streams for t in lost)


def test_p62_a_group_that_fails_whole_is_dropped_and_the_step_proceeds(tmp_path: Path):
    code = COUNTED.format(name="breaks", broken='task.id.endswith("/0")')
    run = trained(toy_config(tmp_path, tasks=rows(QUESTIONS[:2]), code=code, reward="breaks"))
    for row in metric_rows(run).values():
        assert row["rollout/invalid"] == 4
        assert row["group/count"] == 1
        assert row["group/size"] == 4
    assert run.learner.policy.version == 2


@pytest.mark.parametrize(
    "reward", [{}, {"name": "em"}, {"parts": {"em": {"name": "em"}, "f1": {"name": "f1"}}}], ids=str
)
def test_any_config_comes_back_from_the_run_directory(tmp_path: Path, reward: dict[str, Any]):
    config = toy_config(tmp_path)
    plain = config.model_dump(exclude_unset=True, mode="json")
    config = parse_config(RLConfig, plain | ({"reward": reward} if reward else {}))
    (tmp_path / "again.yaml").write_text(rl.config_yaml(config))
    assert load_config(RLConfig, tmp_path / "again.yaml") == config


@pytest.mark.parametrize("isolate", [False, True])
def test_p73_a_reward_that_always_raises_stops_the_first_step_with_traceback_and_sample(tmp_path: Path, isolate: bool):
    code = COUNTED.format(name="breaks", broken="True")
    config = toy_config(tmp_path, code=code, reward="breaks", run={"steps": 9})
    run = rl.start(config.model_copy(update={"reward": config.reward.model_copy(update={"isolate": isolate})}))
    with pytest.raises(TooManyInvalid) as stopped:
        rl.train(run)
    run.close()
    message = str(stopped.value)
    for part in (
        "8 of 8 episodes",
        "max_invalid_share = 0.5",
        "reward_error: 8",
        "Traceback",
        "functions.py",
        "golden",
    ):
        assert part in message
    assert run.step == 0
    samples = of_step(run, 1)
    assert len(samples) == 8
    assert all(t.policy_token_count for t in samples)
    assert samples[0].episode_id in message


ENV = '''
from posttrain.envs.protocol import Observation, Step

class Broken:
    stop_strings = ()
    max_turns = 1
    async def reset(self, task):
        raise OSError("the simulator is gone")
    async def step(self, action):
        return Step(done=True)
    async def close(self):
        pass

class Seen:
    """Rewards are what the row says: an extra column reaches the env."""
    stop_strings = ()
    max_turns = 1
    async def reset(self, task):
        self.difficulty = task.extra["difficulty"]
        return Observation()
    async def step(self, action):
        return Step(reward=self.difficulty / 10, done=True)
    async def close(self):
        pass

def seen(episode, task):
    assert episode.env_reward == task.extra["difficulty"] / 10
    return episode.env_reward
'''


def test_an_env_that_always_raises_stops_the_run_with_its_traceback(tmp_path: Path):
    config = toy_config(tmp_path, code=REWARDS + ENV, env={"name": f"{tmp_path / 'functions.py'}:Broken"})
    run = rl.start(config)
    with pytest.raises(TooManyInvalid, match=r"(?s)env_error: 8.*Traceback.*functions\.py.*the simulator is gone"):
        rl.train(run)
    run.close()


def test_p111_an_extra_column_is_seen_by_env_reward_and_log(tmp_path: Path):
    tasks = [row | {"difficulty": number} for number, row in enumerate(rows())]
    env = {"name": f"{tmp_path / 'functions.py'}:Seen"}
    run = trained(toy_config(tmp_path, tasks=tasks, code=ENV, reward="seen", env=env))
    for trajectory in [*of_step(run, 1), *of_step(run, 2)]:
        difficulty = int(trajectory.task_id.rpartition("/")[2])
        assert trajectory.info["extra"]["difficulty"] == difficulty
        assert isinstance(trajectory.outcome, Score)
        assert trajectory.outcome.value == difficulty / 10


@pytest.mark.parametrize(("share", "stops"), [(0.25, True), (0.375, False), (1.0, False)])
def test_the_limit_on_invalid_episodes_is_a_share_of_the_step(share: float, stops: bool):
    """3 of 8 episodes are broken, one of them in two trajectories."""
    outcomes = [Invalid("timeout", "at last")] * 3 + [Score(0.0)] * 5
    shown = [
        Trajectory(task_id="t", group_id="g", episode_id=str(i), outcome=outcome) for i, outcome in enumerate(outcomes)
    ]
    shown.append(Trajectory(task_id="t", group_id="g", episode_id="0", outcome=outcomes[0]))
    if stops:
        with pytest.raises(TooManyInvalid, match=r"3 of 8 episodes are invalid.*timeout: 3"):
            check_invalid_share(shown, share)
    else:
        check_invalid_share(shown, share)


def test_a_run_in_which_everything_may_break_ends_with_nothing_learnt(tmp_path: Path):
    code = COUNTED.format(name="breaks", broken="True")
    config = toy_config(
        tmp_path,
        code=code,
        reward="breaks",
        run={"max_invalid_share": 1.0},
        algorithm={"advantage": "gae"},
        critic={},
        batch={"epochs": 2},
    )
    run = trained(config)
    assert run.finished
    assert run.learner.policy.version == 0
    assert run.learner.optimizer.steps_done == run.learner.critic_optimizer.steps_done == 4
    assert metric_rows(run)[2]["train/skipped_updates"] == 2


BATCHED = """
def batched(episodes, task):
    return [0.5] * (len(episodes) + {surplus})

async def awaited(episode, task):
    import asyncio
    await asyncio.sleep(0.001)
    return float(len(episode.final_text))
"""


@pytest.mark.parametrize("surplus", [-1, 1])
def test_p76_a_batch_reward_with_a_wrong_count_stops_the_run_naming_both(tmp_path: Path, surplus: int):
    run = rl.start(toy_config(tmp_path, code=BATCHED.format(surplus=surplus), reward="batched"))
    with pytest.raises(RewardError, match=rf"{4 + surplus}\b.*\b4\b"):
        rl.train(run)
    run.close()


def test_p78_an_async_reward_is_awaited(tmp_path: Path):
    run = trained(toy_config(tmp_path, code=BATCHED.format(surplus=0), reward="awaited"))
    assert metric_rows(run)[1]["reward/mean"] > 10


def test_p124_the_mean_reward_is_per_rollout_not_per_row():
    one = Trajectory(task_id="a", group_id="a", episode_id="a", outcome=Score(1.0))
    three = [Trajectory(task_id="b", group_id="b", episode_id="b", outcome=Score(0.0)) for _ in range(3)]
    for trajectory in (one, *three):
        trajectory.add_context([1], Source.PROMPT)
        trajectory.add_sampled([2], [-1.0], 0)
    metrics = Metrics()
    record_rollout(metrics, [one, *three], [one, *three], {"a": "s", "b": "s"})
    row = metrics.reduce()
    assert row["reward/mean"] == 0.5
    assert row["rollout/trajectories"] == 2.0
    assert row["rollout/episodes"] == 2


# ---------------------------------------------------------------- data


def test_p107_p108_overlong_prompts_are_listed_before_the_model_loads(tmp_path: Path):
    """Measured on what will be sent: the template's tokens count."""
    tasks = rows([*QUESTIONS, "Who is the mayor of " * 20 + "?"])
    with pytest.raises(DataError, match=r"1 of 5 prompts have more than 40 tokens(.|\n)*train/4"):
        rl.plan_only(toy_config(tmp_path, tasks=tasks, data={"max_prompt_tokens": 40}))
    config = toy_config(tmp_path, tasks=tasks, data={"max_prompt_tokens": 40, "overlong": "drop"})
    assert rl.plan_only(config).train_tasks == 4
    lengths = sorted(len(t.token_ids) - t.policy_token_count for t in of_step(trained(config), 1))
    exact = toy_config(tmp_path, data={"max_prompt_tokens": lengths[-1] - 1, "overlong": "drop"})
    assert rl.plan_only(exact).train_tasks < 4
    assert not (tmp_path / "run2").exists()


def test_p114_p115_a_killed_run_goes_on_with_the_very_next_task(tmp_path: Path):
    """5 tasks, 2 per step: step 3 spans two epochs; killed before, in and behind it."""
    (tmp_path / "whole").mkdir()
    shape: dict[str, Any] = {"run": {"steps": 6}, "checkpoint": {"every": 1}, "limits": {"max_turn_tokens": 2}}
    five = rows([*QUESTIONS, "Who?"])
    expected = _asked(trained(toy_config(tmp_path / "whole", tasks=five, **shape)))
    assert sorted(expected[:5]) == sorted(expected[5:10]) == sorted(set(expected))
    (tmp_path / "killed").mkdir()
    config = toy_config(tmp_path / "killed", tasks=five, **shape)
    killed_after(rl.start(config), 2)  # its step 2 is not in a checkpoint yet
    for finished, step in ((1, 3), (2, 5)):
        run = rl.resume(tmp_path / "killed" / "run")
        killed_after(run, step)
        assert run.store.all()[-1].step == step - 1 > finished
    run = rl.resume(tmp_path / "killed" / "run")
    rl.train(run)
    run.close()
    assert _asked(run) == expected


def test_p115_the_end_of_an_epoch_is_not_the_end_of_the_run(tmp_path: Path):
    shape: dict[str, Any] = {"run": {"steps": 4}, "checkpoint": {"every": 1}, "limits": {"max_turn_tokens": 2}}
    killed_after(rl.start(toy_config(tmp_path, **shape)), 3)  # the checkpoint is that of step 2, the end of epoch 1
    run = rl.resume(tmp_path / "run")
    assert (run.step, run.stream.epochs) == (2, {"": 1.0})
    rl.train(run)
    run.close()
    asked = _asked(run)
    assert sorted(asked[:4]) == sorted(asked[4:]) == [f"train/{i}" for i in range(4)]
    assert metric_rows(run)[4]["data/epoch"] == 2.0


BY_TASK = """
def by_task(episode, task):
    return {"0": 1.0, "1": 0.0}.get(task.id[-1], len(episode.final_text) % 5 / 10 + 0.1)
"""


def test_tasks_that_teach_nothing_rest_also_across_a_kill(tmp_path: Path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    shape: dict[str, Any] = {
        "code": BY_TASK,
        "reward": "by_task",
        "data": {"curriculum": {"rest_epochs": 2}},
        "run": {"steps": 6},
        "checkpoint": {"every": 1},
        "limits": {"max_turn_tokens": 2},
    }
    whole = trained(toy_config(tmp_path / "whole", **shape))
    asked = _asked(whole)
    assert sorted(asked[:4]) == [f"train/{i}" for i in range(4)]
    assert sorted(asked[4:8]) == ["train/2", "train/2", "train/3", "train/3"]
    assert sorted(asked[8:]) == [f"train/{i}" for i in range(4)]
    assert [row["data/resting"] for row in metric_rows(whole).values()][1] == 2
    killed_after(rl.start(toy_config(tmp_path / "killed", **shape)), 3)
    run = rl.resume(tmp_path / "killed" / "run")
    rl.train(run)
    run.close()
    assert _asked(run) == asked


def _asked(run: rl.Run) -> list[str]:
    """Task ids in the order in which they were asked; group ids hold step and place."""
    places = {t.group_id: t.task_id for step in range(1, run.step + 1) for t in of_step(run, step)}
    return [places[group] for group in sorted(places, key=lambda g: tuple(map(int, g.split("/")[:2])))]


def test_resuming_over_changed_data_says_what_changed_and_goes_on_only_when_told(tmp_path: Path):
    killed_after(rl.start(toy_config(tmp_path, run={"steps": 4}, checkpoint={"every": 1})), 2)
    write_rows(tmp_path / "train.jsonl", rows([*QUESTIONS[1:], "Who is new here?"]))
    file = tmp_path / "run" / "config.yaml"
    with pytest.raises(
        DataError, match=r"(?s)differ from those of the checkpoint.*data\.changed: continue.*config\.yaml"
    ):
        rl.resume(tmp_path / "run")
    file.write_text(file.read_text().replace("changed: error", "changed: continue"))
    run = rl.resume(tmp_path / "run")
    rl.train(run)
    run.close()
    assert run.finished
    assert "resuming over changed data" in (tmp_path / "run" / "log.txt").read_text()


# ---------------------------------------------------------------- several envs


def test_rows_live_in_the_env_they_name_under_its_limits(tmp_path: Path):
    mixed = [row | ({"env": "short"} if i % 2 else {}) for i, row in enumerate(rows())]
    run = trained(
        toy_config(
            tmp_path,
            tasks=mixed,
            data={"train": {"path": str(tmp_path / "train.jsonl"), "columns": {"env": "env"}}},
            envs={"short": {"name": "single_turn", "limits": {"max_turn_tokens": 3}}},
            batch={"prompts_per_step": 4},
        )
    )
    row = metric_rows(run)[1]
    assert row["env/policy_tokens/short"] <= 3 < row["env/policy_tokens/single_turn"] <= 12
    assert row["env/invalid/short"] == 0
    assert row["env/reward/short"] != row["env/reward/single_turn"]


@pytest.mark.parametrize(
    ("envs", "shown"),
    [
        ({"calc": {"name": "single_turn"}}, "envs.calc is an env that no row asks for"),
        ({"calc": {"name": "single_trun"}}, "single_turn"),
        ({"calc": {"name": "single_turn", "limits": {"max_turn_token": 3}}}, "max_turn_token"),
        ({"calc": {"name": "single_turn", "limits": {"max_prompt_tokens": 3}}}, "one limit for all envs"),
        ({"calc": {"name": "search"}}, "add a `retrieval:` section"),
    ],
)
def test_envs_that_cannot_be_are_named(tmp_path: Path, envs: dict[str, Any], shown: str):
    with pytest.raises(ConfigError, match=re.escape(shown)):
        trained(toy_config(tmp_path, envs=envs))


# ---------------------------------------------------------------- checkpoints


BY_NUMBER = '''
VALUES = [0.1, 0.5, 0.9, 0.3, 0.9, 0.2, 0.4]
ASKED = []

def by_number(episode, task):
    """The reward of the n-th evaluation is VALUES[n]."""
    if task.source != "held-out":
        return 0.0
    ASKED.append(1)
    return VALUES[len(ASKED) - 1]
'''


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_checkpoint_with_the_best_evaluation_is_kept(tmp_path: Path, mode: str):
    """Evaluations by step: .1, .5, .9, .3; killed before the checkpoint of step 4, so again: .2 -> VALUES[5], .4."""
    held_out = write_rows(tmp_path / "eval.jsonl", rows(QUESTIONS[:1], data_source="held-out"))
    run = rl.start(
        toy_config(
            tmp_path,
            code=BY_NUMBER,
            reward="by_number",
            run={"steps": 5},
            data={"train": str(tmp_path / "train.jsonl"), "eval": str(held_out)},
            eval={"every": 1},
            checkpoint={"every": 1, "keep": 1, "keep_best": "eval/reward", "mode": mode},
        )
    )
    killed_after(run, 4)
    run = rl.resume(tmp_path / "run")
    rl.train(run)
    run.close()
    values = [row["eval/reward"] for row in metric_rows(run).values()]
    assert values == [0.1, 0.5, 0.9, 0.3, 0.2, 0.4]
    found = run.store.best()
    assert found is not None
    assert (found.step, found.metric) == ((2, 0.9) if mode == "max" else (4, 0.2))
    assert {checkpoint.step for checkpoint in run.store.all()} == {found.step, 5}


def test_keeping_the_best_by_what_no_evaluation_measures_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"keep_best.*eval/"):
        toy_config(tmp_path, checkpoint={"keep_best": "reward/mean"})


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_used(tmp_path: Path):
    run = trained(toy_config(tmp_path, run={"steps": 3}, checkpoint={"every": 1}))
    file = tmp_path / "run" / "checkpoints" / "step-3" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step-3.model\.safetensors differs(.|\n)*delete the folder"):
        rl.resume(tmp_path / "run")
    for damaged in file.parent.iterdir():
        damaged.unlink()
    file.parent.rmdir()
    again = rl.resume(tmp_path / "run")
    assert again.step == 2
    rl.train(again)
    again.close()
    assert file.read_bytes()[:-1] == bytes(content)[:-1]
    assert metric_rows(again) == metric_rows(run)


def test_a_run_that_is_being_written_cannot_be_resumed_beside_it(tmp_path: Path):
    run = rl.start(toy_config(tmp_path))
    with pytest.raises(RunError, match=f"process {os.getpid()}"):
        rl.resume(tmp_path / "run")
    run.close()
    with pytest.raises(RunError, match=r"already holds a run.*posttrain resume"):
        rl.start(toy_config(tmp_path))


def started_processes() -> set[str]:
    """Those that this process has started and that still run."""
    found = set[str]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            found |= {stat.parent.name} if int(parent) == os.getpid() and state != "Z" else set()
    return found


def test_a_run_that_cannot_begin_ends_what_its_rewards_have_started(tmp_path: Path):
    config = toy_config(tmp_path, tasks=rows(answer="assert True"))
    config = config.model_copy(update={"reward": RewardConfig(name="code")})  # it tries its sandbox on the rows
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("unique")
    before = started_processes()
    with pytest.raises(RunError, match=r"thesis\.txt") as caught:
        rl.start(config)
    assert started_processes() <= before, f"while {caught.value!r} and its frames are held"


SINKS_OF_MINE = """
from pathlib import Path

class Mine:
    def __init__(self, run, first_step):
        (Path(__file__).parent / "said").write_text("opened")

    def close(self):
        (Path(__file__).parent / "said").write_text("closed")

def without_login(run, first_step):
    raise PermissionError("log in first")
"""


def test_sinks_open_before_the_model_loads_and_close_when_the_run_cannot_begin(tmp_path: Path):
    (tmp_path / "mine.py").write_text(SINKS_OF_MINE)
    shutil.copytree(model_path("tiny_search_base"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut off")
    mine, model = f"{tmp_path}/mine.py", {"path": str(tmp_path / "model")}
    run: dict[str, Any] = {"sinks": [f"{mine}:Mine", f"{mine}:without_login"]}
    with pytest.raises(PermissionError, match="log in first"):
        rl.start(toy_config(tmp_path, run=run, model=model))
    assert (tmp_path / "said").read_text() == "closed"
    with pytest.raises(ModelError, match="cannot be read"):
        rl.start(toy_config(tmp_path, run={"sinks": [f"{mine}:Mine"]}, model=model))
    assert (tmp_path / "said").read_text() == "closed"


def test_a_finished_run_comes_back_finished(tmp_path: Path):
    first = trained(toy_config(tmp_path))
    again = rl.resume(tmp_path / "run")
    assert again.finished
    rl.train(again)
    again.close()
    assert metric_rows(again) == metric_rows(first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("steps: 2", "steps: 1"), "run.steps is 1, and 2 steps are done; raise it, or set it back"),
        (("epochs: 1", "epochs: 2"), "2 steps of this batch are 4 updates, and the checkpoint has made 2; put batch"),
    ],
)
def test_a_run_goes_on_only_by_a_plan_that_what_is_done_fits_into(tmp_path: Path, change: tuple[str, str], said: str):
    trained(toy_config(tmp_path))
    file = tmp_path / "run" / "config.yaml"
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))
    with pytest.raises(ConfigError, match=said):
        rl.resume(tmp_path / "run")


def test_what_the_log_says_is_in_the_run_directory_and_only_while_the_run_is_open(tmp_path: Path):
    logger = logging.getLogger("posttrain")
    before = list(logger.handlers)
    run = rl.start(toy_config(tmp_path))
    logger.warning("remember me")
    run.close()
    logger.warning("forget me")
    assert logger.handlers == before
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "remember me" in text
    assert "forget me" not in text


def test_p126_a_misspelt_key_on_the_command_line_is_an_error_with_the_nearest_name(tmp_path: Path, monkeypatch, capsys):
    from posttrain import cli

    recipe = Path(__file__).resolve().parents[2] / "recipes" / "tiny_search.yaml"
    monkeypatch.setattr(sys, "argv", ["posttrain", "plan", str(recipe), "batch.prompt_per_step=2"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert "batch.prompts_per_step" in error
    assert "Traceback" not in error


def test_the_plan_on_the_command_line_is_that_of_the_run(tmp_path: Path, monkeypatch, capsys):
    from posttrain import cli

    config = toy_config(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text(rl.config_yaml(config))
    monkeypatch.setattr(sys, "argv", ["posttrain", "plan", str(file), "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    shown = json.loads(capsys.readouterr().out)
    run = trained(config)
    assert shown["optimizer_steps"] == run.learner.optimizer.steps_done == 2
    assert not list(tmp_path.glob("runs"))
