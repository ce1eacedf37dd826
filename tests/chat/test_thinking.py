"""Thinking policies: keep leaves tokens alone; strip_and_fork opens a new trajectory where the template forgets."""

from __future__ import annotations

import pytest

from chat.makers import character_tokenizer
from posttrain.chat import Renderer
from posttrain.chat.thinking import policy_runs, strip_thinking
from posttrain.trajectory import Source

THINK = "<think>\nLet me see.\n</think>\n\n"
USER, NEXT, LAST = ({"role": "user", "content": text} for text in ("One?", "Three?", "Five?"))


def roll(renderer: Renderer, prompt: list, turns: list[tuple[str, list]]) -> tuple[list[int], list[Source]]:
    """A history: prompt, then (sampled text, env messages) pairs; the last messages are not appended."""
    ids = renderer.prompt(prompt)
    source = [Source.PROMPT] * len(ids)
    for number, (text, messages) in enumerate(turns):
        sampled = renderer.tokenizer(text, add_special_tokens=False)["input_ids"] + [renderer.end_of_turn_id]
        ids, source = ids + sampled, source + [Source.POLICY] * len(sampled)
        for piece, who in renderer.delta(messages) if number + 1 < len(turns) else []:
            ids, source = ids + piece, source + [who] * len(piece)
    return ids, source


def test_p05_strip_and_fork_gives_the_context_that_the_template_renders(qwen3_with) -> None:
    renderer = Renderer(qwen3_with("qwen3"), "strip_and_fork")
    ids, source = roll(renderer, [USER], [(THINK + "Two.", [NEXT])])
    answer = {"role": "assistant", "content": THINK + "Two."}
    forked = renderer.fork(ids, source, [NEXT])
    assert forked == renderer.prompt([USER, answer, NEXT])
    assert forked is not None
    assert "Let me see" not in renderer.decode(forked)
    # the third turn forks from the second trajectory, whose prompt is what was forked
    more = [*forked, *renderer.tokenizer(THINK + "Four.")["input_ids"], renderer.end_of_turn_id]
    sources = [Source.PROMPT] * len(forked) + [Source.POLICY] * (len(more) - len(forked))
    second = {"role": "assistant", "content": THINK + "Four."}
    assert renderer.fork(more, sources, [LAST]) == renderer.prompt([USER, answer, NEXT, second, LAST])


def test_p05_keep_leaves_tokens_unchanged(qwen3_with) -> None:
    renderer = Renderer(qwen3_with("qwen3"), "keep")
    ids, source = roll(renderer, [USER], [(THINK + "Two.", [NEXT])])
    assert renderer.fork(ids, source, [NEXT]) is None
    assert "Let me see" in renderer.decode(ids)


def test_thinking_survives_inside_a_tool_loop(qwen3_with) -> None:
    """Qwen3 forgets thinking before a user's turn, not before a tool result."""
    renderer = Renderer(qwen3_with("qwen3"), "strip_and_fork")
    result = {"role": "tool", "content": "red"}
    ids, source = roll(renderer, [USER], [(THINK + "Calling.", [result])])
    assert renderer.fork(ids, source, [result]) is None
    ids, source = roll(renderer, [USER], [(THINK + "Calling.", [result]), (THINK + "Red.", [NEXT])])
    forked = renderer.fork(ids, source, [NEXT])
    assert forked is not None
    assert "Let me see" not in renderer.decode(forked)
    assert renderer.decode(forked).count("red") == 1


def test_no_fork_without_thinking_or_for_templates_that_never_forget(qwen3_with) -> None:
    qwen3 = Renderer(qwen3_with("qwen3"), "strip_and_fork")
    assert qwen3.fork(*roll(qwen3, [USER], [("Two.", [NEXT])]), [NEXT]) is None
    for name in ("qwen2_5", "qwen3_training", "llama3"):
        renderer = Renderer(qwen3_with(name), "strip_and_fork")
        assert renderer.fork(*roll(renderer, [USER], [(THINK + "Two.", [NEXT])]), [NEXT]) is None


@pytest.mark.parametrize("name", ["deepseekv3", "deepseek_r1_distill"])
def test_opening_tag_in_the_generation_prompt_goes_too(qwen3_with, name: str) -> None:
    renderer = Renderer(qwen3_with(name), "strip_and_fork")
    ids, source = roll(renderer, [USER], [("Let me see.\n</think>Two.", [NEXT])])
    forked = renderer.fork(ids, source, [NEXT])
    assert forked == renderer.prompt([USER, {"role": "assistant", "content": "<think>\nx</think>Two."}, NEXT])


def test_empty_thinking_block_that_the_template_had_written(qwen3_with) -> None:
    renderer = Renderer(qwen3_with("qwen3"), "strip_and_fork", template_options={"enable_thinking": False})
    ids, source = roll(renderer, [USER], [("Two.", [NEXT])])
    assert renderer.fork(ids, source, [NEXT]) == renderer.prompt([USER, {"role": "assistant", "content": "Two."}, NEXT])


def test_tags_of_several_tokens_are_cut_between_tokens() -> None:
    renderer = Renderer(character_tokenizer(("<e>",), eos_token="<e>"))
    turn = renderer.text("<think>héllo</think>\n\nParis 巴")
    ids = [*renderer.text("Q:"), *turn]
    source = [Source.PROMPT] * 2 + [Source.POLICY] * len(turn)
    options = {"opening": [], "opening_text": "", "decode": renderer.decode, "encode": renderer.text}
    stripped = strip_thinking(ids, source, **options)
    assert stripped == ids[:2] + turn[-len(renderer.text("Paris 巴")) :]
    assert strip_thinking(ids[:2], source[:2], **options) is None


def test_token_across_the_boundary_keeps_its_answer_part() -> None:
    pieces = {"1": "<think>x", "2": "</think>\n\nPa", "3": "ris"}
    decode = lambda ids: "".join(pieces[str(token)] for token in ids)  # noqa: E731
    stripped = strip_thinking(
        [1, 2, 3], [Source.POLICY] * 3, opening=[], opening_text="", decode=decode, encode=lambda text: [len(text)]
    )
    assert stripped == [2, 3]  # "Pa" encoded anew (its length stands for its id), then the kept token


def test_policy_runs() -> None:
    p, e = Source.POLICY, Source.ENV
    assert policy_runs([e, p, p, e, p]) == [(1, 3), (4, 5)]
    assert policy_runs([]) == []
