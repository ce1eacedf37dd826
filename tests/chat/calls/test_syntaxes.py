"""Each syntax by texts written by hand: what is a call, what is none, and what a wrong one is called."""

# ruff: noqa: E501 -- a case is one line
from __future__ import annotations

import pytest

from posttrain.chat.calls import SYNTAXES, PlainTags, parse, stop_ids
from posttrain.trajectory import CallStatus, StopReason

from .toolsets import TOOLS, Signatures, calls, one, spec

OK, MALFORMED, EMPTY = CallStatus.OK, CallStatus.MALFORMED, CallStatus.EMPTY
TRUNCATED, BAD, UNKNOWN = CallStatus.TRUNCATED, CallStatus.BAD_ARGUMENTS, CallStatus.UNKNOWN_TOOL

GOOD = [
    ("dr_tulu", '<call_tool name="search">tower height</call_tool>', "search", {"query": "tower height"}),
    ("dr_tulu", '<call_tool name="snippet_search" limit="5" year="2020-">q</call>', "snippet_search",
     {"query": "q", "limit": 5, "year": "2020-"}),
    ("dr_tulu", "<call_tool year = '2020' name='snippet_search'> a > b </call_tool>", "snippet_search",
     {"query": "a > b", "year": "2020"}),
    ("dr_tulu", '<call_tool name="browse_webpage" query="x">https://a.b/?c=1&amp;d</call_tool>', "browse_webpage",
     {"url": "https://a.b/?c=1&amp;d", "query": "x"}),
    ("dr_tulu", '<call_tool name="now"></call_tool>', "now", {}),
    ("dr_tulu_unified", '<tool name="search">q</tool>', "search", {"query": "q"}),
    ("search_r1", "I wonder. <search> who wrote it? </search>", "search", {"query": "who wrote it?"}),
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "q"}}\n</tool_call>', "search", {"query": "q"}),
    ("hermes", 'Well:<tool_call>{"arguments": {"query": "\\u00e9\\n"}, "name": "search"}</tool_call>', "search",
     {"query": "é\n"}),
    ("qwen3_coder", "<tool_call>\n<function=snippet_search>\n<parameter=query>\na\nb\n</parameter>\n"
     "<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>", "snippet_search", {"query": "a\nb", "limit": 5}),
    ("qwen3_coder", "<function=search><parameter=query>q</parameter></function>", "search", {"query": "q"}),
    ("llama3_json", '{"name": "search", "parameters": {"query": "q"}}', "search", {"query": "q"}),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "search", "parameters": {"query": "q"}}<|eom_id|>',
     "search", {"query": "q"}),
    ("llama3_json", '<|python_tag|>search.call(query="q")', "search", {"query": "q"}),
    ("llama_pythonic", "[search(query='it\\'s')]", "search", {"query": "it's"}),
    ("llama_pythonic", '<|python_start|>[search("q")]<|python_end|>', "search", {"query": "q"}),
    ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "q"}, "id": "abc123def"}]', "search",
     {"query": "q"}),
    ("mistral", '[{"name": "search", "arguments": {"query": "q"}}]', "search", {"query": "q"}),
    ("mistral_v11", '[TOOL_CALLS]search[ARGS]{"query": "q"}', "search", {"query": "q"}),
    ("mistral_v11", '[TOOL_CALLS]search[CALL_ID]abc[ARGS]{"query": "q"}</s>', "search", {"query": "q"}),
    ("mistral_v11", '[TOOL_CALLS]search{"query": "q"}', "search", {"query": "q"}),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
     '{"query": "q"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "search", {"query": "q"}),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "q"}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "search", {"query": "q"}),
    ("react", "Thought: hm\nAction: search[Foo [bar]]\n", "search", {"query": "Foo [bar]"}),
    ("react", " I look.\nAction 3: Search[q]\nObservation", "search", {"query": "q"}),
    ("react", 'Action: snippet_search\nAction Input: {"query": "q",\n "limit": 2}\nObservation', "snippet_search",
     {"query": "q", "limit": 2}),
    ("react", "Action: search\nAction Input: tower\nheight\nObservation", "search", {"query": "tower\nheight"}),
    ("react", "Action: Finish[Rome]", "finish", {"answer": "Rome"}),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text", "name", "arguments"), GOOD)
def test_a_call_is_read(syntax, text, name, arguments):
    found = one(text, syntax)
    assert (found.status, found.name, found.arguments, found.detail) == (OK, name, arguments, "")


