"""`posttrain check`: answers of known worth, through the real env and reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config import ConfigError, RLConfig, load_config
from posttrain.data.problems import DataError
from posttrain.envs import SearchEnv
from posttrain.loops.check import check, lint_tags
from posttrain.rewards.audit import TAGGED
from posttrain.task import Task

from .toy import rows, toy_config, write_rows

ROOT = Path(__file__).resolve().parents[2]


def toy(folder: Path, reward=None, reward_name="noise", **sections):
    base = {"limits": {"max_turn_tokens": 64, "max_episode_tokens": 256}}
    config = toy_config(folder, reward=reward_name, **{**base, **sections})
    return config if reward is None else config.model_copy(update={"reward": type(config.reward)(**reward)})


def test_the_tiny_recipe_passes():
    found = check(load_config(RLConfig, ROOT / "recipes" / "tiny_search.yaml"), tasks=40)
    assert found.passed
    assert found.played == found.reached == 32
    assert found.audit is not None
    assert (found.audit.false_accepts, found.audit.false_rejects) == (0, 0)
    assert "40        40" in found.render()


def test_the_recipe_of_a_real_model_passes_without_that_model(shared_data, monkeypatch):
    monkeypatch.chdir(ROOT)
    sources = [f"{shared_data}/rag_bench/questions.jsonl"]
    config = load_config(RLConfig, ROOT / "recipes" / "rag_270m.yaml", ["model.path=models/absent"])
    data = config.data.model_copy(
        update={"train": tuple(s.model_copy(update={"path": tuple(sources), "limit": 60}) for s in config.data.train)}
    )
    assert config.retrieval is not None
    retrieval = config.retrieval.model_copy(update={"corpus": str(write_corpus(shared_data))})
    found = check(config.model_copy(update={"data": data, "retrieval": retrieval}), tasks=40)
    assert found.passed, found.render()
    assert found.audit is not None
    assert (found.audit.false_accepts, found.audit.false_rejects) == (0, 0)
    assert any("packaged tokenizer" in note for note in found.notes)


def write_corpus(shared_data: Path) -> Path:
    return shared_data / "search_r1_example" / "corpus.jsonl"


def test_a_reward_that_never_pays_fails(tmp_path):
    found = check(toy(tmp_path))
    assert not found.passed
    assert "accepted answers" in found.problems[0]


def test_a_careless_reward_fails_and_one_that_only_likes_lists_is_named(tmp_path):
    found = check(toy(tmp_path, {"name": "sub_em"}))
    assert not found.passed
    assert any("observation_pasted" in problem for problem in found.problems)
    assert any("gold_repeated" in note for note in found.notes)


def test_a_turn_too_short_for_the_answer_fails_in_the_env_only(tmp_path):
    limits = {"max_turn_tokens": 4, "max_episode_tokens": 256}
    found = check(toy(tmp_path, {"name": "em"}, limits=limits))
    assert (found.played, found.reached) == (4, 0)
    assert found.audit is not None
    assert found.audit.false_rejects == 0
    assert any("cut by limits.max_turn_tokens" in problem for problem in found.problems)


GUESS = """
from posttrain.envs import Observation, Step

class Guess:
    stop_strings, max_turns = ("</answer>",), 2
    async def reset(self, task):
        self.wanted = task.ground_truth[0]
        return Observation()
    async def step(self, action):
        return Step(done=True, reward=1.0) if self.wanted in action.text else Step(observation=Observation(text="No. "))
    async def close(self): ...

class Generous(Guess):
    async def step(self, action):
        return Step(done=True, reward=1.0)

def earned(episode, task):
    return (episode.env_reward or 0.0) / len(episode.policy_texts)
