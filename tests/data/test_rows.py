"""Files as they come: kinds, encodings, broken lines, missing files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.problems import DataError, Problem
from posttrain.data.rows import find_files, read_rows

ROWS: list[dict[str, Any]] = [{"question": "a\u2028b", "answer": "1"}, {"question": "ü", "answer": "2"}]


def write(path: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path: Path) -> tuple[list[dict[str, Any]], list[str], list[Problem]]:
    problems: list[Problem] = []
    rows = list(read_rows(path, problems.append))
    return [row.values for row in rows], [row.where for row in rows], problems


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_json_lines_are_split_at_newlines_only(tmp_path: Path, name: str) -> None:
    rows, places, problems = read(write(tmp_path / name, "\ufeff" + lines(ROWS).replace("\n", "\r\n\n", 1)))
    assert rows == ROWS
    assert [place.rpartition("/")[2] for place in places] == [f"{name} line 1", f"{name} line 3"]
    assert problems == []


def test_json_lists_and_single_objects(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.json", json.dumps(ROWS, indent=2)))[0] == ROWS
    assert read(write(tmp_path / "b.json.gz", json.dumps(ROWS[0], indent=2)))[0] == ROWS[:1]
    with pytest.raises(DataError, match="a list of objects"):
        read(write(tmp_path / "c.json", json.dumps({"data": ROWS})))
    with pytest.raises(DataError, match=r"cannot read .*d\.json"):
        read(write(tmp_path / "d.json", json.dumps(ROWS)[:-5]))


def test_broken_lines_are_collected_with_their_number(tmp_path: Path) -> None:
    text = lines(ROWS[:1]).encode() + b'{"question": \n\xff\xfe\n[1]\n' + lines(ROWS[1:]).encode()
    rows, places, problems = read(write(tmp_path / "a.jsonl", text))
    assert rows == ROWS
    assert places[-1].endswith("a.jsonl line 5")
    assert [problem.where.rpartition(" ")[2] for problem in problems] == ["2", "3", "4"]
    assert {problem.kind for problem in problems} == {"unreadable row"}
    assert "is list [1]" in str(problems[2])


def test_parquet_rows_are_numbered_over_all_batches(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(5000)), "extra": [None if i % 2 else {"x": i} for i in range(5000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    rows, places, _ = read(tmp_path / "a.parquet")
    assert [row["n"] for row in rows] == list(range(5000))
    assert places[4999].endswith("a.parquet row 4999 (from 0)")


def test_unreadable_files_say_which_and_why(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(DataError, match="Git LFS pointer"):
            read(write(tmp_path / name, pointer))
    with pytest.raises(DataError, match=r"b\.parquet"):
        read(write(tmp_path / "b.parquet", "not parquet"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(ROWS * 50).encode())[:-20])
    with pytest.raises(DataError, match=r"c\.jsonl\.gz"):
        read(tmp_path / "c.jsonl.gz")
    (tmp_path / "d.jsonl.gz").write_text(lines(ROWS))
    with pytest.raises(DataError, match=r"d\.jsonl\.gz.*gzip"):
        read(tmp_path / "d.jsonl.gz")


def test_missing_files_name_near_ones(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", lines(ROWS))
    with pytest.raises(DataError, match=r"'trian\.jsonl' does not exist.*that folder has train\.jsonl"):
        find_files(["trian.jsonl"], tmp_path)
    with pytest.raises(DataError, match="no folder"):
        find_files(["nowhere/train.jsonl"], tmp_path)
    with pytest.raises(DataError, match=r"no file matches '\*\.parquet'"):
        find_files(["*.parquet"], tmp_path)
    with pytest.raises(DataError, match="is a folder"):
        find_files([str(tmp_path)], Path())
    write(tmp_path / "train.csv", "a,b\n")
    with pytest.raises(DataError, match="unknown kind of file"):
        find_files(["train.csv"], tmp_path)


def test_globs_are_sorted_and_every_file_is_read_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "a[1].jsonl"):
        write(tmp_path / name, lines(ROWS))
    found = find_files(["a.jsonl", "*.jsonl", "a[1].jsonl"], tmp_path)
    assert [path.name for path in found] == ["a.jsonl", "a[1].jsonl", "b.jsonl"]