TEXTS = [
    ("dr_tulu", "<call_tools> and <call_tool_x> and </tool_call> <tool name='search'>q</tool>"),
    ("dr_tulu_unified", '<tools><tool_call name="search">q</tool_call></tools>'),
    ("search_r1", "<answer> Beijing </answer> <searching> search"),
    ("hermes", "I could write tool_call or <tool_response> here."),
    ("llama3_json", 'Here is some JSON: {"name": "search", "parameters": {"query": "q"}}'),
    ("llama3_json", '{"answer": {"name": "search", "parameters": {}}}'),
    ("llama_pythonic", "[1] says so, and f(x)"),
    ("llama_pythonic", "See [search(query='q')]"),
    ("mistral", "[1, 2] [TOOL] TOOL_CALLS"),
    ("mistral", '[{"answer": 1}]'),
    ("react", "My next Action: search[q]\nActions: search[q]\nI think about Action"),
]


@pytest.mark.parametrize(("syntax", "text"), TEXTS)
def test_a_text_without_a_call_has_none(syntax, text):
    assert calls(text, syntax) == []


WRONG = [
    ("dr_tulu", '<call_tool name="search></call_tool>', MALFORMED, "not closed"),
    ("dr_tulu", '<call_tool name="search>q</call_tool>\n', MALFORMED, 'not closed by "'),
    ("dr_tulu", "<call_tool name=search>q</call_tool>", MALFORMED, "in quotes"),
    ("dr_tulu", "<call_tool>q</call_tool>", MALFORMED, 'name="..."'),
    ("dr_tulu", '<CALL_TOOL name="search">q</CALL_TOOL>', MALFORMED, "lower case"),
    ("dr_tulu", '<call_tool name="search"/>', MALFORMED, "needs a text"),
    ("dr_tulu", '<call_tool name="snippet_search" limit="1" limit="2">q</call_tool>', MALFORMED, "twice"),
    ("dr_tulu", "</call_tool>", MALFORMED, "closes no call"),
    ("dr_tulu", '<call_tool name="search"> </call_tool>', EMPTY, "query"),
    ("dr_tulu", '<call_tool name="snippet_search" limit="five">q</call_tool>', BAD, "'limit' must be integer, got 'five'"),
    ("dr_tulu", '<call_tool name="snippet_search" query="a">b</call_tool>', BAD, "twice"),
    ("dr_tulu", '<call_tool name="now">then</call_tool>', BAD, "takes no text"),
    ("dr_tulu", '<call_tool name="lookup">q</call_tool>', UNKNOWN, "there are 'search', 'snippet_search'"),
    ("search_r1", "<search>q", MALFORMED, "not closed"),
    ("search_r1", "</search>", MALFORMED, "closes no call"),
    ("hermes", "<tool_call></tool_call>", EMPTY, "empty"),
    ("hermes", "<tool_call>search q</tool_call>", MALFORMED, "expected a value, got 'search q"),
    ("hermes", '<tool_call>{"name": "search"</tool_call>', MALFORMED, "comma or the closing bracket"),
    ("hermes", "<tool_call>{'name': 'search'}</tool_call>", MALFORMED, "double quotes"),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "q"}} or so</tool_call>', MALFORMED, "</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', MALFORMED, '"name"'),
    ("hermes", '<tool_call>{"name": "search", "arguments": "q"}</tool_call>', MALFORMED, "no JSON object"),
    ("hermes", '<tool_call>{"name": "search", "name": "now", "arguments": {}}</tool_call>', MALFORMED, "'name' stands twice"),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', MALFORMED, "NaN"),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>', BAD, "surrogate"),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a\nb"}}</tool_call>', MALFORMED, "\\n"),
    ("hermes", '<tool_call>{"name": "search", "arguments": {}}</tool_call>', BAD, "lacks 'query'"),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "q", "k": 1}}</tool_call>', BAD, "no parameter 'k'"),
    ("hermes", '<tool_call>{"name": "snippet_search", "arguments": {"query": "q", "limit": "5"}}</tool_call>', BAD, "integer"),
    ("hermes", '<tool_call>{"name": "snippet_search", "arguments": {"query": "q", "limit": 0}}</tool_call>', BAD, "minimum"),
    ("qwen3_coder", "<tool_call></tool_call>", EMPTY, "empty"),
    ("qwen3_coder", '<tool_call>{"name": "search"}</tool_call>', MALFORMED, "<function="),
    ("qwen3_coder", "<tool_call><function=search><parameter=query>q</function></tool_call>", MALFORMED, "</parameter>"),
    ("qwen3_coder", "<function=search><parameter=query>a</parameter><parameter=query>b</parameter></function>",
     MALFORMED, "twice"),
    ("qwen3_coder", "<function=snippet_search><parameter=query>a</parameter><parameter=limit>x</parameter></function>",
     BAD, "integer"),
    ("llama3_json", '{"name": "search"}', MALFORMED, '"parameters" is missing'),
    ("llama3_json", "<|python_tag|>print(1 + x)", MALFORMED, "expected"),
    ("llama_pythonic", "[search(query=q)]", MALFORMED, "expected a literal"),
    ("llama_pythonic", "[search(query='a', query='b')]", MALFORMED, "twice"),
    ("llama_pythonic", "[search(query=__import__('os'))]", MALFORMED, "expected a literal"),
    ("llama_pythonic", "[search('a', 'b')]", BAD, "takes 1 arguments"),
    ("mistral", "[TOOL_CALLS] []", MALFORMED, "empty"),
    ("mistral_v11", "[TOOL_CALLS]search\nq", MALFORMED, "[ARGS]"),
    ("mistral_v11", "[TOOL_CALLS]search[ARGS][1]", MALFORMED, "must be an object"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", EMPTY, "no call"),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{'query': 1}\n```<｜tool▁call▁end｜>",
     MALFORMED, "double quotes"),
    ("react", "Action: search", MALFORMED, "Action Input"),
    ("react", "Action: search q\nThought: hm", MALFORMED, "Action Input"),
    ("react", "Action: search[q\nThought: hm", MALFORMED, "one line"),
    ("react", "Action: lookup[q]", UNKNOWN, "there is no tool 'lookup'"),
]  # fmt: skip


