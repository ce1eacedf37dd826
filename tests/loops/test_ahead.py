"""Asynchronous runs: what the bound promises, episodes that outlive weights, kills, errors."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from loops.ahead import EPISODES, PATIENT, TWELVE, Killed, Patient, asked, assert_sampled_by, of_step
from loops.toy import largest_change, metric_rows, toy_config, trained, weights
from posttrain.config import RLConfig
from posttrain.loops import rl
from posttrain.loops.ahead import Ahead, TooStale
from posttrain.loops.background import Background
from posttrain.loops.fill import Filled
from posttrain.trajectory import Trajectory


def asynchronous(folder: Path, staleness: int | None, **sections: Any) -> RLConfig:
    sections = {"tasks": TWELVE, "run": {"steps": 5}, **sections}
    return toy_config(folder, sampling={"max_staleness": staleness}, **sections)


# ---------------------------------------------------------------- the bound


def test_bound_0_is_the_synchronous_run_to_the_bit(tmp_path: Path):
    runs: list[rl.Run] = []
    for name, staleness in (("sync", None), ("bound", 0)):
        folder = tmp_path / name
        folder.mkdir()
        data = {"data": {"eval": str(folder / "train.jsonl")}, "eval": {"every": 2, "max_tasks": 3}}
        runs.append(trained(asynchronous(folder, staleness, **data)))
    assert largest_change(*map(weights, runs)) == 0
    assert [run.learner.replica is not None for run in runs] == [False, True]


@pytest.mark.parametrize("staleness", [1, 2])
def test_no_token_is_older_than_the_bound_and_every_step_asks_what_the_synchronous_run_asks(
    tmp_path: Path, staleness: int
):
    folders = [tmp_path / name for name in ("sync", "ahead")]
    for folder in folders:
        folder.mkdir()
    batch = {"epochs": 2}  # two optimizer steps a step
    usual = trained(asynchronous(folders[0], None, batch=batch))
    ahead = trained(asynchronous(folders[1], staleness, batch=batch))
    assert asked(ahead) == asked(usual)
    measured = [metric_rows(ahead)[step]["gap/staleness_max"] for step in range(1, 6)]
    assert measured[0] == 0
    assert all(value <= 2 * staleness for value in measured)
    assert any(value > 0 for value in measured), "nothing ran ahead"
    assert metric_rows(usual)[5]["gap/staleness_max"] == 0


def test_older_tokens_than_allowed_are_an_error():
    def one(step: int, draw: Any) -> Any:
        async def filled() -> Filled:
            trajectory = Trajectory(task_id="t", group_id="g", episode_id=f"e{step}")
            trajectory.add_sampled([1], [-1.0], [0])
            return Filled(trajectories=[trajectory])

        return filled()

    ahead = Ahead(max_staleness=1, steps=3, stream=None, roll_out=one)  # type: ignore[arg-type]
    with Background() as background:
        ahead.start_all(background, done=0, version=0)
        assert len(ahead.take(1, background).trajectories) == 1
        ahead.start_all(background, done=1, version=4)
        ahead.take(2, background)  # sampled by the weights before step 1: one step old
        ahead.start_all(background, done=2, version=8)
        with pytest.raises(TooStale, match="step 3 holds tokens of version 0, allowed is 4"):
            ahead.take(3, background)


# ---------------------------------------------------------------- episodes that outlive weights


def test_an_episode_goes_on_under_new_weights_and_every_token_knows_its_own(tmp_path: Path):
    Patient.go.clear()
    env, limits = PATIENT, {"max_turns": 2}
    run = rl.start(asynchronous(tmp_path, 1, run={"steps": 2}, env=env, limits=limits, optimizer={"lr": 1e-3}))
    Patient.made = 0
    states = [weights(run)]

    def trained_on(step: int, row: Any) -> None:
        states.append(weights(run))

    run.on_row = trained_on
    threading.Thread(target=tell_when_published, args=(run,), daemon=True).start()
    rl.train(run)
    run.close()
    second = of_step(run, 2)
    assert [sorted({v for v in t.policy_versions if v >= 0}) for t in second] == [[0, 1]] * EPISODES
    assert_sampled_by(run, second, dict(enumerate(states[:2])))


def tell_when_published(run: rl.Run) -> None:
    assert run.learner.replica is not None
    while run.learner.replica.version < 1:
        threading.Event().wait(0.005)
    Patient.go.set()


# ---------------------------------------------------------------- kills and errors


def test_what_ran_ahead_of_a_kill_is_neither_lost_nor_counted_twice(tmp_path: Path):
    """Complete steps come back from the checkpoint as they were; the tasks of unfinished ones are asked again."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    checkpoint = {"every": 2}
    whole = trained(asynchronous(folders[0], None, checkpoint=checkpoint))
    run = rl.start(asynchronous(folders[1], 2, checkpoint=checkpoint))

    def kill(step: int, row: Any) -> None:
        if step == 3:
            raise Killed

    run.on_row = kill
    with pytest.raises(Killed):
        rl.train(run)
    run.close()
    resumed = rl.resume(run.directory.path)
    assert resumed.step == 2
    assert resumed.ahead is not None
    complete = {step: making.future.result() for step, making in resumed.ahead._making.items()}
    rl.train(resumed)
    resumed.close()
    assert asked(resumed) == asked(whole)
    for step, filled in complete.items():
        kept = {t.episode_id: t.token_ids for t in filled.trajectories}
        assert {t.episode_id: t.token_ids for t in of_step(resumed, step)} == kept
    assert resumed.learner.policy.version == whole.learner.policy.version


