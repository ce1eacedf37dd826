"""Stored indexes: a folder with the passages, the scores and a manifest that vouches for every byte.

    passages.arrow    id, contents; Arrow IPC, uncompressed, read through a memory map
    vocabulary.json   the terms, in order of their number
    data.npy, indices.npy, indptr.npy   the sparse score matrix of `posttrain.retrieval.bm25.TermScores`
    manifest.json     method, parameters, counts, versions, size and sha256 of the files above

The same corpus gives the same bytes. A folder is built beside its place and renamed into it: one that exists is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.retrieval.analysis import ANALYZER, Analyzer, needs_bigrams
from posttrain.retrieval.bm25 import ENGLISH_STOP_WORDS, LANGUAGE_SAMPLE, BM25Retriever, TermScores, score_terms
from posttrain.retrieval.corpus import CorpusCounts, EmptyPolicy, iter_corpus
from posttrain.retrieval.protocol import Passage

FORMAT = 1
MANIFEST = "manifest.json"
_SCHEMA = pa.schema([("id", pa.string()), ("contents", pa.string())])
_ROWS_PER_BATCH = 16384


class StoredIndexError(ValueError):
    """A stored index is absent, incomplete, changed or of another format; says which file and what to do."""


def build_index(
    corpus: str | Path,
    out: str | Path,
    *,
    method: str = "bm25",
    k1: float = 1.5,
    b: float = 0.75,
    unspaced: bool | None = None,
    empty: EmptyPolicy = "error",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Indexes the corpus file into the folder `out` and returns the manifest.

    Raises `CorpusError` (see `posttrain.retrieval.corpus`), FileExistsError when `out` exists and `overwrite` is off,
    ValueError for an unknown method or parameter. `unspaced` says whether the text is of a script without spaces
    (`posttrain.retrieval.analysis`); None lets the first passages decide. A failure leaves nothing behind, a kill a
    folder `.NAME.building-*`.
    """
    corpus, out = Path(corpus), Path(out)
    _check_parameters(method, k1, b)
    if out.exists() and not overwrite:
        raise FileExistsError(f"{out} exists already; choose another folder, or overwrite it")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST).is_file():
        raise FileExistsError(f"{out} is not an index (it has no {MANIFEST}), so it is not overwritten")
    with _built_beside(out) as folder:
        counts = CorpusCounts()
        texts = _stored(iter_corpus(corpus, empty=empty, counts=counts), folder / "passages.arrow")
        sample = list(islice(texts, LANGUAGE_SAMPLE))
        analyzer = Analyzer(ENGLISH_STOP_WORDS, bigrams=needs_bigrams(sample) if unspaced is None else unspaced)
        scores = score_terms(chain(sample, texts), analyzer, k1=k1, b=b)
        _write_scores(scores, folder)
        manifest = {
            "format": FORMAT,
            "method": method,
            "parameters": {"k1": k1, "b": b, **_described(analyzer)},
            "counts": {**asdict(counts), "terms": len(scores.vocabulary), "scores": len(scores.data)},
            "corpus": {"name": corpus.name, "bytes": corpus.stat().st_size, "sha256": _sha256(corpus)},
            "versions": {"posttrain": version("posttrain"), "bm25s": version("bm25s"), "numpy": version("numpy")},
            "files": {file.name: _fingerprint(file) for file in sorted(folder.iterdir())},
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return manifest


def load_index(path: str | Path, *, mmap: bool = True, check_hashes: bool = True) -> BM25Retriever:
    """Opens a stored index.

    With `mmap`, passages and scores stay on disk until touched. Every file's size is checked always, its sha256 unless
    `check_hashes` is off (hashing reads every byte once: about a second per gigabyte). Raises `StoredIndexError`.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        _verify(folder / name, expected, check_hashes=check_hashes)
    passages = StoredPassages(folder / "passages.arrow", mmap=mmap)
    terms: list[str] = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    data, indices, indptr = (_load_array(folder / f"{name}.npy", mmap) for name in ("data", "indices", "indptr"))
    scores = TermScores({term: number for number, term in enumerate(terms)}, data, indices, indptr)
    _check_counts(manifest["counts"], passages, scores, folder)
    parameters = manifest["parameters"]
    return BM25Retriever(passages, scores, Analyzer(parameters["stop_words"], bigrams=parameters["bigrams"]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, when it is one that this version can read; raises `StoredIndexError`."""
    path = folder / MANIFEST
    if not path.is_file():
        raise StoredIndexError(f"{folder} is no index: {MANIFEST} is missing; build it with `posttrain index`")
    try:
        manifest = json.loads(path.read_bytes())
        seen = (manifest["format"], manifest["method"], manifest["parameters"]["analyzer"])
        complete = {"files", "counts"} <= manifest.keys()
    except (ValueError, KeyError, TypeError) as error:
        raise StoredIndexError(f"{path} is damaged ({error!r}); build the index again") from error
    if seen != (FORMAT, "bm25", ANALYZER) or not complete:
        raise StoredIndexError(
            f"{path}: this version reads format, method, analyzer = {(FORMAT, 'bm25', ANALYZER)}, found {seen}; "
            "build the index again"
        )
    return manifest


class StoredPassages(Sequence[Passage]):
    """Passages in an Arrow file, made into objects when asked for."""

    def __init__(self, path: Path, *, mmap: bool) -> None:
        source = pa.memory_map(str(path)) if mmap else pa.BufferReader(path.read_bytes())
        try:
            table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid as error:
            raise StoredIndexError(f"{path}: not an Arrow file ({error}); build the index again") from error
        self._ids, self._contents = table.column("id"), table.column("contents")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: int) -> Passage:  # pyright: ignore[reportIncompatibleMethodOverride]  (no slices)
        return Passage(self._ids[row].as_py(), self._contents[row].as_py())


