"""The last layer, computed only where its output is read.

A loss reads hidden states before policy tokens. Of all other rows (prompts, what tools said) the last layer gives keys
and values only, so its queries, output projection, MLP and the final norm are left out for them. The layer itself stays
transformers' own, of any architecture: it is called once on all rows, up to where it asks for attention, for their keys
and values, and once on the rows that are read. Whether that works for a model is tried out before it is used.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.trainer.attention import AttentionContext, PackedAttention, layout_of
from posttrain.trainer.prefix import SharedPrefixAttention

WORTH = 1 / 10  # of all rows must go unread: the second call costs as much as a twentieth of the layer on all rows
TRIED = (5, 9, 3)  # lengths of the sequences on which both ways must agree
TOLERANCE = 1e-4


@dataclass(slots=True)
class ReadRows:
    """`inner`, and which rows of the last layer's output are read; the decoder then returns these rows only."""

    inner: AttentionContext
    rows: Tensor  # [r] long, ascending

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self.inner.attend(layer_idx, query, key, value, **options)


class _KeysTaken(Exception):
    """Ends the first call of the last layer."""


@dataclass(slots=True)
class _TakeKeys:
    taken: tuple[Tensor, Tensor] | None = None
    wanted = ("k", "v")  # layers that can leave out the rest do so (`lean_layers.py`)

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.taken = key, value
        raise _KeysTaken


@dataclass(slots=True)
class _AttendFromRows:
    """Queries of some rows only, keys and values of all."""

    context: ReadRows
    key: Tensor
    value: Tensor
    wanted = ("q",)

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        rows = self.context.rows
        heads, size = query.shape[1], query.shape[-1]
        everywhere = query.new_zeros(1, self.key.shape[2], heads, size).index_copy(1, rows, query.transpose(1, 2))
        inner = self.context.inner
        inner = inner.reading(rows) if isinstance(inner, SharedPrefixAttention) else inner
        out = inner.attend(layer_idx, everywhere.transpose(1, 2), self.key, self.value, **options)
        return out.index_select(1, rows)


def prepare_last_layer(decoder: nn.Module) -> bool:
    """Makes the last layer of a transformers decoder skip rows that `ReadRows` leaves out.

    False, and nothing is changed, where that does not give the same numbers for this architecture.
    """
    layers = getattr(decoder, "layers", None)
    parameter = next(decoder.parameters())
    exact = parameter.device.type == "cpu" and parameter.dtype in {torch.float32, torch.float64}
    if not exact or not isinstance(layers, nn.ModuleList) or getattr(layers[-1], "_compiled_call_impl", None):
        return False
    last: Any = layers[-1]
    last.forward = MethodType(_forward, last)
    try:
        agrees = _agrees(decoder)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        agrees = False  # an architecture of another build
    if not agrees:
        del last.forward
    return agrees


def rows_read(rows: Tensor, count: int, loss_mask: Tensor) -> Tensor | None:
    """Which of `count` rows stand before policy tokens, ascending; None when so many do that it is not worth it.

    rows: [T] the row of each token.
    """
    is_read = torch.zeros(count, dtype=torch.bool)
    is_read[rows[loss_mask.nonzero()[:, 0] - 1]] = True
    read = is_read.nonzero()[:, 0]
    return read if 0 < len(read) <= (1 - WORTH) * count else None


def renumbered(rows: Tensor, count: int, read: Tensor) -> Tensor:
    """[T] the place of each token's row among those read, for tokens whose row is."""
    place = torch.full((count,), -1)
    place[read] = torch.arange(len(read))
    return place[rows]


def _forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the layer's own forward, which it calls; [1, R, K] -> [1, r, K]."""
    own = getattr(layer, "posttrain_forward", None) or MethodType(type(layer).forward, layer)  # see `lean_layers.py`
    context = kwargs.get("attention")
    if not isinstance(context, ReadRows):
        return own(hidden_states, *args, **kwargs)
    keys = _TakeKeys()
    with suppress(_KeysTaken):
        own(hidden_states, *args, **kwargs | {"attention": keys})
    if keys.taken is None:
        raise NotImplementedError(f"{type(layer).__name__} never asked for attention")
    count, rows = hidden_states.shape[1], context.rows
    args, kwargs = _of_rows(args, rows, count), _of_rows(kwargs, rows, count)
    kwargs["attention"] = _AttendFromRows(context, *keys.taken)
    return own(hidden_states.index_select(1, rows), *args, **kwargs)


def _of_rows(value: Any, rows: Tensor, count: int) -> Any:
    """Rotary tables, positions and the like, [1, R, ..], of some rows; anything else as it is."""
    if isinstance(value, Tensor):
        by_row = value.dim() >= 2 and value.shape[:2] == (1, count)
        return value.index_select(1, rows) if by_row else value
    if isinstance(value, (tuple, list)):
        return type(value)(_of_rows(part, rows, count) for part in value)
    if isinstance(value, dict):
        return {key: _of_rows(part, rows, count) for key, part in value.items()}
    return value


@torch.no_grad()
def _agrees(decoder: Any) -> bool:
    """Both ways on a few random tokens."""
    device = next(decoder.parameters()).device
    layout = layout_of(TRIED, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(decoder.config.vocab_size, (sum(TRIED),), generator=generator)
    positions = torch.cat([torch.arange(length) for length in TRIED])
    given = {"input_ids": ids[None, layout.token_of_row], "position_ids": positions[None, layout.token_of_row]}
    plain = PackedAttention(layout)
    rows = torch.arange(1, len(layout.token_of_row), 3)
    whole = decoder(**given, use_cache=False, attention=plain).last_hidden_state
    some = decoder(**given, use_cache=False, attention=ReadRows(plain, rows)).last_hidden_state
    expected = whole[:, rows]
    gap = TOLERANCE * (1 + expected.abs().max().item())
    return some.shape == expected.shape and bool((some - expected).abs().max() <= gap)
