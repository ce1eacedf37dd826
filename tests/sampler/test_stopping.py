from __future__ import annotations

import time

import pytest

from pace import allowed
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.stopping import Stops, Vocabulary, completing_tokens
from posttrain.trajectory import StopReason

from .tiny import END, tokenizer


def first_stop(text_or_ids: str | list[int], **params: object) -> tuple[int, object] | None:
    """(tokens kept, what stopped) by asking the rule after every token."""
    ids = tokenizer().encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    rule = Stops(tokenizer()).rule(SamplingParams(max_new_tokens=1, **params))
    for count in range(1, len(ids) + 1):
        stopped = rule.after(ids[:count])
        if stopped is not None:
            return count, stopped[1]
    return None


def brute_force(text: str, strings: tuple[str, ...]) -> int | None:
    ids = tokenizer().encode(text)
    for count in range(1, len(ids) + 1):
        if any(s in tokenizer().decode(ids[:count]) for s in strings):
            return count
    return None


@pytest.mark.parametrize(
    "text",
    [
        "x</s>y",  # `</s` is one token, `>` the next
        "x</s>\ny",  # `>\n` is one token that goes on beyond the stop
        "abababab</s>",
        "</s>",
        "<</s</s>>",
        "no stop at all",
        "巴黎</s>",
        "half 巴</",
    ],
)
def test_a_stop_string_is_found_where_looking_after_every_token_finds_it(text: str) -> None:
    found = first_stop(text, stop_strings=("</s>",))
    assert (found[0] if found else None) == brute_force(text, ("</s>",))


def test_a_stop_string_of_many_bytes_is_completed_by_its_last_byte() -> None:
    ids = tokenizer().encode("巴黎。然后")
    assert first_stop(ids, stop_strings=("。",)) == (9, "。")
    assert first_stop(ids[:8], stop_strings=("。",)) is None


@pytest.mark.parametrize("stop", ["</search>", "abab</search>", "</search>\n"])
def test_a_long_stop_string_spread_over_many_tokens(stop: str) -> None:
    for text in (stop, "x" * 50 + stop, stop[:-2] + stop + stop, "巴黎" * 20 + stop + "rest"):
        found = first_stop(text, stop_strings=(stop,))
        assert found == (brute_force(text, (stop,)), stop)


def test_of_several_strings_the_one_that_ends_first_wins_and_of_two_ending_together_the_longer() -> None:
    assert first_stop("aXYb", stop_strings=("XYb", "Y", "XY"))[1] == "XY"
    assert first_stop("q\n\n", stop_strings=("\n\n", "\n"))[1] == "\n"


def test_a_stop_id_goes_before_a_stop_string() -> None:
    ids = [*tokenizer().encode("ab"), END]
    assert first_stop(ids, stop_ids=frozenset({END}), stop_strings=("<end>",)) == (len(ids), END)
    assert first_stop(ids, stop_strings=("<end>",)) == (len(ids), "<end>")  # control tokens have text, too
    rule = Stops(None).rule(SamplingParams(max_new_tokens=1, stop_ids=frozenset({5, END})))
    assert rule.after([1, 5]) == (StopReason.STOP_ID, 5)


def test_ids_beyond_the_tokenizer_are_harmless() -> None:
    """Models pad their vocabulary; such an id has no text."""
    ids = [*tokenizer().encode("</s"), 99_999, *tokenizer().encode(">")]
    assert first_stop(ids, stop_strings=("</s>",)) == (len(ids), "</s>")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        Stops(None).rule(SamplingParams(max_new_tokens=1, stop_strings=("x",)))


def test_only_tokens_that_can_complete_a_string_are_candidates() -> None:
    texts = Vocabulary.of(tokenizer()).texts
    candidates = completing_tokens(texts, ("</search>",))
    ascii_candidates = {texts[i] for i in candidates if texts[i].isascii()}
    assert ascii_candidates == {">", ">\n"}  # nothing in this vocabulary starts with `h>` or `/search>`
    assert all("\ufffd" in texts[i] for i in candidates if not texts[i].isascii())


@pytest.mark.alone
def test_looking_for_stops_in_a_long_turn_stays_cheap() -> None:
    """The text is read from a short tail only, and only after a candidate."""
    ids = tokenizer().encode("ab>" * 20_000)
    rule = Stops(tokenizer()).rule(SamplingParams(max_new_tokens=1, stop_strings=("</search>",)))
    assert len(rule._tail(ids)) < 60
    start = time.monotonic()
    for _ in range(200):
        assert rule.after(ids) is None
    assert time.monotonic() - start < allowed(0.5)
