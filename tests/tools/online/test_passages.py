"""The part of a text that was asked for."""

from __future__ import annotations

import re
import time

import pytest

from pace import allowed
from posttrain.tools.online.passages import GAP, about_query, around_snippet, beginning, passages

ARTICLE = "\n".join(
    [
        "The harbour. " + "Ships came and went every day of the year. " * 20,
        "The bridge. The Forth Bridge was opened in 1890 and carries trains. It is 2,467 metres long.",
        "The market. " + "Fish and bread were sold there on Mondays. " * 20,
        "The engineer. Benjamin Baker designed the bridge together with John Fowler.",
        "The museum. " + "It shows paintings of the town by unknown hands. " * 20,
    ]
)


def test_passages_cover_the_text_in_order():
    parts = passages(ARTICLE)
    assert max(map(len, parts)) <= 600
    assert re.sub(r"\s+", " ", " ".join(parts)) == re.sub(r"\s+", " ", ARTICLE).strip()
    assert passages("") == []
    assert max(map(len, passages("x" * 5000))) <= 600


def test_a_query_shows_the_passages_about_it_in_the_order_of_the_page():
    shown = about_query(ARTICLE, "who designed the bridge opened in 1890", 1300)
    assert len(shown) <= 1300 + 3
    assert shown.index("opened in 1890") < shown.index("Benjamin Baker")
    assert GAP in shown
    assert about_query("Short page.", "anything", 2000) == "Short page."


@pytest.mark.parametrize("query", ["zeppelin", "", "the of", "!!!"])
def test_a_query_without_a_match_shows_the_beginning(query: str):
    assert about_query(ARTICLE, query, 500) == beginning(ARTICLE, 500)
    assert about_query("! " * 3000, query, 500) == beginning("! " * 3000, 500)


def test_a_snippet_is_found_where_it_stands():
    snippet = "the Forth Bridge, opened 1890, carries trains ..."
    shown = around_snippet(ARTICLE, snippet, 100)
    assert shown is not None
    assert "The Forth Bridge was opened in 1890 and carries trains." in shown
    assert len(shown) < 300
    assert around_snippet(ARTICLE, "quantum chromodynamics lattice", 100) is None
    assert around_snippet("", snippet, 100) is None
    assert around_snippet(ARTICLE, "", 100) is None


@pytest.mark.alone
def test_long_pages_are_quick():
    text = "\n".join(f"Paragraph {at} about topic {at % 97}. It says nothing new." * 3 for at in range(20_000))
    assert len(text) > 2_000_000
    started = time.process_time()
    assert "topic 13" in about_query(text, "topic 13", 2000)
    assert around_snippet(text, "Paragraph 777 about topic 1", 200)
    assert time.process_time() - started < allowed(2.5)
