"""The models of a run: policy, critic, their optimizers, the frozen reference; and what a checkpoint holds of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.algorithms import LOSSES
from posttrain.algorithms.kl import adapted_kl_coef, bounded, straight_through
from posttrain.algorithms.shaping import Running
from posttrain.config import ConfigError, RLConfig
from posttrain.runs.rng import seed_everything
from posttrain.trainer.critic import HEAD, Critic
from posttrain.trainer.distributed_optimizer import DistributedOptimizer
from posttrain.trainer.loading import ModelConfig, load_config, model_path, pick_device
from posttrain.trainer.lora import ADAPTER
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig, Stepper, is_wide
from posttrain.trainer.parallel import keep_freed_memory
from posttrain.trainer.policy import Policy, base_below, keep
from posttrain.trainer.ranks import ALONE, Ranks, TrainerConfig
from posttrain.trainer.sequence import SequenceGroup
from posttrain.trainer.sharding import before_backward, copy_weights, free_gathered
from posttrain.trainer.shards_on_disk import read_shards, write_shards
from posttrain.trainer.zero import ZeroOptimizer
from posttrain.weights.gather import gathered_state

OPTIMIZER_FILE = "optimizer.safetensors"
CRITIC_OPTIMIZER_FILE = "critic_optimizer.safetensors"
CRITIC_FOLDER = "critic"
MEMORY_FILE = "learner.json"  # numbers that a run has learnt besides its weights
MOVE_WITHOUT_ADVANTAGE = {"kl_cov"}  # losses with a term that is not proportional to the advantage
SMALL_HIDDEN_SIZE = 1024


@dataclass(slots=True, kw_only=True)
class Learner:
    """The models of a run. `ref` is there only when a KL is asked for, `critic` only when the config has one.

    On several ranks each rank has a learner, with its shards of the models. `replica` is a second copy of the policy,
    for the native sampler of this rank: whole where the policy is sharded, and in an asynchronous run with the
    weights that it goes on sampling with while the policy is trained. Samplers in processes of their own need none.
    """

    config: RLConfig
    policy: Policy
    optimizer: Stepper
    ref: Policy | None = None
    critic: Critic | None = None
    critic_optimizer: Stepper | None = None
    sampler_shares_weights: bool = True  # and computes as `policy` does: its log-probs need not be computed again
    kl_coef: float = 0.0  # as the controller has left it
    running: Running = field(default_factory=Running)  # of all rewards so far, for their normalisation
    ranks: Ranks = ALONE
    sequence: SequenceGroup | None = None  # ranks that share each micro-batch with this one
    replica: Policy | None = None

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
        """[T] KL by `algorithm.kl_estimator`, with the gradient of `algorithm.kl_gradient` where that is set."""
        algorithm = self.config.algorithm
        functions = algorithm.functions
        value = functions["kl_estimator"](logprobs, ref_logprobs, mask)
        if "kl_gradient" in functions:
            value = straight_through(value, functions["kl_gradient"](logprobs, ref_logprobs, mask))
        return value if algorithm.kl_limit is None else bounded(value, algorithm.kl_limit)

    def adapt_kl_coef(self, measured: float, episodes: int) -> None:
        """One step of the adaptive KL controller, after each rollout; without `algorithm.kl_target` nothing happens.

        measured: mean KL per token. episodes: how many were rolled out.
        """
        algorithm = self.config.algorithm
        if algorithm.kl_target is not None:
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
        """Micro-batches worked on at once: threads on a CPU, one at a time on a GPU, one on each of several ranks."""
        if self.ranks.size > 1:
            return self.data_parallel_size
        return self.config.batch.cpu_workers if self.policy.device.type == "cpu" else 1

    @property
    def data_parallel_size(self) -> int:
        """How many teams of ranks there are; the ranks of a team work on the same micro-batch."""
        return self.ranks.size // self.config.trainer.team

    @property
    def data_parallel_rank(self) -> int:
        """The number of this rank's team, from 0."""
        return self.ranks.rank // self.config.trainer.team

    @property
    def is_first_of_team(self) -> bool:
        """The one rank of a team that contributes its results to sums over all ranks."""
        return self.ranks.rank % self.config.trainer.team == 0

    @property
    def sampled(self) -> Policy:
        """The policy that a sampler of this process runs: the replica where there is one."""
        return self.policy if self.replica is None else self.replica

    def publish(self) -> None:
        """Copies the policy's weights to the replica, if there is one and its version is another."""
        if self.replica is not None and self.replica.version != self.policy.version:
            copy_weights(self.policy, self.replica.module)
            self.replica.version = self.policy.version

    def before_backward(self, module: nn.Module, *, last: bool) -> None:
        """See `sharding.before_backward`. With `trainer.reshard_after_forward` every pass reduces gradients itself."""
        if not self.config.trainer.reshard_after_forward:
            before_backward(module, last=last)

    def free_gathered(self) -> None:
        """See `sharding.free_gathered`."""
        for model in (self.policy, self.ref, self.critic):
            if model is not None:
                free_gathered(model.module)


