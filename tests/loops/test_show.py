"""Colours say who wrote what; the text stays what the tokens are."""

from __future__ import annotations

import pytest

from cases.parts import byte_tokenizer, roll, spec
from posttrain.chat import Renderer
from posttrain.loops.show import ANSWER_STYLE, STYLES, colored, pieces
from posttrain.trajectory import Source, Trajectory

RENDERER = Renderer(byte_tokenizer())


def made(*parts: tuple[Source, str | bytes]) -> Trajectory:
    trajectory = Trajectory(task_id="t", group_id="g", episode_id="e")
    for source, text in parts:
        ids = list(text) if isinstance(text, bytes) else RENDERER.text(text)
        if source is Source.POLICY:
            trajectory.add_sampled(ids, [-1.0] * len(ids), 0)
        else:
            trajectory.add_context(ids, source)
    return trajectory


def styled(trajectory: Trajectory, style: str, first: int = 0) -> list[str]:
    shown = colored(trajectory, RENDERER, first=first)
    return [shown.plain[span.start : span.end] for span in shown.spans if span.style == style]


def test_an_episode_in_colours():
    rollout = spec(["<think>hm</think><search>tower</search>", "<think>so</think><answer>Paris</answer>"])
    (trajectory,) = roll(rollout)
    shown = colored(trajectory, rollout.renderer)
    assert shown.plain == rollout.renderer.decode(trajectory.token_ids)
    assert styled(trajectory, STYLES[Source.POLICY]) == [
        "<think>hm</think><search>tower</search>",
        "<think>so</think><answer>Paris</answer>",
    ]
    (information,) = styled(trajectory, STYLES[Source.ENV])
    assert "The tower is in Paris." in information
    assert styled(trajectory, STYLES[Source.PROMPT]) == ["Where is the tower?"]
    assert styled(trajectory, ANSWER_STYLE) == ["Paris"]


def test_every_source_has_a_style():
    assert STYLES.keys() == set(Source)
    assert len(set(STYLES.values())) == len(STYLES)


def test_p28_an_answer_in_what_was_read_is_not_highlighted():
    trajectory = made((Source.ENV, "<answer>Rome</answer>"), (Source.POLICY, "<answer>Oslo</answer>"))
    assert styled(trajectory, ANSWER_STYLE) == ["Oslo"]


@pytest.mark.parametrize(
    "text", ["<think><answer>no</answer></think>", "<answer>no</answer></think>", "<think>open <answer>no</answer>"]
)
def test_an_answer_in_a_thought_is_not_highlighted(text):
    assert styled(made((Source.POLICY, text)), ANSWER_STYLE) == []


def test_from_a_position_on_only_what_follows():
    trajectory = made((Source.PROMPT, "q"), (Source.POLICY, "one"), (Source.ENV, "two"))
    assert colored(trajectory, RENDERER, first=4).plain == "two"
    assert colored(trajectory, RENDERER, first=len(trajectory)).plain == ""


def test_a_character_over_a_border_of_sources_is_shown_once_and_whole():
    table = {byte: RENDERER.text("é")[i] for i, byte in enumerate("é".encode())}
    trajectory = Trajectory(task_id="t", group_id="g", episode_id="e")
    trajectory.add_context([*RENDERER.text("a"), table["é".encode()[0]]], Source.ENV)
    trajectory.add_sampled([table["é".encode()[1]]], [-1.0], 0)
    assert list(pieces(trajectory, RENDERER)) == [(Source.ENV, "a"), (Source.POLICY, "é")]


def test_text_cannot_steer_the_terminal():
    trajectory = made((Source.ENV, "a\x1b[2Jb\rc\x07\x7f\x9b"), (Source.POLICY, "<answer>\x1b[1m</answer>\n\t"))
    shown = colored(trajectory, RENDERER)
    assert shown.plain == "a␛[2Jb␍c␇␡\ufffd<answer>␛[1m</answer>\n\t"
    assert styled(trajectory, ANSWER_STYLE) == ["␛[1m"]
