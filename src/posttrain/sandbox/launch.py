"""The process that runs foreign code: started as `python -I -S` with an empty environment, standard library only.

It reads one request per line and answers with one line. For each it forks a chain of processes that is gone before the
answer is written, so that nothing remains of one run for the next:

* the monitor stays outside, reads the output, watches time, memory and disk, and kills;
* init is process 1 of new namespaces, with a root directory that holds Python and an empty folder; the kernel kills all
  that is left when it ends. It ends with the monitor;
* the program gives up its rights and runs the code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from typing import Any

from posttrain.sandbox import kernel
from posttrain.sandbox.confine import Plan, build_root, confine_program, leave_namespaces, plan_of
from posttrain.sandbox.program import run_program
from posttrain.sandbox.scratch import remove
from posttrain.sandbox.watch import Watch

POLL_SECONDS = 0.02
_CHUNK = 1 << 16


def main() -> None:
    """Serves until its parent closes the pipe."""
    library = [path for path in sys.path[:-1] if os.path.exists(path)]  # the last is where we lie ourselves
    settings = json.loads(sys.stdin.buffer.readline())
    settings["import_path"] = [*library, *settings.pop("packages")]
    settings["readable"] = [*library, os.path.join(sys.base_prefix, "lib"), *settings["readable"]]
    _reply({"ready": True})
    while line := sys.stdin.buffer.readline():
        monitor = os.fork()
        if monitor == 0:
            _monitor_run(settings | json.loads(line))
            os._exit(0)
        os.waitpid(monitor, 0)
    with contextlib.suppress(OSError):  # our parent does it, too, when it ends us; this is for one that was killed
        remove(settings["scratch"])


def _reply(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _monitor_run(request: dict[str, Any]) -> None:
    place = tempfile.mkdtemp(prefix="posttrain-sandbox-", dir=request["scratch"])
    try:
        answer = _monitored(plan_of(request, place), request)
    except OSError as error:
        answer = {"problem": str(error)}
    finally:
        with contextlib.suppress(OSError):
            remove(place)
    _reply(answer)


def _monitored(plan: Plan, request: dict[str, Any]) -> dict[str, Any]:
    """Runs the request in a chain of processes and returns what became of it."""
    out, err, status = os.pipe(), os.pipe(), os.pipe()
    started = time.monotonic()
    leave_namespaces(plan)
    init = os.fork()
    if init == 0:
        _init(plan, request, out[1], err[1], status[1])
    for _, writing in (out, err, status):
        os.close(writing)
    watch = Watch(plan, init, started)
    texts = {out[0]: bytearray(), err[0]: bytearray(), status[0]: bytearray()}
    limit = _read_all(texts, watch, status[0])
    _end(init)
    for reading in texts:
        os.close(reading)
    answer = json.loads(bytes(texts[status[0]]) or b"{}")
    answer |= {
        "stdout": bytes(texts[out[0]]).decode("utf-8", "replace"),
        "stderr": bytes(texts[err[0]]).decode("utf-8", "replace"),
        "seconds": time.monotonic() - started,
    }
    return answer | ({"limit": limit} if limit else {})


def _read_all(texts: dict[int, bytearray], watch: Watch, status: int) -> str | None:
    """Reads until init has reported and its pipes are empty, or a limit is passed; returns that limit."""
    poll = select.poll()
    for descriptor in texts:
        poll.register(descriptor, select.POLLIN)
    poll.register(0, 0)  # our own parent: only its end is of interest
    open_pipes = set(texts)
    while open_pipes:
        for descriptor, event in poll.poll(POLL_SECONDS * 1000):
            if descriptor == 0:
                return "parent"
            data = os.read(descriptor, _CHUNK) if event & (select.POLLIN | select.POLLHUP) else b""
            texts[descriptor] += data
            if not data:
                poll.unregister(descriptor)
                open_pipes.discard(descriptor)
        if status not in open_pipes:
            _drain(texts, open_pipes, watch)
            return None
        limit = watch.passed(sum(len(text) for key, text in texts.items() if key != status))
        if limit:
            _cut(texts, watch, status)
            return limit
    return None


def _drain(texts: dict[int, bytearray], pipes: set[int], watch: Watch) -> None:
    """What the pipes still hold; a process that lives on may keep them open, so there is no waiting for their end."""
    for descriptor in pipes:
        os.set_blocking(descriptor, False)
        while len(texts[descriptor]) <= watch.plan.output_bytes:
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            texts[descriptor] += data


def _cut(texts: dict[int, bytearray], watch: Watch, status: int) -> None:
    for key, text in texts.items():
        if key != status:
            del text[watch.plan.output_bytes :]


def _end(init: int) -> None:
    """Kills init, its session, and with process 1 of the namespace all that is in it."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(init, signal.SIGKILL)
    os.waitpid(init, 0)


def _init(plan: Plan, request: dict[str, Any], out: int, err: int, status: int) -> None:
    """Never returns. What goes wrong before the program starts is reported as `problem`."""
    try:
        os.setsid()
        _descriptors(request["stdin"], out, err, status)
        build_root(plan, request)
        if plan.on_linux:  # after the change of user, which would undo it
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        program = os.fork()
        if program == 0:
            os.close(3)
            _program(plan, request)
        report = _waited(program)
    except BaseException as error:
        report = {"problem": f"{type(error).__name__}: {error}"}
    os.write(3, json.dumps(report).encode())
    os._exit(0)


def _program(plan: Plan, request: dict[str, Any]) -> None:
    try:
        confine_program(plan)
    except BaseException as error:
        os.write(2, f"the sandbox could not confine the program: {error}\n".encode())
        os._exit(NOT_CONFINED)
    run_program(request["code"], plan.import_path)


NOT_CONFINED = 213  # exit code of a program that was not started, because it would not have been confined


def _waited(program: int) -> dict[str, Any]:
    """Waits for the program and reaps what it leaves meanwhile."""
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            break
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_CONFINED:
        return {"problem": "the program could not be confined"}
    return {"exit_code": code, "cpu_seconds": usage.ru_utime + usage.ru_stime, "memory_kib": usage.ru_maxrss}


def _descriptors(stdin: str, out: int, err: int, status: int) -> None:
    """0, 1, 2 are the program's, 3 is ours; nothing else stays open."""
    given = tempfile.TemporaryFile()  # noqa: SIM115 -- closed below; a file, so that nobody has to feed it
    given.write(stdin.encode("utf-8", "surrogatepass"))
    given.seek(0)
    kept = [os.dup(given.fileno()), os.dup(out), os.dup(err), os.dup(status)]
    given.close()
    high = [os.dup2(descriptor, 100 + i) for i, descriptor in enumerate(kept)]
    for i, descriptor in enumerate(high):
        os.dup2(descriptor, i)
    os.closerange(4, 4096)
