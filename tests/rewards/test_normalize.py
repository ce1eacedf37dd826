from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rewards.normalize import normalize_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel-Tower!", "eiffeltower"),
        ("U.S.", "us"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),
        ("$5 + 3^2", "5 32"),
        ("“Paris”", "paris"),
        ("«Où?»", "où"),
        ("Straße", "strasse"),
        ("ＰＡＲＩＳ　２０２４", "paris 2024"),
        ("cafe\u0301", "café"),
        ("北京。", "北京"),
        ("2010–2012", "20102012"),
        ("a\u00a0b\tc\n", "b c"),
        ("The", ""),
        ("?!", ""),
        ("", ""),
    ],
)
def test_one_spelling(text, expected):
    assert normalize_answer(text) == expected


@settings(derandomize=True, deadline=None)
@given(st.text())
def test_case_and_outer_space_never_matter(text):
    assert normalize_answer(f"  {text}\n") == normalize_answer(text)
    assert normalize_answer(text.casefold()) == normalize_answer(text)


@settings(derandomize=True, deadline=None)
@given(st.text(alphabet=st.characters(codec="ascii")))
def test_ascii_agrees_with_squads_recipe(text):
    bare = "".join(char for char in text.lower() if char not in string.punctuation)
    assert normalize_answer(text) == " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())
