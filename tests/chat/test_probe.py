"""The start-up probe over 17 real templates and some that rewrite history."""

from __future__ import annotations

import pytest

from chat.makers import CHATML, appended, character_tokenizer
from posttrain.chat import ChatError, NotAppendOnly, Renderer
from posttrain.chat.probe import Verdict, conversations

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEXT = ("plain", "multi_turn", "system", "thinking")
TOOLS = ("tool_text", "tool_result", "tool_results_together", "tool_rounds", "tool_thinking")

ALL = dict.fromkeys((*TEXT, *TOOLS), "append_only")
NO_TOOLS = dict.fromkeys(TEXT, "append_only") | dict.fromkeys(TOOLS, "unsupported")
FORGETS = ALL | {"thinking": "thinking_dropped", "tool_thinking": "thinking_dropped"}
EXPECTED: dict[str, dict[str, str]] = {
    "cohere": NO_TOOLS,
    "gemma": NO_TOOLS | {"system": "unsupported"},
    "gemma3": NO_TOOLS,
    "glm4moe": FORGETS,
    "llama3": NO_TOOLS | {"tool_text": "append_only"},
    "llama3_1": ALL | {"tool_results_together": "unsupported"},
    "llama3_2": ALL | {"tool_results_together": "unsupported"},
    "phi3": NO_TOOLS,
    "phi3_5": NO_TOOLS,
    "qwen2_5": ALL,
    "qwen2_5_training": ALL,
    # the last assistant turn of qwen3 shows an empty thinking block, which goes when the next turn comes
    "qwen3": dict.fromkeys(ALL, "thinking_dropped") | {"plain": "append_only"},
    "qwen3_instruct_2507": ALL,
    "qwen3_training": ALL,
    "smolvlm": NO_TOOLS | {"tool_text": "append_only"},
}
# expected and found text of the first differing token
REFUSED = {
    "deepseekv3": ("<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>"),
    "deepseek_r1_distill": ("<｜tool▁outputs▁begin｜>", "\n"),
}


def tiny(template: str) -> Renderer:
    return Renderer(character_tokenizer(SPECIAL, template, eos_token="<|im_end|>"))


def test_the_tables_cover_every_real_template(templates) -> None:
    assert {path.stem for path in templates.glob("*.jinja")} == {*EXPECTED, *REFUSED}
    assert set(conversations()) == {*TEXT, *TOOLS}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_verdict_on_a_real_template(qwen3_with, name: str) -> None:
    report = Renderer(qwen3_with(name)).probe()
    assert {conversation: verdict.value for conversation, verdict in report.verdicts.items()} == EXPECTED[name]
    assert set(report.reasons) == {c for c, verdict in report.verdicts.items() if verdict is not Verdict.APPEND_ONLY}
    assert report.drops_thinking is ("thinking_dropped" in EXPECTED[name].values())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_p03_real_templates_that_rewrite_tool_history_are_refused(qwen3_with, name: str) -> None:
    """DeepSeek opens the tool outputs of the first round only: the second one looks different, depending on history."""
    renderer = Renderer(qwen3_with(name))
    with pytest.raises(NotAppendOnly, match="tool_text") as caught:
        renderer.probe()
    error = caught.value
    assert error.conversation == "tool_text"
    assert (error.expected.text, error.found.text) == REFUSED[name]
    assert error.expected.id == renderer.tokenizer.convert_tokens_to_ids(REFUSED[name][0])
    assert f"index {error.index}" in str(error)
    assert "probe(tools=False)" in str(error)
    verdicts = renderer.probe(tools=False).verdicts
    assert set(verdicts) == set(TEXT)
    assert set(verdicts.values()) == {Verdict.THINKING_DROPPED}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_conversation_built_by_deltas_equals_the_templates_own_render(qwen3_with, name: str) -> None:
    """Independent of the probe: prompt + (answer, end of turn) + delta against one render of everything."""
    renderer = Renderer(qwen3_with(name))
    user = lambda text: {"role": "user", "content": text}  # noqa: E731
    answers = ["It is  red.", "Yes: 7 × 6 = 42!", "巴黎"]
    questions = ["What colour?", "Sure?\n\n", "  And the capital? 😀"]
    messages = [user(questions[0])]
    built = renderer.prompt(messages)
    for answer, question in zip(answers, [*questions[1:], "Bye."], strict=True):
        # smolvlm puts the space behind "Assistant:" into the policy's turn, glm an empty thinking block
        lead = {"smolvlm": " ", "glm4moe": "\n<think></think>\n"}.get(name, "")
        lead = "<think>\n\n</think>\n\n" if name == "qwen3_training" else lead
        built += renderer.tokenizer(lead + answer, add_special_tokens=False)["input_ids"] + renderer.closing(None)
        built += appended(renderer, [user(question)])
        messages += [{"role": "assistant", "content": answer}, user(question)]
    assert built == renderer.rendered(messages, generation=True)


REWRITERS = {
    "first message counts the others": "n={{ messages|length }}" + CHATML,
    "last message is marked": CHATML.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}!{% endif %}"),
    "last answer is marked": CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if loop.last and m.role == 'assistant' %}!{% endif %}"
    ),
    "only the last two messages are shown": CHATML.replace("in messages", "in messages[-2:]"),
    "old answers are shortened": CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:2] }}"),
    "system prompt comes back before a tool": "{% if messages[-1].role == 'tool' %}sys{% endif %}" + CHATML,
}


@pytest.mark.parametrize("case", sorted(REWRITERS))
def test_p03_history_that_changes_is_refused_with_the_first_differing_token(case: str) -> None:
    try:
        renderer = tiny(REWRITERS[case])
    except ChatError:  # the first message is gone already while sentinels are rendered
        return
    with pytest.raises(NotAppendOnly) as caught:
        renderer.probe()
    error = caught.value
    assert error.expected.id != error.found.id
    assert error.conversation in conversations()
    assert f"index {error.index}" in str(error)
    assert repr(error.conversation) in str(error)


def test_p03_the_named_token_is_the_first_that_differs() -> None:
    with pytest.raises(NotAppendOnly) as caught:
        tiny(REWRITERS["first message counts the others"]).probe()
    assert caught.value.conversation == "plain"
    assert (caught.value.index, caught.value.expected.text, caught.value.found.text) == (2, "1", "2")


def test_append_only_template_passes() -> None:
    report = tiny(CHATML).probe()
    assert all(report.verdicts[name] is Verdict.APPEND_ONLY for name in TEXT)
    assert report.verdicts["tool_text"] is Verdict.APPEND_ONLY
    assert all(report.verdicts[name] is Verdict.UNSUPPORTED for name in TOOLS[1:])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('not for chats') }}", "not for chats"),
        ("nothing is shown", "does not show the text of a user message"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "assistant message"),
    ],
)
def test_templates_without_any_chat_are_refused_at_once(template: str, reason: str) -> None:
    with pytest.raises(ChatError, match=reason):
        tiny(template)
