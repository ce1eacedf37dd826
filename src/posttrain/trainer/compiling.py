"""torch.compile, layer by layer: what stands between two matrix products becomes one kernel.

All layers of a model share one compilation, for any number of tokens and any architecture. In training a layer is one
graph forward and one backward, attention included; where what attention does depends on the batch (the sampler's, and
the contexts for CPUs), it is left out and the layer is cut in two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as symbols
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.trainer import attention
from posttrain.trainer.norms import with_own_forward

KINDS = 64  # compilations of one class of layers; torch's own limit is 8, and kinds that come later are not compiled


def run_plainly(layer: nn.Module) -> None:
    """Undoes `compile_layers` for a layer that is to work on DTensors: for those, lengths that vary are untried."""
    layer._compiled_call_impl = None


def compile_layers(module: nn.Module, backend: Any = "inductor") -> None:
    """In place. Compilation itself happens at the first forward (and once more at the first with gradients)."""
    attention.attend_untraced = torch.compiler.disable(attention.attend_untraced)
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            with_own_forward(layer)  # torch 2.11 cannot trace the norms for CPUs
            compiled = torch.compile(layer._call_impl, dynamic=True, backend=backend)
            layer._compiled_call_impl = _with_settings(compiled)


def _with_settings(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Made at every call, as torch 2.13 has such settings by thread.

    A layer is compiled for itself with gradients, without, and sampled from; frozen or adapted; with a window; for one
    token. All models of a process count together: a policy with windows, its reference and its sampler are past 8.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        symbols.use_duck_shape = False  # lengths that happen to be equal in one batch may differ in the next one
        torch._dynamo.config.recompile_limit = max(KINDS, torch._dynamo.config.recompile_limit)
        return compiled(*args, **kwargs)

    return call
