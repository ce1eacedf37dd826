"""Programs judged by tests, in real processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from tests.sandbox.ways import WAYS

from posttrain.rewards import RewardError, score
from posttrain.rewards.code import Ran, RunnerError, checks_of, program_of
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.scoring import check_tasks
from posttrain.sandbox import SandboxError
from posttrain.task import Invalid, Score

from .episodes import episode, task
from .servers import Reply, stub


class Processes:
    """A runner for these tests: a bare process with a deadline, no isolation."""

    async def run(self, program: str, *, stdin: str, seconds: float) -> Ran:
        def work() -> Ran:
            command = [sys.executable, "-I", "-S", "-c", program]
            try:
                done = subprocess.run(
                    command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False
                )
            except subprocess.TimeoutExpired:
                return Ran(None, timed_out=True)
            return Ran(done.returncode, done.stdout, done.stderr)

        return await asyncio.to_thread(work)


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ("assert add(1, 2) == 3", "assert add(0, 0) == 0")


def judged(text, golds=TESTS, runner=None, **options):
    reward = load_reward(RewardConfig(name="code", options=options), runner=runner or Processes())
    return asyncio.run(score(reward, episode(text), task(*golds)))


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
    [("assert f() == 1", 1), ('["assert a", "assert b"]', 2), ('[{"input": "1", "output": "2"}]', 1),
     ('{"inputs": [["1", "2"]], "outputs": [3]}', 1), ('{"test_list": ["assert a", "assert b"]}', 2)],
)  # fmt: skip
def test_shapes_of_tests(gold, count):
    assert len(checks_of(task(gold))) == count


@pytest.mark.parametrize("gold", ["", "[]", '{"inputs": [1], "outputs": []}', '{"x": 1}', "[3]"])
def test_p80_rows_without_tests_are_found_before_anything_starts(gold):
    reward = load_reward("code", runner=Processes())
    with pytest.raises(RewardError, match="reward code"):
        check_tasks({None: reward}, [task(gold)])


@pytest.mark.skipif(not WAYS, reason="no way of isolation works on this machine")
def test_without_a_runner_programs_run_in_the_sandbox():
    reward = load_reward(RewardConfig(name="code", options={"seconds_per_test": 5.0}))
    check_tasks({None: reward}, [task(*TESTS)])
    network = "```python\nimport socket\nsocket.socket()\ndef add(a, b):\n    return a + b\n```"
    for text, value in ((ADD, 1.0), (ADD.replace("+", "-"), 0.0), (network, 0.0)):
        outcome = asyncio.run(score(reward, episode(text), task(*TESTS)))
        assert isinstance(outcome, Score), outcome
        assert outcome.value == value
    doubled = task(json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]}))
    outcome = asyncio.run(score(reward, episode("```python\nprint(int(input()) * 2)\n```"), doubled))
    assert isinstance(outcome, Score)
    assert outcome.value == 1.0
    reward.close()


def test_where_nothing_isolates_the_start_says_so(monkeypatch):
    def refuses(*_: object, **__: object) -> None:
        raise SandboxError("no way to isolate")

    monkeypatch.setattr("posttrain.rewards.code.Sandbox", refuses)
    reward = load_reward(RewardConfig(name="code"))
    with pytest.raises(RewardError, match=r"no way to isolate; or give options\.url of a code API"):
        check_tasks({None: reward}, [task(*TESTS)])


def test_a_sandbox_that_fails_says_nothing_about_the_program():
    class Broken:
        async def run(self, program: str, *, stdin: str, seconds: float) -> Ran:
            raise RunnerError("no namespaces here")

    outcome = judged(ADD, runner=Broken())
    assert outcome == Invalid("sandbox_failed", "no namespaces here")


def test_open_instructs_code_api():
    with stub(Reply({"results": [1, 0]})) as server:
        outcome = judged(ADD, url=server.url + "/test_program", all_or_nothing=False)
    assert outcome.value == 0.5
    assert server.requests[0]["tests"] == list(TESTS)
    assert server.requests[0]["program"].startswith("def add")
    assert set(server.requests[0]) == {"program", "tests", "max_execution_time"}
    with stub(Reply({"results": [1]})) as server, pytest.raises(RewardError, match="1 results for 2 tests"):
        judged(ADD, url=server.url)
