"""One attention function for training and sampling, plugged into transformers' attention interface.

A model loaded with `attn_implementation="posttrain"` asks the `AttentionContext` passed to its decoder as the keyword
`attention` who may see whom. Transformers then builds no mask at all (none is registered under this name), and the
sequence dimension is whatever the context says it is: packed segments in training, a decode batch in the sampler.
Not here: KV caches (the sampler's), masks for padding (there is none: padding stands to the right and is never read).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.trainer.compiled_attention import Segment, Sight, compiled_attention, takes

NAME = "posttrain"


class AttentionContext(Protocol):
    """The attention of one forward of the decoder, which says what a mask would: which tokens see which."""

    def attend(
        self,
        layer_idx: int,
        query: Tensor,  # [1, H, T, D], rotary positions applied
        key: Tensor,  # [1, Hkv, T, D]
        value: Tensor,  # [1, Hkv, T, D]
        *,
        scaling: float,
        sliding_window: int | None = None,  # a token sees this many tokens, itself included; None = all before it
        softcap: float | None = None,  # these two are passed only by models that have them;
        sinks: Tensor | None = None,  # [H]; a context that cannot apply them must not take them silently
    ) -> Tensor:  # [1, T, H, D]
        ...


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers. Dropout is not applied: `Policy` switches it off."""
    if attention is None:
        raise RuntimeError(
            "the model was called without an attention context; call it through Policy.logprobs, the native sampler, "
            "or set_attn_implementation('sdpa') first"
        )
    refuse_unsupported(module, attention_mask, kwargs)
    extras = {"softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}
    attend = partial(attend_traced if getattr(attention, "traceable", False) else attend_untraced, attention, module)
    out = attend(
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        **{name: extra for name, extra in extras.items() if extra is not None},
    )
    return out, None


def attend_traced(context: AttentionContext, module: nn.Module, *qkv: Tensor, **options: Any) -> Tensor:
    """Compilers see into it; a context that does not look at `layer_idx` gives all layers one compilation."""
    return context.attend(module.layer_idx, *qkv, **options)  # type: ignore[arg-type]


def attend_untraced(context: AttentionContext, module: nn.Module, *qkv: Tensor, **options: Any) -> Tensor:
    """The same, out of the sight of compilers once there are any (see `compiling.py`)."""
    return attend_traced(context, module, *qkv, **options)


def refuse_unsupported(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raises NotImplementedError for anything that would change the result and that a context does not know of."""
    if attention_mask is not None:
        raise NotImplementedError("an attention mask reached the packed attention; pass none, segments are independent")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise NotImplementedError(
            f"{type(module).__name__} is not causal; only decoder-only models can be trained here"
        )
    for name in ("position_bias", "alibi", "head_mask"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name}, which the packed attention does not apply"
            )


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)


@dataclass(frozen=True, slots=True)
class Bucket:
    """`count` segments padded on the right to `length` tokens, from row `start` of the layout."""

    start: int
    count: int
    length: int

    @property
    def segments(self) -> list[Segment]:
        return [(0, 0, self.start + i * self.length, self.length) for i in range(self.count)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every token of a batch stands in the row that the decoder sees (R rows, R >= T).

    Sorting and padding once per forward spares every layer its own gather and scatter. A pad row repeats some real
    token; it stands to the right of its segment, so that under causal attention no real token sees it.
    """

    buckets: tuple[Bucket, ...]
    token_of_row: Tensor  # [R] long: which token of the batch a row holds
    row_of_token: Tensor  # [T] long


def layout_of(lengths: Sequence[int], device: torch.device) -> Layout:
    """Buckets of near-equal lengths, longest first."""
    order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    length = torch.tensor([lengths[s] for s in order])
    start = torch.tensor(lengths).cumsum(0)[order] - length  # first token of each segment, in bucket order
    buckets = _cut(length.tolist())
    padded = torch.tensor([b.length for b in buckets]).repeat_interleave(torch.tensor([b.count for b in buckets]))
    first_row = padded.cumsum(0) - padded
    rows = int(padded.sum())
    column = torch.arange(rows) - first_row.repeat_interleave(padded)
    real = column < length.repeat_interleave(padded)
    token_of_row = start.repeat_interleave(padded) + torch.where(real, column, 0)
    row_of_token = torch.empty(sum(lengths), dtype=torch.long)
    row_of_token[token_of_row[real]] = torch.arange(rows)[real]
    return Layout(tuple(buckets), token_of_row.to(device), row_of_token.to(device))


def _cut(descending: Sequence[int]) -> list[Bucket]:
    """Greedy: a segment joins the open bucket while it wastes at most 1/16 of the bucket's length (or 3 tokens)."""
    buckets: list[Bucket] = []
    start = 0
    for length in descending:
        last = buckets[-1] if buckets else None
        if last is not None and last.length - length <= max(3, last.length // 16):
            buckets[-1] = Bucket(last.start, last.count + 1, last.length)
        else:
            buckets.append(Bucket(start, 1, length))
        start += buckets[-1].length
    return buckets


@dataclass(slots=True)
class PackedAttention:
    """Segments are independent and causal, on rows laid out by `layout_of`; exact on every device."""

    layout: Layout
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict[tuple[int, int | None], Tensor])

    def attend(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if softcap is None and sinks is None and takes(query):
            segments = [segment for bucket in self.layout.buckets for segment in bucket.segments]
            return compiled_attention(query, key, value, Sight.of(segments, scaling=scaling, window=sliding_window))
        rows = [bucket.count * bucket.length for bucket in self.layout.buckets]
        parts = zip(
            self.layout.buckets,
            query.transpose(1, 2).split(rows, dim=1),  # one split, not many slices: its backward is a single cat
            key.transpose(1, 2).split(rows, dim=1),
            value.transpose(1, 2).split(rows, dim=1),
            strict=True,
        )
        out: list[Tensor] = []
        for bucket, *qkv in parts:
            q, k, v = (x.view(bucket.count, bucket.length, *x.shape[2:]).transpose(1, 2) for x in qkv)
            window = sliding_window if sliding_window is not None and sliding_window < bucket.length else None
            if softcap is None and sinks is None:
                mask = None if window is None else self._visible(bucket.length, window, q.device)
                o = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
                )
            else:
                visible = self._visible(bucket.length, window, q.device)
                o = exact_attention(q, k, v, visible, scaling=scaling, softcap=softcap, sinks=sinks)
            out.append(o.transpose(1, 2).reshape(1, bucket.count * bucket.length, *o.shape[1:2], o.shape[3]))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def _visible(self, length: int, window: int | None, device: torch.device) -> Tensor:
        """[length, length] bool, True where the row may see the column."""
        if (length, window) not in self._masks:
            distance = torch.arange(length, device=device)
            distance = distance[:, None] - distance[None, :]
            self._masks[length, window] = (distance >= 0) & (distance < (length if window is None else window))
        return self._masks[length, window]


def has_plain_scores(module: nn.Module) -> bool:
    """Whether attention is softmax(scaling * Q K^T) V and nothing else: no soft caps (Gemma-2), no sinks (gpt-oss)."""
    has_sinks = any(name.endswith("sinks") for name, _ in module.named_parameters())
    return getattr(module.config, "attn_logit_softcapping", None) is None and not has_sinks


def exact_attention(
    query: Tensor,  # [N, H, Lq, D]
    key: Tensor,  # [N, Hkv, Lk, D]
    value: Tensor,
    visible: Tensor,  # broadcastable to [N, H, Lq, Lk], bool
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [H] logit of a virtual key without value
) -> Tensor:
    """[N, H, Lq, D]: attention written out, for what SDPA lacks (Gemma-2's soft cap, the sinks of gpt-oss)."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~visible, torch.finfo(torch.float32).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    return weights @ value.repeat_interleave(groups, dim=1)
