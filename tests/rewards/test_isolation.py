"""Custom functions from files, in worker processes. P-numbers are the field's bug reports."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from posttrain.boundary.processes import kill_tree
from posttrain.rewards import RewardError, isolation, score, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.functions import FunctionSpec
from posttrain.rewards.scoring import IsolatedReward
from posttrain.task import Invalid, Score

from .episodes import episode, task

FUNCTIONS = """
import os, sys, time
import dataclasses
from posttrain.task import Score

CALLS = 0

@dataclasses.dataclass
class Parsed:
    text: str

def good(episode, task, bonus=0.0):
    print("chatter on stdout must not meet the messages")
    return Score(1.0 + bonus, {"pid": float(os.getpid())}, prediction=Parsed(episode.final_text).text)

def tower(episode, task):
    base = 9 if episode.final_text == "hang" else 1
    return base**base**base**base > 0

def sleeper(episode, task):
    time.sleep(3600 if episode.final_text == "hang" else 0)
    return 1.0

def spawner(episode, task):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    open(episode.final_text, "w").write(str(child.pid))
    time.sleep(3600)

def dies(episode, task):
    if episode.final_text == "die":
        os._exit(3)
    return 1.0

def leaves(episode, task):
    sys.exit(4)

def raises(episode, task):
    raise KeyError(episode.final_text)

def seven(episodes, task):
    return [1.0] * 7

def lengths(episodes, task):
    return [len(e.final_text) for e in episodes]

async def awaited(episode, task):
    return 1.0

def where(episode, task):
    return os.getpid()

def waits(episode, task):
    time.sleep(0.3)
    return 1.0

def reaps(episode, task):
    if os.fork() == 0:
        os.fork()  # an orphan, unless it ends first
        os._exit(0)
    ended = 0
    while True:
        try:
            ended += os.wait()[0] > 0
        except ChildProcessError:
            return ended

not_a_function = 3
"""


@pytest.fixture
def location(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return lambda name: f"mine.py:{name}"


@pytest.fixture
def scored(location):
    """Scores final texts with a function of the file and ends its workers."""
    rewards = []

    def call(name, *texts, **config):
        reward = load_reward(RewardConfig(name=location(name), **config))
        rewards.append(reward)
        return asyncio.run(score_group(reward, [episode(text) for text in texts], task("x")))

    yield call
    for reward in rewards:
        reward.close()


def test_a_function_from_a_file_runs_in_another_process_with_its_options(scored):
    outcome = scored("good", "hello", options={"bonus": 0.5})[0]
    assert (outcome.value, outcome.prediction) == (1.5, "hello")
    assert outcome.components["pid"] != os.getpid()


def test_isolate_false_runs_in_this_process(scored):
    assert scored("where", "x", isolate=False) == [Score(float(os.getpid()))]


def test_async_functions_stay_in_the_event_loop(scored, location):
    assert scored("awaited", "x") == [Score(1.0)]
    assert not isinstance(load_reward(RewardConfig(name=location("awaited"))), IsolatedReward)


def test_p74_a_power_tower_is_killed_at_the_deadline_and_the_others_are_scored(scored):
    started = time.monotonic()
    outcomes = scored("tower", "ok", "hang", "ok", "ok", seconds=1.0, workers=1)
    assert time.monotonic() - started < 30
    assert [outcome == Score(1.0) for outcome in outcomes] == [True, False, True, True]
    assert outcomes[1].reason == "reward_timeout"
    assert "mine.py:tower took longer than 1.0 s and was killed" in outcomes[1].detail


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_a_function_may_wait_until_it_has_no_child_left(scored):
    """What ends the worker with its parent is none; what its children leave behind is."""
    assert scored("reaps", "x", seconds=60.0) == [Score(2.0)]


def test_a_worker_that_answers_as_its_time_ends_is_given_to_no_other_call(location, monkeypatch):
    """It is being killed then, which takes a while: the next call would be told that its function crashed."""
    worker, answered, receive = isolation.Worker(FunctionSpec(location("waits"))), threading.Event(), isolation.receive

    def received(stream):
        reply = receive(stream)
        answered.set()
        return reply

    def kill_late(pid, token):
        assert answered.wait(60)
        kill_tree(pid, token)

    monkeypatch.setattr(isolation, "receive", received)
    monkeypatch.setattr(isolation, "kill_tree", kill_late)
    assert worker.evaluate([episode("x")], task("x"), 0.1) == [Score(1.0)]
    assert not worker.is_alive


def test_a_sleeper_is_killed_and_the_event_loop_lives(location):
    reward = load_reward(RewardConfig(name=location("sleeper"), seconds=0.5))

    async def with_heartbeat():
        scoring = asyncio.create_task(score(reward, episode("hang"), task("x")))
        beats = 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            beats += 1
        return scoring.result(), beats

    outcome, beats = asyncio.run(with_heartbeat())
    reward.close()
    assert outcome.reason == "reward_timeout"
    assert beats > 10


def test_what_a_killed_function_started_dies_too(scored, tmp_path):
    note = tmp_path / "pid"
    assert scored("spawner", str(note), seconds=3.0)[0].reason == "reward_timeout"
    child = int(note.read_text())
    for _ in range(100):
        status = Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the grandchild is still running")


def test_a_crash_is_invalid_and_the_next_call_gets_a_new_worker(scored):
    outcomes = scored("dies", "x", "die", "x", workers=1)
    assert [outcome == Score(1.0) for outcome in outcomes] == [True, False, True]
    assert outcomes[1] == Invalid("reward_crashed", "the process of reward mine.py:dies ended with exit code 3")


@pytest.mark.parametrize(("name", "cause"), [("raises", "KeyError: 'boom'"), ("leaves", "SystemExit: 4")])
def test_p72_what_is_raised_comes_back_with_its_traceback(scored, name, cause):
    outcome = scored(name, "boom")[0]
    assert outcome.reason == "reward_error"
    assert cause in outcome.detail
    assert f"in {name}" in outcome.detail


def test_p76_a_wrong_count_crosses_the_process_boundary_as_an_error(scored):
    with pytest.raises(RewardError, match="returned 7 values for 8 episodes"):
        scored("seven", *["x"] * 8)


def test_batch_functions_are_called_once_for_the_group(scored):
    assert [outcome.value for outcome in scored("lengths", "a", "bb", "ccc")] == [1, 2, 3]


def test_workers_are_reused_and_bounded(location):
    reward = load_reward(RewardConfig(name=location("where"), workers=2))

    async def many_loops():
        return [outcome.value for outcome in await score_group(reward, [episode("x")] * 6, task("x"))]

    pids = set(asyncio.run(many_loops())) | set(asyncio.run(many_loops()))
    reward.close()
    assert 1 <= len(pids) <= 2


def test_the_deadline_does_not_count_the_wait_for_a_worker(scored):
    outcomes = scored("waits", *["x"] * 5, seconds=1.0, workers=1)
    assert outcomes == [Score(1.0)] * 5


def test_close_ends_the_workers(location):
    reward = load_reward(RewardConfig(name=location("where")))
    pid = int(asyncio.run(score(reward, episode("x"), task("x"))).value)
    os.kill(pid, 0)
    reward.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_program_that_forgets_to_close_still_ends_and_takes_its_workers_along(location):
    program = f"""
