from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from posttrain.retrieval.analysis import Analyzer
from posttrain.retrieval.bm25 import ENGLISH_STOP_WORDS, score_terms
from posttrain.retrieval.bm25_build import write_scores

ANALYZER = Analyzer(ENGLISH_STOP_WORDS)


def made_up_texts(count: int, words: int) -> list[str]:
    rng = random.Random(0)
    texts = [" ".join(f"w{int(rng.paretovariate(0.7))}" for _ in range(rng.randint(1, words))) for _ in range(count)]
    texts[count // 2] = "the of"  # a passage without a term
    return texts


@pytest.mark.parametrize(("passages_per_block", "scores_per_range"), [(1 << 15, 1 << 22), (7, 50), (100, 9)])
def test_the_bits_are_bm25s(tmp_path: Path, passages_per_block: int, scores_per_range: int):
    texts = made_up_texts(200, 30)
    sizes = {"passages_per_block": passages_per_block, "scores_per_range": scores_per_range}
    written = write_scores(texts, ANALYZER, tmp_path, k1=0.9, b=0.4, **sizes)
    expected = score_terms(texts, ANALYZER, k1=0.9, b=0.4)
    assert list(written.vocabulary) == list(expected.vocabulary)
    np.testing.assert_array_equal(written.indptr, expected.indptr)
    np.testing.assert_array_equal(written.indices, expected.indices)
    np.testing.assert_array_equal(written.data, expected.data)
    assert (written.data.dtype, written.indices.dtype) == (np.float32, np.int32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npy", "indices.npy", "indptr.npy"]


def test_a_corpus_without_a_word_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="none of 2 passages has a searchable term"):
        write_scores(["x", "the"], ANALYZER, tmp_path)
