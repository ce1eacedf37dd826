"""One turn: thoughts, pieces, what is left of the text, and limits."""

from __future__ import annotations

import random
import time

import pytest

from posttrain.chat.calls import SYNTAXES, CallParser, over_budget, parse_turn
from posttrain.chat.calls.attempt import MAX_CALLS
from posttrain.trajectory import CallStatus, StopReason

from .toolsets import TOOLS, calls

SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "q"}}\n</tool_call>'
HERMES = SYNTAXES["hermes"]


def statuses(text, **options):
    return [found.status for found in calls(text, "hermes", **options)]


def test_p24_calls_in_thoughts_do_not_count():
    assert calls("<think>maybe <search>foo</search></think><answer>x</answer>", "search_r1") == []
    assert statuses(f"<think>{SEARCH}</think>{SEARCH}<think>{SEARCH}") == [CallStatus.OK]
    assert statuses(f"{SEARCH}</think>{SEARCH}", in_thought=True) == [CallStatus.OK]


def test_p24_calls_in_thoughts_count_when_asked_for():
    assert statuses(f"<think>{SEARCH}</think>{SEARCH}", thought=None) == [CallStatus.OK] * 2
    assert statuses(f"<thought>{SEARCH}</thought>", thought=("<thought>", "</thought>")) == []


def test_a_thought_that_the_prompt_opened_withdraws_what_came_before_its_end():
    parser = CallParser(HERMES, TOOLS)
    assert len(parser.feed(SEARCH)) == 1
    assert len(parser.feed(f"</think>The answer.{SEARCH}")) == 1
    parsed = parser.finish()
    assert len(parsed.attempts) == 1
    assert parsed.content == "The answer."


def test_a_thought_tag_within_an_argument_is_text():
    text = SEARCH.replace('"q"', '"</think> <think>"')
    (found,) = calls(text, "hermes")
    assert found.arguments == {"query": "</think> <think>"}


def test_calls_count_in_quotations_and_code_fences():
    assert statuses(f"You could write:\n```\n{SEARCH}\n```\n> {SEARCH}") == [CallStatus.OK] * 2


@pytest.mark.parametrize("name", SYNTAXES)
def test_what_is_neither_thought_nor_call_is_the_content(name):
    call = SYNTAXES[name].render([("search", {"query": "a"}), ("search", {"query": "b"})], TOOLS)
    parsed = parse_turn(f"<think>hm</think>\n{call}\n", SYNTAXES[name], TOOLS)
    assert parsed.content == ""
    assert len(parsed.attempts) == 2
    if not SYNTAXES[name].anchored:
        assert parse_turn(f"<think>hm</think>I look.\n{call}\n", SYNTAXES[name], TOOLS).content == "I look."


def test_positions_are_those_of_the_text():
    text = f"ab <think>x</think> {SEARCH} cd {SEARCH}"
    assert [text[found.start : found.end] for found in calls(text, "hermes")] == [SEARCH] * 2


def test_a_stop_string_within_something_else_leaves_it_open():
    parsed = parse_turn('<call_tool name="search" query="a </call_tool>', SYNTAXES["dr_tulu"], TOOLS)
    assert (parsed.in_call, parsed.in_thought) == (True, False)
    parsed = parse_turn("<think>I could <search>q</search>", SYNTAXES["search_r1"], TOOLS)
    assert (parsed.in_call, parsed.in_thought) == (False, True)
    parsed = parse_turn("<search>q</search>", SYNTAXES["search_r1"], TOOLS)
    assert (parsed.in_call, parsed.in_thought) == (False, False)


def test_a_call_is_told_as_soon_as_it_is_complete():
    parser = CallParser(HERMES, TOOLS)
    told = [len(parser.feed(character)) for character in f"{SEARCH} and"]
    assert told.index(1) == len(SEARCH) - 1
    assert sum(told) == 1


@pytest.mark.parametrize("name", SYNTAXES)
def test_pieces_of_any_size_give_what_the_whole_gives(name):
    syntax = SYNTAXES[name]
    rng = random.Random(name)
    call = syntax.render([("search", {"query": "a ] [ 'b' é"}), ("search", {"query": "</answer"})], TOOLS)
    for text in (call, f"<think>x</think>{call}\nbla</think>{call}", call[:-2] + "x" + call[3:], "x" + call + call[:9]):
        whole = parse_turn(text, syntax, TOOLS, stop_reason=StopReason.LENGTH)
        for size in (1, 2, 7, 40):
            parser = CallParser(syntax, TOOLS)
            at = 0
            while at < len(text):
                step = rng.randint(1, size)
                parser.feed(text[at : at + step])
                at += step
            assert parser.finish(StopReason.LENGTH) == whole


def test_p47_thousands_of_calls_in_a_turn_are_refused_as_one():
    found = calls(SEARCH * 14_408, "hermes")
    assert len(found) == MAX_CALLS + 1
    assert found[-1].status is CallStatus.OVER_BUDGET
    assert found[-1].end == len(SEARCH) * 14_408
    capped = over_budget(found, 2)
    assert [attempt.status for attempt in capped[:4]] == [CallStatus.OK] * 2 + [CallStatus.OVER_BUDGET] * 2
    assert "only 2 calls" in capped[2].detail


def test_a_budget_counts_only_calls_that_would_run():
    found = calls(f"<tool_call>oh</tool_call>{SEARCH}{SEARCH}", "hermes")
    assert [attempt.status for attempt in over_budget(found, 1, "spent")] == [
        CallStatus.MALFORMED,
        CallStatus.OK,
        CallStatus.OVER_BUDGET,
    ]


def test_an_attempt_is_recorded_with_what_became_of_it():
    (found,) = calls(SEARCH, "hermes")
    assert found.record().arguments == {"query": "q"}
    record = found.record(status=CallStatus.TIMEOUT, detail="too late", seconds=2.0)
    assert (record.name, record.status, record.detail, record.seconds) == ("search", CallStatus.TIMEOUT, "too late", 2)


@pytest.mark.alone
@pytest.mark.parametrize("name", SYNTAXES)
def test_a_long_turn_fed_by_the_character_takes_linear_time(name):
    """Each doubling of the text may take three times as long at most, on a machine with other work."""
    call = SYNTAXES[name].render([("search", {"query": "x" * 40_000})], TOOLS)

    def seconds(text):
        parser = CallParser(SYNTAXES[name], TOOLS)
        start = time.process_time()
        for character in text:
            parser.feed(character)
        parser.finish()
        return time.process_time() - start

    assert seconds(call) < 3 * seconds(call[: len(call) // 2]) + 0.05