"""


@pytest.mark.parametrize("reward", ["env", "earned"])
def test_a_reward_that_comes_from_the_env_is_judged_by_what_is_played(tmp_path, reward):
    env = {"name": f"{tmp_path}/functions.py:Guess"}
    config = toy(tmp_path, {"name": "env"} if reward == "env" else None, reward, code=GUESS, env=env)
    found = check(config)
    assert found.passed, found.render()
    assert any("only what was played counts" in note for note in found.notes)
    generous = {"name": f"{tmp_path}/functions.py:Generous"}
    config = toy(tmp_path, {"name": "env"} if reward == "env" else None, reward, code=GUESS, env=generous)
    found = check(config)
    assert not found.passed
    assert "4 of 4 wrong answers get 1 in the env: task train/0 with '<think>" in found.problems[0]


def test_rows_of_two_rewards_are_answered_in_both_forms(tmp_path):
    mixed = rows()
    mixed[0] |= {"reward": "gsm8k", "answer": "#### 42"}
    found = check(toy(tmp_path, {"name": "em"}, tasks=mixed))
    assert found.passed, found.render()
    assert found.reached == 4


def test_an_answer_that_no_comparison_reads_is_no_fault_of_a_row_that_is_judged_otherwise(tmp_path):
    """`a` is an article to exact match, and a number to mathematics."""
    letter = [{"id": "1", "question": "x = a, x = ?", "answer": "a", "kind": "algebra"}]
    by = {"by": {"column": "kind", "rewards": {"algebra": {"name": "math"}}}}
    assert check(toy(tmp_path, by, tasks=letter)).passed
    own = {"path": str(tmp_path / "train.jsonl"), "reward": "math"}
    assert check(toy(tmp_path, {"name": "em"}, tasks=letter, data={"train": [own]})).passed
    with pytest.raises(DataError, match="normalises to nothing"):
        check(toy(tmp_path, {"name": "em"}, tasks=letter))


def test_rubrics_and_tests_have_no_answer_to_play(tmp_path):
    write_rows(tmp_path / "r.jsonl", rows(rubrics=["names a town"]))
    source = {
        "path": str(tmp_path / "r.jsonl"),
        "columns": {"ground_truth": "rubrics"},
        "ground_truth_format": "opaque",
    }
    options = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    config = toy(tmp_path, {"name": "rubric", "options": options}, data={"train": [source]})
    found = check(config)
    assert found.passed
    assert found.audit is None
    assert "no answer" in found.notes[-1]


def prompt(text: str) -> Task:
    return Task(id="t", prompt=({"role": "system", "content": text}, {"role": "user", "content": "?"}))


def test_p50_a_tag_that_only_resembles_a_known_one_is_a_problem():
    env = SearchEnv(retriever=None)  # type: ignore[arg-type]
    said = "Reason in <thinking> and </thinking>, use <search> q </search>, then <answer> a </answer>."
    problems, notes = lint_tags([prompt(said)] * 3, env, TAGGED)
    assert problems == ["the prompts name <thinking>, which nothing reads; did you mean <think>?"]
    assert notes == []
    problems, notes = lint_tags([prompt("Answer."), prompt("What does <answers> do?"), prompt("?")], env, TAGGED)
    assert problems == []
    assert [note.split(":")[0] for note in notes] == ["no prompt names <answer>", "no prompt names <search>"]


def test_a_form_of_ones_own(tmp_path):
    code = "def shouted(episode, task):\n    return float(task.ground_truth[0] + '!' == episode.final_text)\n"
    config = toy(tmp_path, code=code, reward_name="shouted")
    assert not check(config).passed
    assert check(config, frame="{answer}!").passed
    with pytest.raises(ConfigError, match="must hold"):
        check(config, frame="x")


def test_the_command_prints_a_table_or_json_and_fails_by_its_exit_code(tmp_path):
    (tmp_path / "ok.jsonl").write_text('{"id": "1", "question": "Where?", "answer": "Doli"}\n')
    text = (
        "model: {path: tiny_search_base}\ndata: {train: ok.jsonl}\nreward: {name: NAME}\n"
        "batch: {samples_per_prompt: 2}\n"
    )
    for name, code in (("em", 0), ("gsm8k", 1)):
        (tmp_path / "c.yaml").write_text(text.replace("NAME", name))
        command = [sys.executable, "-m", "posttrain", "check", "c.yaml", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        record = json.loads(done.stdout.splitlines()[-1])
        assert record["passed"] is (code == 0)
        assert record["audit"]["kinds"]["gold"]["count"] == 1
