"""Start-up checks: the packed, fused path of a policy must be the model's own function, or the run does not start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from posttrain.packing import Batch
from posttrain.trainer.attention import AttentionContext, PackedAttention, layout_of
from posttrain.trainer.loading import ModelError

CHECK_LENGTHS = (5, 9, 3)
CHECK_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


class CheckedPolicy(Protocol):
    """What the checks need of a `Policy`."""

    module: nn.Module

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def config(self) -> Any: ...
    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor: ...
    def hidden_states(self, token_ids: Tensor, positions: Tensor, attention: AttentionContext) -> Tensor: ...


@torch.no_grad()
def check_policy(policy: CheckedPolicy) -> None:
    """Packed, fused log-probs of a few random tokens must equal the model's own, one sequence at a time.

    Catches architectures that post-process logits, carry state besides attention, or express windows as masks only.
    Raises ModelError.
    """
    check_windows(policy)
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(policy.config.vocab_size, (n,), generator=generator) for n in CHECK_LENGTHS]
    batch = probe_batch(ids)
    packed = policy.logprobs(batch).cpu()
    plain = torch.cat([plain_logprobs(policy.module, sequence.to(policy.device)).cpu() for sequence in ids])
    gap = (packed - plain).abs().max().item()
    if not gap <= CHECK_TOLERANCE[policy.dtype]:
        raise ModelError(
            f"{type(policy.module).__name__}: packed log-probs differ from the model's own by {gap:.3g} "
            f"(allowed {CHECK_TOLERANCE[policy.dtype]}); this architecture does something to its logits, or between "
            "tokens, that the trainer does not know of"
        )


@dataclass(slots=True)
class WindowRecorder:
    """Attention that notes which sliding window every layer asks for."""

    inner: PackedAttention
    windows: dict[int, int | None] = field(default_factory=dict[int, "int | None"])

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.windows[layer_idx] = options.get("sliding_window")
        return self.inner.attend(layer_idx, query, key, value, **options)


@torch.no_grad()
def check_windows(policy: CheckedPolicy) -> None:
    """A layer that its config calls sliding must tell attention its window: no mask will carry it.

    Sequences of the length of a window are too long to compare at start-up. Raises ModelError.
    """
    config = getattr(policy.config, "get_text_config", lambda: policy.config)()
    recorder = WindowRecorder(PackedAttention(layout_of([2], policy.device)))
    ids = torch.arange(2, device=policy.device)
    policy.hidden_states(ids, ids, recorder)
    kinds = list(getattr(config, "layer_types", None) or [])
    masked_only = [
        f"layer {layer} ({kind})"
        for layer, kind in enumerate(kinds)
        if layer in recorder.windows and kind != "full_attention" and recorder.windows[layer] is None
    ]
    if not kinds and getattr(config, "sliding_window", None) and not any(recorder.windows.values()):
        masked_only = [f"all layers (sliding_window {config.sliding_window})"]
    if masked_only:
        raise ModelError(
            f"{type(policy.module).__name__}: {', '.join(masked_only[:3])} would limit who sees whom by a mask only, "
            "which the packed attention does not build; this architecture is not supported"
        )


def plain_logprobs(module: nn.Module, token_ids: Tensor) -> Tensor:
    """[L] log-probs by the model's own forward with transformers' eager attention, 0.0 at the first token."""
    own = module.config._attn_implementation  # type: ignore[union-attr]
    module.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        logits = module(input_ids=token_ids[None], use_cache=False).logits[0].float()
    finally:
        module.set_attn_implementation(own)  # type: ignore[operator]
    following = logits[:-1].log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]
    return torch.cat([following.new_zeros(1), following])


def probe_batch(sequences: Sequence[Tensor]) -> Batch:
    """A batch of bare token lists in which everything but first tokens counts as written by the policy."""
    lengths = [len(sequence) for sequence in sequences]
    repeats = torch.tensor(lengths)
    segments = torch.arange(len(lengths)).repeat_interleave(repeats)
    positions = torch.cat([torch.arange(length) for length in lengths])
    count = sum(lengths)
    return Batch(
        token_ids=torch.cat(list(sequences)),
        positions=positions,
        segment_ids=segments,
        loss_mask=positions > 0,
        episode_index=segments,
        group_index=segments,
        rollout_logprobs=torch.full((count,), float("nan")),
        policy_versions=torch.where(positions > 0, 0, -1),
        rewards=torch.zeros(count),
        lengths=lengths,
    )
