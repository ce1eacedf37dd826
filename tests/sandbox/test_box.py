"""What a sandbox gives to code that behaves, and what it says when it cannot isolate."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sandbox.ways import WAYS

from posttrain.sandbox import Sandbox, SandboxError, SandboxLimits

pytestmark = pytest.mark.skipif(not WAYS, reason="no way of isolation works on this machine")


@pytest.fixture(params=WAYS, scope="module")
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = Sandbox(SandboxLimits(wall_seconds=10.0), isolation=request.param)
    yield sandbox
    sandbox.close()


def test_input_output_and_exit_code(box: Sandbox):
    result = box.run_blocking(
        "import sys\nname = input()\nprint('hi', name)\nprint('oh', file=sys.stderr)", stdin="Ö\n"
    )
    assert (result.stdout, result.stderr, result.exit_code, result.limit) == ("hi Ö\n", "oh\n", 0, None)
    assert result.ok
    assert box.run_blocking("import sys; sys.exit(3)").exit_code == 3
    assert box.run_blocking("raise SystemExit('why')").stderr == "why\n"
    assert box.run_blocking("import os; os.abort()").exit_code == -6


def test_a_traceback_shows_the_code_and_nothing_of_ours(box: Sandbox):
    result = box.run_blocking("def f():\n    return 1 / 0\n\nf()")
    assert result.exit_code == 1
    assert 'File "main.py", line 4, in <module>\n    f()' in result.stderr
    assert "posttrain" not in result.stderr
    assert "SyntaxError" in box.run_blocking("def").stderr


def test_it_is_the_main_module_with_the_whole_library(box: Sandbox):
    code = """
import __main__, asyncio, csv, dataclasses, decimal, hashlib, json, multiprocessing, random, re, sqlite3, ssl
import statistics, tempfile, threading, typing, zoneinfo, math, pathlib, concurrent.futures
@dataclasses.dataclass
class P: x: int
async def main(): await asyncio.sleep(0.01); return P(1)
with tempfile.TemporaryDirectory() as folder: pathlib.Path(folder, "a").write_text("x")
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(list(pool.map(abs, [-1, -2])))
assert __main__.main is main
print(asyncio.run(main()), sqlite3.connect(":memory:").execute("select 1").fetchall(), exit is not None)
"""
    result = box.run_blocking(code)
    assert result.stdout == "[1, 2]\nP(x=1) [(1,)] True\n", result


def test_threads_and_exit_handlers_end_as_in_a_script(box: Sandbox):
    code = """
import atexit, threading, time
atexit.register(print, "bye")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""
    assert box.run_blocking(code).stdout == "thread\nbye\n"


def test_files_are_there_and_can_be_imported(box: Sandbox):
    files = {"data.txt": "x", "pack/inner.py": "A = 5"}
    assert (
        box.run_blocking("from pack.inner import A; print(A, open('data.txt').read())", files=files).stdout == "5 x\n"
    )
    for name in ("/etc/x", "../x", "a/../../x", ""):
        with pytest.raises(ValueError, match="relative path"):
            box.run_blocking("", files={name: ""})


def test_packages_and_further_files_only_when_asked_for(box: Sandbox, tmp_path: Path):
    assert "ModuleNotFoundError" in box.run_blocking("import numpy").stderr
    tmp_path.chmod(0o755)
    (tmp_path / "table.csv").write_text("a,b")
    open_box = Sandbox(isolation=box.isolation, packages=True, readable=[tmp_path])
    code = f"import numpy; print(numpy.ones(3).sum(), open({str(tmp_path / 'table.csv')!r}).read())"
    assert open_box.run_blocking(code).stdout == "3.0 a,b\n"
    assert not open_box.run_blocking(f"open({str(tmp_path / 'table.csv')!r}, 'w')").ok
    open_box.close()


def test_odd_text_goes_in_and_out(box: Sandbox):
    assert box.run_blocking("import os; os.write(1, b'\\xff\\x00')").stdout == "\ufffd\x00"
    assert box.run_blocking("print('\\ud800')").stdout == "?\n"
    assert box.run_blocking("print(len(input()))", stdin="\ud800\n").ok
    assert not box.run_blocking("a = '\ud800'; print(").ok


def test_many_at_once_and_cancelled_ones_are_killed(box: Sandbox):
    async def many() -> list[str]:
        results = await asyncio.gather(*(box.run(f"print({i})") for i in range(6)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await box.run("import time; time.sleep(60)", timeout_s=60.0)
        return [result.stdout for result in results]

    started = time.monotonic()
    assert asyncio.run(many()) == [f"{i}\n" for i in range(6)]
    assert time.monotonic() - started < 8
    assert box.run_blocking("print('on')").stdout == "on\n"


def test_without_isolation_it_refuses_unless_told_so():
    with pytest.raises(SandboxError, match="whatever you can"):
        Sandbox(isolation="none")
    box = Sandbox(SandboxLimits(wall_seconds=5), isolation="none", allow_unisolated=True)
    result = box.run_blocking("import os; print(os.path.exists('/etc/passwd'), 'API_KEY' in os.environ)")
    assert (result.stdout, result.isolation) == ("True False\n", "none")
    assert box.run_blocking("while True: pass", timeout_s=1.0).limit in ("cpu", "wall")
    box.close()


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="needs Linux, this is darwin"):
        Sandbox()
    box = Sandbox(allow_unisolated=True)
    assert box.isolation == "none"
    box.close()


def test_limits_must_be_above_zero():
    with pytest.raises(ValueError, match="wall_seconds"):
        SandboxLimits(wall_seconds=0)
