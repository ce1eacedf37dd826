"""Texts that nobody means: no crash, no effect of pieces, no quadratic time."""

# ruff: noqa: E501 -- a table
from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from pace import allowed
from posttrain.chat.calls import SYNTAXES, parse

from .toolsets import TOOLS

ROOT = Path(__file__).resolve().parents[3]


def script(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fuzz = script("benchmarks/fuzz_calls.py")


def test_two_thousand_fuzzed_turns():
    assert fuzz.run(seed=0, cases=2_000).cases == 2_000


SIZE = 1_000_000
GARBAGE = [
    "<", "<call_tool ", '<call_tool name="a" ', '<call_tool name="', '<call_tool name="a">', "</call>", "<search>",
    "<tool_call>", '<tool_call>{"', '<tool_call>{"name": "a", "arguments": {"', "<think>", "<think></think>", "</think>",
    "<function=a><parameter=a>", "</parameter> ", "[TOOL_CALLS]", "[TOOL_CALLS] [{", "[TOOL_CALLS]a[ARGS]{", "{", "[[",
    "[f(", "[f(a='", "<|python_tag|>a(", "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{", "\nAction: a[", "\nAction: ",
    "\nAction: a\nAction Input: {", '"', "'", "\\", " ", "\n", "é", "\ud800", "1,", '{"name": "a", "parameters": {}} ',
]  # fmt: skip


def seconds(work) -> float:
    """Of the processor; the better of two tries, as either may have to collect the garbage of other tests."""
    start = time.process_time()
    work()
    return time.process_time() - start


@pytest.mark.parametrize("name", SYNTAXES)
def test_a_megabyte_of_garbage_is_read_in_about_a_second(name):
    slow = {}
    for unit in GARBAGE:
        text = (unit * (SIZE // len(unit)))[: SIZE // 5]
        slow[unit] = 5 * min(seconds(lambda text=text: parse(text, SYNTAXES[name], TOOLS)) for _ in range(2))
    assert max(slow.values()) < allowed(0.5), max(slow, key=slow.__getitem__)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "head", "unit"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"q": [', "[1],"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"q": "', "a\\n"),
        ("llama_pythonic", "[f(a=[", "{},"),
        ("llama_pythonic", "[f(a='''", "''a"),
        ("llama_pythonic", "[", "f(),"),
        ("mistral", "[TOOL_CALLS] [", '{"name":"a","arguments":{}},'),
        ("qwen3_coder", "<function=a><parameter=b>", "</parameter> x"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "search "),
        ("react", 'Action: a\nAction Input: {"b": [', "1,"),
        ("dr_tulu", '<call_tool name="a', "&quot;"),
        ("dr_tulu", "<call_tool", " a='1'"),
    ],
)
def test_a_megabyte_within_one_call_is_read_in_about_a_second(name, head, unit):
    """The best of two: other work on the machine slows this one, too."""
    text = head + unit * (SIZE // len(unit))
    seconds = []
    for _ in range(2):
        start = time.process_time()
        parse(text, SYNTAXES[name], TOOLS)
        seconds.append(time.process_time() - start)
        if seconds[0] < 0.5:
            break
    assert min(seconds) < allowed(1.0)


@pytest.mark.alone
@pytest.mark.parametrize("name", SYNTAXES)
def test_a_megabyte_of_result_is_made_harmless_in_about_a_second(name):
    for unit in ("<", "</tool_output", "</ " + " " * 20, "[", "\nAction: ", "<｜"):
        start = time.process_time()
        SYNTAXES[name].result("search", unit * (SIZE // len(unit)))
        assert time.process_time() - start < allowed(0.5)
