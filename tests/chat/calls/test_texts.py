"""JSON and Python inside a turn, held against the standard library's readers."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.chat.calls.json_text import MAX_DEPTH, JsonText, flaw, json_value, loads
from posttrain.chat.calls.python_text import PythonProblem, bracketed, literal, spelled
from posttrain.chat.calls.scan import Lookout, Scan

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def read(reader: Any, text: str, size: int) -> tuple[Any, str]:
    """(what the reader returns, what it has left) for a text in pieces of `size`."""
    scan = Scan()
    run = reader(scan)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    left = ""
    try:
        next(run)
        for number, piece in enumerate(pieces):
            scan.push(piece)
            left = "".join(pieces[number + 1 :])
            next(run)
        scan.ended, left = True, ""
        next(run)
    except StopIteration as stop:
        return stop.value, scan.buffer[scan.at :] + left
    raise AssertionError("the reader waits for more than there is")


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 2]), st.sampled_from([1, 3, 1000]), st.sampled_from(["", "}", " x", '"', "</a>"]))
def test_a_json_value_ends_where_it_ends(value, indent, size, behind):
    text = json.dumps(value, indent=indent)
    found, left = read(json_value, text + behind, size)
    if isinstance(value, dict | list | str) or behind[:1] in ("}", " ", ""):
        assert found == JsonText(text)
        assert left == behind


PIECES = [
    "{",
    "}",
    "[",
    "]",
    '"a"',
    ":",
    ",",
    "1",
    "-0.5e3",
    "true",
    "null",
    " ",
    '"\\u00e9"',
    '"\\x"',
    "01",
    "NaN",
    "'a'",
]


@settings(max_examples=600, deadline=None)
@given(
    st.text('{}[]:,"\\ \n01.eE-+truefalsn/u', max_size=25) | st.lists(st.sampled_from(PIECES), max_size=9).map("".join)
)
def test_what_is_json_is_what_the_standard_library_takes(text):
    """As a list's only element, so that every value has a visible end."""
    text = f"[{text}]"
    found, left = read(json_value, text, 1)
    try:
        json.loads(text, parse_constant=lambda name: json.loads("NaN!"))
        valid = True
    except ValueError:
        valid = False
    assert (not found.problem and not left) == valid
    assert found == read(json_value, text, 1000)[0]


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_depth_is_bounded(depth):
    text = "[" * depth + "]" * depth
    found, _ = read(json_value, text, 7)
    assert ("nested" in found.problem) == (depth > MAX_DEPTH)
    assert bool(flaw(json.loads(text))) == (depth > MAX_DEPTH)
    with pytest.raises(ValueError, match="nested"):
        loads("[" * 10**6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{'a': 1}", "double quotes"),
        ('{"a": 1,}', "comma too many in front of }"),
        ("[1,]", "a value is missing"),
        ('{"a" 1}', "a colon behind the key"),
        ('{"a": 1 "b": 2}', "a comma or the closing bracket"),
        ("```json", "code fence"),
        ('["a\tb"]', "'\\t' itself"),
        ('["\\q"]', "is no escape"),
        ("[1}", "a comma or the closing bracket"),
        ("{1: 2}", "a key in double quotes"),
        ("[" + "9" * 500 + "]", "too long"),
    ],
)
def test_what_is_wrong_is_said_in_words(text, says):
    for size in (1, 100):
        assert says in read(json_value, text, size)[0].problem


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, [float("inf")], {"a": [{"b": "x\ud83d"}]}])
def test_flaws_are_found_wherever_they_are(value):
    assert flaw(value)


PYTHON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@settings(deadline=None)
@given(PYTHON)
def test_literals_are_read_as_python_reads_them(value):
    assert literal(repr(value)) == value
    assert literal(spelled(value)) == value
    assert "\0" in spelled(value) or ast.literal_eval(spelled(value)) == value


@settings(max_examples=400, deadline=None)
@given(st.text("ab'\"\\n\nx0u{}[](),:", max_size=14))
def test_strings_are_read_as_python_reads_them(inner):
    for quote in ("'", '"', "'''", '"""'):
        text = quote + inner + quote
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, str) and "\\N" not in inner and len(ast.dump(ast.parse(text))) and " " not in text:
            try:
                found = literal(text)
            except PythonProblem:
                continue  # "a" "b" next to each other, and prefixes, are not taken
            assert found == value


def test_tuples_are_lists_and_json_constants_are_taken():
    assert literal("(1, 2, [true, null], ('a'), (1,))") == [1, 2, [True, None], "a", [1]]
    assert literal(r"'\x41\u00e9\U0001F642\101\n\q'") == "Aé🙂A\n\\q"


@pytest.mark.parametrize(
    "text", ["f()", "1 + 1", "a", "{1: 2}", "[1", "'a", "{**{}}", "b'x'", "0x10", "1_000", "[1 2]", ""]
)
def test_what_is_no_literal_is_refused(text):
    with pytest.raises(PythonProblem):
        literal(text)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("[f(a='])', b=\"]\")] rest", " rest"),
        ("[f('''a'b\n]'''), g('')]", ""),
        ('[f("\\"]")]x', "x"),
        ("[f('a\\\n]')]", ""),
        ('[f("""a\n\nb""")]', ""),
    ],
)
def test_brackets_in_strings_do_not_count(text, left, size):
    found, behind = read(bracketed, text, size)
    assert (found.problem, behind) == ("", left)
    assert found.text == text.removesuffix(left)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_the_first_literal_is_found_and_of_two_that_begin_together_the_longer(size):
    lookout = Lookout(["<a", "<a>b", "<A"], any_case=True)
    assert read(lambda scan: scan.text_until(lookout), "x<a>c", size)[0] == ("x", "<a")
    assert read(lambda scan: scan.text_until(lookout), "x<A>B", size)[0] == ("x", "<A>B")
    assert read(lambda scan: scan.text_until(lookout), "x<a>", size)[0] == ("x", "<a")
    assert read(lambda scan: scan.text_until(lookout), "x<", size)[0] == ("x<", "")