import asyncio
from posttrain.rewards import score
from posttrain.rewards.config import load_reward
from posttrain.task import Task
from posttrain.trajectory import Episode
episode = Episode(task_id="t", episode_id="e", segments=())
print(int(asyncio.run(score(load_reward("{location("where")}"), episode, Task(id="t", prompt=()))).value))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    ends = time.monotonic() + 20
    while is_alive(int(done.stdout)) and time.monotonic() < ends:  # it hears of the end a moment later
        time.sleep(0.01)
    assert not is_alive(int(done.stdout))


# ---------------------------------------------------------------- what cannot be loaded


def test_a_missing_file_names_the_folder_searched(location):
    with pytest.raises(RewardError, match=r"no file 'other.py' \(looked from"):
        load_reward("other.py:good")


def test_a_misspelt_function_names_the_nearest(location):
    with pytest.raises(RewardError, match=r"has no 'god'\. Did you mean 'good'"):
        load_reward("mine.py:god")


def test_a_missing_module_is_named():
    with pytest.raises(RewardError, match="no module 'nowhere_at_all'"):
        load_reward("nowhere_at_all:fn")


def test_something_else_than_a_function_is_refused(location):
    with pytest.raises(RewardError, match="is of type int; expected a function"):
        load_reward("mine.py:not_a_function")


def test_an_unknown_option_is_refused_before_anything_starts(location):
    with pytest.raises(RewardError, match="unexpected keyword argument 'bonsu'"):
        load_reward(RewardConfig(name=location("good"), options={"bonsu": 1}))


def test_a_file_that_fails_to_import_says_what_it_raised(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import not_there_either\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RewardError, match=r"ModuleNotFoundError: No module named 'not_there_either', raised at .*broken.py:1"
    ):
        load_reward("broken.py:fn")


def test_a_module_location_works_too():
    reward = load_reward("posttrain.rewards.qa:em")
    assert asyncio.run(score(reward, episode("<answer>x</answer>"), task("x"))).value == 1
    reward.close()
