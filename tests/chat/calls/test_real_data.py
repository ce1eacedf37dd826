"""Real calls, real schemas, real prose: every well-formed call is read, none is invented.

Counts are held against the data's own fields, or against regular expressions written here.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from posttrain.chat.calls import SYNTAXES, NotExpressible, PlainTags, Signatures, parse
from posttrain.chat.calls.signature import Signature
from posttrain.trajectory import CallStatus

from .toolsets import Spec

OK = CallStatus.OK
GENERAL = [name for name in SYNTAXES if name != "search_r1"]  # search_r1 knows one tool of one text


def rows(path: Path) -> Iterator[dict[str, Any]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    if ".json." in path.name or path.suffix == ".json":
        yield from json.loads(text)
    else:
        yield from (json.loads(line) for line in text.split("\n") if line)


def specs(functions: list[dict[str, Any]]) -> list[Spec]:
    return [Spec(function["name"], function.get("description", ""), function["parameters"]) for function in functions]


# BFCL: a gold answer gives for every parameter the list of right values; '' among them: it may be left out.


def first_choice(options: Any) -> Any:
    """The first right value; within objects every key again has a list of right values."""
    value = next((option for option in options if option != ""), "")
    return within(value)


def within(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: first_choice(options) for key, options in value.items() if isinstance(options, list)}
    return [within(item) for item in value] if isinstance(value, list) else value


def gold_calls(answer: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    calls = [next(iter(call.items())) for call in answer["ground_truth"]]
    return [
        (name, {key: first_choice(options) for key, options in arguments.items() if options != [""]})
        for name, arguments in calls
    ]


@pytest.fixture(scope="module")
def bfcl(shared_data: Path) -> list[tuple[Signatures, list[tuple[str, dict[str, Any]]]]]:
    """(tools, gold calls) of 800 single-turn tasks."""
    found = []
    for kind in ("simple_python", "multiple", "parallel"):
        answers = {row["id"]: row for row in rows(shared_data / "bfcl" / f"possible_answer_{kind}.jsonl")}
        for row in rows(shared_data / "bfcl" / f"BFCL_v4_{kind}.jsonl.gz"):
            found.append((Signatures(specs(row["function"])), gold_calls(answers[row["id"]])))
    assert len(found) == 800
    return found


WRONG_IN_THE_DATA = {
    ("game_result.get_winner", "venue"),
    ("math.power", "mod"),
}  # a truth value for a text, null for a number


def fits(name: str, arguments: dict[str, Any]) -> bool:
    """Whether the data's own answer follows the data's own schema."""
    return not any(
        (name, key) in WRONG_IN_THE_DATA and (value is None or value is True) for key, value in arguments.items()
    )


def test_gold_arguments_fit_their_schemas(bfcl):
    calls = [(tools.get(name), name, arguments) for tools, found in bfcl for name, arguments in found]
    assert len(calls) == 1140
    assert [bool(signature.complaints(arguments)) for signature, _, arguments in calls] == [
        not fits(name, arguments) for _, name, arguments in calls
    ]
    assert sum(fits(name, arguments) for _, name, arguments in calls) == 1137


def mutations(signature: Signature, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Wrong arguments made from right ones: one left out, one too many, one of another type, one outside its enum."""
    for key in signature.required:
        yield {name: value for name, value in arguments.items() if name != key}
    yield {**arguments, "no_such_parameter": 1}
    for key in arguments:
        types = signature.types(key)
        wrong = {"string": 5, "object": "a", "array": {}, "boolean": "true", "integer": "5", "number": [1]}
        yield from ({**arguments, key: value} for kind, value in wrong.items() if types == {kind})
        if "enum" in signature.properties[key]:
            yield {**arguments, key: "none of these"}


def test_mutated_arguments_are_refused(bfcl):
    """Of every fourth task; of all tasks there are 6,874 mutations."""
    count = 0
    for tools, calls in bfcl[::4]:
        for name, arguments in calls:
            signature = tools.get(name)
            for mutated in mutations(signature, arguments):
                count += 1
                text = SYNTAXES["hermes"].render([(name, mutated)], tools)
                assert [found.status for found in parse(text, SYNTAXES["hermes"], tools)] == [CallStatus.BAD_ARGUMENTS]
    assert count > 1_500


@pytest.mark.parametrize("name", GENERAL)
def test_gold_answers_survive_every_syntax(bfcl, name):
    """Rendered and read again: names, values, and their number, for all 800 tasks."""
    count = 0
    for tools, calls in bfcl:
        calls = [(tool, arguments) for tool, arguments in calls if fits(tool, arguments)]
        if calls:
            found = parse(SYNTAXES[name].render(calls, tools), SYNTAXES[name], tools)
            assert [(call.name, call.status) for call in found] == [(tool, OK) for tool, _ in calls]
            assert [call.arguments for call in found] == [arguments for _, arguments in calls]
            count += len(found)
    assert count == 1137


