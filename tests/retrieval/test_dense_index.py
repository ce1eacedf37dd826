from __future__ import annotations

import fcntl
import gzip
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.retrieval.bm25 import BM25Retriever
from posttrain.retrieval.corpus import CorpusError
from posttrain.retrieval.dense import DenseRetriever
from posttrain.retrieval.dense_index import VectorOptions, build_dense_index, load_dense_index
from posttrain.retrieval.encoder import Encoder, EncoderConfig
from posttrain.retrieval.hybrid import HybridRetriever
from posttrain.retrieval.index import StoredIndexError, build_index, load_index
from posttrain.retrieval.opening import build_hybrid_index, open_index

from .models import write_encoder
from .servers import PEOPLE

QUERIES = ["analytical engine", "first compiler", "London"]
SMALL = VectorOptions(passages_per_shard=2)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> EncoderConfig:
    return EncoderConfig(model=str(write_encoder(tmp_path_factory.mktemp("encoder"))), device="cpu")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps({"id": p.id, "contents": p.contents}) + "\n" for p in PEOPLE))
    return path


@pytest.fixture
def index(corpus: Path, encoder: EncoderConfig, tmp_path: Path) -> Path:
    build_dense_index(corpus, tmp_path / "index", encoder, SMALL)
    return tmp_path / "index"


def edit_manifest(index: Path, **changes: Any) -> None:
    manifest = json.loads((index / "manifest.json").read_text())
    (index / "manifest.json").write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_stored_index_answers_like_one_in_memory(index: Path, encoder: EncoderConfig, mmap: bool):
    stored = load_dense_index(index, mmap=mmap, device="cpu")
    fresh = DenseRetriever.from_passages(PEOPLE, Encoder(encoder))
    for found, expected in zip(stored.search(QUERIES, 3), fresh.search(QUERIES, 3), strict=True):
        assert [p.id for p in found] == [p.id for p in expected]
        assert [p.score for p in found] == pytest.approx([p.score for p in expected], abs=1e-5)
    assert list(stored.passages) == PEOPLE


def test_the_manifest_says_what_is_stored(index: Path, encoder: EncoderConfig):
    manifest = json.loads((index / "manifest.json").read_text())
    assert manifest["method"] == "dense"
    assert manifest["parameters"]["encoder"]["name"] == encoder.model
    assert len(manifest["parameters"]["encoder"]["sha256"]) == 64
    assert manifest["counts"]["passages"] == 4
    assert (manifest["counts"]["dimensions"], manifest["counts"]["truncated"]) == (16, 2)
    files = {path.name for path in index.iterdir()}
    assert files == {"manifest.json", "passages.arrow", "vectors-00000.npy", "vectors-00001.npy"}
    assert set(manifest["files"]) == files - {"manifest.json"}


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_kinds_of_faiss(corpus: Path, encoder: EncoderConfig, tmp_path: Path, kind: str, index: Path):
    pytest.importorskip("faiss", reason="the extra dense is not installed")
    build_dense_index(corpus, tmp_path / kind, encoder, VectorOptions(kind=kind, passages_per_shard=3))
    assert {path.name for path in (tmp_path / kind).iterdir()} == {"manifest.json", "passages.arrow", "vectors.faiss"}
    found = load_dense_index(tmp_path / kind, device="cpu").search(QUERIES, 2)
    expected = load_dense_index(index, device="cpu").search(QUERIES, 2)
    assert [[p.id for p in row] for row in found] == [[p.id for p in row] for row in expected]


def test_a_faiss_index_made_elsewhere(corpus: Path, encoder: EncoderConfig, tmp_path: Path, index: Path):
    """What Search-R1's index builder writes: a file of FAISS beside the corpus."""
    faiss = pytest.importorskip("faiss", reason="the extra dense is not installed")
    made = faiss.IndexFlatIP(16)
    made.add(Encoder(encoder).encode([p.contents for p in PEOPLE], "passage"))
    faiss.write_index(made, str(tmp_path / "e5_Flat.index"))
    options = VectorOptions(faiss_file=tmp_path / "e5_Flat.index")
    manifest = build_dense_index(corpus, tmp_path / "wrapped", encoder, options)
    assert manifest["parameters"]["vectors"]["kind"] == "faiss file"
    found = load_dense_index(tmp_path / "wrapped", device="cpu").search(QUERIES, 2)
    expected = load_dense_index(index, device="cpu").search(QUERIES, 2)
    assert [[p.id for p in row] for row in found] == [[p.id for p in row] for row in expected]
    made.add(np.ones((1, 16), dtype=np.float32))
    faiss.write_index(made, str(tmp_path / "e5_Flat.index"))
    with pytest.raises(ValueError, match="5 vectors for 4 passages"):
        build_dense_index(corpus, tmp_path / "other", encoder, options)


