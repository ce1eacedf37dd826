from __future__ import annotations

from dataclasses import replace

import pytest

from posttrain.rewards.length import overlong, target_length, words_of_answer
from posttrain.task import Invalid

from .episodes import env, episode, task


def of(tokens: int, *segments):
    return replace(episode(*(segments or ("x",))), policy_token_count=tokens)


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (1000, -1.0)])
def test_dapos_soft_punishment(tokens, value):
    assert overlong(of(tokens), task(), max_tokens=100, buffer=20).value == pytest.approx(value)


def test_p82_only_what_the_policy_wrote_counts():
    read = of(10, "a", env("word " * 10_000), "b")
    assert overlong(read, task(), max_tokens=100, buffer=20).value == 0
    assert overlong(read, task(), max_tokens=100, buffer=20).components["tokens"] == 10


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_outside_the_length_is_refused(buffer):
    with pytest.raises(ValueError, match="buffer"):
        overlong(of(1), task(), max_tokens=100, buffer=buffer)


@pytest.mark.parametrize(
    ("tokens", "options", "value"),
    [
        (100, {"target": 100}, 1.0),
        (50, {"target": 100, "scale": 100}, 0.5),
        (150, {"target": 100, "scale": 100}, 0.5),
        (50, {"target": 100, "scale": 100, "shorter_is_fine": True}, 1.0),
        (150, {"target": 100, "scale": 100, "shorter_is_fine": True}, 0.5),
        (9000, {"target": 100}, 0.0),
    ],
)
def test_open_instructs_target_lengths(tokens, options, value):
    assert target_length(of(tokens), task(), **options).value == pytest.approx(value)


def test_a_row_may_name_its_target():
    assert target_length(of(7), task("7")).value == 1
    assert isinstance(target_length(of(7), task("long")), Invalid)


def test_words_of_the_answer():
    assert words_of_answer(episode("<think>a b c d</think> one two"), task(), low=2, high=2).value == 1
    assert words_of_answer(episode("one"), task(), low=2).value == 0
