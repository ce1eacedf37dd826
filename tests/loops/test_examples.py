"""What a user would copy: the search env of the docs and the arithmetic recipe are checked, and train."""

from __future__ import annotations

import re
import runpy
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from posttrain.config import RLConfig, load_config
from posttrain.data.load import load_tasks
from posttrain.envs.trial import trial
from posttrain.loops.check import check
from posttrain.task import Task

from .toy import metric_rows, trained

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "search_env.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert found
    return found[1]


def test_a_search_env_of_ones_own_is_short_is_right_and_trains(tmp_path, monkeypatch):
    assert len(block("python").splitlines()) <= 150
    (tmp_path / "library.py").write_text(block("python"))
    (tmp_path / "library.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    small = ["run.steps=2", "run.sinks=[]", "batch.prompts_per_step=4"]
    config = load_config(RLConfig, Path("library.yaml"), small)
    found = check(config)
    assert found.passed, found.render()
    assert found.audit is not None
    assert (found.audit.false_accepts, found.audit.false_rejects) == (0, 0)
    done = metric_rows(trained(config))
    assert len(done) == 2
    assert all(row["rollout/invalid"] == 0 for row in done.values())
    assert any(row["rollout/calls"] > 1 for row in done.values()), "pages were asked for"


@pytest.fixture(scope="module")
def arithmetic() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "recipes" / "arithmetic.py"))


def test_expressions_are_evaluated_exactly(arithmetic):
    evaluate = arithmetic["evaluate"]
    assert evaluate("(3 + 5) * 3", [3, 3, 5]) == 24
    assert evaluate("1 / 3 + 2", [1, 2, 3]) == Fraction(7, 3)
    assert evaluate(" 3 -5 ", [5, 3]) == -2


@pytest.mark.parametrize(
    "text",
    [
        "", "3", "3 + 5 + 5", "3 + 6", "35", "8", "3 ** 5", "3 // 5", "-3 + 5", "3(5)", "(3, 5)", "3 5", "3 + ",
        "03 + 5", "3.0 + 5", "3 + 5 # 1", "__import__('os')", "True + 3 + 5", "3_0 + 5", "3 / (5 - 5)", "3 < 5",
        "٣ + 5", "3\n+ 5", "3 + 5" * 99, "(" * 99, "9" * 101, "\x003+5",
    ],
)  # fmt: skip
def test_what_is_no_expression_of_the_numbers_is_refused_and_never_run(arithmetic, text: str):
    with pytest.raises(arithmetic["WrongExpression"]):
        arithmetic["evaluate"](text, [3, 5])


def test_no_task_is_in_both_splits_and_every_answer_is_right(arithmetic):
    train, held_out = (arithmetic["rows"](split, numbers=3, count=64) for split in ("train", "eval"))
    assert len(train) == len(held_out) == 64
    assert {row["id"] for row in train}.isdisjoint(row["id"] for row in held_out)
    for row in [*train[:8], *held_out[:8]]:
        task = Task(id=row["id"], prompt=(), ground_truth=(row["answer"],), extra=row)
        judge = trial(arithmetic["reward"], arithmetic["Arithmetic"])
        task.validate(judge, wrong=["", str(row["target"]), f"{row['answer']} + 0"])
        corrected = trial(
            arithmetic["reward"],
            arithmetic["Arithmetic"],
            form=["<answer> 1 + 1 </answer>", "<answer> {answer} </answer>"],
        )
        task.validate(corrected, full=0.75)


def test_the_recipe_is_right_and_trains_from_a_model_of_random_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    base = runpy.run_path("recipes/arithmetic_base.py")
    tokenizer = base["build_tokenizer"]()
    policy = base["Policy"].random(base["model_config"](len(tokenizer)), seed=0, device="cpu")
    assert base["train"](policy, tokenizer, steps=12, batch_size=16) < 4.0, "from 5.6, the entropy of all bytes"
    policy.save(tmp_path / "model", tokenizer)
    settings = [f"model.path={tmp_path}/model", f"run.dir={tmp_path}/run", "run.sinks=[]", "run.steps=1"]
    settings += ["batch.prompts_per_step=2", "batch.prompts_per_mini_batch=2", "eval.max_tasks=2"]
    config = load_config(RLConfig, Path("recipes/arithmetic.yaml"), settings)
    assert len(load_tasks(config.data, "train")) > 100
    found = check(config, tasks=40)
    assert found.passed, found.render()
    assert metric_rows(trained(config))[1]["rollout/invalid"] == 0
