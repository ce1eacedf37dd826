"""`posttrain serve`: a model behind the endpoint that external agents are trained through, for any client.

The same code answers as in training, so what an agent does here it can be trained on. Nothing is learnt; with a folder
to record in, every conversation is kept token by token.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.boundary.local import guarded
from posttrain.config import EvalRunConfig
from posttrain.endpoint import ExternalAgent
from posttrain.endpoint.answer import Tell
from posttrain.endpoint.app import App, Respondent
from posttrain.endpoint.desk import Desk
from posttrain.endpoint.serving import Listener
from posttrain.endpoint.wire import CompletionRequest, Refusal, Reply
from posttrain.loops.build import load_renderer
from posttrain.loops.target import Target, find_target
from posttrain.rollout import RolloutSpec, Ticket
from posttrain.runs.config_file import ConfigError, parse_config
from posttrain.runs.trajectories import write_trajectories
from posttrain.sampler.native import NativeSampler, workers_for
from posttrain.sampler.protocol import SamplingParams
from posttrain.task import Task

log = logging.getLogger("posttrain")
TOKENS_PER_RECORDING = 200_000  # then it is put away, and conversations that go on are rendered anew
MAX_TOKENS = 32768  # of a conversation, where no config says it


class OpenDesk(Respondent):
    """Answers everybody, from one recording after the other. folder: where finished recordings are written."""

    def __init__(self, spec: RolloutSpec, agent: ExternalAgent, *, seed: int, folder: Path | None) -> None:
        self._spec, self._agent, self._seed, self._folder = spec, agent, seed, folder
        self._number = 0
        self._desk = self._new_desk()

    async def answer(self, request: CompletionRequest, tell: Tell | None = None) -> Reply:
        if self._desk.idle and self._desk.recording.tokens > TOKENS_PER_RECORDING:
            self.put_away()
            self._desk = self._new_desk()
        return await self._desk.answer(request, tell)

    def post(self, body: Any) -> None:
        raise Refusal("nothing is trained here, so rewards have no place", status=404)

    def put_away(self) -> None:
        """Frees what is cached, and keeps what was recorded."""
        self._desk.close()
        trajectories = [thread.trajectory for thread in self._desk.recording.threads]
        if self._folder is not None and trajectories:
            texts = [self._spec.renderer.decode(t.token_ids) for t in trajectories]
            write_trajectories(self._folder, self._number, trajectories, texts)

    def _new_desk(self) -> Desk:
        self._number += 1
        name = f"serve/{self._number}"
        task = Task(id=name, prompt=())
        ticket = Ticket(task=task, group_id=name, sample=0, run_seed=self._seed, step=self._number)
        return Desk(ticket, self._spec, self._agent, lambda failure: log.warning("not answered: %s", failure))


def served_target(named: str, overrides: Sequence[str] = (), *, config: Path | None = None) -> Target:
    """As `find_target`; a model needs no config here."""
    path = Path(named)
    of_a_run = (path / "config.yaml").is_file() or path.parent.name == "checkpoints"
    if config is not None or of_a_run or path.suffix in (".yaml", ".yml"):
        return find_target(named, overrides, config=config)
    if overrides:
        raise ConfigError([f"{overrides[0]}: settings change a config; add --config FILE.yaml"])
    limits = dict.fromkeys(("max_turn_tokens", "max_episode_tokens", "max_prompt_tokens"), MAX_TOKENS)
    return Target(config=parse_config(EvalRunConfig, {"model": {"path": named}, "data": {}, "limits": limits}))


def open_desk(target: Target, *, syntax: str | None = None, folder: Path | None = None) -> OpenDesk:
    """Loads the model. syntax: of tool calls; default the config's, else hermes."""
    config = target.config
    options: dict[str, Any] = dict(config.env.options) if config.env.name == "external" else {"agent": print}
    options |= {"other_sampling": "exclude"} | ({} if syntax is None else {"syntax": syntax})
    try:
        agent = ExternalAgent(**options)
    except ValueError as error:
        raise ConfigError([f"{'env.options' if syntax is None else '--syntax'}: {error}"]) from error
    renderer, policy = load_renderer(config), target.load_policy()
    context = getattr(policy.config, "max_position_embeddings", None) or MAX_TOKENS
    longest = min(config.limits.max_episode_tokens, context)
    bounds = {"max_episode_tokens": longest, "max_prompt_tokens": 1 << 30, "max_turns": None}
    limits = config.limits.model_copy(update=bounds)
    spec = RolloutSpec(
        make_env=_no_env,
        sampler=NativeSampler(policy, renderer.tokenizer, workers=workers_for(policy.device), truncation="allow"),
        renderer=renderer,
        limits=limits,
        params=SamplingParams(max_new_tokens=limits.max_turn_tokens),
    )
    return OpenDesk(spec, agent, seed=config.run.seed, folder=folder)


def _no_env(task: Task) -> Any:
    raise NotImplementedError("nobody plays an episode here")


async def serve(desk: OpenDesk, host: str, port: int, *, token: str | None, say: Callable[[str], None]) -> None:
    """Serves until interrupted or terminated; `say` is told the address."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def find(key: str | None) -> Respondent | None:
        fits = token is None or (key is not None and secrets.compare_digest(key.encode(), token.encode()))
        return desk if fits else None

    listener = Listener(guarded(App(find), host, has_token=token is not None), host, port)
    await listener.start()
    say(f"{listener.url}/v1")
    try:
        await stop.wait()
    finally:
        await listener.stop()
        desk.put_away()
