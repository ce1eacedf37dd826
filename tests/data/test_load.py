"""Rows -> tasks: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data import DataConfig, DataError, SourceConfig, TaskSet, load_tasks, tasks_from_rows
from posttrain.task import Task

ARTICLES = ("a", "an", "the")


def no_empty_gold(answer: str) -> str | None:
    """The rule of a reward that drops articles and punctuation before it compares."""
    words = "".join(c if c.isalnum() else " " for c in answer.lower()).split()
    return None if [word for word in words if word not in ARTICLES] else "normalises to empty text"


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"q{i}?", "answer": f"a{i}", **more} for i in range(count)]


def load(path: Path, *, options: dict[str, Any] | None = None, **source: Any) -> TaskSet:
    return load_tasks(DataConfig(train=[{"path": str(path), **source}], **options or {}))


def verl_row(i: int, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"q{i}?"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": [f"a{i}"]}},
        "extra_info": {"split": "train", "index": i},
        **more,
    }


def test_verl_parquet_with_unified_structs(tmp_path: Path) -> None:
    rows = [
        verl_row(0, extra_info={"index": 0, "tools_kwargs": {"search": {"create_kwargs": {"gt": "x"}}}}),
        verl_row(1, extra_info={"index": 1, "tools_kwargs": {"python": {"create_kwargs": {"limit": 3}}}}),
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    first, second = load(tmp_path / "train.parquet")
    assert first.prompt == ({"role": "user", "content": "q0?"},)
    assert first.ground_truth == ("a0",)
    assert first.source == "nq"
    assert first.extra["extra_info"]["tools_kwargs"] == {"search": {"create_kwargs": {"gt": "x"}}}
    assert second.extra["extra_info"]["tools_kwargs"] == {"python": {"create_kwargs": {"limit": 3}}}
    assert first.extra["reward_model"]["style"] == "rule"


def test_openrlhf_jsonl(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"input": "2+2?", "label": "4", "datasource": "sums"}])
    (task,) = load(path)
    assert (task.prompt[0]["content"], task.ground_truth, task.source) == ("2+2?", ("4",), "sums")


def test_open_instruct_rows_with_rubrics_and_final_reply(tmp_path: Path) -> None:
    rubric = json.dumps({"query": "q", "rubrics": [{"description": "d", "weight": 1}]})
    rows = [
        {"messages": [{"role": "user", "content": "q"}], "ground_truth": rubric, "dataset": "general_rubric"},
        {
            "messages": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "s"}],
            "ground_truth": ["5"],
            "dataset": ["gsm8k", "math"],
        },
    ]
    tasks = load(jsonl(tmp_path / "rl.jsonl", rows))
    first, second = tasks
    assert first.ground_truth == (rubric,)
    assert second.prompt == ({"role": "user", "content": "r"},)
    assert second.source == "gsm8k,math"
    assert any("1 conversations end in the assistant's reply" in line for line in tasks.report_lines())


def test_columns_template_and_routing_are_configured_per_source(tmp_path: Path) -> None:
    row = {"qid": 7, "q": "Who?", "meta": {"gold": ["A", "B"]}, "set": "x", "level": 3}
    (task,) = load(
        jsonl(tmp_path / "q.jsonl", [row]),
        name="mine",
        columns={"id": "qid", "ground_truth": "meta.gold", "source": "set"},
        prompt_template="Level {level}\nQuestion: {q}\n",
        system_prompt="Search first.",
        env="search",
        reward="f1",
    )
    assert task.id == "mine/7"
    assert [message["role"] for message in task.prompt] == ["system", "user"]
    assert task.prompt[1]["content"] == "Level 3\nQuestion: Who?\n"
    assert task.ground_truth == ("A", "B")
    assert (task.source, task.env, task.reward) == ("x", "search", "f1")
    assert task.extra == row


def test_env_and_reward_columns_override_those_of_the_source(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", [*questions(1, agent="react"), {"question": "z?", "answer": "z"}])
    first, second = load(path, columns={"env": "agent"}, env="single")
    assert (first.env, second.env) == ("react", "single")


def test_p111_extra_columns_are_carried(tmp_path: Path) -> None:
    (task,) = load(jsonl(tmp_path / "q.jsonl", questions(1, difficulty="hard", tags=["x"])))
    assert task.extra["difficulty"] == "hard"
    assert task.extra["tags"] == ["x"]


def test_p81_rows_without_answer_are_all_counted_and_named(tmp_path: Path) -> None:
    rows = questions(100)
    for i in range(10, 20):
        rows[i]["answer"] = None
    rows[50]["answer"] = []
    rows[60]["question"] = None
    path = jsonl(tmp_path / "q.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith("12 of 100 rows cannot be used")
    assert "no ground truth: 11 (first 3 shown)" in message
    assert f"{path} line 11, column 'answer': holds no answer (null); give at least one" in message
    assert f"{path} line 61, column 'question': is null" in message
    assert "line 14" not in message
    assert len(caught.value.problems) == 12


def test_invalid_rows_are_dropped_only_when_asked_and_counted(tmp_path: Path) -> None:
    rows = questions(5)
    rows[2]["answer"] = None
    path = jsonl(tmp_path / "q.jsonl", rows)
    with path.open("a") as file:
        file.write("{broken\n")
    tasks = load(path, options={"invalid": "drop"})
    assert [task.ground_truth for task in tasks] == [("a0",), ("a1",), ("a3",), ("a4",)]
    (report,) = tasks.reports
    assert (report.rows_read, report.loaded, len(report.invalid)) == (6, 4, 2)
    assert "4 tasks (6 rows read, 0 filtered out, 2 invalid dropped" in tasks.report_lines()[0]


def test_p34_gold_that_normalises_to_empty_is_refused_with_its_row(tmp_path: Path) -> None:
    rows = [*questions(3), {"question": "which article?", "answer": "The"}, {"question": "p?", "answer": "?!"}]
    path = jsonl(tmp_path / "q.jsonl", rows)
    config = DataConfig(train=str(path))
    with pytest.raises(DataError, match=r"line 4, column 'answer': str 'The': normalises to empty text") as caught:
        load_tasks(config, check_ground_truth=no_empty_gold)
    assert len(caught.value.problems) == 2
    assert len(load_tasks(config)) == 5  # another reward may well score "The"


def test_p34_an_unscorable_alias_leaves_the_row_usable_and_is_counted(tmp_path: Path) -> None:
    rows = [*questions(2), {"question": "where?", "answer": ["France", "🇫🇷", "La France"]}]
    path = jsonl(tmp_path / "q.jsonl", rows)
    tasks = load_tasks(DataConfig(train=str(path)), check_ground_truth=no_empty_gold)
    assert list(tasks)[2].ground_truth == ("France", "La France")
    assert list(tasks)[2].extra["answer"][1] == "🇫🇷"
    (note,) = tasks.reports[0].notes
    assert note.startswith("1 answers that cannot be scored were left out")
    assert "q.jsonl line 3, str '🇫🇷': normalises to empty text" in note


def count_words(task: Task) -> int:
    return sum(len(message["content"].split()) for message in task.prompt)


def test_p107_overlong_prompts_are_listed_at_the_start(tmp_path: Path) -> None:
    rows = questions(10)
    rows[3]["question"] = "w " * 50
    rows[7]["question"] = "w " * 80
    path = jsonl(tmp_path / "q.jsonl", rows)
    config = DataConfig(train=str(path), max_prompt_tokens=49)
    with pytest.raises(DataError) as caught:
        load_tasks(config, measure=count_words)
    message = str(caught.value)
    assert "2 of 10 prompts have more than 49 tokens" in message
    assert "the longest prompt has 80" in message
    assert message.index("line 8") < message.index("line 4")
    tasks = load_tasks(config.model_copy(update={"overlong": "drop"}), measure=count_words)
    assert len(tasks) == 8
    assert [item.tokens for item in tasks.reports[0].overlong] == [50, 80]
    assert "2 over-long dropped" in tasks.report_lines()[0]


def test_p108_the_limit_holds_for_what_will_be_sent(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", questions(2))
    config = DataConfig(train=str(path), max_prompt_tokens=10)
    assert len(load_tasks(config, measure=count_words)) == 2
    with pytest.raises(DataError, match="2 of 2 prompts have more than 10 tokens"):
        load_tasks(config, measure=lambda task: count_words(task) + 200)  # with tool schemas
    with pytest.raises(TypeError, match="measure"):
        load_tasks(config)


def test_overlong_drop_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", questions(2))
    with pytest.raises(DataError, match="2 of 2 prompts"):
        load_tasks(DataConfig(train=str(path), max_prompt_tokens=1, overlong="drop"), measure=lambda task: 2)


def test_a_prompt_that_cannot_be_rendered_is_named(tmp_path: Path) -> None:
    def measure(task: Task) -> int:
        raise ValueError("roles must alternate")

    path = jsonl(tmp_path / "q.jsonl", questions(1))
    with pytest.raises(DataError, match=r"q\.jsonl line 1: the prompt cannot be rendered: ValueError: roles must"):
        load_tasks(DataConfig(train=str(path), max_prompt_tokens=5), measure=measure)


def test_empty_data_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", [])
    with pytest.raises(DataError, match="is empty"):
        load(path)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="is empty"):
        load(tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"data\.train names no files"):
        load_tasks(DataConfig())
    jsonl(path, [{"question": "q", "answer": None}])
    with pytest.raises(DataError, match="has no tasks left: 1 invalid"):
        load(path, options={"invalid": "drop"})


def test_filters_and_limit_come_before_checks(tmp_path: Path) -> None:
    rows = [{**row, "split": "dev" if i % 2 else "train", "n": i} for i, row in enumerate(questions(10))]
    rows[1]["answer"] = None
    path = jsonl(tmp_path / "q.jsonl", rows)
    assert [task.extra["n"] for task in load(path, where={"split": "train"})] == [0, 2, 4, 6, 8]
    assert [task.extra["n"] for task in load(path, where={"split": "train", "n": [2, 3, 8]})] == [2, 8]
    tasks = load(path, where={"split": "train"}, limit=2)
    assert [task.extra["n"] for task in tasks] == [0, 2]
    assert (tasks.reports[0].rows_read, tasks.reports[0].rows_filtered_out) == (3, 1)


def test_a_filter_that_keeps_nothing_shows_what_there_is(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", questions(3, split="train"))
    with pytest.raises(DataError, match=r"where split: 'trian'; that column holds str 'train' \(3 rows\)"):
        load(path, where={"split": "trian"})
    with pytest.raises(DataError, match="no such column"):
        load(path, where={"splt": "train"})


@pytest.mark.parametrize(
    ("row", "source", "message"),
    [
        ({"text": "x"}, {}, "no column for the prompt .looked for prompt, messages"),
        ({"question": "x"}, {}, "no column for the ground_truth.*ground_truth_required: false"),
        ({"question": "x", "answer": "y"}, {"columns": {"prompt": "qestion"}}, r"no row has column \['qestion'\]"),
        ({"question": "x", "answer": "y"}, {"prompt_template": "{q}"}, r"no row has column \['q'\].*'question'"),
        (
            {"question": "x", "answer": "y"},
            {"columns": {"ground_truth": ["answer", "z"]}},
            r"no row has column \['z'\]",
        ),
    ],
)
def test_columns_that_are_not_there_are_named(
    tmp_path: Path, row: dict[str, Any], source: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(jsonl(tmp_path / "q.jsonl", [row]), **source)


def test_a_named_column_may_begin_late(tmp_path: Path) -> None:
    rows = questions(150)
    rows[140]["agent"] = "react"
    tasks = list(load(jsonl(tmp_path / "q.jsonl", rows), columns={"env": "agent"}))
    assert [task.env for task in tasks[139:142]] == [None, "react", None]


def test_a_system_prompt_does_not_hide_one_of_the_row(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl(tmp_path / "q.jsonl", [{"prompt": prompt, "answer": "a"}])
    assert next(iter(load(path))).prompt == tuple(prompt)
    with pytest.raises(DataError, match="already begins with a system message"):
        load(path, system_prompt="t")


def test_named_ids_must_be_unique_and_present(tmp_path: Path) -> None:
    rows = questions(4)
    for row, value in zip(rows, ["x", "y", "x", None], strict=True):
        row["key"] = value
    path = jsonl(tmp_path / "q.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load(path, columns={"id": "key"})
    assert f"line 3, column 'key': 'x' is also the id of {path} line 1" in str(caught.value)
    assert "line 4, column 'key': is missing or null" in str(caught.value)
    tasks = load(path, columns={"id": "key"}, options={"invalid": "drop"})
    assert [task.id for task in tasks] == ["q/x", "q/y"]
    assert tasks.origins["q/y"].endswith("line 2")


def test_whole_numbers_of_a_float_column_are_names_and_others_are_not() -> None:
    """pandas makes floats of a column of whole numbers with a gap."""
    source = SourceConfig(path="x.jsonl")  # type: ignore[arg-type]
    rows = questions(2)
    found = tasks_from_rows([{**row, "id": number} for row, number in zip(rows, (7.0, 8.0), strict=True)], source)
    assert [task.id for task in found] == ["x/7", "x/8"]
    for odd in (0.5, float("inf"), {"n": 1}, [[1]]):
        with pytest.raises(DataError, match="a name is text or a whole number"):
            tasks_from_rows([{**rows[0], "id": odd}], source)


@pytest.mark.parametrize("levels", [102, 300, 900])
def test_rows_that_are_nested_too_deeply_are_refused_by_name(tmp_path: Path, levels: int) -> None:
    deep = "[" * levels + "]" * levels
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"question": "q?", "answer": "a", "extra": {deep}}}\n{deep}\n')
    with pytest.raises(DataError) as refused:
        load(path)
    assert "rows.jsonl line 1: has more than 100 levels of lists and objects; flatten it" in str(refused.value)
    assert "rows.jsonl line 2: is list [[" in str(refused.value)
    with pytest.raises(DataError, match=r"source 'rows': where: .*line 1: has more than 100 levels"):
        load(path, where={"extra": 1})
    path.write_text(json.dumps({"question": "q?", "answer": deep}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl line 1"):
        load(path, ground_truth_format="json_answers")


def test_ninety_levels_are_kept(tmp_path: Path) -> None:
    deep = json.loads("[" * 90 + "]" * 90)
    (task,) = load(jsonl(tmp_path / "rows.jsonl", questions(1, extra=deep)))
    assert task.extra["extra"] == deep


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no such device")
def test_a_path_that_is_no_regular_file_is_said_to_be_none() -> None:
    with pytest.raises(DataError, match="'/dev/null' is no regular file"):
        load(Path("/dev/null"))


def test_a_found_id_column_with_repeats_is_passed_over_with_a_note(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", questions(3, id="train_0"))
    tasks = load(path)
    assert len({task.id for task in tasks}) == 3
    assert any("column 'id' does not name every row uniquely" in line for line in tasks.report_lines())


def test_content_ids_survive_other_rows_coming_and_going(tmp_path: Path) -> None:
    rows = questions(5)
    before = {task.ground_truth: task.id for task in load(jsonl(tmp_path / "q.jsonl", rows))}
    after = {
        task.ground_truth: task.id for task in load(jsonl(tmp_path / "q.jsonl", [*rows[:0:-1], *questions(9)[5:]]))
    }
    assert all(after[gold] == before[gold] for gold in after if gold in before)
    twins = load(jsonl(tmp_path / "q.jsonl", [rows[0], rows[1], rows[0]]))
    first, _, third = twins
    assert third.id == f"{first.id}-2"
    assert any("1 tasks repeat another's" in line for line in twins.report_lines())


def test_several_sources_keep_name_weight_and_order(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 3)):
        jsonl(tmp_path / f"{name}.jsonl", questions(count))
    config = DataConfig(train=[{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 3}], eval="b.jsonl")
    tasks = load_tasks(config, root=tmp_path)
    assert [(source.name, source.weight, len(source.tasks)) for source in tasks.sources] == [("a", 1, 2), ("b", 3, 3)]
    assert {task.source for task in tasks} == {"a", "b"}
    assert len(tasks) == 5
    assert len(load_tasks(config, "eval", root=tmp_path)) == 3


def test_rows_in_memory_pass_the_same_checks() -> None:
    source = SourceConfig(path="frame")
    rows = [verl_row(0, prompt=np.array([{"role": "user", "content": "q"}], dtype=object)), verl_row(1)]
    assert [task.ground_truth for task in tasks_from_rows(rows, source)] == [("a0",), ("a1",)]
    with pytest.raises(DataError, match=r"row 1 \(from 0\), column 'reward_model.ground_truth': holds no answer"):
        tasks_from_rows([rows[0], verl_row(1, reward_model={"ground_truth": None})], source)


def test_notes_point_at_what_is_allowed_but_rarely_meant(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": '["Paris"]'}, {"question": "r", "answer": "2+3=5\n#### 5"}]
    text = "\n".join(load(jsonl(tmp_path / "q.jsonl", rows)).report_lines())
    assert "ground_truth_format: json_answers" in text
    assert 'answer_after: "####"' in text


def test_what_a_file_could_not_take_later_is_refused_at_the_start() -> None:
    rows = [{"id": "a\udce9", "question": "q?", "answer": "x"}, {"id": "b", "question": "[" * 99_999, "answer": "x"}]
    source = SourceConfig(path="x.jsonl", columns={"id": "id"})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="column 'id': holds half a character at position 1"):
        tasks_from_rows(rows, source)
    (task,) = tasks_from_rows(rows[1:], source)
    assert task.prompt[0]["content"] == "[" * 99_999, "text that only looks like JSON, however deep"