@pytest.mark.parametrize(("syntax", "text", "status", "says"), WRONG)
def test_a_wrong_call_is_typed_and_says_why(syntax, text, status, says):
    found = one(text, syntax)
    assert found.status is status
    assert says in found.detail


@pytest.mark.parametrize("name", SYNTAXES)
def test_p23_two_calls_in_one_turn_are_both_found_in_order(name):
    syntax = SYNTAXES[name]
    text = syntax.render([("search", {"query": "a"}), ("search", {"query": "b"})], TOOLS)
    assert [found.arguments for found in calls(text, name)] == [{"query": "a"}, {"query": "b"}]


@pytest.mark.parametrize("name", ["dr_tulu", "dr_tulu_unified", "search_r1"])
def test_p23_where_calls_are_run_one_by_one_a_turn_ends_at_the_first_closing_tag(name):
    syntax = SYNTAXES[name]
    text = syntax.render([("search", {"query": "a"})], TOOLS)
    assert text.endswith(syntax.stop_strings[0])


def test_p26_an_empty_query_is_no_call():
    assert one("<search> \n</search>", "search_r1").status is EMPTY


@pytest.mark.parametrize(
    "text", ["<SEARCH>q</SEARCH>", "<search>q</answer>", "<search>a<search>", "<Search>q</search>"]
)
def test_p27_mismatched_or_wrongly_written_tags_are_malformed(text):
    assert {found.status for found in calls(text, "search_r1")} == {MALFORMED}


def test_p39_a_closing_tag_within_a_value_closes_nothing():
    for name in ("hermes", "qwen3_coder"):
        text = SYNTAXES[name].render([("search", {"query": 'a </tool_call> "b" <tool_call>'})], TOOLS)
        assert one(text, name).arguments == {"query": 'a </tool_call> "b" <tool_call>'}
    text = '<call_tool name="browse_webpage" query="a </call_tool> b">u</call_tool>'
    assert one(text, "dr_tulu").arguments == {"url": "u", "query": "a </call_tool> b"}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "search", "arguments": {"query": "q"},}',
        '{"name": "search", "arguments": {"query": "q",}}',
        '{"name": "search"}',
        '[{"name": "search", "arguments": {"query": "q"}}]',
        '```json\n{"name": "search", "arguments": {"query": "q"}}\n```',
    ],
)
def test_p41_json_that_is_no_call_is_one_malformed_attempt_with_the_reason(body):
    found = one(f"<tool_call>\n{body}\n</tool_call>", "hermes")
    assert found.status is MALFORMED
    assert found.detail
    good = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
    both = calls(f"<tool_call>\n{body}\n</tool_call>\n{good}", "hermes")
    assert [attempt.status for attempt in both] == [MALFORMED, OK], "the next call is not lost"


def test_p42_arguments_as_a_json_string_are_decoded_once_more():
    text = '<tool_call>{"name": "snippet_search", "arguments": "{\\"query\\": \\"q\\", \\"limit\\": 3}"}</tool_call>'
    assert one(text, "hermes").arguments == {"query": "q", "limit": 3}
    assert one(text.replace("3}", '\\"x\\"}'), "hermes").status is BAD