def build_and_die(corpus: Path, out: Path, encoder: EncoderConfig) -> int:
    """A build in a process of its own that kills itself behind the first shard; how it ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, where other threads live
        child = os.fork()  # a new program would only import the same again
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    real, calls = Encoder.encode, []

    def encode(self, texts, kind):
        calls.append(len(texts))
        if len(calls) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, texts, kind)

    try:
        Encoder.encode = encode  # type: ignore[method-assign]
        build_dense_index(corpus, out, encoder, SMALL)
    finally:
        os._exit(1)


@pytest.fixture
def stopped(corpus: Path, encoder: EncoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an index would be whose build was stopped behind its first shard."""

    def stop(done: int, _: int | None) -> None:
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_dense_index(corpus, tmp_path / "stopped", encoder, SMALL, on_progress=stop)
    return tmp_path / "stopped"


def test_a_killed_build_goes_on_behind_its_last_shard(
    corpus: Path, encoder: EncoderConfig, index: Path, monkeypatch: pytest.MonkeyPatch
):
    killed = index.with_name("killed")
    assert build_and_die(corpus, killed, encoder) == -signal.SIGKILL
    assert not killed.exists()
    real, encoded = Encoder.encode, []

    def encode(self, texts, kind):
        encoded.extend(texts)
        return real(self, texts, kind)

    monkeypatch.setattr(Encoder, "encode", encode)
    seen: list[tuple[int, int | None]] = []
    build_dense_index(corpus, killed, encoder, SMALL, on_progress=lambda *done: seen.append(done))
    assert encoded == [p.contents for p in PEOPLE[2:]]
    assert seen[0] == (2, 4)
    assert seen[-1] == (4, 4)
    for path in index.iterdir():
        assert path.read_bytes() == (killed / path.name).read_bytes()
    assert not (killed.parent / ".killed.building").exists()


def test_an_unfinished_build_never_mixes(stopped: Path, corpus: Path, encoder: EncoderConfig, tmp_path: Path):
    other = EncoderConfig(model=str(write_encoder(tmp_path / "other", seed=1)), device="cpu")
    with pytest.raises(StoredIndexError, match=r"unfinished index of something else \(encoder.name was .*sha256 was"):
        build_dense_index(corpus, stopped, other, SMALL)
    with pytest.raises(StoredIndexError, match=r"encoder.max_tokens was 64, is 9"):
        build_dense_index(corpus, stopped, encoder.model_copy(update={"max_tokens": 9}), SMALL)
    with pytest.raises(StoredIndexError, match=r"vectors.encoded_in was 'float32', is 'bfloat16'"):
        build_dense_index(corpus, stopped, encoder.model_copy(update={"dtype": "bfloat16"}), SMALL)
    with corpus.open("a") as stream:
        stream.write('{"id": "p4", "contents": "new"}\n')
    with pytest.raises(StoredIndexError, match=r"corpus.bytes was"):
        build_dense_index(corpus, stopped, encoder, SMALL)
    assert not stopped.exists()
    manifest = build_dense_index(corpus, stopped, encoder, SMALL, overwrite=True)
    assert manifest["counts"]["passages"] == 5


def test_two_builders_of_one_index(stopped: Path, corpus: Path, encoder: EncoderConfig):
    with (stopped.parent / ".stopped.building" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoredIndexError, match="another process is building"):
            build_dense_index(corpus, stopped, encoder, SMALL)


def test_the_encoder_may_lie_elsewhere_but_must_be_the_same(index: Path, tmp_path: Path):
    moved = EncoderConfig(model=str(write_encoder(tmp_path / "moved")), device="cpu")
    assert load_dense_index(index, encoder=moved).search(QUERIES, 1)
    other = EncoderConfig(model=str(write_encoder(tmp_path / "other", seed=1)), device="cpu")
    with pytest.raises(StoredIndexError, match="is not the one that made this index"):
        load_dense_index(index, encoder=other)
    with pytest.raises(StoredIndexError, match=r"encoded with \{'pooling': 'mean'\}, asked is \{'pooling': 'cls'\}"):
        load_dense_index(index, encoder=moved.model_copy(update={"pooling": "cls"}))


