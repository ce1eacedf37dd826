"""FlashAttention on packed rows, for half precision on a GPU: version 4 on Hopper where the extra `flash` is installed,
else the version 2 that comes with torch.

Version 4 is written in a language that compiles for the GPU at hand, at the first call. Not here: who may see whom
beyond causal sequences and their windows (`attention.py`), caches (`sampler/cached_varlen.py`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from posttrain.trainer.attention import has_plain_scores

try:  # torch >= 2.10
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch: length buckets are used on every device
    varlen_attn = None

VARLEN_TAKES_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters
HOPPER = 9  # compute capability; newer GPUs have not been tried with version 4,
HEADS_OF_FOUR = (64, 128)  # nor have windows and heads of other sizes
LEAST_FOUR = Version("4.0.0b36")


def use_varlen(device: torch.device, dtype: torch.dtype, module: nn.Module) -> bool:
    """Whether `packed_flash_attention` can serve this model: else length buckets do."""
    if varlen_attn is None or device.type != "cuda" or dtype not in {torch.bfloat16, torch.float16}:
        return False
    config: Any = module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim <= 256 and has_plain_scores(module)


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def version_on(device: torch.device) -> int:
    """Of FlashAttention: 4 or 2."""
    try:  # by its version, since packages of version 2 bring sketches of 4 along
        installed = Version(metadata.version("flash-attn-4")) >= LEAST_FOUR
    except metadata.PackageNotFoundError:
        return 2
    return 4 if installed and is_hopper(device) else 2


def packed_flash_attention(
    qkv: tuple[Tensor, Tensor, Tensor],  # [Tq, H, D], [Tk, Hkv, D], [Tk, Hkv, Dv]
    ends: tuple[Tensor, Tensor],  # [S + 1] int32 cumulative lengths of queries and of keys, on the device
    longest: tuple[int, int],
    *,
    scaling: float,
    window: int | None,
    version: int,  # of `version_on`
) -> Tensor:  # [Tq, H, Dv]
    """Causal, S sequences one after another, the queries of each aligned with the end of its keys (CUDA, half
    precision, head size <= 256)."""
    if varlen_attn is None:
        raise NotImplementedError("this torch has no varlen_attn; use_varlen tells when to use it")
    q, k, v = qkv
    if version == 4 and window is None and q.shape[2] in HEADS_OF_FOUR:
        return version_four(q, k, v, *ends, longest, scaling)[0]
    options: dict[str, Any] = {"enable_gqa": True} if VARLEN_TAKES_GQA and q.shape[1] != k.shape[1] else {}
    if not VARLEN_TAKES_GQA and q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    left = -1 if window is None else window - 1
    return varlen_attn(q, k, v, *ends, *longest, scale=scaling, window_size=(left, 0), **options)  # type: ignore[return-value]


@torch.library.custom_op("posttrain::flash_attention_4", mutates_args=())
def version_four(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, longest: Sequence[int], scaling: float
) -> tuple[Tensor, Tensor]:
    """[Tq, H, Dv] and, float32, [H, Tq] logarithms of the denominators; one operator for compilers."""
    out, lse, *_ = _four()._flash_attn_fwd(
        q, k, v, return_lse=True, **_sequences(q_ends, k_ends, longest), softmax_scale=scaling
    )
    return out, lse.contiguous()


@version_four.register_fake
def _(q, k, v, q_ends, k_ends, longest, scaling):
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op("posttrain::flash_attention_4_backward", mutates_args=())
def version_four_backward(
    grad: Tensor, kept: Sequence[Tensor], longest: Sequence[int], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; kept: these three, what came out, ends."""
    *tensors, q_ends, k_ends = kept
    q, k, v, out, lse = tensors
    dq, dk, dv, *_ = _four()._flash_attn_bwd(
        q, k, v, out, grad, lse, **_sequences(q_ends, k_ends, longest), softmax_scale=scaling,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq.contiguous(), dk.contiguous(), dv.contiguous()  # they come as queries lie, which compilers do not expect


@version_four_backward.register_fake
def _(grad, kept, longest, scaling):
    q, k, v, *_ = kept
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@cache
def _four() -> Any:
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # which its compiler passes over
    return interface


def _sequences(q_ends: Tensor, k_ends: Tensor, longest: Sequence[int]) -> dict[str, Any]:
    return {
        "cu_seqlens_q": q_ends,
        "cu_seqlens_k": k_ends,
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "causal": True,
    }


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scaling = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    kept = list(ctx.saved_tensors)
    return *version_four_backward(grad.contiguous(), kept, ctx.longest, ctx.scaling), *[None] * 4


version_four.register_autograd(_backward, setup_context=_remember)
