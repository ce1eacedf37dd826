"""A config -> the parts of a run, cheapest first: everything that can be wrong with the data is found before the model
loads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import ValidationError
from transformers.models.auto.tokenization_auto import AutoTokenizer

from posttrain.chat import ChatError, Renderer
from posttrain.config import WORLDS, ConfigError, RLConfig, options_for, resolve
from posttrain.data import TaskSet, load_tasks
from posttrain.data.config import SourceConfig
from posttrain.data.problems import FieldError
from posttrain.endpoint import AgentEpisode, ExternalAgent, Host
from posttrain.envs.protocol import awaited, check_env
from posttrain.loops.collect import Collector, Credit
from posttrain.loops.toolbox import open_tools, tools_for, warm
from posttrain.retrieval.client import HttpRetriever
from posttrain.retrieval.config import make_retriever
from posttrain.retrieval.protocol import Passage, RetrievalError, Retriever
from posttrain.rewards import Reward
from posttrain.rewards.config import RewardConfig, load_rewards
from posttrain.rewards.normalize import normalize_answer
from posttrain.rewards.scoring import check_tasks, for_evaluation
from posttrain.rollout import RolloutSpec, Ticket
from posttrain.sampler.protocol import Sampler, SamplingParams
from posttrain.task import Task, detached
from posttrain.tools.config import close_tools
from posttrain.tools.guards import Counted
from posttrain.tools.protocol import Tool
from posttrain.trainer.loading import ModelError, check_directory, model_path

COMPARING = {"em", "f1", "sub_em"}
log = logging.getLogger("posttrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What an episode needs besides a task and a model: chat renderer, retriever, rewards, envs and tools."""

    renderer: Renderer
    retriever: Retriever | None
    rewards: Mapping[str | None, Reward]
    envs: Mapping[str, Callable[..., Any]]  # of Env or ExternalAgent, without arguments
    tools: Mapping[str, Counted]

    @property
    def tokenizer(self) -> Any:
        return self.renderer.tokenizer

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()

    async def release(self) -> None:
        """Ends connections and processes of the world, on the event loop that used them; they open again if needed."""
        if self.retriever is not None:
            await self.retriever.close()
        await close_tools(self.tools.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(Stage):
    """A stage and the tasks of a training run."""

    train: TaskSet
    eval: TaskSet | None


def load_parts(config: RLConfig) -> Parts:
    """Tokenizer, chat template, all rows, retriever and rewards. Raises the room's own error for what is wrong."""
    renderer = load_renderer(config)
    train = load_part(config, "train", renderer)
    evaluation = load_part(config, "eval", renderer) if config.data.eval else None
    _check_all_envs_are_used(config, [*train, *(evaluation or ())])
    stage = make_stage(config, renderer, [*train, *(evaluation or ())])
    return Parts(
        renderer=renderer,
        retriever=stage.retriever,
        rewards=stage.rewards,
        envs=stage.envs,
        tools=stage.tools,
        train=train,
        eval=evaluation,
    )


def _check_all_envs_are_used(config: RLConfig, tasks: Sequence[Task]) -> None:
    used = {task.env for task in tasks}
    for name in config.envs:
        if name not in used:
            named = ", ".join(sorted(env for env in used if env is not None)) or "none"
            fix = f"give a source of the data `env: {name}`, or `columns: {{env: COLUMN}}`, or leave the env out"
            raise ConfigError([f"envs.{name} is an env that no row asks for (rows name: {named}); {fix}"])


def load_renderer(config: RLConfig) -> Renderer:
    """Tokenizer and chat template of the model, probed."""
    renderer = Renderer(load_tokenizer(config.model.path), config.model.thinking)
    renderer.probe()
    return renderer


def load_part(config: RLConfig, part: Literal["train", "eval"], renderer: Renderer) -> TaskSet:
    """All tasks of one part of the data, measured on the ids that will be sent: the schemas of tools included."""
    envs = cache(lambda name: env_to_look_at(name, config))
    tools = cache(lambda name: schemas_of(name, envs(name), renderer))
    tools(config.env.name)  # before the rows: an env that cannot be made is no fault of a row
    limit, key = prompt_limit(config)
    tasks = load_tasks(
        config.data.model_copy(update={"max_prompt_tokens": limit}),
        part,
        measure=lambda task: len(renderer.prompt(task.prompt, tools(task.env or config.env.name))),
        check_ground_truth=unscorable if compares_answers(config.reward, getattr(config.data, part)) else None,
        check_task=lambda task: check_playable(task, task.env or config.env.name, envs),
        limit_key=key,
    )
    for report in tasks.reports:
        if report.invalid or report.overlong or report.notes:
            log.warning("data.%s, %s", part, "\n".join(report.lines()))
    return tasks


def prompt_limit(config: RLConfig) -> tuple[int, str]:
    """The most tokens that a prompt may have, and the key that says so."""
    limits = [
        (config.limits.max_prompt_tokens, "limits.max_prompt_tokens"),
        (config.limits.max_episode_tokens - 1, "limits.max_episode_tokens"),  # one token must be left to the policy
    ]
    if config.data.max_prompt_tokens is not None:
        limits.append((config.data.max_prompt_tokens, "data.max_prompt_tokens"))
    return min(limits)


class _NoSearch:
    """Stands in for the retriever of an env that is made only to be looked at."""

    async def retrieve(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise NotImplementedError("an env must not search before its episode begins")

    async def close(self) -> None:
        return None


def env_to_look_at(name: str, config: RLConfig) -> Any:
    """An env called `name`, closed again; finds before anything starts when such an env cannot be made."""
    tools = open_tools(config) if config.env_called(name).takes_tools else {}
    try:
        env = env_maker(name, config, None if config.retrieval is None else _NoSearch(), tools)()
        check_env(env)
        asyncio.run(awaited(env.close))
        asyncio.run(close_tools(tools.values()))
    except ConfigError:
        raise
    except Exception as error:
        options = dict(config.env_called(name).options)
        raise ConfigError([f"env {name} cannot be made with {options}: {type(error).__name__}: {error}"]) from error
    return env


def schemas_of(name: str, env: Any, renderer: Renderer) -> Any:
    """The tool schemas of an env; raises ConfigError when the chat template would not show them."""
    schemas = getattr(env, "tools", None) or None
    if schemas:
        try:
            renderer.prompt([{"role": "user", "content": "?"}], schemas)
        except ChatError as error:
            fix = "the envs `tools` and `react` do so with the option describe: text"
            raise ConfigError([f"env {name}: {error}; {fix}"]) from error
    return schemas


def check_playable(task: Task, name: str, envs: Callable[[str], Any]) -> None:
    """Raises FieldError for a row that names an env that is not there, or that its env cannot play (`check_task`)."""
    try:
        env = envs(name)
    except ValidationError as error:
        seen = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise FieldError("", "unknown env", seen, "correct the row, or describe the env under `envs`") from error
    check = getattr(env, "check_task", None)
    try:
        said = None if check is None else check(task.own())
    except Exception as error:
        why = f"{error}" if isinstance(error, ValueError) else f"check_task raised {type(error).__name__}: {error}"
        raise FieldError("", "not for its env", f"the env {name} cannot play it: {why}", "correct the row") from error
    if said is not None:
        fix = "let it raise ValueError for a row that cannot be played, and return nothing"
        raise ConfigError([f"check_task of the env {name} returned {said!r:.80}; {fix}"])


def check_search(stage: Stage) -> None:
    """Asks a search server one question: a run whose server is down would train on the episodes that do not search."""
    retriever = stage.retriever
    if not isinstance(retriever, HttpRetriever):
        return
    try:
        asyncio.run(retriever.retrieve(["ready?"], 1))
    except RetrievalError as error:
        fix = "start it (`posttrain serve-search INDEX`), or correct retrieval.url"
        raise ConfigError([f"the search server cannot be used: {error}; {fix}"]) from error


def make_stage(config: RLConfig, renderer: Renderer, tasks: Sequence[Task] = (), *, judged: bool = True) -> Stage:
    """Makes the retriever, the tools, and the rewards and envs that the config or one of the tasks names.

    judged: False = no rewards. Raises the error of the room that finds something wrong.
    """
    retriever = None if config.retrieval is None else make_retriever(config.retrieval, seed=config.run.seed)
    names = {config.env.name, *(task.env for task in tasks if task.env is not None)}
    rewards = load_rewards(config.reward, (task.reward for task in tasks)) if judged else {}
    check_tasks(rewards, tasks)
    tools = open_tools(config) if any(config.env_called(name).takes_tools for name in names) else {}
    warm(tools)
    return Stage(
        renderer=renderer,
        retriever=retriever,
        rewards=rewards,
        envs={name: env_maker(name, config, retriever, tools) for name in sorted(names)},
        tools=tools,
    )


def load_tokenizer(path: str) -> Any:
    """Raises ModelError for what cannot be read, whichever way transformers stumbles over it."""
    place = model_path(path)
    check_directory(place)
    try:
        return AutoTokenizer.from_pretrained(place)
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ModelError(
            f"no tokenizer could be loaded from model.path = {path} ({type(error).__name__}: {first}); it must be a "
            "directory with tokenizer.json beside config.json, or a hub id that can be reached"
        ) from error


def compares_answers(reward: RewardConfig, sources: Sequence[SourceConfig] = ()) -> bool:
    """Whether every row's reward normalises its accepted answers and compares them as text."""
    if reward.by is not None:
        parts = [*reward.by.rewards.values(), *([reward.by.default] if reward.by.default else [])]
        chosen = [{part.name} for part in parts]
    else:
        chosen = [{part.name for part in reward.parts.values()} or {reward.name}]
    own = [{source.reward} for source in sources if source.reward is not None]
    own += [{"another"} for source in sources if source.columns.reward is not None]  # each row its own
    return all(not names.isdisjoint(COMPARING) for names in (*chosen, *own))


def unscorable(answer: str) -> str | None:
    """Why an accepted answer could never be matched, or None."""
    return None if normalize_answer(answer) else "normalises to nothing, so that no prediction can equal it"


@dataclass(frozen=True, slots=True)
class EnvMaker:
    """Makes envs of one name. Each gets a copy of the options: a list among them that an env changes is its own."""

    factory: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.factory(**detached(dict(self.options)))


def env_maker(
    name: str, config: RLConfig, retriever: Retriever | None, tools: Mapping[str, Tool] | None = None
) -> Callable[..., Any]:
    """A function without arguments that makes an env called `name`, with its options, retriever and tools bound.

    Raises ConfigError for an unknown name, and for an env that needs a section which the config lacks.
    """
    if name not in config.envs and name != config.env.name:
        resolve(WORLDS, name, "env")  # for its error, which names the nearest
    env = config.env_called(name)
    options = dict(env.options)
    if env.takes_retriever:
        if retriever is None or config.retrieval is None:
            raise ConfigError([f"the env {name}, which some rows ask for, searches: add a `retrieval:` section"])
        options |= options_for(env.factory, {"retriever": retriever, "top_k": config.retrieval.top_k})
    if env.takes_tools:
        if not tools:
            raise ConfigError([f"the env {name}, which some rows ask for, calls tools: add a `tools:` section"])
        options["tools"] = tools_for(env, name, tools)
    return EnvMaker(env.factory, options)


def is_external(make: Callable[..., Any]) -> bool:
    """Whether what `env_maker` returned makes an external agent, which plays its episodes itself, and no env."""
    factory = make.factory if isinstance(make, EnvMaker) else make
    return isinstance(factory, type) and issubclass(factory, ExternalAgent)


def make_collector(
    config: RLConfig, parts: Stage, sampler: Sampler, params: SamplingParams, *, evaluates: bool = True
) -> Collector:
    """evaluates: for an evaluation, from which rewards with a state (evolving rubrics) must learn nothing."""
    rewards = {name: for_evaluation(r) for name, r in parts.rewards.items()} if evaluates else parts.rewards
    return Collector(spec=make_spec(config, parts, sampler, params), rewards=rewards, seed=config.run.seed)


def training_credit(config: RLConfig) -> Credit:
    algorithm = config.algorithm
    return Credit(algorithm.outcome_reward_coef, algorithm.turn_reward_coef, greedy=algorithm.needs_greedy)


def make_spec(config: RLConfig, parts: Stage, sampler: Sampler, params: SamplingParams) -> RolloutSpec:
    """How episodes are rolled out: by an env, or, for tasks of an external agent, by the agent behind the endpoint."""

    def make_env(task: Task) -> Any:
        return parts.envs[task.env or config.env.name]()

    def play_otherwise(ticket: Ticket, spec: RolloutSpec) -> AgentEpisode | None:
        found = agents.get(ticket.task.env or config.env.name)
        return None if found is None else AgentEpisode(ticket, spec, *found)

    made = {name: make() for name, make in parts.envs.items() if is_external(make)}
    agents = {name: (agent, Host(agent.host, agent.port)) for name, agent in made.items()}
    return RolloutSpec(
        make_env=make_env,
        sampler=sampler,
        renderer=parts.renderer,
        limits=config.limits,
        env_limits=config.env_limits,
        params=params,
        play_otherwise=play_otherwise if agents else None,
    )


def training_params(config: RLConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.limits.max_turn_tokens,
        temperature=config.sampling.temperature,
        top_p=config.sampling.top_p,
        top_k=config.sampling.top_k,
    )


def eval_params(config: RLConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.limits.max_turn_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        top_k=config.eval.top_k,
    )
