"""An agent that exists already, unchanged: a function or a program that talks to an OpenAI-compatible endpoint.

It is started once per episode and told where the policy answers. What it does with the answers (tools, sub-agents,
memory) is its own business.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import secrets
import shlex
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Literal

from posttrain.boundary.leash import on_leash
from posttrain.boundary.processes import TOKEN, kill_tree
from posttrain.chat.calls import SYNTAXES
from posttrain.deadline import in_thread
from posttrain.location import did_you_mean, locate
from posttrain.task import EpisodeInvalid, Task

OUTPUT_CHARS = 65536  # of a program's output that are kept as its answer
END_SECONDS = 5.0  # for a program and all that it has started to be killed
ERROR_LINES = 20  # of a failing program's standard error that are shown
OtherSampling = Literal["refuse", "ignore", "exclude"]


class ExternalAgent:
    """How an agent is run, and how its requests are understood.

    agent: "path.py:agent" or "pkg.mod:agent", `agent(task, base_url, api_key)`; `async def`, or plain and then run in a
        thread of its own. It returns a number (its reward), a text (its answer, for a reward function) or None.
    command: a program instead. OPENAI_BASE_URL and OPENAI_API_KEY are in its environment, the task as JSON on its
        standard input; {id} and {prompt} (the task's last message) are filled in. Its output is the answer, and it is
        killed with all its children when the episode ends.
    syntax: how the policy writes tool calls: a row of `posttrain.chat.calls.SYNTAXES`, or "none".
    reasoning: "content" leaves thoughts in the content; "separate" moves them to `reasoning_content`.
    show_tools: whether the tools of a request are described to the policy. False for a policy that knows them.
    other_sampling: what becomes of a request with a temperature or top_p that is not the run's. "refuse" it; "ignore"
        what it asks for; or sample as asked and "exclude" it from training.
    concurrency: agents at once; None = as many as there are episodes, or for a
        command four per core.
    address: HOST:PORT on which the endpoint listens; port 0 takes a free one.
    """

    stop_strings: tuple[str, ...] = ()
    max_turns = 1 << 30  # no limit of its own; limits.max_turns bounds the requests of an episode

    def __init__(
        self,
        *,
        agent: str | Callable[..., Any] | None = None,
        command: str | list[str] | None = None,
        syntax: str = "hermes",
        reasoning: Literal["content", "separate"] = "content",
        show_tools: bool = True,
        other_sampling: OtherSampling = "refuse",
        concurrency: int | None = None,
        address: str = "127.0.0.1:0",
    ) -> None:
        if (agent is None) == (command is None):
            raise ValueError("say either agent: 'path.py:function', or command: 'program and arguments'")
        self._function = locate(agent) if isinstance(agent, str) else agent
        self._command = shlex.split(command) if isinstance(command, str) else command
        if self._function is not None and not callable(self._function):
            raise TypeError(f"agent must be a function of (task, base_url, api_key), got {self._function!r:.80}")
        if syntax != "none" and syntax not in SYNTAXES:
            raise ValueError(f"there is no syntax {syntax!r}.{did_you_mean(syntax, [*SYNTAXES, 'none'])}")
        if reasoning not in ("content", "separate"):
            raise ValueError(f"reasoning must be content or separate, got {reasoning!r}")
        if other_sampling not in ("refuse", "ignore", "exclude"):
            raise ValueError(f"other_sampling must be refuse, ignore or exclude, got {other_sampling!r}")
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency}")
        self.syntax, self.reasoning, self.show_tools = syntax, reasoning, show_tools
        self.other_sampling: OtherSampling = other_sampling
        self.host, self.port = split_address(address)
        self.concurrency = concurrency or (4 * (os.cpu_count() or 1) if self._command else None)

    async def run(self, task: Task, base_url: str, api_key: str) -> Any:
        """The agent's whole run; raises what it raises. Cancelling it ends a program with all its children."""
        if self._command is not None:
            return await _run_command(self._command, task, base_url, api_key)
        function = self._function
        assert function is not None
        try:
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                return await function(task, base_url, api_key)
            return await in_thread(lambda: function(task, base_url, api_key))
        except SystemExit as error:
            raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error  # it shall not end the run

    async def close(self) -> None:
        return None


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"an address is HOST:PORT, such as 127.0.0.1:0; got {address!r}")
    return host.strip("[]"), int(port)


async def _run_command(command: list[str], task: Task, base_url: str, api_key: str) -> str:
    prompt = str(task.prompt[-1].get("content") or "") if task.prompt else ""
    filled = [part.replace("{id}", task.id).replace("{prompt}", prompt) for part in command]
    token = secrets.token_hex(16)
    address = {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": api_key}
    if shutil.which(filled[0]) is None:
        raise EpisodeInvalid("agent_error", f"{filled[0]} cannot be started: there is no such program")
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *on_leash(*filled),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **address, TOKEN: token},
            start_new_session=True,
        )
    )
    try:  # the start is not cancelled: asyncio would kill the leash, and then wait for the program's end
        process = await asyncio.shield(starting)
        out, err = await process.communicate(json.dumps(_as_json(task)).encode())
    finally:
        await _end(await asyncio.shield(starting), token)
    if process.returncode != 0:
        tail = "\n".join(err.decode("utf-8", "replace").splitlines()[-ERROR_LINES:])
        raise EpisodeInvalid("agent_error", f"{filled[0]} ended with exit code {process.returncode}: {tail}")
    return out.decode("utf-8", "replace").strip()[-OUTPUT_CHARS:]


async def _end(process: asyncio.subprocess.Process, token: str) -> None:
    """Nothing of it is left running: its leash sees to that, unless that hangs or was killed itself."""
    try:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                await asyncio.wait_for(process.wait(), END_SECONDS)
    finally:
        if process.returncode is None or process.returncode < 0:
            kill_tree(process.pid, token)
    await process.wait()


def _as_json(task: Task) -> Mapping[str, Any]:
    extra = json.loads(json.dumps(dict(task.extra), default=str))
    return {"id": task.id, "prompt": list(task.prompt), "ground_truth": list(task.ground_truth), "extra": extra}
