"""DeepSpeed's ZeRO (Rajbhandari et al. 2020) in the place of FSDP2: the same steps by another engine.

Stage 2 divides masters, moments and gradients among the ranks and leaves the whole weights with each; stage 3 divides
these, too, and gathers those of a module right before it is computed. The engine owns gradients and update. What a step
is stays ours: the schedule, what decays, what is clipped, when an update is skipped, and that gradients are summed over
ranks and micro-batches, where the engine would average them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from posttrain.trainer.loading import ModelError
from posttrain.trainer.optimizer import (
    MASTER,
    STEPS_DONE,
    OptimizerConfig,
    Stepper,
    StepReport,
    adamw,
    by_parameter,
)
from posttrain.trainer.ranks import DeepSpeedConfig, Ranks, TrainerConfig
from posttrain.trainer.sharding import AtHand, RunGathered

Result = TypeVar("Result")
MOMENTS = ("exp_avg", "exp_avg_sq")


class Trained(Protocol):
    """What is needed of a policy or critic."""

    module: nn.Module
    run_gathered: RunGathered
    at_hand: AtHand

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def parameters(self) -> list[tuple[str, nn.Parameter]]: ...


class ZeroOptimizer(Stepper):
    """Divides a model among all ranks and steps it; every rank has to make one, and to call whatever it calls.

    Masters and moments are float32. From now on forwards of the model go through the engine (`run_gathered`), which
    takes a gradient for one of all ranks' mean: it is given as many times as there are ranks.
    """

    def __init__(
        self, model: Trained, config: OptimizerConfig, total_steps: int | None, trainer: TrainerConfig, ranks: Ranks
    ) -> None:
        super().__init__(model.parameters(), config, total_steps)
        assert trainer.zero is not None
        self._ranks = ranks
        self._stage = trainer.zero.stage
        self._mastered = model.dtype is not torch.float32
        self._shapes = {name: p.shape for name, p in self.named.items()}
        wide = {name: p.detach().clone() for name, p in self.named.items() if p.dtype is not model.dtype}
        self._base = adamw(self.named.values(), config)
        self._deepspeed = _deepspeed(model.device)
        half = model.dtype is torch.bfloat16
        options = _options(trainer.zero, clip=config.max_grad_norm, half=half, offload=trainer.offload)
        room = _Room(model.module)
        self._engine = self._deepspeed.initialize(model=room, optimizer=self._base, config=options)[0]
        self._make_moments()
        model.run_gathered = self._run_gathered
        model.at_hand = self._deepspeed.zero.GatheredParameters
        for name, value in wide.items():
            self._set(name, MASTER, value)

    def step(self) -> StepReport:
        lr = self.lr
        for group in self._base.param_groups:
            group["lr"] = lr
        self._engine.step()
        self.pass_over()
        return StepReport(float(self._engine.get_global_grad_norm()), lr, not self._engine.was_step_applied())

    def state_tensors(self, *, keep: bool = True) -> dict[str, Tensor]:
        tensors = {STEPS_DONE: torch.tensor(self.steps_done)}
        for name in self.named:
            for key, value in self._state_of(name):
                if keep:
                    tensors[f"{name}/{key}"] = value.to("cpu", copy=True).contiguous()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        states = by_parameter(tensors, self._shapes)
        for name, state in states.items():
            for key, value in state.items():
                self._set(name, key, value)
        self.steps_done = int(tensors[STEPS_DONE].item())

    def _run_gathered(self, work: Callable[[], Any], /) -> Any:
        result = self._engine(work)
        for tensor in result if isinstance(result, tuple) else (result,):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: grad * self._ranks.size)
        return result

    def _state_of(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(key, whole tensor) of the state of one parameter; a collective, so every rank has to read all of it."""
        parameter, read = self.named[name], self._deepspeed.utils
        if self._mastered:
            yield MASTER, read.safe_get_full_fp32_param(parameter)
        step = next(iter(self._base.state.values()))["step"]
        if not step:
            return
        yield "step", step
        for key in MOMENTS:
            yield key, read.safe_get_full_optimizer_state(parameter, key)

    def _set(self, name: str, key: str, value: Tensor) -> None:
        parameter = self.named[name]
        value = value.to(parameter.device, torch.float32)
        if key == "step":
            for state in self._base.state.values():
                state["step"].copy_(value)
        elif self._stage == 2 and key == MASTER:
            self._deepspeed.utils.safe_set_full_fp32_param(parameter, value)
        elif self._stage == 2:
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, value, key)
        else:
            self._set_share(parameter, key, value)

    def _set_share(self, parameter: Any, key: str, value: Tensor) -> None:
        """Sets this rank's share of a padded value; DeepSpeed's own way fails where the size does not divide evenly."""
        size = parameter.ds_tensor.numel()
        padded = nn.functional.pad(value.flatten(), (0, size * self._ranks.size - value.numel()))
        share = padded[self._ranks.rank * size :][:size]
        if key == MASTER:
            self._deepspeed.utils.safe_set_local_fp32_param(parameter, share)
        else:
            self._deepspeed.utils.safe_set_local_optimizer_state(parameter, share, key)

    def _make_moments(self) -> None:
        """Makes the moments before the first step: DeepSpeed would otherwise link those of the first group only."""
        zero = self._engine.optimizer
        masters = zero.single_partition_of_fp32_groups if self._stage == 2 else zero.fp32_partitioned_groups_flat
        for master in masters:
            moments = {key: torch.zeros_like(master, requires_grad=False) for key in MOMENTS}
            self._base.state[master] = {"step": torch.zeros((), device=master.device), **moments}
        if self._stage == 2:
            zero._lazy_init_hp_params_optimizer_state()


class _Room(nn.Module):
    """The module that DeepSpeed wraps; its forward calls the given function, with the weights gathered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, work: Callable[[], Result]) -> Result:
        return work()


def _deepspeed(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    try:
        import deepspeed  # type: ignore[import-not-found]
    except ImportError as error:
        raise ModelError(
            f"trainer.backend is deepspeed, which cannot be imported ({error}); pip install 'posttrain[deepspeed]', or "
            "set fsdp2"
        ) from error
    if device.type == "cpu":  # it would compile a collective of its own, a minute of g++, where gloo will do
        deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # it calls collectives by their old names
    return deepspeed


def _options(config: DeepSpeedConfig, *, clip: float | None, half: bool, offload: bool) -> dict[str, Any]:
    """A step is over when we say so (no managed accumulation); all sums are float32."""
    zero: dict[str, Any] = {"stage": config.stage, "reduce_bucket_size": config.bucket_elements}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.stage == 3:
        zero["stage3_param_persistence_threshold"] = config.persistent_below
        zero |= {"offload_param": {"device": "cpu"}} if offload else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": clip or 0.0,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": half, "check_grad_overflow": True},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
