"""Runs the code in the process that was made for it, as `python main.py` would, and ends the process."""

from __future__ import annotations

import atexit
import contextlib
import linecache
import os
import site
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence

NAME = "main.py"


def run_program(code: str, import_path: Sequence[str]) -> None:
    """Never returns. The exit code is Python's own: 1 after an exception, the argument of sys.exit otherwise."""
    status = 1
    try:
        status = _run(code, import_path)
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of a script does
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status)


def _run(code: str, import_path: Sequence[str]) -> int:
    module = _fresh_main(code, import_path)
    try:
        exec(compile(code, NAME, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as stop:
        return _exit_code(stop)
    except BaseException as error:
        _show(error)
        return 1
    return 0


def _fresh_main(code: str, import_path: Sequence[str]) -> types.ModuleType:
    for name in [name for name in sys.modules if name.partition(".")[0] == "posttrain"]:
        del sys.modules[name]
    sys.path[:] = [os.getcwd(), *import_path]
    os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
    tempfile.tempdir = None  # chosen again
    site.setquit()  # `exit`, which Python was started without
    sys.argv[:] = [NAME]
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)  # noqa: SIM115
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)  # lines in tracebacks
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """The traceback from the code's own first line on."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    with contextlib.suppress(BaseException):
        traceback.print_exception(type(error), error, below if not isinstance(error, SyntaxError) else None)