def test_an_encoder_of_other_dimensions(index: Path, tmp_path: Path):
    wide = Encoder(EncoderConfig(model=str(write_encoder(tmp_path / "wide", hidden_size=32)), device="cpu"))
    manifest = json.loads((index / "manifest.json").read_text())
    parameters = manifest["parameters"]
    parameters["encoder"] |= {"name": wide.settings.name, "sha256": wide.settings.sha256}
    edit_manifest(index, parameters=parameters)
    with pytest.raises(StoredIndexError, match=r"the vectors have 16 dimensions, .* makes 32"):
        load_dense_index(index, device="cpu")


@pytest.mark.parametrize("name", ["passages.arrow", "vectors-00001.npy"])
def test_a_changed_or_missing_file_is_named(index: Path, name: str):
    path = index / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + b"!" + whole[-8:])
    with pytest.raises(StoredIndexError, match=rf"{name} was changed since it was built"):
        load_dense_index(index)
    path.unlink()
    with pytest.raises(StoredIndexError, match=rf"{name} is missing"):
        load_dense_index(index)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no passage"),
        (b'{"id": "a", "contents": "  "}\n', "is empty"),
        (gzip.compress(b'{"id": "a", "contents": "word"}\n', mtime=0)[:-6], "damaged gzip file"),
    ],
)
def test_a_corpus_that_cannot_be_read_leaves_no_index(
    tmp_path: Path, encoder: EncoderConfig, content: bytes, message: str
):
    path = tmp_path / ("c.jsonl.gz" if content[:2] == b"\x1f\x8b" else "c.jsonl")
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        build_dense_index(path, tmp_path / "index", encoder)
    assert not (tmp_path / "index").exists()


def test_a_corpus_that_is_not_there(tmp_path: Path, encoder: EncoderConfig):
    with pytest.raises(CorpusError, match="no such file"):
        build_dense_index(tmp_path / "c.jsonl", tmp_path / "index", encoder)


def test_a_hybrid_index(corpus: Path, encoder: EncoderConfig, tmp_path: Path):
    manifest = build_hybrid_index(corpus, tmp_path / "both", encoder, SMALL)
    assert manifest["method"] == "hybrid"
    opened = open_index(tmp_path / "both", device="cpu", rrf_k=10, depth=7)
    assert isinstance(opened, HybridRetriever)
    assert [type(part) for part in opened.retrievers] == [BM25Retriever, DenseRetriever]
    assert (opened.k, opened.depth) == (10, 7)
    with pytest.raises(FileExistsError, match="exists already"):
        build_hybrid_index(corpus, tmp_path / "both", encoder, SMALL)


def test_a_hybrid_index_of_two_corpora_is_refused(corpus: Path, encoder: EncoderConfig, tmp_path: Path):
    build_hybrid_index(corpus, tmp_path / "both", encoder, SMALL)
    with corpus.open("a") as stream:
        stream.write('{"id": "p4", "contents": "new"}\n')
    build_index(corpus, tmp_path / "both" / "bm25", overwrite=True)
    with pytest.raises(StoredIndexError, match="is an index of another corpus"):
        open_index(tmp_path / "both", device="cpu")


def test_the_parts_of_a_hybrid_index_that_are_there_are_kept(
    corpus: Path, encoder: EncoderConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    build_hybrid_index(corpus, tmp_path / "both", encoder, SMALL)
    (tmp_path / "both" / "manifest.json").unlink()  # killed at the very end
    monkeypatch.setattr("posttrain.retrieval.opening.build_index", None)
    monkeypatch.setattr("posttrain.retrieval.opening.build_dense_index", None)
    assert build_hybrid_index(corpus, tmp_path / "both", encoder, SMALL)["method"] == "hybrid"


def test_open_index_takes_every_method(index: Path, corpus: Path, tmp_path: Path):
    build_index(corpus, tmp_path / "bm25")
    assert isinstance(open_index(tmp_path / "bm25"), BM25Retriever)
    assert isinstance(open_index(index, device="cpu"), DenseRetriever)
    with pytest.raises(StoredIndexError, match=r"found \(1, 'dense', None\)"):
        load_index(index)
    with pytest.raises(StoredIndexError, match=r"found \(1, 'bm25'\)"):
        load_dense_index(tmp_path / "bm25")
