"""Stored dense indexes, built in pieces: a build that was killed goes on behind its last complete shard.

    passages.arrow      as in every index
    vectors-00000.npy   [n, dimensions] of the passages in order, one file per shard; searched through memory maps
    vectors.faiss       instead of the shards, where the vectors are of one of FAISS' kinds
    manifest.json       the encoder (name, sha256, settings), counts, the corpus' sha256, size and sha256 of the files

While it is built the folder is called `.NAME.building` and holds plan.json, which says of what corpus, encoder and
settings its shards are; a build with another plan refuses to go on in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from posttrain.retrieval.corpus import CorpusCounts, EmptyPolicy, iter_corpus
from posttrain.retrieval.dense import DenseRetriever, ExactVectors, FaissVectors, Vectors, VectorSearch, write_faiss
from posttrain.retrieval.encoder import Encoder, EncoderConfig, EncoderSettings
from posttrain.retrieval.storage import (
    FORMAT,
    MANIFEST,
    Progress,
    StoredIndexError,
    StoredPassages,
    file_sha256,
    fingerprint,
    put_in_place,
    read_manifest,
    refuse_to_replace,
    sync,
    verify_files,
    write_manifest,
    write_passages,
)

PLAN, LOCK, FAISS_FILE = "plan.json", "lock", "vectors.faiss"


class VectorOptions(BaseModel):
    """How the vectors of a dense index are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str = "exact"  # exact; with FAISS: flat, ivf, hnsw, or a string of its index_factory
    dtype: Literal["float32", "float16"] = "float32"  # of the shards
    passages_per_shard: int = Field(default=8192, ge=1)  # what a kill can cost
    faiss_file: Path | None = None  # an index of these very passages, made elsewhere by the same encoder


