"""The data section: short forms, and configurations that cannot mean anything."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from posttrain.data import DataConfig, SourceConfig
from posttrain.data.config import template_columns


@pytest.mark.parametrize(
    "train",
    [
        "a/nq.parquet",
        ["a/nq.parquet"],
        {"path": "a/nq.parquet"},
        [{"path": "a/nq.parquet"}],
        [{"path": ["a/nq.parquet"]}],
    ],
)
def test_a_bare_path_is_the_short_form(train: Any) -> None:
    (source,) = DataConfig(train=train).train
    assert source.path == ("a/nq.parquet",)
    assert source.default_name == "nq"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("train.jsonl.gz", "train"),
        ("../shared/data/rag_bench/questions.jsonl", "questions"),
        ("data/nq/*.parquet", "nq"),
        ("data/**/part-*.parquet", "data"),
        ("../*.json", "data"),
        (".hidden", ".hidden"),
    ],
)
def test_sources_are_named_after_their_file_or_folder(path: str, name: str) -> None:
    assert SourceConfig(path=path).default_name == name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"train": "a.jsonl", "shufle": True}, "shufle"),
        ({"train": {"path": "a.jsonl", "promt_template": "{q}"}}, "promt_template"),
        ({"train": {"path": "a.jsonl", "columns": {"answer": "x"}}}, "answer"),
        ({"train": {"path": []}}, "at least 1"),
        ({"train": [{"path": "a.jsonl", "weight": 1}, "b.jsonl"]}, "1 of 2 sources have a weight"),
        ({"train": [{"path": "a.jsonl", "weight": 0}]}, "greater than 0"),
        ({"train": [{"path": "a.jsonl", "weight": float("inf")}]}, "finite"),
        ({"train": ["x/train.parquet", "y/train.parquet"]}, "2 sources are named 'train'"),
        ({"train": {"path": "a.jsonl", "prompt_template": "Question"}}, "names no column"),
        ({"train": {"path": "a.jsonl", "prompt_template": "{question"}}, "literal braces"),
        ({"train": {"path": "a.jsonl", "prompt_template": "{question!r}"}}, "without format specification"),
        ({"train": "a.jsonl", "max_prompt_tokens": 0}, "greater than or equal to 1"),
        ({"train": "a.jsonl", "overlong": "cut"}, "'error' or 'drop'"),
    ],
)
def test_sections_that_cannot_be_meant_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**section)


def test_template_columns_are_those_between_braces() -> None:
    assert template_columns("{a} {{b}} {c.d}") == ("a", "c.d")