@pytest.mark.parametrize("name", SYNTAXES)
def test_p44_a_tool_that_does_not_exist_is_answered_with_those_that_do(name):
    here = Signatures([spec("search", "query", query={"type": "string"})])
    only = Signatures([spec("browse", "url", url={"type": "string"})])
    found = one(SYNTAXES[name].render([("search", {"query": "q"})], here), name, only)
    assert found.status is UNKNOWN
    assert "'browse'" in str(SYNTAXES[name].correction(found, only))


@pytest.mark.parametrize("name", SYNTAXES)
def test_p45_a_call_that_the_length_limit_cut_is_truncated(name):
    text = SYNTAXES[name].render([("snippet_search", {"query": "tower height", "limit": 2})], TOOLS) if (
        name != "search_r1"
    ) else "<search>tower height</search>"  # fmt: skip
    whole = {"llama3_json": 1, "llama_pythonic": 1, "mistral": 2, "mistral_v11": 1, "react": 1}.get(name, 2)
    for end in range(len(text) // 2, len(text) - whole + 1):
        found = calls(text[:end], name, stop_reason=StopReason.LENGTH)
        assert not [attempt for attempt in found if attempt.status is OK] or text[end:] in (
            "<｜tool▁calls▁end｜>"[-len(text[end:]) :], "]"
        ), text[:end]  # fmt: skip
        assert found[-1].status in (TRUNCATED, OK)
    assert one(text, name, stop=StopReason.LENGTH).status is OK


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.ABORT, StopReason.CONTEXT_FULL, StopReason.DEADLINE])
def test_p45_a_call_that_only_seems_whole_is_truncated(stop):
    assert one("Action: search\nAction Input: half of a que", "react", stop=stop).status is TRUNCATED
    assert one("Action: search[a [b]", "react", stop=stop).status is TRUNCATED
    assert one("Action: search\nAction Input: all of a query", "react", stop=StopReason.STOP_ID).status is OK


def test_p48_single_quotes_and_marks_within_attributes():
    assert one("<tool name='search'>a</tool>", "dr_tulu_unified").arguments == {"query": "a"}
    found = one('<tool name="browse_webpage" query="a > b">c</tool>', "dr_tulu_unified")
    assert found.arguments == {"url": "c", "query": "a > b"}


def test_attributes_know_entities_and_texts_do_not():
    text = '<call_tool name="browse_webpage" query="&lt;&quot;&amp;quot;&#10;&eacute;">&lt;</call_tool>'
    assert one(text, "dr_tulu").arguments == {"url": "&lt;", "query": '<"&quot;\n&eacute;'}


def test_a_second_attribute_called_name_is_an_argument():
    people = Signatures([spec("find", "name", name={"type": "string"}, age={"type": "integer"})])
    assert one('<call_tool name="find" name="Ann" age="3"></call_tool>', "dr_tulu", people).arguments == {
        "name": "Ann",
        "age": 3,
    }


def test_tags_of_ones_own():
    legacy = PlainTags("legacy", {"find": "search", "code": "python"}, answer=None, result_tag="result")
    tools = Signatures(
        [spec("search", "query", query={"type": "string"}), spec("python", "code", code={"type": "string"})]
    )
    found = parse("<find>q</find><code>\nprint(1)\n</code>", legacy, tools)
    assert [(attempt.name, attempt.arguments) for attempt in found] == [
        ("search", {"query": "q"}),
        ("python", {"code": "print(1)"}),
    ]
    assert legacy.stop_strings == ("</find>", "</code>")


def test_values_without_a_name_go_to_parameters_in_order():
    assert one("[snippet_search('q', 3, year='2020')]", "llama_pythonic").arguments == {
        "query": "q",
        "limit": 3,
        "year": "2020",
    }
    assert one("[search('q')]", "llama_pythonic", None).status is MALFORMED


def test_without_signatures_texts_stay_texts_and_nothing_is_unknown():
    found = one('<call_tool name="x" limit="5">q</call_tool>', "dr_tulu", None)
    assert (found.status, found.arguments) == (OK, {"limit": "5", "query": "q"})
    assert one("<search></search>", "search_r1", None).status is EMPTY


def test_stop_tokens_become_the_ids_that_a_vocabulary_has():
    assert stop_ids(SYNTAXES["llama3_json"], {"<|eot_id|>": 9, "a": 1}) == {9}
    assert stop_ids(SYNTAXES["dr_tulu"], {"a": 1}.get) == frozenset()