def build_dense_index(
    corpus: str | Path,
    out: str | Path,
    encoder: EncoderConfig,
    options: VectorOptions | None = None,
    *,
    empty: EmptyPolicy = "error",
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """Encodes the corpus file into the folder `out` and returns the manifest.

    Whatever stops it, the next call with the same corpus, encoder and settings goes on. Raises `CorpusError`,
    `EncoderError`, FileExistsError when `out` exists and `overwrite` is off, `StoredIndexError` when an unfinished
    index of another plan is there and `overwrite` is off, or another process builds it.
    """
    corpus, out, options = Path(corpus), Path(out), options or VectorOptions()
    refuse_to_replace(out, overwrite=overwrite)
    if not corpus.is_file():
        next(iter_corpus(corpus))  # says what is wrong with it
    loaded = Encoder(encoder)
    plan = {
        "corpus": {"name": corpus.name, "bytes": corpus.stat().st_size, "sha256": file_sha256(corpus)},
        "empty": empty,
        "encoder": asdict(loaded.settings),
        "vectors": options.model_dump(mode="json", exclude={"faiss_file"}) | {"encoded_in": encoder.dtype},
    }
    with _building(out, plan, start_over=overwrite) as folder:
        counts = _passages(corpus, folder, empty)
        passages = StoredPassages(folder / "passages.arrow", mmap=True)
        if options.faiss_file is not None:
            shutil.copyfile(options.faiss_file, folder / FAISS_FILE)
        else:
            _encode_missing(passages, loaded, options, folder, on_progress or _no_progress)
        counts |= {"dimensions": loaded.dimensions, "truncated": _truncated(folder)}
        manifest = _finished(folder, plan, counts, options, on_progress or _no_progress)
        DenseRetriever(passages, loaded, _vectors(folder, options.kind, mmap=True, effort=None))  # do they fit?
        write_manifest(folder, manifest)
        _remove(folder / PLAN, folder / LOCK)
        put_in_place(folder, out)
    return manifest


def load_dense_index(
    path: str | Path,
    *,
    encoder: EncoderConfig | None = None,
    device: str = "auto",
    mmap: bool = True,
    check_hashes: bool = True,
    effort: int | None = None,
) -> DenseRetriever:
    """Opens a stored dense index with its encoder.

    encoder: where the model lies on this machine, when that is not what the manifest says, its dtype and device.
    Raises `StoredIndexError` when the files are not those of the manifest, or the encoder is not the one (by the
    sha256 of its files and every setting that a vector depends on) that made the vectors.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if (manifest["format"], manifest["method"]) != (FORMAT, "dense"):
        seen = (manifest["format"], manifest["method"])
        raise StoredIndexError(f"{folder / MANIFEST}: expected format, method = {(FORMAT, 'dense')}, found {seen}")
    verify_files(folder, manifest, check_hashes=check_hashes)
    passages = StoredPassages(folder / "passages.arrow", mmap=mmap)
    kind = manifest["parameters"]["vectors"]["kind"]
    vectors = _vectors(folder, "flat" if (folder / FAISS_FILE).is_file() else kind, mmap=mmap, effort=effort)
    loaded = _same_encoder(EncoderSettings(**manifest["parameters"]["encoder"]), encoder, device)
    try:
        return DenseRetriever(passages, loaded, vectors)
    except ValueError as error:
        raise StoredIndexError(f"{folder}: {error}") from error


def _same_encoder(stored: EncoderSettings, given: EncoderConfig | None, device: str) -> Encoder:
    config = given or EncoderConfig(device=device)
    config = config.model_copy(update={"model": config.model or stored.name})
    settings = {name: getattr(stored, name) for name in asdict(stored) if name not in ("name", "sha256")}
    asked = {name: getattr(config, name) for name in settings if getattr(config, name) is not None}
    wrong = {name: value for name, value in asked.items() if value != settings[name]}
    if wrong:
        kept = {name: settings[name] for name in wrong}
        raise StoredIndexError(f"the index was encoded with {kept}, asked is {wrong}; build another index for that")
    loaded = Encoder(config.model_copy(update=settings))
    if loaded.settings.sha256 != stored.sha256:
        raise StoredIndexError(
            f"the encoder {config.model} is not the one that made this index ({stored.name}): the sha256 of its files "
            f"is {loaded.settings.sha256[:12]}..., not {stored.sha256[:12]}...; name the right model, or build again"
        )
    return loaded


def _vectors(folder: Path, kind: str, *, mmap: bool, effort: int | None) -> VectorSearch:
    if kind != "exact" or (folder / FAISS_FILE).is_file():
        return FaissVectors(folder / FAISS_FILE, mmap=mmap, effort=effort)
    return ExactVectors(_shards(folder, mmap))


def _shards(folder: Path, mmap: bool = True) -> list[Vectors]:
    paths = sorted(folder.glob("vectors-*.npy"))
    # asarray: a plain view on the mapped memory
    return [np.asarray(np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)) for path in paths]


@contextmanager
def _building(out: Path, plan: dict[str, Any], *, start_over: bool) -> Iterator[Path]:
    """The folder of an unfinished build, locked for this process; it outlives whatever ends the block."""
    folder = out.parent / f".{out.name}.building"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoredIndexError(f"another process is building {out} (in {folder}); wait for it") from None
        stored = json.loads((folder / PLAN).read_text()) if (folder / PLAN).is_file() else None
        if stored is not None and stored != plan:
            if not start_over:
                raise StoredIndexError(_another_plan(folder, stored, plan))
            _remove(*(path for path in folder.iterdir() if path.name != LOCK))
        _write_whole(folder / PLAN, json.dumps(plan, indent=2, ensure_ascii=False).encode())
        yield folder


def _another_plan(folder: Path, stored: dict[str, Any], plan: dict[str, Any]) -> str:
    changed = [
        f"{part}.{key} was {stored[part].get(key)!r}, is {value!r}"
        for part in ("corpus", "encoder", "vectors")
        for key, value in plan[part].items()
        if stored[part].get(key) != value
    ]
    differs = "; ".join(changed) or "another policy for empty rows"
    return (
        f"{folder} holds an unfinished index of something else ({differs}); build that one to its end, "
        "delete the folder, or overwrite it"
    )


def _passages(corpus: Path, folder: Path, empty: EmptyPolicy) -> dict[str, int]:
    """Writes the passages unless an earlier build did; returns the counts of the corpus."""
    counted = folder / "passages.json"
    if not counted.is_file():
        counts = CorpusCounts()
        for _ in write_passages(iter_corpus(corpus, empty=empty, counts=counts), folder / "passages.arrow"):
            pass
        sync(folder / "passages.arrow")
        _write_whole(counted, json.dumps(asdict(counts)).encode())
    return json.loads(counted.read_text())


def _encode_missing(
    passages: StoredPassages, encoder: Encoder, options: VectorOptions, folder: Path, on_progress: Progress
) -> None:
    size, total = options.passages_per_shard, len(passages)
    for number, first in enumerate(range(0, total, size)):
        last = min(first + size, total)
        path = folder / f"vectors-{number:05d}.npy"
        if not path.is_file():  # it is renamed into place when it is complete
            before = encoder.truncated
            vectors = np.empty((last - first, encoder.dimensions), dtype=options.dtype)
            for start in range(first, last, 512):
                end = min(start + 512, last)
                texts = [passages[row].contents for row in range(start, end)]
                vectors[start - first : end - first] = encoder.encode(texts, "passage")
                on_progress(end, total)
            if not np.isfinite(vectors).all():
                raise StoredIndexError(
                    f"{encoder.settings.name} gave vectors that are not finite for passages {first} to {last}; "
                    "use dtype float32 or bfloat16 for the encoder, and float32 for the vectors"
                )
            _write_whole(folder / f"{path.stem}.truncated", str(encoder.truncated - before).encode())
            temporary = path.with_suffix(".part")
            with temporary.open("wb") as stream:
                np.save(stream, vectors, allow_pickle=False)
            sync(temporary)
            os.replace(temporary, path)
        on_progress(last, total)


def _finished(
    folder: Path, plan: dict[str, Any], counts: dict[str, int], options: VectorOptions, on_progress: Progress
) -> dict[str, Any]:
    described = dict(plan["vectors"])
    if options.faiss_file is not None:
        described["kind"] = "faiss file"
    elif options.kind != "exact":
        shards = _shards(folder)
        described |= write_faiss(
            shards, options.kind, folder / FAISS_FILE, lambda done: on_progress(done, counts["passages"])
        )
        _remove(*folder.glob("vectors-*.npy"))
    _remove(*folder.glob("*.truncated"), *folder.glob("*.part"), folder / "passages.json")
    stored = [path for path in sorted(folder.iterdir()) if path.name not in (PLAN, LOCK, MANIFEST)]
    return {
        "format": FORMAT,
        "method": "dense",
        "parameters": {"encoder": plan["encoder"], "vectors": described},
        "counts": counts,
        "corpus": plan["corpus"],
        "versions": {name: version(name) for name in ("posttrain", "numpy", "torch", "transformers")},
        "files": {path.name: fingerprint(path) for path in stored},
    }


def _truncated(folder: Path) -> int:
    return sum(int(path.read_text()) for path in folder.glob("*.truncated"))


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(data)
    sync(temporary)
    os.replace(temporary, path)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _no_progress(done: int, total: int | None) -> None:
    pass