@dataclass(frozen=True, slots=True)
class Models:
    """Which models a process of a run loads: those of a new run, or those of a checkpoint."""

    config: RLConfig
    optimizer_steps: int  # of the whole run
    checkpoint: Path | None = None
    version: int = 0  # of the policy: optimizer steps behind its weights

    def load(self, ranks: Ranks) -> Learner:
        seed_everything(self.config.run.seed)
        learner = make_learner(self.config, self.optimizer_steps, self.checkpoint, ranks)
        learner.policy.version = learner.sampled.version = self.version
        return learner


def make_learner(
    config: RLConfig, optimizer_steps: int, checkpoint: Path | None = None, ranks: Ranks = ALONE
) -> Learner:
    """Loads the models of a new run, or those of a checkpoint together with their optimizers."""
    model = config.model if checkpoint is None else model_in(checkpoint, config.model)
    if pick_device(model.device).type == "cpu":  # before anything is computed: start-up checks stall, too
        hidden_size = load_config(model_path(model.path)).get_text_config().hidden_size
        torch.set_num_threads(max(1, threads_for(hidden_size) // ranks.on_this_host))
        if hidden_size < SMALL_HIDDEN_SIZE:
            keep_freed_memory()
    ranks, sequence = _teams(config, ranks)
    policy = Policy.from_config(_trained(model, config.trainer, ranks), seed=config.run.seed)
    ref = _make_ref(config, policy, ranks, sequence) if wants_reference(config) else None
    policy = _spread(policy, config.trainer, ranks, sequence)
    learner = Learner(
        config=config,
        policy=policy,
        optimizer=_optimizer(policy, config.optimizer, optimizer_steps, ranks, config.trainer),
        sampler_shares_weights=config.sampler.computes_as_trainer,
        ref=ref,
        kl_coef=config.algorithm.kl_coef,
        ranks=ranks,
        sequence=sequence,
        replica=Policy.from_config(model, seed=config.run.seed) if needs_replica(config, ranks.size) else None,
    )
    if config.critic is not None:
        start = config.critic.path or config.model.path if checkpoint is None else checkpoint / CRITIC_FOLDER
        critic = Critic.from_config(start, _trained(config.model, config.trainer, ranks))
        learner.critic = _spread(critic, config.trainer, ranks, sequence)
        learner.critic_optimizer = _optimizer(
            learner.critic, config.critic.optimizer, optimizer_steps, ranks, config.trainer
        )
    if checkpoint is not None:
        _load_optimizers(learner, checkpoint)
        memory = json.loads((checkpoint / MEMORY_FILE).read_text(encoding="utf-8"))
        learner.kl_coef, learner.running = memory["kl_coef"], Running(**memory["running"])
    return learner


def needs_replica(config: RLConfig, ranks: int) -> bool:
    """Whether a rank holds the policy a second time, for its sampler."""
    shares = config.sampler.engine == "native" and not config.cluster.samplers  # others have copies of their own
    return shares and (_divided(config, ranks) or config.sampling.max_staleness is not None)


def _divided(config: RLConfig, ranks: int) -> bool:
    """Whether no rank has all weights of the policy."""
    return ranks > 1 and config.trainer.divides_weights


def wants_reference(config: RLConfig) -> bool:
    return config.algorithm.kl_coef > 0 or config.algorithm.measure_kl


def shares_reference(config: RLConfig, ranks: int) -> bool:
    """Whether the reference is the policy's own weights, below its adapters: no second copy is held."""
    return not _divided(config, ranks) and config.model.lora is not None and config.model.lora.path is None


def model_in(checkpoint: Path, model: ModelConfig) -> ModelConfig:
    """The model of a run as a checkpoint has it: its weights, or its adapters on the weights of `model.path`."""
    if model.lora is None:
        return model.model_copy(update={"path": str(checkpoint)})
    lora = model.lora.model_copy(update={"path": str(checkpoint / ADAPTER)})
    return model.model_copy(update={"lora": lora})


def _trained(model: ModelConfig, trainer: TrainerConfig, ranks: Ranks) -> ModelConfig:
    """The model config without `compile` where layers cannot be compiled: ZeRO-3 gathers the modules inside a layer one
    by one, and Megatron-core replaces the layers."""
    in_parts = trainer.backend == "megatron" or (trainer.zero is not None and trainer.zero.stage == 3)
    return model.model_copy(update={"compile": False}) if ranks.size > 1 and in_parts else model


Model = TypeVar("Model", Policy, Critic)


def _spread(model: Model, trainer: TrainerConfig, ranks: Ranks, sequence: SequenceGroup | None) -> Model:
    if ranks.size > 1:
        model.shard(ranks, trainer, sequence)
    return model


def _teams(config: RLConfig, ranks: Ranks) -> tuple[Ranks, SequenceGroup | None]:
    """The ranks divided as the config asks for. Raises ConfigError where there are too few or too many."""
    trainer = config.trainer
    problem = trainer.problem_with(ranks.size)
    if problem is not None:
        raise ConfigError([problem])
    return ranks.divided(trainer.tensor_parallel), SequenceGroup.of(ranks, trainer)


def _optimizer(
    model: Policy | Critic, config: OptimizerConfig, steps: int, ranks: Ranks, trainer: TrainerConfig
) -> Stepper:
    if ranks.size > 1 and trainer.zero is not None:
        return ZeroOptimizer(model, config, steps, trainer, ranks)
    if isinstance(model, Policy) and model.megatron is not None:
        return model.megatron.optimizer(model.parameters(), config, steps)
    if ranks.size > 1 and not trainer.divides_weights:
        return DistributedOptimizer.of_whole(model.parameters(), config, steps)
    half = ranks.size > 1 and not is_wide(model.dtype)
    mastered = {name for name, _ in model.parameters() if not name.startswith(HEAD)} if half else set[str]()
    return Optimizer(model.parameters(), config, steps, mastered=mastered)


def _make_ref(config: RLConfig, policy: Policy, ranks: Ranks, sequence: SequenceGroup | None) -> Policy:
    """The reference: the policy as it was before the first step.

    Where it is sharded its parameters are frozen, and so in the dtype that it computes in, without masters or moments.
    A run with DeepSpeed shards it by FSDP2: the two differ only in the update, and the reference has none.
    """
    if shares_reference(config, ranks.size):
        return _spread(base_below(policy, config.model), config.trainer, ranks, sequence)
    trainer = config.trainer
    trainer = trainer if trainer.zero is None else trainer.model_copy(update={"backend": "fsdp2", "deepspeed": None})
    ref = Policy.from_config(_trained(config.model, trainer, ranks), seed=config.run.seed)
    if ranks.size > 1:
        ref.module.requires_grad_(False)
    return _spread(ref, trainer, ranks, sequence)


def threads_for(hidden_size: int) -> int:
    """torch threads on a CPU: one where Python threads fill the cores (engines and micro-batches side by side).

    The matrices of a small model are done before a second torch thread has woken up, and its barriers stall beside a
    busy neighbour: 32 x 640 x 2048 took 12 ms instead of 1. Larger models hold too much memory for two of everything.
    """
    return 1 if hidden_size < SMALL_HIDDEN_SIZE else os.cpu_count() or 1


def staged(learner: Learner, tokenizer: Any = None) -> Callable[[Path], None]:
    """Takes what a checkpoint holds, as it is now, and returns the function that writes it to a folder.

    The folder gets the policy in Hugging Face layout (of a policy with adapters the adapters alone, in `adapter/`), and
    critic, optimizers and `learner.json` beside it. With `checkpoint.background` everything is copied, so that training
    may go on while it is written; without, the policy's weights are read when the function is called.
    Every rank has to call both: rank 0 writes what was gathered, and with `checkpoint.sharded` each its own shards.
    """
    learner.publish()
    leads = learner.ranks.leads
    writes = [_staged_state(learner, learner.optimizer, OPTIMIZER_FILE)]
    if learner.critic is not None and learner.critic_optimizer is not None:
        critic, values = learner.critic, learner.critic.state(keep=leads)
        writes += [_staged_state(learner, learner.critic_optimizer, CRITIC_OPTIMIZER_FILE)]
        writes += [lambda folder: critic.save(folder / CRITIC_FOLDER, values)] if leads else []
    state = _policy_state(learner)
    if leads:
        policy = learner.sampled
        memory = json.dumps({"kl_coef": learner.kl_coef, "running": asdict(learner.running)})
        writes += [
            lambda folder: keep(policy, folder, tokenizer, state),
            lambda folder: (folder / MEMORY_FILE).write_text(memory, encoding="utf-8"),
        ]

    def write(folder: Path) -> None:
        for part in writes:
            part(folder)

    return write


def _policy_state(learner: Learner) -> dict[str, Tensor] | None:
    """The weights that rank 0 saves. None: those of `learner.sampled` at the moment of writing. Every rank calls it."""
    if _divided(learner.config, learner.ranks.size) and learner.replica is None:
        return gathered_state(learner.policy, keep=learner.ranks.leads)
    return learner.sampled.state() if learner.ranks.leads and learner.config.checkpoint.background else None


def _staged_state(learner: Learner, optimizer: Stepper, file: str) -> Callable[[Path], object]:
    ranks = learner.ranks
    if isinstance(optimizer, Optimizer) and learner.config.checkpoint.sharded:
        shards = optimizer.state_tensors(gather=False)
        return lambda folder: write_shards(folder / Path(file).stem, shards, ranks)
    tensors = optimizer.state_tensors(keep=ranks.leads)
    return lambda folder: save_file(tensors, folder / file) if ranks.leads else None


def _load_optimizers(learner: Learner, checkpoint: Path) -> None:
    named: Mapping[str, Stepper | None] = {
        OPTIMIZER_FILE: learner.optimizer,
        CRITIC_OPTIMIZER_FILE: learner.critic_optimizer,
    }
    for file, optimizer in named.items():
        shards = checkpoint / Path(file).stem
        if optimizer is None:
            continue
        if shards.is_dir():
            sharded = isinstance(optimizer, Optimizer)
            masters = dict(zip(optimizer.named, optimizer.masters, strict=True)) if sharded else None
            optimizer.load_state_tensors(read_shards(shards, masters, learner.ranks))
        else:
            optimizer.load_state_tensors(load_file(checkpoint / file))
