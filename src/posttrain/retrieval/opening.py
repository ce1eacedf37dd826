"""Stored indexes of every method: opened by what their manifest says, and hybrid ones built.

A hybrid index is a folder with a complete index in `bm25/` and one in `dense/`, of the same corpus.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.corpus import EmptyPolicy
from posttrain.retrieval.dense import DenseRetriever
from posttrain.retrieval.dense_index import VectorOptions, build_dense_index, load_dense_index
from posttrain.retrieval.encoder import EncoderConfig
from posttrain.retrieval.hybrid import RRF_K, HybridRetriever
from posttrain.retrieval.index import build_index, load_index
from posttrain.retrieval.storage import (
    FORMAT,
    MANIFEST,
    Progress,
    StoredIndexError,
    file_sha256,
    read_manifest,
    sync,
    write_manifest,
)


def open_index(
    path: str | Path,
    *,
    encoder: EncoderConfig | None = None,
    device: str = "auto",
    check_hashes: bool = True,
    effort: int | None = None,
    rrf_k: float = RRF_K,
    depth: int = 100,
) -> BM25Retriever | DenseRetriever | HybridRetriever:
    """Opens a stored index of any method; raises `StoredIndexError`, or `EncoderError` where its encoder is missing.

    encoder, device, effort: see `load_dense_index`. rrf_k, depth: see `HybridRetriever`.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    method = manifest["method"]
    if method == "dense":
        return load_dense_index(folder, encoder=encoder, device=device, check_hashes=check_hashes, effort=effort)
    if method == "hybrid":
        _check_parts(folder, manifest)
        lexical = load_index(folder / "bm25", check_hashes=check_hashes)
        dense = load_dense_index(
            folder / "dense", encoder=encoder, device=device, check_hashes=check_hashes, effort=effort
        )
        return HybridRetriever([lexical, dense], k=rrf_k, depth=depth)
    return load_index(folder, check_hashes=check_hashes)


def build_hybrid_index(
    corpus: str | Path,
    out: str | Path,
    encoder: EncoderConfig,
    options: VectorOptions | None = None,
    *,
    empty: EmptyPolicy = "error",
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """A BM25 index and a dense one of the same corpus; goes on where an earlier call was stopped.

    Raises what `build_index` and `build_dense_index` raise.
    """
    corpus, out = Path(corpus), Path(out)
    if (out / MANIFEST).is_file() and not overwrite:
        raise FileExistsError(f"{out} exists already; choose another folder, or overwrite it (--overwrite)")
    if out.exists() and {path.name for path in out.iterdir()} - {MANIFEST, "bm25", "dense", ".dense.building"}:
        raise FileExistsError(f"{out} is not a hybrid index, so it is not overwritten")
    (out / MANIFEST).unlink(missing_ok=True)
    if overwrite or not _is_of(out / "bm25", corpus):
        build_index(corpus, out / "bm25", empty=empty, overwrite=True, on_progress=on_progress)
    if overwrite or not _is_of(out / "dense", corpus):
        build_dense_index(
            corpus, out / "dense", encoder, options, empty=empty, overwrite=overwrite, on_progress=on_progress
        )
    parts = {name: read_manifest(out / name) for name in ("bm25", "dense")}
    manifest = {
        "format": FORMAT,
        "method": "hybrid",
        "parameters": {name: part["parameters"] for name, part in parts.items()},
        "counts": parts["bm25"]["counts"] | parts["dense"]["counts"],
        "corpus": parts["dense"]["corpus"],
        "versions": {"posttrain": version("posttrain")},
        "files": {},
    }
    write_manifest(out, manifest)
    sync(out / MANIFEST)
    _check_parts(out, manifest)
    return manifest


def _is_of(folder: Path, corpus: Path) -> bool:
    """Is this a complete index of that corpus?"""
    return (folder / MANIFEST).is_file() and read_manifest(folder)["corpus"]["sha256"] == file_sha256(corpus)


def _check_parts(folder: Path, manifest: dict[str, Any]) -> None:
    for name in ("bm25", "dense"):
        part = read_manifest(folder / name)
        if part["corpus"]["sha256"] != manifest["corpus"]["sha256"]:
            raise StoredIndexError(
                f"{folder / name} is an index of another corpus ({part['corpus']['name']}) than the whole "
                f"({manifest['corpus']['name']}); build the hybrid index again"
            )
