"""The server that all tests of a worker fork processes from: it has imported what they need, and computed nothing."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PRELOAD = (
    "preload.begin",
    "posttrain.loops.rl",
    "posttrain.envs.tiny_world",
    "transformers.models.qwen3.modeling_qwen3",
    "omegaconf.vendor.antlr4.LL1Analyzer",
    "deepspeed",  # where it is installed
    "cluster.fleet",
    "invariants.killing",
    "preload.end",
)
COMMAND = "from posttrain.cli import main; main()"


@functools.cache
def server() -> Any:
    """A multiprocessing context. Python keeps one such server for a process, and preloads for who asks first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    path = [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))  # it is not told sys.path before Python 3.13
        ensure_running()
    return context


class Program:
    """What `python -c code arguments` does, in a process that need not import torch and transformers any more.

    By default the code is the command line. What it prints stands in the folder, in `stdout` and `stderr`.
    """

    def __init__(self, folder: Path, *arguments: object, code: str = COMMAND, inside: bool = False) -> None:
        """inside: it runs in that folder, not where the tests do."""
        self._folder = folder
        words = [str(argument) for argument in arguments]
        self._process = server().Process(target=_run, args=(code, words, folder, inside))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit status, -N when signal N has ended it; None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def ended(self, seconds: float) -> tuple[int, str, str]:
        """(exit status, stdout, stderr). Raises AssertionError when it takes longer."""
        self._process.join(seconds)
        status = self.poll()
        if status is None:
            self.kill()
            self._process.join()
        out, err = [(self._folder / name).read_text() for name in ("stdout", "stderr")]
        assert status is not None, f"it runs for longer than {seconds} s:\n{out}\n{err}"
        return status, out, err


def _run(code: str, arguments: list[str], folder: Path, inside: bool) -> None:
    if inside:
        os.chdir(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(folder / name, "wb", buffering=0) as said:
            os.dup2(said.fileno(), descriptor)
    module = ModuleType("__main__")
    sys.modules["__main__"], sys.argv, sys.path[0:0] = module, ["-c", *arguments], [""]
    exec(compile(code, "<string>", "exec"), vars(module))
