from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.retrieval import Passage
from posttrain.retrieval.corpus import CorpusCounts, CorpusError, iter_corpus, read_corpus

ROWS = [{"id": "a", "contents": '"T"\none'}, {"id": "b", "contents": '"U"\ntwo'}]
PASSAGES = [Passage("a", '"T"\none'), Passage("b", '"U"\ntwo')]


def write(path: Path, rows: list[Any]) -> Path:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    text = json.dumps(rows) if name.endswith(".json") else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.json", "c.json.gz", "c.parquet"])
def test_every_format_gives_the_same_passages(tmp_path: Path, name: str):
    assert read_corpus(write(tmp_path / name, ROWS)) == PASSAGES


@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.parquet"])
def test_title_and_text_become_contents(tmp_path: Path, name: str):
    rows = [{"id": 7, "title": "T\nx", "text": "one"}, {"id": 8, "title": None, "text": "two"}]
    assert read_corpus(write(tmp_path / name, rows)) == [Passage("7", '"T x"\none'), Passage("8", '""\ntwo')]


def test_contents_win_over_title_and_text(tmp_path: Path):
    row = {"_id": "a", "title": "other", "text": "other", "contents": '"T"\none', "url": "x"}
    assert read_corpus(write(tmp_path / "c.jsonl", [row])) == PASSAGES[:1]


def test_a_corpus_without_ids_is_numbered(tmp_path: Path):
    path = write(tmp_path / "c.json", [{"title": "T", "text": "one"}, {"title": "U", "text": "two"}])
    assert [passage.id for passage in read_corpus(path)] == ["0", "1"]


def test_blank_lines_are_no_rows(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n\n{json.dumps(ROWS[1])}\n\n")
    assert read_corpus(path) == PASSAGES


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROWS[0], ROWS[0]], r"row 2: id 'a' was used by row 1 already"),
        ([ROWS[0], {"id": "b"}], r"row 2: expected `contents`, or `title` and `text`; the columns here are \['id'\]"),
        ([ROWS[0], {"contents": "x"}], r"row 2: some rows have an `id` and some do not"),
        ([ROWS[0], {"id": "b", "contents": 3}], r"row 2: `contents` must be a string, got int: 3"),
        ([{"id": "b", "title": 1, "text": "x"}], r"row 1: `title` must be a string"),
        ([{"id": " ", "contents": "x"}], r"row 1: `id` must be a non-empty string or an integer, got ' '"),
        ([{"id": True, "contents": "x"}], r"row 1: `id` must be"),
        ([{"id": 1.5, "contents": "x"}], r"row 1: `id` must be"),
        ([{"id": "b", "contents": "\ud800"}], r"row 1: `contents` holds half a surrogate pair at character 0"),
        ([{"id": "b", "contents": '""\n ...'}], r"row 1: passage 'b' is empty; remove it, or drop"),
        ([{"id": "b", "title": "only", "text": " "}], r"row 1: passage 'b' is empty"),
        (["text"], r"row 1: expected an object, got str: 'text'"),
        ([], r"holds no passage \(0 rows, 0 of them empty\)"),
    ],
)
def test_bad_rows_are_refused_by_number(tmp_path: Path, rows: list[Any], message: str):
    for name in ("c.jsonl", "c.json"):
        with pytest.raises(CorpusError, match=message) as caught:
            read_corpus(write(tmp_path / name, rows))
        assert name in str(caught.value)


def test_bad_parquet_rows_are_refused_by_number(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"c.parquet, row 2: id 'a' was used by row 1 already"):
        read_corpus(write(tmp_path / "c.parquet", [ROWS[0], ROWS[0]]))
    with pytest.raises(CorpusError, match=r"expected `contents`, or `title` and `text`; the columns are \['passage'\]"):
        read_corpus(write(tmp_path / "c.parquet", [{"passage": "x"}]))


def test_empty_passages_are_dropped_and_counted_on_request(tmp_path: Path):
    rows = [ROWS[0], {"id": "e", "contents": " "}, ROWS[1]]
    counts = CorpusCounts()
    assert list(iter_corpus(write(tmp_path / "c.jsonl", rows), empty="drop", counts=counts)) == PASSAGES
    assert counts == CorpusCounts(rows=3, passages=2, empty_dropped=1)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.jsonl", b'{"id": 1, "contents": "x"}\n{"id": 2,', r"row 2: not JSON"),
        ("c.jsonl", b'{"id": 1, "contents": "\xff"}', r"row 1: not UTF-8 at byte"),
        ("c.json", b'{"a": 1}', r"expected a list of objects, got dict"),
        ("c.json", b"<html>", r"c.json: not JSON"),
        ("c.jsonl.gz", b"not gzip", r"damaged gzip file"),
        ("c.jsonl.gz", gzip.compress(b'{"id": 1, "contents": "x"}\n', mtime=0)[:-9], r"damaged gzip file"),
        ("c.parquet", b"PAR1 no", r"not a readable parquet file"),
        ("c.csv", b"", r"cannot tell the format; expected .jsonl"),
        ("c.parquet.gz", b"", r"cannot tell the format"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, data: bytes, message: str):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=message):
        read_corpus(tmp_path / name)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(CorpusError, match=r"none.jsonl: no such file"):
        read_corpus(tmp_path / "none.jsonl")


def test_search_r1s_own_example(shared_data: Path):
    passages = read_corpus(shared_data / "search_r1_example" / "corpus.jsonl")
    assert [passage.id for passage in passages] == [str(number) for number in range(10)]
    assert passages[0].title == "Evan Morris"
    assert passages[0].text.startswith("Evan Morris Evan L. Morris (January 26, 1977")


def test_a_published_corpus_without_ids(shared_data: Path):
    passages = read_corpus(shared_data / "retrieval_2wiki" / "2wikimultihopqa_corpus.json.gz")
    assert len(passages) == 6119
    assert (passages[0].id, passages[0].title) == ("0", "Teutberga")
