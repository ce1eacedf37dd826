"""A run that is killed, whenever that is, and resumed ends with the very bits of one that was left alone.

Parameters, optimizer, critic, random states, consumed ids, metrics and trajectories are compared byte by byte. Seconds
are exempt; they have a file of their own. `benchmarks/kill.py` does the same with hundreds of kills.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from cli_runs import command_in
from invariants.killing import (
    AT_EVERY_KIND,
    CONFIGS,
    GRPO,
    OFTEN,
    PPO,
    STEPS,
    Life,
    Moment,
    Remains,
    by_command,
    consumed,
    live,
    random_lives,
    remains,
)

RANDOM_KILLS = {"grpo": 12, "ppo": 8}
ISOLATED = tuple(override.replace("isolate: false", "isolate: true") for override in GRPO)  # answers come later
WHOLE = CONFIGS | {"isolated": ISOLATED}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Remains, float]]:
    """Runs that nobody interrupts, with what they leave and the seconds they take."""

    def lead(name: str) -> tuple[Path, Remains, float]:
        folder = base / name
        started = time.monotonic()
        live(folder, WHOLE[name])
        return folder, remains(folder), time.monotonic() - started

    base = tmp_path_factory.mktemp("whole")
    live(base / "first", GRPO, Moment(seconds=0))  # the server has started and imported when this is over
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(WHOLE, pool.map(lead, WHOLE), strict=True))


@pytest.fixture(scope="module")
def lives(
    whole: dict[str, tuple[Path, Remains, float]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Life]]:
    """All the killing, two lives at a time."""
    base = tmp_path_factory.mktemp("lives")
    for name in RANDOM_KILLS:
        (base / name).mkdir()
    with ThreadPoolExecutor(2) as pool:
        jobs: dict[str, Future[list[Life]]] = {
            "command": pool.submit(_by_command, base / "command"),
            "points": pool.submit(lambda: [Life(base / "points").lead((*GRPO, *OFTEN), AT_EVERY_KIND)]),
        }
        for name, kills in RANDOM_KILLS.items():
            longest = whole[name][2]
            jobs[name] = pool.submit(random_lives, base / name, CONFIGS[name], seed=name, kills=kills, longest=longest)
    return {name: job.result() for name, job in jobs.items()}


def _by_command(folder: Path) -> list[Life]:
    """`posttrain rl` killed, `posttrain resume` killed, `posttrain resume`; the reward in worker processes."""
    life = Life(folder)
    for seconds in (0.8, 0.5):
        if by_command(folder, ISOLATED, seconds):
            life.kills.append(f"{seconds} s")
    by_command(folder, ISOLATED)
    return [life]


@pytest.mark.parametrize("name", [*RANDOM_KILLS, "points", "command"])
def test_p116_killed_and_resumed_is_bit_identical_to_never_killed(
    whole: dict[str, tuple[Path, Remains, float]], lives: dict[str, list[Life]], name: str
):
    expected = whole[{"ppo": "ppo", "command": "isolated"}.get(name, "grpo")][1]
    assert expected.best is not None
    for life in lives[name]:
        assert remains(life.folder).differences(expected) == [], life.kills


def test_the_kills_were_many_and_of_every_kind(lives: dict[str, list[Life]]):
    kills = {name: [kill for life in lives_of for kill in life.kills] for name, lives_of in lives.items()}
    assert sum(len(kills[name]) for name in RANDOM_KILLS) == 20
    assert [kill.partition(" (")[0] for kill in kills["points"]] == [str(moment) for moment in AT_EVERY_KIND]
    assert len(kills["command"]) == 2


def test_the_comparison_is_of_something(whole: dict[str, tuple[Path, Remains, float]]):
    """Both runs learnt, from different samples, and differ from each other everywhere."""
    folder, grpo, _ = whole["grpo"]
    rows = [json.loads(line) for line in grpo.metrics.splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[-1]["train/optimizer_steps"] == 2 * STEPS >= rows[-1]["train/policy_version"] > STEPS
    assert len({row["filter/rounds"] for row in rows[1:]}) > 1
    assert len({tuple(ids) for ids in consumed(folder)}) == STEPS
    assert {"model.safetensors", "optimizer.safetensors", "state.json", "chat_template.jinja"} <= grpo.checkpoint.keys()
    ppo = whole["ppo"][1]
    assert {"critic/model.safetensors", "critic/value_head.safetensors", "critic_optimizer.safetensors"} <= (
        ppo.checkpoint.keys()
    )
    named = " ".join(ppo.differences(grpo))
    for part in ("metrics.jsonl", "model.safetensors", "state.json", "trajectories"):
        assert part in named


def test_a_finished_run_says_so_and_changes_nothing(
    whole: dict[str, tuple[Path, Remains, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    folder, before, _ = whole["grpo"]
    done = command_in(tmp_path, monkeypatch, capfd)("resume", folder)
    assert done.code == 0
    assert f"finished: all {STEPS} steps are done" in done.out
    assert remains(folder).differences(before) == []


def test_p118_p120_the_latest_checkpoint_and_its_version_are_restored(whole: dict[str, tuple[Path, Remains, float]]):
    """What was sampled after a resume carries the version that the weights really have."""
    rows = whole["ppo"][1].trajectories
    by_step = {row["step"]: set(row["policy_versions"]) - {-1} for row in rows}
    assert by_step == {1: {0}, **{step: {4 * (step - 2)} for step in range(2, STEPS + 1)}}  # step 1: critic only
    assert PPO[-1].endswith("warmup_steps: 1}")
