from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from posttrain.retrieval import Passage
from posttrain.retrieval.dense import DenseRetriever, ExactVectors, FaissVectors, write_faiss
from posttrain.retrieval.encoder import Encoder, EncoderConfig

from .models import write_encoder
from .servers import PEOPLE


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return Encoder(EncoderConfig(model=str(write_encoder(tmp_path_factory.mktemp("encoder"))), device="cpu"))


@pytest.fixture(scope="module")
def people(encoder: Encoder) -> DenseRetriever:
    return DenseRetriever.from_passages(PEOPLE, encoder)


def random_shards(*sizes: int, dimensions: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made = rng.standard_normal((sum(sizes), dimensions)).astype(np.float32)
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    return np.split(made, np.cumsum(sizes)[:-1])


def test_exact_search_is_a_sort_of_all_inner_products(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("posttrain.retrieval.dense._ROWS_AT_ONCE", 7)
    shards = random_shards(10, 1, 30)
    queries = random_shards(5)[0]
    scores, rows = ExactVectors(shards).search(queries, 6)
    every = queries @ np.concatenate(shards).T
    expected = np.argsort(-every, axis=1, kind="stable")[:, :6]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(scores, np.take_along_axis(every, expected, 1), atol=1e-6)


def test_equal_scores_come_in_order_of_the_rows():
    shard = np.ones((50, 4), dtype=np.float32)
    _, rows = ExactVectors([shard, shard]).search(np.ones((2, 4), dtype=np.float32), 7)
    assert rows.tolist() == [[0, 1, 2, 3, 4, 5, 6]] * 2


def test_half_precision_shards():
    shards = random_shards(40)
    queries = random_shards(3)[0]
    half, full = (ExactVectors([shards[0].astype(kind)]).search(queries, 3) for kind in (np.float16, np.float32))
    np.testing.assert_array_equal(half[1], full[1])
    np.testing.assert_allclose(half[0], full[0], atol=2e-3)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw", "IVF4,SQ8"])
def test_faiss_finds_what_exact_search_finds(tmp_path: Path, kind: str, mmap: bool):
    pytest.importorskip("faiss", reason="the extra dense is not installed")
    shards = random_shards(150, 150)
    seen: list[int] = []
    made = write_faiss(shards, kind, tmp_path / "v.faiss", seen.append)
    assert seen == [150, 300]
    assert made["factory"] == {"flat": "Flat", "ivf": "IVF7,Flat", "hnsw": "HNSW32,Flat"}.get(kind, kind)
    found = FaissVectors(tmp_path / "v.faiss", mmap=mmap, effort=256)
    assert (len(found), found.dimensions) == (300, 8)
    queries = random_shards(20)[0]
    scores, rows = found.search(queries, 5)
    true_scores, true_rows = ExactVectors(shards).search(queries, 5)
    assert (rows[:, 0] == true_rows[:, 0]).mean() == 1.0
    np.testing.assert_allclose(scores[:, 0], true_scores[:, 0], atol=2e-2)


def test_an_unknown_kind_of_faiss_is_refused(tmp_path: Path):
    pytest.importorskip("faiss", reason="the extra dense is not installed")
    with pytest.raises(ValueError, match="FAISS knows no index 'HSNW' of 8 dimensions"):
        write_faiss(random_shards(10), "HSNW", tmp_path / "v.faiss", lambda done: None)


def test_a_damaged_faiss_file_is_named(tmp_path: Path):
    pytest.importorskip("faiss", reason="the extra dense is not installed")
    (tmp_path / "v.faiss").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"v.faiss is no FAISS index"):
        FaissVectors(tmp_path / "v.faiss")


def test_a_passage_is_nearest_to_itself(people: DenseRetriever):
    found = people.search([passage.contents for passage in PEOPLE], 1)
    assert [passages[0].id for passages in found] == [passage.id for passage in PEOPLE]
    assert [passages[0].score for passages in found] == pytest.approx([1.0] * 4, abs=1e-5)


def test_top_k_larger_than_the_corpus(people: DenseRetriever):
    assert len(people.search(["compiler"], 100)[0]) == 4


def test_blank_queries_find_nothing_and_no_queries_have_no_answers(people: DenseRetriever):
    assert people.search(["", "  \n", "compiler"], 1)[:2] == [[], []]
    assert people.search([""], 1) == [[]]
    assert people.search([], 1) == []


def test_a_huge_query_is_cut_like_a_huge_passage(people: DenseRetriever):
    assert len(people.search(["compiler " * 100_000], 2)[0]) == 2


def test_top_k_below_one_is_refused(people: DenseRetriever):
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        people.search(["engine"], 0)


def test_vectors_of_another_encoder_are_refused(encoder: Encoder):
    with pytest.raises(ValueError, match=r"the vectors have 8 dimensions, .* makes 16"):
        DenseRetriever(PEOPLE, encoder, ExactVectors(random_shards(4)))


def test_vectors_of_another_corpus_are_refused(encoder: Encoder):
    with pytest.raises(ValueError, match="5 vectors for 4 passages"):
        DenseRetriever(PEOPLE, encoder, ExactVectors(random_shards(5, dimensions=16)))


def test_the_event_loop_goes_on_while_a_search_runs(people: DenseRetriever, monkeypatch: pytest.MonkeyPatch):
    threads: set[str] = set()
    slow = people.encoder.encode

    def encode(texts, kind):
        threads.add(threading.current_thread().name)
        time.sleep(0.2)
        return slow(texts, kind)

    monkeypatch.setattr(people.encoder, "encode", encode)

    async def run() -> tuple[int, list[list[Passage]]]:
        ticks = 0
        search = asyncio.gather(*(people.retrieve([f"engine {i}"], 1) for i in range(20)))
        while not search.done():
            await asyncio.sleep(0.01)
            ticks += 1
        await people.close()
        return ticks, [found[0] for found in search.result()]

    ticks, found = asyncio.run(run())
    assert ticks >= 5
    assert all(len(passages) == 1 for passages in found)
    assert len(threads) == 1
    assert "MainThread" not in threads


def test_several_event_loops_one_after_the_other(people: DenseRetriever):
    assert asyncio.run(people.retrieve(["engine"], 2)) == asyncio.run(people.retrieve(["engine"], 2))
