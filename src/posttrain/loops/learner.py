"""Who learns: policy, critic and their optimizers, the frozen reference; and what of them a checkpoint holds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.algorithms import LOSSES
from posttrain.algorithms.kl import adapted_kl_coef, bounded, straight_through
from posttrain.algorithms.shaping import Running
from posttrain.config import RLConfig
from posttrain.trainer.critic import Critic
from posttrain.trainer.loading import load_config, model_path, pick_device
from posttrain.trainer.optimizer import Optimizer
from posttrain.trainer.parallel import keep_freed_memory
from posttrain.trainer.policy import Policy

OPTIMIZER_FILE = "optimizer.safetensors"
CRITIC_OPTIMIZER_FILE = "critic_optimizer.safetensors"
CRITIC_FOLDER = "critic"
MEMORY_FILE = "learner.json"  # numbers that a run has learnt besides its weights
MOVE_WITHOUT_ADVANTAGE = {"kl_cov"}  # losses with a term that is not proportional to the advantage
SMALL_HIDDEN_SIZE = 1024


@dataclass(slots=True, kw_only=True)
class Learner:
    """The models of a run. `ref` is there only when a KL is asked for, `critic` only when the config has one."""

    config: RLConfig
    policy: Policy
    optimizer: Optimizer
    ref: Policy | None = None
    critic: Critic | None = None
    critic_optimizer: Optimizer | None = None
    sampler_shares_weights: bool = True  # the sampler runs `policy` itself
    kl_coef: float = 0.0  # as the controller has left it
    running: Running = field(default_factory=Running)  # of all rewards so far, for their normalisation

    @property
    def temperature(self) -> float:
        return self.config.sampling.temperature

    def policy_learns(self, step: int) -> bool:
        """False while only the critic warms up. step: numbered from 1."""
        return self.config.critic is None or step > self.config.critic.warmup_steps

    @property
    def silent_groups_may_go(self) -> bool:
        """Whether leaving out groups whose advantages are all 0 is exact: when nothing else moves a weight.

        The KL term of the loss does (unless it is switched off for them), so do an entropy bonus and a critic, whose
        values change between the epochs of a step, and so may a loss that is not ours.
        """
        algorithm = self.config.algorithm
        kl_moves = self.kl_in_loss and algorithm.kl_on_silent_groups
        proportional = algorithm.loss in LOSSES and algorithm.loss not in MOVE_WITHOUT_ADVANTAGE
        return proportional and not kl_moves and self.critic is None and algorithm.entropy_coef == 0

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[T] by the chosen estimator, with the gradient of another one if asked for."""
        algorithm = self.config.algorithm
        functions = algorithm.functions
        value = functions["kl_estimator"](logprobs, ref_logprobs, mask)
        if "kl_gradient" in functions:
            value = straight_through(value, functions["kl_gradient"](logprobs, ref_logprobs, mask))
        return value if algorithm.kl_limit is None else bounded(value, algorithm.kl_limit)

    def adapt_kl_coef(self, measured: float | None, episodes: int) -> None:
        """The controller's step, once after each rollout; a fixed coefficient stays."""
        algorithm = self.config.algorithm
        if algorithm.kl_target is not None and measured is not None:
            target, horizon = algorithm.kl_target, algorithm.kl_horizon
            self.kl_coef = adapted_kl_coef(self.kl_coef, measured, target=target, horizon=horizon, episodes=episodes)

    @property
    def kl_in_loss(self) -> bool:
        return self.config.algorithm.kl_coef > 0 and self.config.algorithm.kl_in == "loss"

    @property
    def kl_is_only_measured(self) -> bool:
        return self.config.algorithm.measure_kl and self.config.algorithm.kl_coef == 0

    @property
    def parallel_micro_batches(self) -> int:
        """Micro-batches worked on at once: threads on a CPU, one at a time on a GPU."""
        return self.config.batch.cpu_workers if self.policy.device.type == "cpu" else 1


def make_learner(config: RLConfig, optimizer_steps: int, checkpoint: Path | None = None) -> Learner:
    """Loads the models of a new run, or those of a checkpoint together with their optimizers."""
    model = config.model if checkpoint is None else config.model.model_copy(update={"path": str(checkpoint)})
    if pick_device(model.device).type == "cpu":  # before anything is computed: start-up checks stall, too
        hidden_size = load_config(model_path(model.path)).get_text_config().hidden_size
        torch.set_num_threads(threads_for(hidden_size))
        if hidden_size < SMALL_HIDDEN_SIZE:
            keep_freed_memory()
    policy = Policy.from_config(model)
    learner = Learner(
        config=config,
        policy=policy,
        optimizer=Optimizer(policy.parameters(), config.optimizer, optimizer_steps),
        ref=Policy.from_config(config.model) if config.algorithm.kl_coef > 0 or config.algorithm.measure_kl else None,
        kl_coef=config.algorithm.kl_coef,
    )
    if config.critic is not None:
        start = config.critic.path or config.model.path if checkpoint is None else checkpoint / CRITIC_FOLDER
        learner.critic = Critic.from_policy(start, config.model.device, config.model.dtype)
        learner.critic_optimizer = Optimizer(learner.critic.parameters(), config.critic.optimizer, optimizer_steps)
    if checkpoint is not None:
        _load_optimizers(learner, checkpoint)
        memory = json.loads((checkpoint / MEMORY_FILE).read_text(encoding="utf-8"))
        learner.kl_coef, learner.running = memory["kl_coef"], Running(**memory["running"])
    return learner


def threads_for(hidden_size: int) -> int:
    """torch threads on a CPU: one where Python threads fill the cores (engines and micro-batches side by side).

    The matrices of a small model are done before a second torch thread has woken up, and its barriers stall beside a
    busy neighbour: 32 x 640 x 2048 took 12 ms instead of 1. Larger models hold too much memory for two of everything.
    """
    return 1 if hidden_size < SMALL_HIDDEN_SIZE else os.cpu_count() or 1


def save_learner(learner: Learner, folder: Path, tokenizer: Any) -> None:
    """The policy in Hugging Face layout in `folder` itself, everything else beside it."""
    learner.policy.save(folder, tokenizer)
    save_file(dict(learner.optimizer.state_tensors()), folder / OPTIMIZER_FILE)
    memory = {"kl_coef": learner.kl_coef, "running": asdict(learner.running)}
    (folder / MEMORY_FILE).write_text(json.dumps(memory), encoding="utf-8")
    if learner.critic is not None and learner.critic_optimizer is not None:
        learner.critic.save(folder / CRITIC_FOLDER)
        save_file(dict(learner.critic_optimizer.state_tensors()), folder / CRITIC_OPTIMIZER_FILE)


def _load_optimizers(learner: Learner, checkpoint: Path) -> None:
    named: Mapping[str, Optimizer | None] = {
        OPTIMIZER_FILE: learner.optimizer,
        CRITIC_OPTIMIZER_FILE: learner.critic_optimizer,
    }
    for file, optimizer in named.items():
        if optimizer is not None:
            optimizer.load_state_tensors(load_file(checkpoint / file))