def _described(analyzer: Analyzer) -> dict[str, Any]:
    return {"analyzer": ANALYZER, "bigrams": analyzer.bigrams, "stop_words": sorted(analyzer.stop_words)}


def _check_parameters(method: str, k1: float, b: float) -> None:
    if method != "bm25":
        raise ValueError(f"unknown index method {method!r}; known: bm25")
    if not (0 <= k1 < float("inf") and 0 <= b <= 1):
        raise ValueError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, got k1={k1}, b={b}")


def _stored(passages: Iterator[Passage], path: Path) -> Iterator[str]:
    """Writes the passages as they go by and hands their contents on: one pass over the corpus, one batch in memory."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        ids: list[str] = []
        contents: list[str] = []
        for passage in passages:
            ids.append(passage.id)
            contents.append(passage.contents)
            if len(ids) == _ROWS_PER_BATCH:
                writer.write_batch(pa.record_batch([ids, contents], schema=_SCHEMA))
                ids, contents = [], []
            yield passage.contents
        if ids:
            writer.write_batch(pa.record_batch([ids, contents], schema=_SCHEMA))


def _write_scores(scores: TermScores, folder: Path) -> None:
    terms = json.dumps(list(scores.vocabulary), ensure_ascii=False)
    (folder / "vocabulary.json").write_text(terms, encoding="utf-8")
    np.save(folder / "data.npy", scores.data, allow_pickle=False)
    np.save(folder / "indices.npy", scores.indices, allow_pickle=False)
    np.save(folder / "indptr.npy", scores.indptr, allow_pickle=False)


@contextmanager
def _built_beside(out: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `out` when the block ends well, and goes when it does not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp makes folders that only their owner can read
        for path in (*folder.iterdir(), folder):
            _sync(path)
        replaced = _move_away(out)
        folder.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if replaced is not None:
        shutil.rmtree(replaced)


def _move_away(out: Path) -> Path | None:
    if not out.exists():
        return None
    replaced = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    out.rename(replaced)  # onto an empty folder: atomic
    return replaced


def _sync(path: Path) -> None:
    """Makes a file, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _verify(path: Path, expected: dict[str, Any], *, check_hashes: bool) -> None:
    if not path.is_file():
        raise StoredIndexError(f"{path} is missing; build the index again, or copy the whole folder")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise StoredIndexError(f"{path} has {size} bytes, the manifest says {expected['bytes']}; copy the folder again")
    if check_hashes and _sha256(path) != expected["sha256"]:
        raise StoredIndexError(f"{path} was changed since it was built (sha256 differs); build the index again")


def _load_array(path: Path, mmap: bool) -> np.ndarray[Any, Any]:
    # asarray: a plain view on the mapped memory; slices of np.memmap objects cost a microsecond each
    return np.asarray(np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False))


def _check_counts(counts: dict[str, int], passages: StoredPassages, scores: TermScores, folder: Path) -> None:
    found = {"passages": len(passages), "terms": len(scores.vocabulary), "scores": len(scores.data)}
    expected = {name: counts.get(name) for name in found}
    consistent = len(scores.indices) == len(scores.data) and len(scores.indptr) == len(scores.vocabulary) + 1
    if found != expected or not consistent:
        raise StoredIndexError(
            f"{folder}: the manifest counts {expected}, the files hold {found}; build the index again"
        )
