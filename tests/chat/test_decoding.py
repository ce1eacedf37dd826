"""Reading ids back: cut characters, special tokens, and that reading changes nothing."""

from __future__ import annotations

import pytest

from chat.makers import character_tokenizer, sentencepiece_tokenizer
from posttrain.chat import Renderer
from posttrain.chat.decoding import _ends_inside_character


@pytest.fixture(scope="module")
def bytewise() -> Renderer:
    return Renderer(character_tokenizer(("<eos>",), eos_token="<eos>"))


def test_p19_cut_character_shows_a_mark_and_scorers_see_whole_characters(bytewise: Renderer) -> None:
    whole = bytewise.text("巴黎")
    assert len(whole) == 6
    assert bytewise.decode(whole[:4]) == "巴\ufffd"
    assert bytewise.complete_text(whole[:4]) == "巴"
    assert bytewise.complete_text(whole[:5]) == "巴"
    assert bytewise.complete_text(whole) == "巴黎"


def test_p19_with_the_real_tokenizer(qwen3_with) -> None:
    renderer = Renderer(qwen3_with("qwen3"))
    for text in ("𓂀 x 🧑‍🚀", "ꙮ", "巴黎𠮷"):
        ids = renderer.text(text)
        for cut in range(len(ids) + 1):
            complete = renderer.complete_text(ids[:cut])
            assert text.startswith(complete)
            assert "\ufffd" not in complete
            assert len(renderer.decode(ids[:cut])) >= len(complete)


def test_a_replacement_mark_that_the_policy_wrote_stays(bytewise: Renderer) -> None:
    ids = bytewise.text("odd \ufffd")
    assert bytewise.complete_text(ids) == "odd \ufffd"


def test_special_tokens_are_shown_to_people_and_not_to_scorers(bytewise: Renderer) -> None:
    eos = next(iter(bytewise.stop_ids))
    ids = [*bytewise.text("Paris"), eos]
    assert bytewise.decode(ids) == "Paris<eos>"
    assert bytewise.complete_text(ids) == "Paris"


def test_tags_stay_in_the_text_of_scorers(qwen3_with) -> None:
    renderer = Renderer(qwen3_with("qwen3"))
    ids = renderer.tokenizer("<think>\nx\n</think>\n\n<tool_call>{}</tool_call><|im_end|>")["input_ids"]
    assert renderer.complete_text(ids) == "<think>\nx\n</think>\n\n<tool_call>{}</tool_call>"


def test_byte_fallback_of_sentencepiece(shared_data) -> None:
    renderer = Renderer(sentencepiece_tokenizer(shared_data / "tokenizers" / "mistral_v3.tokenizer.model"))
    ids = renderer.text("see 𓂀")
    assert len(ids) >= 6
    assert renderer.complete_text(ids[:-1]).rstrip() == "see"
    assert renderer.decode(ids[:-1]).endswith("\ufffd")
    assert renderer.complete_text(ids) == "see 𓂀"


def test_where_utf8_stops_inside_a_character() -> None:
    cases = {b"": False, b"a": False, "é".encode(): False, b"\xc3": True, b"\xe5\xb7": True, b"\xf0\x9f\x98": True}
    for data, inside in cases.items():
        assert _ends_inside_character(data) is inside
    assert not _ends_inside_character("\ufffd".encode())
    assert not _ends_inside_character(b"\x80\x80\x80\x80")
