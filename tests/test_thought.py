"""What of a text is thought."""

from __future__ import annotations

import pytest

from posttrain.thought import ends_in_thought, outside_thoughts


@pytest.mark.parametrize(
    ("text", "visible", "inside"),
    [
        ("a<think>b</think>c<think>d</think>e", "ace", False),
        ("a<think>b", "a", True),
        ("b <search>x</search></think>c", "c", False),
        ("a</think>b<think>c</think>d", "bd", False),
        ("</think>a", "a", False),
        ("a</think>b</think>c", "b</think>c", False),
        ("<think>a<think>b</think>c", "c", False),
        ("a</think>b<think>c", "b", True),
        ("plain <b", "plain <b", False),
    ],
)
def test_thoughts(text: str, visible: str, inside: bool) -> None:
    assert (outside_thoughts(text), ends_in_thought(text)) == (visible, inside)


def test_a_long_text_without_thoughts_is_read_once() -> None:
    text = "<a" * 500_000
    assert outside_thoughts(text) == text
