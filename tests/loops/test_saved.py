"""`posttrain show`: saved trajectories are found by what became of them, and shown as they were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import ConfigError
from posttrain.loops.saved import Wanted, find
from posttrain.loops.show import STYLES
from posttrain.runs.trajectories import read_trajectories, write_file
from posttrain.task import Invalid
from posttrain.trajectory import Source

from .toy import rows, toy_config, trained

CODE = """
def graded(episode, task):
    return 1.0 if task.id.endswith("0") else 0.25
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two steps of 2 prompts x 4 samples."""
    folder = tmp_path_factory.mktemp("show")
    return trained(toy_config(folder, tasks=rows(), code=CODE, reward="graded")).directory.path


def told(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["show", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_what_is_shown_is_what_was_saved(run):
    found = find(run, Wanted(most=100))
    saved = [t for file in sorted((run / "trajectories").glob("*.parquet")) for t in read_trajectories(file)]
    assert (found.matched, found.total, found.files, found.note) == (16, 16, 2, "")
    assert [one.trajectory for one in found.shown] == saved
    for one in found.shown:
        assert found.renderer is not None
        whole = "".join(text for _, text in one.segments)
        assert whole == found.renderer.decode(one.trajectory.token_ids)
        assert {who for who, _ in one.segments} <= {source.name.lower() for source in Source}
    assert "train" in found.shown[0].as_dict()["source"]


def test_filters_by_reward_step_task_and_text(run):
    best = find(run, Wanted(reward=">0.5", most=100))
    assert best.matched == 4
    assert {one.as_dict()["reward"] for one in best.shown} == {1.0}
    assert find(run, Wanted(reward=">0.1,<0.5")).matched == 12
    assert find(run, Wanted(reward="=2")).matched == 0
    assert {one.step for one in find(run, Wanted(step=2, most=100)).shown} == {2}
    (first, *_) = find(run, Wanted(order="best")).shown
    (last, *_) = find(run, Wanted(order="worst")).shown
    assert (first.as_dict()["reward"], last.as_dict()["reward"]) == (1.0, 0.25)
    mine = find(run, Wanted(task="2", most=100))
    assert {one.trajectory.task_id for one in mine.shown} == {"train/2"}


def test_names_that_nothing_has_are_errors_with_what_there_is(run, tmp_path):
    with pytest.raises(ConfigError, match=r"no trajectory has the task '7'\. There are 4: train/0"):
        find(run, Wanted(task="7"))
    with pytest.raises(ConfigError, match=r"no trajectory has the env 'search'\. There are 0: none"):
        find(run, Wanted(env="search"))
    with pytest.raises(ConfigError, match=r"outcome 'scor'\. Did you mean 'score'"):
        find(run, Wanted(outcome="scor"))
    with pytest.raises(ConfigError, match="write bounds such as"):
        find(run, Wanted(reward="high"))
    with pytest.raises(ConfigError, match="holds no parquet files"):
        find(tmp_path, Wanted())
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="holds no trajectories"):
        find(tmp_path, Wanted())


def test_a_file_alone_is_shown_without_colours_unless_a_model_is_named(run, tmp_path):
    (found, *_) = find(run, Wanted()).shown
    found.trajectory.outcome = Invalid("timeout", "call_seconds passed")
    found.trajectory.rewards = [0.0] * (len(found.trajectory) - 1) + [0.5]
    write_file(tmp_path / "one.parquet", 0, [found.trajectory], ["the text\x1b[31m"])
    plain = find(tmp_path / "one.parquet", Wanted(outcome="timeout"))
    assert "say --model MODEL" in plain.note
    assert plain.shown[0].segments == (("all", "the text\x1b[31m"),)
    shown = told(tmp_path / "one.parquet")
    assert "the text\u241b[31m" in shown
    assert "call_seconds passed" in shown
    assert "invalid: timeout, its turns earned 0.5" in shown
    named = find(tmp_path / "one.parquet", Wanted(), model="tiny_search_base")
    assert [who for who, _ in named.shown[0].segments][-1] == "policy"
    with pytest.raises(ConfigError, match="--model nowhere/at/all"):
        find(tmp_path / "one.parquet", Wanted(), model="nowhere/at/all")


@pytest.mark.parametrize(
    "config", [b"", b"\xff\x00", b"a: [", b"a: " + b"[" * 3000, b"model: path", b"model: {path: 3}", b"a: 2020-99-99"]
)
def test_a_run_whose_config_is_damaged_is_shown(run: Path, tmp_path: Path, config: bytes):
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "config.yaml").write_bytes(config)
    assert find(copied, Wanted(most=1)).renderer is not None, "its checkpoint has a tokenizer"
    shutil.rmtree(copied / "checkpoints")
    found = find(copied, Wanted(most=1))
    assert found.renderer is None
    assert "without colours" in found.note


def test_colours_say_who_wrote_what(run):
    found = find(run, Wanted(most=1))
    text = next(piece for piece in found.render() if "Where was" in piece.plain or "Who" in piece.plain)
    styles = {str(span.style) for span in text.spans}
    assert {STYLES[Source.PROMPT], STYLES[Source.POLICY]} <= styles


def test_the_command_prints_a_summary_tokens_or_json(run):
    shown = told(run, "-n", "1", "--reward", ">0.5")
    assert "4 of 16 trajectories in 2 files match, 1 shown" in shown
    assert "colours: prompt, policy, env, template, injected" in shown
    assert "reward 1" in shown
    assert "4 of 16 trajectories in 2 files match, 4 shown" in told(run, "-n", str(10**20), "--reward", ">0.5")
    record = json.loads(told(run, "--json", "-n", "2", "--order", "best"))
    assert (record["matched"], len(record["trajectories"])) == (16, 2)
    one = record["trajectories"][0]
    assert (one["reward"], one["outcome"], one["calls"]) == (1.0, "score", [])
    assert one["policy_tokens"] <= one["tokens"]
    lines = told(run, "--tokens", "-n", "1").splitlines()
    assert (
        sum(" policy " in line for line in lines[3:]) == find(run, Wanted(most=1)).shown[0].as_dict()["policy_tokens"]
    )