def test_search_r1_says_which_gold_answers_it_cannot_express(bfcl):
    expressed = 0
    for tools, calls in bfcl:
        syntax = PlainTags("one", {f"t{number}": tool.name for number, tool in enumerate(tools)})
        for call in calls:
            try:
                text = syntax.render([call], tools)
            except NotExpressible:
                assert set(call[1]) != {tools.main(call[0])}
                continue
            expressed += 1
            assert [found.arguments for found in parse(text, syntax, tools)] == [call[1]]
    assert expressed == 31


@pytest.mark.parametrize("name", GENERAL)
def test_examples_of_all_tools_are_valid(bfcl, name):
    for tools, _ in bfcl[::10]:
        for tool in tools:
            (found,) = parse(SYNTAXES[name].example(tool, tools), SYNTAXES[name], tools)
            assert (found.status, found.detail) == (OK, "")


API_FILES = {
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot", "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}  # fmt: skip


def test_multi_turn_answers_written_in_python_are_read_as_python_reads_them(shared_data):
    folder = shared_data / "bfcl"
    answers = {row["id"]: row["ground_truth"] for row in rows(folder / "possible_answer_multi_turn_base.jsonl")}
    count, wrong = 0, []
    for row in rows(folder / "BFCL_v4_multi_turn_base.jsonl.gz"):
        files = [folder / f"func_doc_{API_FILES[api]}.jsonl" for api in row["involved_classes"]]
        tools = Signatures(specs([function for file in files for function in rows(file)]))
        for turn in answers[row["id"]]:
            found = parse(f"[{', '.join(turn)}]", SYNTAXES["llama_pythonic"], tools) if turn else []
            assert [call.name for call in found] == [text.partition("(")[0] for text in turn]
            for call, text in zip(found, turn, strict=True):
                node = ast.parse(text, mode="eval").body
                assert isinstance(node, ast.Call)
                named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                assert call.arguments is not None
                assert {key: call.arguments[key] for key in named} == named
                assert list(call.arguments.values())[len(named) :] == [ast.literal_eval(value) for value in node.args]
                count += 1
                if call.status is not OK:
                    wrong.append((call.name, call.detail))
    assert count == 1142
    assert wrong == [("close_ticket", "argument 'ticket_id' must be integer, got 'ticket_001'")], "as it is in the data"


# Rollouts of a search agent: OpenAI messages; arguments are JSON texts, two of them broken.


@pytest.fixture(scope="module")
def rollouts(shared_data: Path) -> list[dict[str, Any]]:
    return list(rows(shared_data / "agent_trajectories" / "searchr1_hotpotqa_200.jsonl.gz"))


def test_calls_of_real_rollouts(rollouts):
    """Read without a schema: all but the two broken ones. With it: also a few that no such function would take."""
    statuses: list[CallStatus] = []
    reference = 0
    for row in rollouts:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
        tools = Signatures(specs([tool["function"] for tool in row["tools"]]))
        for message in row["messages"]:
            raw = [call["function"] for call in message.get("tool_calls") or ()]
            text = "\n".join(
                f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}\n</tool_call>'
                for call in raw
            )
            found = parse(text, SYNTAXES["hermes"], tools)
            assert len(found) == len(raw)
            for call, function, unchecked in zip(found, raw, parse(text, SYNTAXES["hermes"]), strict=True):
                statuses.append(call.status)
                try:
                    arguments = json.loads(function["arguments"])
                except ValueError:
                    assert call.status is unchecked.status is CallStatus.MALFORMED
                    continue
                reference += 1
                assert (unchecked.status, unchecked.arguments) == (OK, arguments)
                schema = schemas.get(function["name"])
                if schema is None:
                    assert call.status is CallStatus.UNKNOWN_TOOL
                    continue
                named = set(schema["required"]) <= set(arguments) <= set(schema["properties"])
                queries = arguments.get("query_list")
                fits = named and isinstance(queries, list) and all(isinstance(query, str) for query in queries)
                assert (call.status is OK) == fits, call
    assert len(statuses) == 363
    assert reference == 361
    assert Counter(statuses) == {
        OK: 346,
        CallStatus.BAD_ARGUMENTS: 14,
        CallStatus.UNKNOWN_TOOL: 1,
        CallStatus.MALFORMED: 2,
    }


def test_tags_in_the_text_of_real_rollouts(rollouts):
    """Some of these policies wrote `<tool_call> query </tool_call>`, as their prompt says."""
    texts = [m["content"] or "" for row in rollouts for m in row["messages"] if m["role"] == "assistant"]
    syntax = PlainTags("as_prompted", {"tool_call": "search"})
    found = [call for text in texts for call in parse(text, syntax)]
    expected = [
        body.strip()
        for text in texts
        for body in re.findall(r"<tool_call>((?:(?!</?tool_call>).)*)</tool_call>", text, re.DOTALL)
    ]
    assert len(expected) == 33
    assert [(call.status, call.arguments) for call in found] == [(OK, {"query": body}) for body in expected]


