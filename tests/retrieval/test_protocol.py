from __future__ import annotations

import pytest

from posttrain.retrieval import Passage, RetrievalError
from posttrain.retrieval.protocol import check_top_k, quoted
from posttrain.task import EpisodeInvalid


def test_a_passage_knows_its_title_and_text():
    passage = Passage("1", '"Evan Morris"\nA lobbyist.\nBorn 1977.')
    assert (passage.title, passage.text, passage.score) == ("Evan Morris", "A lobbyist.\nBorn 1977.", None)


@pytest.mark.parametrize(
    ("contents", "title"),
    [("no quotes\ntext", "no quotes"), ('"one line"', "one line"), ('"', '"'), ("", ""), ('""\ntext', "")],
)
def test_titles_of_unusual_contents(contents: str, title: str):
    assert Passage("1", contents).title == title


def test_a_line_break_in_a_title_does_not_end_it():
    assert Passage("1", quoted("Two\n lines", "text")).title == "Two lines"


def test_p59_a_retrieval_failure_is_an_invalid_episode_whoever_forgets_to_catch_it():
    with pytest.raises(EpisodeInvalid) as caught:
        raise RetrievalError("http_status", "HTTP 503", status=503)
    assert caught.value.reason == "tool_down"
    assert caught.value.detail == "retrieval http_status: HTTP 503"


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_below_one_is_refused(top_k: int):
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        check_top_k(top_k)