def test_complete_and_unfinished_steps_survive_in_a_checkpoint(tmp_path: Path):
    run = rl.start(asynchronous(tmp_path, 2))
    assert run.ahead is not None
    stuck = asyncio.Event()

    async def roll_out(step: int, draw: Any) -> Filled:
        if step == 2:
            draw(2)
            await stuck.wait()
        return await rl.roll_out(run, step, draw)

    run.ahead.roll_out = roll_out
    with Background() as background:
        run.ahead.start_all(background, done=0, version=0)
        first, third = (run.ahead._making[step].future.result() for step in (1, 3))
        rl.checkpoint(run, background)
    run.close()
    again = rl.resume(run.directory.path)
    assert again.ahead is not None
    back = {step: making.future.result() for step, making in again.ahead._making.items()}
    assert back == {1: first, 3: third}
    with Background() as background:
        again.ahead.start_all(background, done=0, version=0)
        second = again.ahead._making[2].future.result()
    again.close()
    ids = [list(dict.fromkeys(t.task_id for t in filled.trajectories)) for filled in (first, second, third)]
    fresh = rl.start(asynchronous(tmp_path, 2, run={"dir": str(tmp_path / "fresh")}))
    expected = [[task.id for task in fresh.stream.next(2)] for _ in range(3)]
    fresh.close()
    assert ids == expected


def test_what_goes_wrong_in_a_rollout_stops_the_run_and_leaves_no_thread(tmp_path: Path):
    code = "def broken(episode, task):\n    raise KeyError('no such thing')\n"
    run = rl.start(asynchronous(tmp_path, 1, code=code, reward="broken"))
    with pytest.raises(RuntimeError, match="no such thing"):
        rl.train(run)
    run.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "posttrain-rollout"]


# ---------------------------------------------------------------- the config


def test_stale_tokens_are_weighed_unless_the_config_says_otherwise(tmp_path: Path):
    assert asynchronous(tmp_path, None).algorithm.correction is None
    assert asynchronous(tmp_path, 0).algorithm.correction is None, "nothing is stale"
    assert asynchronous(tmp_path, 1).algorithm.correction == "truncated_is"
    assert asynchronous(tmp_path, 1, algorithm={"correction": "icepop"}).algorithm.correction == "icepop"
    assert asynchronous(tmp_path, 1, algorithm={"correction": None}).algorithm.correction is None
    assert asynchronous(tmp_path, 1, algorithm={"old_logprobs": "sampler"}).algorithm.correction is None