# Conversations with function calls (glaive), and prose.


@pytest.fixture(scope="module")
def conversations(shared_data: Path) -> list[dict[str, Any]]:
    return list(rows(shared_data / "preference_sft" / "toolcall_sft_250.json.gz"))


@pytest.mark.parametrize("name", GENERAL)
def test_calls_of_conversations_survive_every_syntax(conversations, name):
    count = 0
    for row in conversations:
        tools = Signatures(specs(json.loads(row["tools"])))
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                call = json.loads(turn["value"])
                text = SYNTAXES[name].render([(call["name"], call["arguments"])], tools)
                (found,) = parse(text, SYNTAXES[name], tools)
                assert (found.status, found.name, found.arguments) == (OK, call["name"], call["arguments"])
                count += 1
    assert count == 170


@pytest.mark.parametrize("name", SYNTAXES)
def test_no_call_is_invented_in_prose(shared_data, conversations, name):
    texts = [turn["value"] for row in conversations for turn in row["conversations"] if turn["from"] != "function_call"]
    folder = shared_data / "preference_sft"
    texts += [m["content"] for row in rows(folder / "tinker_conversations.jsonl") for m in row["messages"]]
    texts += [m["content"] for row in rows(folder / "kto_250.json.gz") for m in row["messages"]]
    for row in rows(folder / "dpo_250.json.gz"):
        texts += [row["chosen"]["value"], row["rejected"]["value"], *(turn["value"] for turn in row["conversations"])]
    reports = rows(shared_data / "deep_research" / "drb_reports_claude37_40.jsonl.gz")
    texts += [value for row in reports for value in row.values() if isinstance(value, str)]
    texts += [page["contents"] for page in rows(shared_data / "agent_trajectories" / "wiki18_passages.jsonl.gz")]
    found = [(text[call.start : call.end][:100], call) for text in texts for call in parse(text, SYNTAXES[name])]
    assert len(texts) == 4762
    assert found == []


def test_actions_of_react_transcripts(shared_data):
    with gzip.open(
        shared_data / "react_trajectories" / "hotpotqa_react_base_5trials.txt.gz", "rt", encoding="utf-8"
    ) as file:
        text = file.read()
    turns = re.split(r"^Observation \d+:.*$", text, flags=re.MULTILINE)
    found = [call for turn in turns for call in parse(turn, SYNTAXES["react"])]
    lines = re.findall(r"^Action \d+: *(.*)$", text, re.MULTILINE)
    whole = [match for line in lines if (match := re.fullmatch(r"(\w+)\[(.*)\]\s*", line))]
    assert len(found) == len(lines) == len(whole) == 1867
    assert [call.name.lower() for call in found] == [match[1].lower() for match in whole]
    assert [list((call.arguments or {}).values()) for call in found] == [[match[2]] for match in whole]


# What real chat templates write is what the parsers read.

TEMPLATES = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "llama3_1": "llama3_json",
    "llama3_2": "llama3_json", "deepseekv3": "deepseek_v3",
}  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_that_chat_templates_write(shared_data, conversations, template):
    source = (shared_data / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    syntax = SYNTAXES[TEMPLATES[template]]
    count = 0
    for row in conversations:
        for turn in row["conversations"]:
            if turn["from"] != "function_call":
                continue
            call = json.loads(turn["value"])
            given = json.dumps(call["arguments"]) if template.startswith("deepseek") else call["arguments"]
            calls = [{"type": "function", "function": {"name": call["name"], "arguments": given}}]
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
            rendered = [
                render_jinja_template([part], chat_template=source, bos_token="", eos_token="")[0][0]
                for part in (messages[:1], messages)
            ]
            found = parse(
                rendered[1].removeprefix(rendered[0]).removeprefix("<|start_header_id|>assistant<|end_header_id|>\n\n"),
                syntax,
            )
            assert [(c.name, c.status, c.arguments) for c in found] == [(call["name"], OK, call["arguments"])]
            count += 1
    assert count == 170


def test_calls_of_rendered_qwen3_conversations(shared_data):
    count, malformed = 0, 0
    for row in rows(shared_data / "chat_templates" / "golden_qwen3.jsonl.gz"):
        text = next(value for value in row.values() if isinstance(value, str) and "<|im_start|>" in value)
        turns = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL)
        found = [call for turn in turns for call in parse(turn, SYNTAXES["hermes"])]
        expected = [c["function"] for m in row["messages"] for c in m.get("tool_calls") or ()]
        good = [(c.name, c.arguments) for c in found if c.status is OK]
        assert good == [(c["name"], c["arguments"]) for c in expected]
        count += len(good)
        assert len(found) == sum(turn.count("<tool_call>") for turn in turns)
        malformed += len(found) - len(good)
    assert (count, malformed) == (46, 2), "two texts hold <tool_call> around plain words"
