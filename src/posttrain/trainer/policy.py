"""The policy: a causal language model that gives the log-prob of every token it wrote.

Sees only `Batch`es; never hears of rewards, groups or algorithms. `logprobs[t]` is log p(token t | tokens of the same
segment before t) at `temperature`, 0.0 where `loss_mask` is False.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.packing import Batch
from posttrain.trainer.attention import AttentionContext, PackedAttention, layout_of
from posttrain.trainer.checks import check_policy
from posttrain.trainer.compiling import compile_layers
from posttrain.trainer.flash_attention import use_varlen, version_on
from posttrain.trainer.fused import LogitsRule, head_product
from posttrain.trainer.last_layer import ReadRows, prepare_last_layer, renumbered, rows_read
from posttrain.trainer.lean_layers import quicken_layers
from posttrain.trainer.loading import (
    ModelConfig,
    ModelError,
    build_module,
    load_module,
    pick_device,
    pick_dtype,
    write_module,
)
from posttrain.trainer.lora import ADAPTER, save_adapter, trained_state, with_adapters, without_adapters
from posttrain.trainer.megatron import MegatronDecoder, divide
from posttrain.trainer.norms import quicken_norms
from posttrain.trainer.prefix import SharedPrefixAttention, shared_layout, use_shared
from posttrain.trainer.prefix_varlen import VarlenAttention, varlen_layout
from posttrain.trainer.ranks import Ranks, TrainerConfig
from posttrain.trainer.sequence import SequenceGroup
from posttrain.trainer.sharding import AtHand, RunGathered, shard, unsharded
from posttrain.trainer.vocabulary import head_logprobs


class Policy:
    """A module with its `version`: the optimizer steps behind its weights (the loop counts)."""

    def __init__(self, module: nn.Module, *, version: int = 0, check: bool = True) -> None:
        self.module = module
        self.version = version
        self.rule = logits_rule(module)
        self.decoder = decoder_of(module)
        self.run_gathered: RunGathered = unsharded
        self.at_hand: AtHand = nullcontext
        quicken_norms(self.decoder)
        self.sequence: SequenceGroup | None = None  # with whom it shares the rows of a micro-batch
        self.megatron: MegatronDecoder | None = None  # in the place of decoder and head
        self._place: tuple[torch.device, torch.dtype] | None = None  # where and in what a sharded module computes
        self.narrows = check and prepare_last_layer(self.decoder)
        if check:
            check_policy(self)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        version: int = 0,
    ) -> Policy:
        """Loads safetensors in Hugging Face layout. Raises ModelError naming what is wrong with the directory."""
        place = pick_device(str(device))
        return cls(load_module(path, place, pick_dtype(dtype, place)), version=version)

    @classmethod
    def from_config(cls, config: ModelConfig, *, version: int = 0, seed: int = 0) -> Policy:
        """seed: of fresh adapters. Raises ModelError as `load` and `with_adapters` do."""
        place = pick_device(config.device)
        module = load_module(config.path, place, pick_dtype(config.dtype, place))
        if config.lora is not None:
            module = with_adapters(module, config.lora, seed=seed)
        policy = cls(module, version=version)
        if config.gradient_checkpointing:
            policy.checkpoint_activations()
        if config.compiles_on(place.type):
            compile_layers(policy.module)
        return policy

    @classmethod
    def random(cls, config: Any, *, seed: int, device: str = "cpu", dtype: str | torch.dtype = torch.float32) -> Policy:
        """Fresh weights of a transformers config; the global random state is left as it was."""
        place = pick_device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(build_module(config, place, pick_dtype(dtype, place)))

    def shard(self, ranks: Ranks, config: TrainerConfig, sequence: SequenceGroup | None = None) -> None:
        """Shards the parameters over `ranks`, in place. From now on a forward is a collective: all ranks run as many.

        DeepSpeed shards them when its optimizer is made (`zero.ZeroOptimizer`); with `ddp` weights stay whole on every
        rank (`distributed_optimizer.DistributedOptimizer`), and nothing is done here.

        sequence: the ranks that work on the same micro-batch and divide its rows among them; None = no such ranks.
        """
        if sequence is not None:
            self.sequence, self.narrows = sequence.fitted(self.module), False
        if not config.divides_weights:
            return
        self._place = (self.device, self.dtype)
        if config.backend == "megatron":
            self.narrows = False
            self.megatron = divide(self, ranks, config)
            self.at_hand = self.megatron.at_hand
        elif config.zero is None:
            self.run_gathered = shard(self.module, ranks, config, self.dtype)
        elif config.zero.stage == 3:
            self.narrows = False  # it leaves modules half-way, which then would stay gathered

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device if self._place is None else self._place[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in; sharded parameters may be stored in a wider one."""
        return next(self.module.parameters()).dtype if self._place is None else self._place[1]

    @property
    def config(self) -> Any:
        return self.module.config

    @property
    def computes_prefixes_once(self) -> bool:
        """Whether a prefix that the segments of a group share is computed once for all of them."""
        where = (self.device, self.dtype, self.module)
        return use_shared(*where) or use_varlen(*where)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable ones, by name, in the module's order; tied weights once."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """[T] float32, differentiable unless under no_grad."""
        return self.run_gathered(lambda: self._at_policy_tokens(batch, temperature, with_entropy=False)[0])

    def logprobs_and_entropy(self, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """([T] log-probs, [T] entropies of the distributions the tokens were drawn from), 0.0 off the mask."""
        work = partial(self._at_policy_tokens, batch, temperature, with_entropy=True)
        logprobs, entropy = self.run_gathered(work)
        assert entropy is not None
        return logprobs, entropy

    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor:
        """[1, R, K] last hidden states of one row of R tokens; `attention` says who sees whom."""
        if self.megatron is not None:
            return self.megatron(token_ids, positions, attention)
        quicken_layers(self.decoder, len(token_ids))
        return decoder_hidden_states(self.decoder, token_ids, positions, attention)

    def next_token_logits(self, hidden: Tensor) -> Tensor:
        """[.., V] float32 logits as the model itself would give them (before temperature)."""
        head = head_of(self.module)
        return self.rule.apply(head_product(hidden, head.weight, head.bias))

    def checkpoint_activations(self) -> None:
        """Recomputes activations in the backward pass; transformers does so in train mode only (dropout is off)."""
        self.module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.module.train()

    @property
    def adapted(self) -> bool:
        """Whether only adapters train."""
        return hasattr(self.module, "peft_config")

    def state(self) -> dict[str, Tensor]:
        """A copy of the weights (the adapters alone where only they train) in host memory, to be saved later.

        Tied weights stay tied.
        """
        copies: dict[int, Tensor] = {}
        state = trained_state(self.module) if self.adapted else self.module.state_dict()
        for tensor in state.values():
            copies.setdefault(tensor.data_ptr(), tensor.to("cpu", copy=True))
        return {name: copies[tensor.data_ptr()] for name, tensor in state.items()}

    def save(self, directory: str | Path, tokenizer: Any = None) -> None:
        """Writes Hugging Face layout (config.json, model.safetensors); with a tokenizer, its files as they are.

        A model with LoRA adapters is written merged, so that it loads anywhere, with the adapters beside it in
        `adapter/`.
        """
        module: Any = self.module
        if self.adapted:
            save_adapter(module, Path(directory) / ADAPTER)
            module = copy.deepcopy(module).merge_and_unload()  # merging in place could not be undone to the bit
        write_module(module, Path(directory), tokenizer)

    def _at_policy_tokens(
        self, batch: Batch, temperature: float, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch = batch.to(self.device)
        rows, hidden = packed_hidden_states(self, batch, before_policy_only=True)
        written = batch.written()
        before = rows[written - 1]  # token t is predicted from its predecessor, which is of the same segment
        if self.sequence is not None:
            written, before = written[before >= 0], before[before >= 0]
        how: dict[str, Any] = {"temperature": temperature, "rule": self.rule, "with_entropy": with_entropy}
        read, targets = hidden.index_select(0, before), batch.token_ids[written]
        if self.megatron is not None:
            logprobs, entropy = self.megatron.head_logprobs(read, targets, **how)
        else:
            logprobs, entropy = head_logprobs(read, head_of(self.module), targets, **how)
        together = None if self.sequence is None else self.sequence.sum
        logprobs = scatter(logprobs, written, len(batch), together)
        return logprobs, None if entropy is None else scatter(entropy, written, len(batch), together)


def keep(policy: Policy, directory: str | Path, tokenizer: Any = None, state: dict[str, Tensor] | None = None) -> None:
    """Writes a policy for a checkpoint: as `Policy.save`, but of one with adapters the adapters alone, in `adapter/`.

    tokenizer: written beside the weights. state: weights to write instead of the current ones, see `Policy.state`.
    """
    if policy.adapted:
        save_adapter(policy.module, Path(directory) / ADAPTER, state)
        if tokenizer is not None:
            tokenizer.save_pretrained(Path(directory) / ADAPTER)
    else:
        write_module(policy.module, Path(directory), tokenizer, state)


def base_below(policy: Policy, config: ModelConfig) -> Policy:
    """A frozen policy that is the base model below the adapters of another one, on the same memory.

    config: that of the policy; says whether layers are compiled.
    """
    base = Policy(without_adapters(policy.module))
    if config.compiles_on(base.device.type):
        compile_layers(base.module)
    return base


def packed_hidden_states(model: Any, batch: Batch, *, before_policy_only: bool = False) -> tuple[Tensor, Tensor]:
    """([T] row of each token, [R, K] hidden states by row) of a policy or critic; tokens may share a row.

    before_policy_only: only rows that predict a policy token are wanted; other tokens may get row -1, which is none.
    Where ranks divide the rows of a micro-batch, tokens whose row is on another rank get -1, too.
    """
    layout = shared_layout(batch, model.device) if use_shared(model.device, model.dtype, model.module) else None
    if layout is not None:
        context: AttentionContext = SharedPrefixAttention.of(layout)
    elif use_varlen(model.device, model.dtype, model.module):
        layout = varlen_layout(batch, model.device)
        context = VarlenAttention(layout, version_on(model.device))
    else:
        layout = layout_of(batch.lengths, model.device)
        context = PackedAttention(layout)
    of_row, rows = layout.token_of_row, layout.row_of_token
    if before_policy_only and model.narrows and (read := rows_read(rows, len(of_row), batch.loss_mask)) is not None:
        context, rows = ReadRows(context, read), renumbered(rows, len(of_row), read)
    if model.sequence is not None:
        of_row, rows, context = model.sequence.own_rows(batch, of_row, rows, context)
    hidden = model.hidden_states(batch.token_ids[of_row], batch.positions[of_row], context)
    return rows, hidden[0]


def decoder_hidden_states(
    decoder: Callable[..., Any], token_ids: Tensor, positions: Tensor, attention: AttentionContext
) -> Tensor:
    """[1, R, K]: one row of R tokens through a transformers decoder."""
    out = decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attention=attention)
    return out.last_hidden_state


def scatter(values: Tensor, index: Tensor, count: int, together: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """[count], `values` at `index`, 0.0 elsewhere; keeps the graph even when `index` is empty.

    together: sums the result over the ranks that divide the rows of a micro-batch, each of which has some places.
    """
    out = torch.zeros(count, dtype=values.dtype, device=values.device).index_copy(0, index, values)
    return out if together is None else together(out)


def decoder_of(module: nn.Module) -> nn.Module:
    """The stack of layers below the head. LoRA layers live inside it; prompt tuning lives around it and is refused."""
    config: Any = getattr(module, "active_peft_config", None)
    if config is not None and getattr(config, "is_prompt_learning", False):
        raise ModelError(
            f"{config.peft_type} puts virtual tokens before the input; only adapters inside layers train here"
        )
    inner: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner.base_model
    if decoder is inner:
        raise ModelError(f"{type(inner).__name__} has no decoder below a head; load a causal language model")
    return decoder


def head_of(module: nn.Module) -> nn.Linear:
    """The output embedding; its weight may be tied to the input embedding."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise ModelError(f"the head is a {type(head).__name__}, not a Linear; exclude lm_head from adapters")
    return head


def logits_rule(module: nn.Module) -> LogitsRule:
    """Scale and soft cap of the logits by the model's config; the start-up check compares with the model itself."""
    config: Any = module.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return LogitsRule(scale=scale / divisor, softcap=getattr(config, "final_logit_softcapping", None))
