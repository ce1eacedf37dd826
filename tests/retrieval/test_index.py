from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.corpus import CorpusError
from posttrain.retrieval.index import StoredIndexError, build_index, load_index

from .servers import PEOPLE


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PEOPLE))
    return path


@pytest.fixture
def index(corpus: Path, tmp_path: Path) -> Path:
    build_index(corpus, tmp_path / "index")
    return tmp_path / "index"


def left_over(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def edit_manifest(index: Path, **changes: Any) -> None:
    manifest = json.loads((index / "manifest.json").read_text())
    (index / "manifest.json").write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("check_hashes", [True, False])
def test_a_stored_index_answers_like_one_in_memory(index: Path, mmap: bool, check_hashes: bool):
    stored, fresh = load_index(index, mmap=mmap, check_hashes=check_hashes), BM25Retriever.from_passages(PEOPLE)
    queries = ["analytical engine", "first compiler", "nothing known", "London"]
    assert stored.search(queries, 3) == fresh.search(queries, 3)
    assert list(stored.passages) == PEOPLE


def test_the_manifest_says_what_is_stored(index: Path, corpus: Path):
    manifest = json.loads((index / "manifest.json").read_text())
    assert manifest["method"] == "bm25"
    assert (manifest["parameters"]["k1"], manifest["parameters"]["b"]) == (1.2, 0.6)
    assert manifest["parameters"]["stop_words"][:3] == ["a", "an", "and"]
    assert manifest["counts"] == {"rows": 4, "passages": 4, "empty_dropped": 0, "terms": 17, "scores": 24}
    assert manifest["corpus"]["name"] == corpus.name
    assert manifest["versions"]["bm25s"]
    stored = {path.name for path in index.iterdir()} - {"manifest.json"}
    assert (
        set(manifest["files"])
        == stored
        == {
            "passages.arrow",
            "vocabulary.json",
            "data.npy",
            "indices.npy",
            "indptr.npy",
        }
    )


def test_the_same_corpus_gives_the_same_bytes(corpus: Path, tmp_path: Path):
    assert build_index(corpus, tmp_path / "one") == build_index(corpus, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_parameters_are_stored_and_used(corpus: Path, tmp_path: Path):
    manifest = build_index(corpus, tmp_path / "index", k1=0.9, b=0.4, unspaced=True)
    loaded = load_index(tmp_path / "index")
    assert manifest["parameters"]["bigrams"] is loaded.analyzer.bigrams is True
    assert loaded.search(["engine"], 3) == BM25Retriever.from_passages(PEOPLE, k1=0.9, b=0.4).search(["engine"], 3)


def test_nothing_is_overwritten_unasked(index: Path, corpus: Path, tmp_path: Path):
    with pytest.raises(FileExistsError, match="exists already"):
        build_index(corpus, index)
    corpus.write_text('{"id": "new", "contents": "other words"}\n')
    build_index(corpus, index, overwrite=True)
    assert [passage.id for passage in load_index(index).passages] == ["new"]
    assert left_over(tmp_path) == []


def test_a_folder_that_is_no_index_is_never_replaced(corpus: Path, tmp_path: Path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not an index"):
        build_index(corpus, tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious" / "thesis.txt").read_text() == "years of work"


def test_a_failed_build_leaves_nothing_and_keeps_the_old_index(index: Path, corpus: Path, tmp_path: Path):
    corpus.write_text('{"id": 1, "contents": "fine"}\n{"id": 1, "contents": "again"}\n')
    with pytest.raises(CorpusError, match="row 2: id '1' was used"):
        build_index(corpus, index, overwrite=True)
    assert len(load_index(index).passages) == 4
    with pytest.raises(CorpusError):
        build_index(corpus, tmp_path / "second")
    assert not (tmp_path / "second").exists()
    assert left_over(tmp_path) == []


def test_a_killed_build_leaves_no_index(corpus: Path, tmp_path: Path):
    program = (
        "import os, sys; from posttrain.retrieval import index, storage\n"
        "storage.sync = lambda path: os._exit(9)  # the process dies when the files are written, before the rename\n"
        "index.build_index(sys.argv[1], sys.argv[2])"
    )
    out = tmp_path / "index"
    assert subprocess.run([sys.executable, "-c", program, str(corpus), str(out)], check=False).returncode == 9
    assert not out.exists()
    build_index(corpus, out)
    assert len(load_index(out).passages) == 4


@pytest.mark.parametrize("name", ["passages.arrow", "vocabulary.json", "data.npy", "indices.npy", "indptr.npy"])
def test_a_changed_missing_or_cut_file_is_named(index: Path, name: str):
    path = index / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"!" + whole[-8:])
    with pytest.raises(StoredIndexError, match=rf"{name} was changed since it was built"):
        load_index(index)
    path.write_bytes(whole[:-1])
    with pytest.raises(StoredIndexError, match=rf"{name} has {len(whole) - 1} bytes, the manifest says {len(whole)}"):
        load_index(index, check_hashes=False)
    path.unlink()
    with pytest.raises(StoredIndexError, match=rf"{name} is missing"):
        load_index(index)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, r"expected format, method, analyzer = .* found \(99"),
        ({"method": "dense"}, r"found \(1, 'dense'"),
        ({"parameters": {"analyzer": "old"}}, r"'old'\); build the index again"),
        ({"parameters": None}, r"manifest.json is damaged"),
        ({"counts": {"passages": 5, "terms": 17, "scores": 24}}, r"the manifest counts .*5.*, the files hold .*4"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(index: Path, changes: dict[str, Any], message: str):
    edit_manifest(index, **changes)
    with pytest.raises(StoredIndexError, match=message):
        load_index(index)


def test_folders_that_hold_no_index(tmp_path: Path, index: Path):
    with pytest.raises(StoredIndexError, match=r"manifest.json is missing; build it with `posttrain index`"):
        load_index(tmp_path)
    (index / "manifest.json").write_text("{")
    with pytest.raises(StoredIndexError, match="is damaged"):
        load_index(index)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -1.0}, "k1 >= 0"),
        ({"b": 1.5}, "0 <= b <= 1"),
        ({"k1": float("nan")}, "k1 >= 0"),
    ],
)
def test_bad_parameters(corpus: Path, tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        build_index(corpus, tmp_path / "index", **options)
    assert not (tmp_path / "index").exists()


def test_scores_stay_on_disk_when_mapped(index: Path):
    scores = load_index(index)._scores
    assert isinstance(scores.data.base, np.memmap)
    assert type(scores.data) is np.ndarray


def test_an_index_can_be_read_by_others(index: Path):
    assert os.stat(index).st_mode & 0o055 == 0o055


def test_the_real_corpus(shared_data: Path, tmp_path: Path, rag_bench: BM25Retriever):
    path = shared_data / "rag_bench" / "corpus.jsonl.gz"
    manifest = build_index(path, tmp_path / "index")
    assert manifest["counts"]["passages"] == 10_739
    assert manifest["corpus"]["sha256"] == "82d699a980e5ad4d3251e8bc06e3162695f2e1ee8c163860a945e574302b1fc6"
    queries = ["who wrote the song counterparts", "drummer inducted into the Hall of Fame", "Empress Wang"]
    assert load_index(tmp_path / "index").search(queries, 10) == rag_bench.search(queries, 10)
