"""Question files of the field, read by column configuration alone: every row, with the counts their makers state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain.data import DataConfig, DataError, TaskSet, TaskStream, load_tasks


def load(root: Path, *, options: dict[str, Any] | None = None, **source: Any) -> TaskSet:
    return load_tasks(DataConfig(train=[source], **options or {}), root=root)


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ({}, 3167),
        ({"split": "train"}, 2155),
        ({"split": "train", "dataset": "nq"}, 1655),
        ({"split": "dev"}, 914),
        ({"split": ["dev", "dev_reflexion"], "dataset": "hotpotqa"}, 248),
    ],
)
def test_rag_bench_questions(shared_data: Path, where: dict[str, Any], count: int) -> None:
    tasks = load(
        shared_data, path="rag_bench/questions.jsonl", where=where, prompt_template="Question: {question}\n", name="rag"
    )
    assert len(tasks) == count
    first = next(iter(tasks))
    assert first.prompt[0]["content"] == f"Question: {first.extra['question']}\n"
    assert first.id == f"rag/{first.extra['id']}"
    assert first.source == first.extra["dataset"]
    assert first.extra["gold"]
    assert all(task.ground_truth == tuple(task.extra["answers"]) for task in tasks)


def test_arpo_train_10k_has_one_row_without_answer(shared_data: Path) -> None:
    path = "verl_parquet/arpo_train_10k.parquet"
    with pytest.raises(DataError, match=r"1 of 10,000 rows cannot be used.*\n.*\n.*row 5274 \(from 0\)") as caught:
        load(shared_data, path=path)
    assert "column 'reward_model.ground_truth': has an empty answer" in str(caught.value)
    tasks = load(shared_data, path=path, options={"invalid": "drop"})
    assert (tasks.reports[0].rows_read, len(tasks)) == (10_000, 9_999)
    first = next(iter(tasks))
    assert [message["role"] for message in first.prompt] == ["system", "user"]
    assert first.ground_truth == ("3\\sqrt{3} - 6",)
    assert first.source == "DR_grpo_mix"
    assert first.extra["extra_info"]["index"] == 0
    assert "metadata" not in first.extra  # a column of nulls
    assert len(load(shared_data, path="verl_parquet/arpo_train_10k.parquet", where={"ability": "qa"})) == 5000
    assert len(load(shared_data, path="verl_parquet/arpo_valid.parquet")) == 180


@pytest.mark.parametrize(
    ("source", "count", "answers"),
    [
        ({"path": "gsm8k/train.jsonl.gz", "answer_after": "####"}, 7473, ("72",)),
        ({"path": "gsm8k/test.jsonl.gz", "answer_after": "####"}, 1319, ("18",)),
        ({"path": "multihop/2wiki_train500.jsonl.gz"}, 500, ("October 5, 1987",)),
        ({"path": "multihop/2wiki_dev.jsonl.gz"}, 114, ("Free Guy",)),
        ({"path": "multihop/hotpotqa_distractor.jsonl.gz"}, 150, ("Rush",)),
        ({"path": "multihop/hotpotqa_reflexion100.jsonl.gz"}, 99, ("Gesellschaft mit beschränkter Haftung",)),
        (
            {"path": "multihop/musique_ans.jsonl.gz", "columns": {"ground_truth": ["answer", "answer_aliases"]}},
            150,
            ("Stanley",),
        ),
        ({"path": "nq_open/nq_open_oracle_dev.jsonl.gz"}, 2155, ("Wilhelm Conrad Röntgen",)),
        ({"path": "qa_eval/bamboogle.jsonl"}, 125, ("james madison",)),
        ({"path": "qa_eval/2wiki.jsonl"}, 198, None),
        ({"path": "qa_eval/hotpotqa.jsonl"}, 194, ("1.95 m",)),
        ({"path": "qa_eval/musique.jsonl"}, 199, ("passes over the Rio di Palazzo",)),
        ({"path": "qa_eval/hotpot_dev_v1_simplified.jsonl.gz"}, 7345, ("yes",)),
        ({"path": "qa_eval/nq_triviaqa.jsonl"}, 369, ("A simple majority", "A simple majority vote")),
        ({"path": "qa_eval/strategyqa229.jsonl", "bool_answers": ["yes", "no"]}, 229, ("no",)),
        ({"path": "math/math500.jsonl.gz"}, 500, ("\\left( 3, \\frac{\\pi}{2} \\right)",)),
        ({"path": "math/aime24.jsonl"}, 30, ("204",)),
        ({"path": "math/amc23.jsonl"}, 40, ("27",)),
        ({"path": "countdown/train.jsonl.gz", "columns": {"ground_truth": "solution"}}, 1000, ("75 + 8 + 65 - 28",)),
        ({"path": "verl_parquet/verl_e2e_arithmetic_train.parquet", "ground_truth_required": False}, 800, ()),
        ({"path": "deep_research/drb_query.jsonl", "ground_truth_required": False}, 100, ()),
        ({"path": "deep_research/scholarqa_*_300.jsonl", "ground_truth_required": False}, 600, ()),
    ],
    ids=lambda value: value["path"] if isinstance(value, dict) else "",
)
def test_question_files(shared_data: Path, source: dict[str, Any], count: int, answers: tuple[str, ...] | None) -> None:
    tasks = load(shared_data, **source)
    assert len(tasks) == count
    assert all(task.prompt[-1]["content"].strip() for task in tasks)
    assert answers is None or next(iter(tasks)).ground_truth == answers


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("search_r1_example/corpus.jsonl", "no column for the prompt"),
        ("preference_sft/dpo_250.json.gz", "no column for the prompt"),
        ("preference_sft/kto_250.json.gz", "250 of 250 rows.*\n.*\n.*column 'label': is True; say what true"),
        ("preference_sft/tinker_conversations.jsonl", "no column for the ground_truth"),
    ],
)
def test_files_of_another_purpose_are_refused(shared_data: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(shared_data, path=path)


def test_a_mixture_of_real_files_streams_by_share(shared_data: Path) -> None:
    config = DataConfig(
        train=[
            {"path": "gsm8k/test.jsonl.gz", "answer_after": "####", "weight": 1},
            {"path": "rag_bench/questions.jsonl", "where": {"split": "train"}, "weight": 3},
        ]
    )
    stream = TaskStream(load_tasks(config, root=shared_data), seed=3)
    for _ in range(5):
        batch = stream.next(64)
        assert sum(task.id.startswith("questions/") for task in batch) == 48
