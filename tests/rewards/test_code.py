"""Programs judged by tests, in the sandbox."""

from __future__ import annotations

import asyncio
import json

import pytest

from posttrain.rewards import RewardError, score
from posttrain.rewards.code import checks_of, program_of
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.scoring import check_tasks
from posttrain.task import Invalid, Score
from sandbox.ways import WAYS

from .episodes import episode, task
from .servers import Reply, stub

if not WAYS:
    pytest.skip("nothing on this machine can confine a program", allow_module_level=True)

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ("assert add(1, 2) == 3", "assert add(0, 0) == 0")


def judged(text, golds=TESTS, **options):
    reward = load_reward(RewardConfig(name="code", options=options))
    try:
        return asyncio.run(score(reward, episode(text), task(*golds)))
    finally:
        reward.close()


def test_all_tests_pass():
    outcome = judged(f"Here:\n{ADD}\nDone.")
    assert (outcome.value, outcome.components["tests_passed"]) == (1.0, 1.0)


def test_some_pass():
    half = "```python\ndef add(a, b):\n    return 0\n```"
    assert judged(half).value == 0
    assert judged(half).components["tests_passed"] == 0.5
    assert judged(half, all_or_nothing=False).value == 0.5


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def add(a, b): return 1/0",
        "def add(",
        "while True: pass",
    ],
)
def test_ending_early_failing_and_hanging_are_no_success(program):
    assert judged(f"```python\n{program}\n```", seconds_per_test=1.0, max_tests=1).value == 0


def test_inputs_and_outputs():
    program = "```python\nprint(int(input()) * 2)\n```"
    tests = json.dumps({"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]})
    assert judged(program, (tests,)).value == 1
    assert judged("```\nprint(4)\n```", (tests,), all_or_nothing=False).value == 0.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [("no program", "no_answer"), ("```python\nx = 1", "malformed_answer"), ("```python\n\n```", "empty_answer"),
     ("<think>```python\nx = 1\n```</think> no", "no_answer")],
)  # fmt: skip
def test_texts_without_a_program(text, problem):
    assert judged(text).components[problem] == 1


def test_the_last_python_block_counts():
    text = "```python\nold\n```\n```python\nnew\n```\n```bash\nls\n```"
    assert program_of(episode(text)).text == "new\n"
    assert program_of(episode("```\nbare\n```")).text == "bare\n"


@pytest.mark.parametrize(
    ("gold", "count"),
    [
        ("assert f() == 1", 1),
        ("assert f() == 1\nassert f() == 2", 2),
        ('["assert a", "assert b"]', 2),
        ('[{"input": "1", "output": "2"}]', 1),
        ('{"inputs": [["1", "2"]], "outputs": [3]}', 1),
        ('{"test_list": ["assert a", "assert b"]}', 2),
    ],
)
def test_shapes_of_tests(gold, count):
    assert len(checks_of(task(gold))) == count


@pytest.mark.parametrize("gold", ["", "[]", '{"inputs": [1], "outputs": []}', '{"x": 1}', "[3]"])
def test_p80_rows_without_tests_are_found_before_anything_starts(gold):
    reward = load_reward("code")
    with pytest.raises(RewardError, match="reward code"):
        check_tasks({None: reward}, [task(gold)])


def test_what_is_expected_never_enters_the_sandbox():
    checks = checks_of(task("assert f(1, [2]) == {'a': (1, 2)}\nassert f(0) == -1.5"))
    assert checks == [{"call": "f(1, [2])", "expected": {"a": (1, 2)}}, {"call": "f(0)", "expected": -1.5}]
    assert checks_of(task("assert f(1) == g(2)")) == [{"code": "assert f(1) == g(2)"}]
    assert checks_of(task("x = 1\nassert f(x) == 1")) == [{"code": "x = 1\nassert f(x) == 1"}]


def test_a_value_that_equals_everything_is_no_success():
    cheat = "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()"
    assert judged(f"```python\n{cheat}\n```").value == 0


def test_arguments_and_values_of_apps():
    tests = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})
    assert judged(ADD, (tests,)).value == 1


def test_programs_are_confined(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("42")
    reads = f"```python\nprint(open({str(secret)!r}).read())\n```"
    assert judged(reads, (json.dumps({"input": "", "output": "42"}),)).value == 0


def test_a_sandbox_that_breaks_says_nothing_about_the_program():
    reward = load_reward("code")
    reward.check_task(task(*TESTS))
    reward._sandbox.close()
    outcome = asyncio.run(score(reward, episode(ADD), task(*TESTS)))
    assert isinstance(outcome, Score | Invalid)
    if isinstance(outcome, Invalid):
        assert outcome.reason == "sandbox_failed"


def test_open_instructs_code_api():
    with stub(Reply({"results": [1, 0]})) as server:
        outcome = judged(ADD, url=server.url + "/test_program", all_or_nothing=False)
    assert outcome.value == 0.5
    assert server.requests[0]["tests"] == list(TESTS)
    assert server.requests[0]["program"].startswith("def add")
    assert set(server.requests[0]) == {"program", "tests", "max_execution_time"}
    with stub(Reply({"results": [1]})) as server, pytest.raises(RewardError, match="1 results for 2 tests"):
        judged(ADD, url=server.url)
