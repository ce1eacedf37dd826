"""The critic: a decoder with one number per policy token, the expected return before that token is written."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.packing import Batch
from posttrain.trainer.compiling import compile_layers
from posttrain.trainer.last_layer import prepare_last_layer
from posttrain.trainer.lean_layers import quicken_layers
from posttrain.trainer.loading import ModelConfig, ModelError, load_decoder, no_progress_bars, pick_device, pick_dtype
from posttrain.trainer.norms import quicken_norms
from posttrain.trainer.optimizer import OptimizerConfig
from posttrain.trainer.policy import decoder_hidden_states, packed_hidden_states, scatter
from posttrain.trainer.ranks import Ranks, TrainerConfig
from posttrain.trainer.sequence import SequenceGroup
from posttrain.trainer.sharding import AtHand, RunGathered, shard, shard_alone, unsharded, whole_state

HEAD = "value_head"
HEAD_FILE = f"{HEAD}.safetensors"


class CriticConfig(BaseModel):
    """Which model values are learned with, and how fast."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = Field(default=None, description="directory or hub id; None = the policy's weights")
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    warmup_steps: int = Field(default=0, ge=0, description="first steps in which only the critic learns")
    value_clip: float | None = Field(default=0.2, gt=0, description="clip of the value around its old one; None = none")


class ValueHead(nn.Linear):
    """Computes in float32 at least, whatever hidden states it is given and its weights are gathered in."""

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        return nn.functional.linear(input.to(wide), self.weight.to(wide), self.bias.to(wide))


class Critic:
    """`values[t]` belongs to the state before token t: it is read from token t - 1, where log-prob t is read, too."""

    def __init__(self, module: nn.Module, head: nn.Linear) -> None:
        self.module = module
        self.head = head
        self.run_gathered: RunGathered = unsharded
        self.at_hand: AtHand = nullcontext
        self.sequence: SequenceGroup | None = None
        self._place: tuple[torch.device, torch.dtype] | None = None  # see `Policy`
        quicken_norms(module)
        self.narrows = prepare_last_layer(module)

    @classmethod
    def from_policy(
        cls, path: str | Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto"
    ) -> Critic:
        """The decoder of the language model at `path` below a new head of zeros, so that all values start at 0.

        A directory written by `Critic.save` is loaded with its head.
        """
        place = pick_device(str(device))
        module = load_decoder(path, place, pick_dtype(dtype, place))
        head = ValueHead(module.config.hidden_size, 1, device=place)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        critic = cls(module, head)
        if (Path(path) / HEAD_FILE).is_file():
            critic._load_head(Path(path) / HEAD_FILE)
        return critic

    @classmethod
    def from_config(cls, path: str | Path, config: ModelConfig) -> Critic:
        """See `from_policy`. config: how models are held, as for the policy."""
        critic = cls.from_policy(path, config.device, config.dtype)
        if config.gradient_checkpointing:
            critic.checkpoint_activations()
        if config.compiles_on(critic.device.type):
            compile_layers(critic.module)
        return critic

    def shard(self, ranks: Ranks, config: TrainerConfig, sequence: SequenceGroup | None = None) -> None:
        """See `Policy.shard`. The head becomes a part of the module; it computes in float32 as before."""
        assert ranks.mesh is not None
        if sequence is not None:
            self.sequence, self.narrows = sequence.fitted(self.module), False
        if not config.divides_weights:
            return
        self._place = (self.device, self.dtype)
        self.module.add_module(HEAD, self.head)
        if config.zero is None:
            shard_alone(self.head, ranks.mesh, offload=config.offload)
            self.run_gathered = shard(self.module, ranks, config, self.dtype)
        elif config.zero.stage == 3:
            self.narrows = False

    @property
    def device(self) -> torch.device:
        return self.head.weight.device if self._place is None else self._place[0]

    @property
    def dtype(self) -> torch.dtype:
        """See `Policy.dtype`."""
        return next(self.module.parameters()).dtype if self._place is None else self._place[1]

    @property
    def config(self) -> Any:
        return self.module.config

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable ones, by name."""
        named = dict(self.module.named_parameters()) | dict(self.head.named_parameters(prefix=HEAD))
        return [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]

    def values(self, batch: Batch) -> Tensor:
        """[T] float32, differentiable unless under no_grad; 0.0 off the loss mask."""
        return self.run_gathered(lambda: self._values(batch))

    def _values(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        rows, hidden = packed_hidden_states(self, batch, before_policy_only=True)
        written = batch.written()
        before = rows[written - 1]
        if self.sequence is not None:
            written, before = written[before >= 0], before[before >= 0]
        values = self.head(hidden[before])[:, 0]
        return scatter(values, written, len(batch), None if self.sequence is None else self.sequence.sum)

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        """[1, R, K] last hidden states of one row of R tokens."""
        quicken_layers(self.module, len(token_ids))
        decoder = self.module if self._place is None else self.module.forward  # `run_gathered` has gathered its weights
        return decoder_hidden_states(decoder, token_ids, positions, attention)

    def checkpoint_activations(self) -> None:
        """See `Policy.checkpoint_activations`."""
        self.module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.module.train()

    def state(self, *, keep: bool = True) -> dict[str, Tensor]:
        """A copy of the weights in the memory of the host, to be saved later, the head's named HEAD/NAME.

        Shards are gathered: every rank has to call it; with keep=False a rank only helps, and gets nothing.
        """
        if self._place is not None:
            gathered = whole_state(self, keep=keep)
            head = {f"{HEAD}/{name}": gathered.pop(f"{HEAD}.{name}") for name in self.head.state_dict() if keep}
            return {name: tensor.to(self.dtype) for name, tensor in gathered.items()} | head
        if not keep:
            return {}
        both = (self.module.state_dict(), self.head.state_dict(prefix=f"{HEAD}/"))
        return {name: tensor.to("cpu", copy=True) for state in both for name, tensor in state.items()}

    def save(self, directory: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """Hugging Face layout of the decoder, and the head beside it. state: these weights instead of those of now."""
        state = dict(self.state() if state is None else state)
        head = {name: state.pop(f"{HEAD}/{name}").contiguous() for name in self.head.state_dict()}
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            self.module.save_pretrained(target, state_dict=state)  # type: ignore[operator]
        save_file(head, target / HEAD_FILE)

    def _load_head(self, file: Path) -> None:
        tensors = load_file(file)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in self.head.state_dict().items()}
        if shapes != wanted:
            raise ModelError(f"{file} holds {shapes}, this critic's head is {wanted}")
        self.head.load_state_dict(tensors)
