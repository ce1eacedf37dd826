"""Stored indexes: a folder with the passages, the scores and a manifest that vouches for every byte.

    passages.arrow    id, contents; Arrow IPC, uncompressed, read through a memory map
    vocabulary.json   the terms, in order of their number
    data.npy, indices.npy, indptr.npy   the sparse score matrix of `posttrain.retrieval.bm25.TermScores`
    manifest.json     method, parameters, counts, versions, size and sha256 of the files above

The same corpus gives the same bytes. A folder is built beside its place and renamed into it: one that exists is whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.retrieval.analysis import ANALYZER, Analyzer, needs_bigrams
from posttrain.retrieval.bm25 import ENGLISH_STOP_WORDS, K1, LANGUAGE_SAMPLE, B, BM25Retriever, TermScores
from posttrain.retrieval.bm25_build import write_scores
from posttrain.retrieval.corpus import CorpusCounts, EmptyPolicy, iter_corpus
from posttrain.retrieval.storage import (
    FORMAT,
    MANIFEST,
    Progress,
    StoredIndexError,
    StoredPassages,
    built_beside,
    file_sha256,
    fingerprint,
    read_manifest,
    refuse_to_replace,
    verify_files,
    write_manifest,
    write_passages,
)


def build_index(
    corpus: str | Path,
    out: str | Path,
    *,
    k1: float = K1,
    b: float = B,
    unspaced: bool | None = None,
    empty: EmptyPolicy = "error",
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Indexes the corpus file by BM25 into the folder `out` and returns the manifest; memory does not grow with texts.

    Raises `CorpusError` (see `posttrain.retrieval.corpus`), FileExistsError when `out` exists and `overwrite` is off,
    ValueError for a bad parameter. `unspaced` says whether the text is of a script without spaces
    (`posttrain.retrieval.analysis`); None lets the first passages decide. A failure leaves nothing behind, a kill a
    folder `.NAME.building-*`.
    """
    corpus, out = Path(corpus), Path(out)
    if not (0 <= k1 < float("inf") and 0 <= b <= 1):
        raise ValueError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, got k1={k1}, b={b}")
    refuse_to_replace(out, overwrite=overwrite)
    with built_beside(out) as folder:
        counts = CorpusCounts()
        read = iter_corpus(corpus, empty=empty, counts=counts)
        texts = _watched(write_passages(read, folder / "passages.arrow"), on_progress)
        sample = list(islice(texts, LANGUAGE_SAMPLE))
        analyzer = Analyzer(ENGLISH_STOP_WORDS, bigrams=needs_bigrams(sample) if unspaced is None else unspaced)
        scores = write_scores(chain(sample, texts), analyzer, folder, k1=k1, b=b)
        terms = json.dumps(list(scores.vocabulary), ensure_ascii=False)
        (folder / "vocabulary.json").write_text(terms, encoding="utf-8")
        manifest = {
            "format": FORMAT,
            "method": "bm25",
            "parameters": {"k1": k1, "b": b, **_described(analyzer)},
            "counts": {**asdict(counts), "terms": len(scores.vocabulary), "scores": len(scores.data)},
            "corpus": {"name": corpus.name, "bytes": corpus.stat().st_size, "sha256": file_sha256(corpus)},
            "versions": {"posttrain": version("posttrain"), "bm25s": version("bm25s"), "numpy": version("numpy")},
            "files": {file.name: fingerprint(file) for file in sorted(folder.iterdir())},
        }
        write_manifest(folder, manifest)
    return manifest


def load_index(path: str | Path, *, mmap: bool = True, check_hashes: bool = True) -> BM25Retriever:
    """Opens a stored index.

    With `mmap`, passages and scores stay on disk until touched. Every file's size is checked always, its sha256 unless
    `check_hashes` is off (hashing reads every byte once: about a second per gigabyte). Raises `StoredIndexError`.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    seen = (manifest["format"], manifest["method"], manifest["parameters"].get("analyzer"))
    if seen != (FORMAT, "bm25", ANALYZER):
        raise StoredIndexError(
            f"{folder / MANIFEST}: expected format, method, analyzer = {(FORMAT, 'bm25', ANALYZER)}, found {seen}; "
            "build the index again"
        )
    verify_files(folder, manifest, check_hashes=check_hashes)
    passages = StoredPassages(folder / "passages.arrow", mmap=mmap)
    terms: list[str] = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    data, indices, indptr = (_load_array(folder / f"{name}.npy", mmap) for name in ("data", "indices", "indptr"))
    scores = TermScores({term: number for number, term in enumerate(terms)}, data, indices, indptr)
    _check_counts(manifest["counts"], passages, scores, folder)
    parameters = manifest["parameters"]
    return BM25Retriever(passages, scores, Analyzer(parameters["stop_words"], bigrams=parameters["bigrams"]))


def _described(analyzer: Analyzer) -> dict[str, Any]:
    return {"analyzer": ANALYZER, "bigrams": analyzer.bigrams, "stop_words": sorted(analyzer.stop_words)}


def _watched(texts: Iterator[str], on_progress: Progress | None) -> Iterator[str]:
    done = 0
    for done, text in enumerate(texts, start=1):
        if on_progress is not None and done % 1024 == 0:
            on_progress(done, None)
        yield text
    if on_progress is not None:
        on_progress(done, done)


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
