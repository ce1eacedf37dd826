"""A config -> the parts of a run, cheapest first: everything that can be wrong with the data is found before the model
loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from transformers import AutoTokenizer

from posttrain.chat import Renderer
from posttrain.config import ConfigError, EnvConfig, RLConfig
from posttrain.data import TaskSet, load_tasks
from posttrain.envs import Env
from posttrain.loops.collect import Collector
from posttrain.retrieval.config import make_retriever
from posttrain.retrieval.protocol import Retriever
from posttrain.rewards import Reward
from posttrain.rewards.config import load_rewards
from posttrain.rewards.normalize import normalize_answer
from posttrain.rollout import RolloutSpec
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import Sampler, SamplingParams
from posttrain.task import Task
from posttrain.trainer.loading import check_directory, model_path
from posttrain.trainer.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What an episode needs besides a task and a model: the words, the world and the judge."""

    renderer: Renderer
    retriever: Retriever | None
    rewards: Mapping[str | None, Reward]
    envs: Mapping[str, Callable[..., Env]]

    @property
    def tokenizer(self) -> Any:
        return self.renderer.tokenizer

    def close(self) -> None:
        for reward in self.rewards.values():
            reward.close()


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
    stage = make_stage(config, renderer, [*train, *(evaluation or ())])
    return Parts(
        renderer=renderer,
        retriever=stage.retriever,
        rewards=stage.rewards,
        envs=stage.envs,
        train=train,
        eval=evaluation,
    )


def load_renderer(config: RLConfig) -> Renderer:
    """Tokenizer and chat template of the model, probed."""
    renderer = Renderer(load_tokenizer(config.model.path), config.model.thinking)
    renderer.probe()
    return renderer


def load_part(config: RLConfig, part: Literal["train", "eval"], renderer: Renderer) -> TaskSet:
    """All tasks of one part of the data, measured on the ids that will be sent."""
    return load_tasks(
        config.data,
        part,
        measure=lambda task: len(renderer.prompt(task.prompt)),
        check_ground_truth=unscorable,
    )


def make_stage(config: RLConfig, renderer: Renderer, tasks: Sequence[Task] = ()) -> Stage:
    """The retriever, and the rewards and envs that the config or one of the tasks names."""
    retriever = None if config.retrieval is None else make_retriever(config.retrieval, seed=config.run.seed)
    names = {config.env.name, *(task.env for task in tasks if task.env is not None)}
    return Stage(
        renderer=renderer,
        retriever=retriever,
        rewards=load_rewards(config.reward, (task.reward for task in tasks)),
        envs={name: env_maker(name, config, retriever) for name in sorted(names)},
    )


def load_tokenizer(path: str) -> Any:
    check_directory(model_path(path))
    return AutoTokenizer.from_pretrained(model_path(path))


def unscorable(answer: str) -> str | None:
    """Why an accepted answer could never be matched, or None."""
    return None if normalize_answer(answer) else "normalises to nothing, so that no prediction can equal it"


def env_maker(name: str, config: RLConfig, retriever: Retriever | None) -> Callable[..., Env]:
    """Makes envs called `name`: the options of the config's env, the retriever for one that takes it."""
    env = config.env if name == config.env.name else EnvConfig(name=name)
    options = dict(env.options)
    if env.takes_retriever:
        if retriever is None or config.retrieval is None:
            raise ConfigError([f"the env {name}, which some rows ask for, searches: add a `retrieval:` section"])
        options |= {"retriever": retriever, "top_k": config.retrieval.top_k}
    return partial(env.factory, **options)


def make_collector(config: RLConfig, parts: Stage, sampler: Sampler, params: SamplingParams) -> Collector:
    return Collector(spec=make_spec(config, parts, sampler, params), rewards=parts.rewards, seed=config.run.seed)


def make_spec(config: RLConfig, parts: Stage, sampler: Sampler, params: SamplingParams) -> RolloutSpec:
    def make_env(task: Task) -> Env:
        return parts.envs[task.env or config.env.name]()

    return RolloutSpec(make_env=make_env, sampler=sampler, renderer=parts.renderer, limits=config.limits, params=params)


def make_sampler(policy: Policy, parts: Stage) -> NativeSampler:
    """One sampler for training and evaluation. It truncates when asked to; the config refuses that for training."""
    return NativeSampler(policy, parts.tokenizer, truncation="allow")


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
