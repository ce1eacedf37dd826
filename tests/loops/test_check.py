"""`posttrain check`: answers of known worth, through the real env and reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import command_in
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


ADD = "def add(a, b):\n    return a + b\n"
TWICE = "print(int(input()) * 2)\n"
PAIRS = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]})
PROGRAMS = (
    {"id": "add", "question": "Add.", "answer": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"], "solution": ADD},
    {"id": "io", "question": "Twice.", "answer": PAIRS, "solution": f"```python\n{TWICE}```"},
)


def programs(folder: Path, tasks=PROGRAMS, **options):
    source = {"path": str(folder / "train.jsonl"), "ground_truth_format": "opaque"}
    reward = {"name": "code", "options": {"allow_unisolated": True, "seconds_per_test": 5.0, **options}}
    return toy(folder, reward, tasks=tasks, data={"train": [source]})


def test_programs_are_played_and_judged_by_their_tests(tmp_path):
    found = check(programs(tmp_path))
    assert found.passed, found.render()
    assert found.audit is not None
    assert (found.played, found.reached) == (2, 2)
    kinds = {kind: (tally.count, tally.accepted) for kind, tally in found.audit.tallies.items()}
    assert kinds.pop("gold") == (2, 2)
    assert all(accepted == 0 for _, accepted in kinds.values()), kinds
    assert {"empty", "garbage", "hard_coded_print", "ends_early", "answer_in_thought"} <= kinds.keys()
    assert kinds["hard_coded_print"] == (2, 0)


def test_tests_that_a_print_passes_and_a_wrong_solution_are_problems(tmp_path):
    weak = {**PROGRAMS[1], "answer": json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})}
    found = check(programs(tmp_path, [weak, {**PROGRAMS[0], "solution": ADD.replace("+", "-")}]))
    assert not found.passed
    assert any("hard_coded_print" in problem and "task train/io" in problem for problem in found.problems)
    assert any("1 of 2 accepted answers do not get 1 in the env: task train/add" in p for p in found.problems)


def test_programs_without_a_reference_are_still_shown_what_is_wrong(tmp_path):
    bare = [{key: value for key, value in row.items() if key != "solution"} for row in PROGRAMS]
    found = check(programs(tmp_path, bare))
    assert found.passed, found.render()
    assert (found.played, found.audit.tallies["gold"].count, found.audit.tallies["garbage"].count) == (0, 0, 2)
    assert any("2 of 2 rows have no reference solution" in note for note in found.notes)
    named = [row | {"mine": "    return a + b\n", "question": "def add(a, b):\n"} for row in bare[:1]]
    found = check(programs(tmp_path, named), solution="mine")
    assert (found.played, found.reached) == (1, 1), found.render()
    with pytest.raises(ConfigError, match="no row has a program in the column 'yours'"):
        check(programs(tmp_path, named), solution="yours")
    with pytest.raises(ConfigError, match="--solution is for rows that the reward `code` judges; here it is em"):
        check(toy(tmp_path, {"name": "em"}), solution="mine")


def test_rubrics_have_no_answer_to_play(tmp_path):
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
    for form in ("x", "{answr}", "{answer.text}", "{answer} {", "{answer} {}", r"\boxed{{answer}}"):
        with pytest.raises(ConfigError, match=r"must hold \{answer\}.*other braces are doubled"):
            check(config, frame=form)


def test_the_command_prints_a_table_or_json_and_fails_by_its_exit_code(tmp_path, monkeypatch, capfd):
    command = command_in(tmp_path, monkeypatch, capfd)
    (tmp_path / "ok.jsonl").write_text('{"id": "1", "question": "Where?", "answer": "Doli"}\n')
    text = (
        "model: {path: tiny_search_base}\ndata: {train: ok.jsonl}\nreward: {name: NAME}\n"
        "batch: {samples_per_prompt: 2}\n"
    )
    for name, code in (("em", 0), ("gsm8k", 1)):
        (tmp_path / "c.yaml").write_text(text.replace("NAME", name))
        done = command("check", "c.yaml", "--json")
        assert done.code == code, done.err
        record = json.loads(done.out.splitlines()[-1])
        assert record["passed"] is (code == 0)
        assert record["audit"]["kinds"]["gold"]["count"] == 1
