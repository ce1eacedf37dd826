"""torch.compile, layer by layer: what stands between two matrix products or around attention becomes one kernel.

All layers of a model share one compilation, for any number of tokens. Attention itself is left alone: it is a kernel
already, and what it does depends on the batch. So every layer is cut in two there, and works for any architecture.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from posttrain.trainer import attention


def compile_layers(module: nn.Module) -> None:
    """In place. Compilation itself happens at the first forward (and once more at the first with gradients)."""
    apart = torch.compiler.disable(attention.attention_forward)
    ALL_ATTENTION_FUNCTIONS.register(attention.NAME, apart)
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(dynamic=True)
