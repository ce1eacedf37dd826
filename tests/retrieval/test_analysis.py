from __future__ import annotations

import json
import re
from pathlib import Path

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.retrieval.analysis import Analyzer, needs_bigrams

WORDS = Analyzer(bm25s.stopwords.STOPWORDS_EN)
PAIRS = Analyzer(bm25s.stopwords.STOPWORDS_EN, bigrams=True)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The cat and a Dog", ["cat", "dog"]),
        ("don't mix 3 with 42_x", ["don", "mix", "42_x"]),
        ("Ｔｏｋｙｏ TOKYO", ["tokyo", "tokyo"]),  # full width
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("Beyonce\u0301 Beyonc\u00e9", ["beyonc\u00e9", "beyonc\u00e9"]),  # composed and decomposed
        ("co\u00adoperate", ["cooperate"]),  # soft hyphen
        ("ﬁnance", ["finance"]),  # ligature
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),  # vowel signs are combining marks
        ("Влади́мир", ["влади́мир"]),
        ("!?… — “”", []),
        ("", []),
    ],
)
def test_terms(text: str, terms: list[str]):
    assert WORDS.terms(text) == terms
    assert PAIRS.terms(text) == terms


@pytest.mark.parametrize(
    ("text", "words", "pairs"),
    [
        ("北京大学 in Beijing", ["北京大学", "beijing"], ["北京", "京大", "大学", "beijing"]),
        ("李 Li", ["li"], ["李", "li"]),
        ("サマーウォーズ2", ["サマーウォーズ2"], ["サマ", "マー", "ーウ", "ウォ", "ォー", "ーズ"]),
        ("서울은", ["서울은"], ["서울", "울은"]),
        ("ภาษาไทย", ["ภาษาไทย"], ["ภา", "าษ", "ษา", "าไ", "ไท", "ทย"]),
    ],
)
def test_scripts_without_spaces(text: str, words: list[str], pairs: list[str]):
    assert WORDS.terms(text) == words
    assert PAIRS.terms(text) == pairs


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_terms_are_those_of_bm25s(text: str):
    reference = [word for word in re.findall(r"(?u)\b\w\w+\b", text.lower()) if word not in WORDS.stop_words]
    assert WORDS.terms(text) == reference


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_folding_again_changes_nothing(text: str):
    terms = WORDS.terms(text)
    assert WORDS.terms(" ".join(terms)) == terms


def test_a_corpus_is_told_by_its_letters():
    assert needs_bigrams(["北京大学是一所大学", "Peking University"])
    assert not needs_bigrams(["Empress Wang (Chinese: 王皇后) was an empress of the Tang dynasty."])
    assert not needs_bigrams(["", "..."])


def test_the_real_corpus_is_of_words(shared_data: Path):
    lines = (shared_data / "search_r1_example" / "corpus.jsonl").read_text().splitlines()
    texts = [json.loads(line)["contents"] for line in lines]
    assert len(texts) == 10
    assert not needs_bigrams(texts)
