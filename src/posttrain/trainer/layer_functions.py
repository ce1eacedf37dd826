"""The two halves of a decoder layer around its attention, as functions with backward passes, float32 on a CPU.

Each goes over the rows in blocks that stay in a core's cache while they meet one matrix after the other; what stands
between the products is compiled by numba (`layers_numba.py`). Saved for the backward pass are the inputs of norms, the
products behind them and the weights; the rest is computed again while its block is worked on.

    Project    y = norm(x),  q, k, v = turned(y Wq^T), turned(y Wk^T), y Wv^T   (heads may have norms of their own)
    Feed       h = x + o Wo^T,  z = norm(h),  h + (silu(z Wg^T) * z Wu^T) Wd^T
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posttrain.numba_code import numba_code

BLOCK = 512  # rows
NOTHING = np.empty(0, np.float32)

Weights = Sequence[Tensor | None]


class Project(torch.autograd.Function):
    """x [R, K] -> x, queries [R, H * D], keys and values [R, G * D].

    cos, sin: [R, D]. epsilons, and the first three weights: of the norms of x, of queries, of keys (None: no norm).
    Then weight and bias of queries, keys, values; a weight of None stands for what is not wanted, and comes out so.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, epsilons: Sequence[float], *weights: Tensor | None):
        norms, linears = weights[:3], weights[3:]
        products = [None if w is None else x.new_empty(len(x), len(w)) for w in linears[::2]]
        normed = [None if norm is None else product for norm, product in zip(norms[1:], products, strict=False)]
        out = [p if n is None else torch.empty_like(n) for p, n in zip(products, (*normed, None), strict=True)]
        scales, y = x.new_empty(len(x)), _scratch(x, x.shape[1])
        for s, part in _blocks(x):
            _kernels().normed(_array(x[s]), _array(norms[0]), _float(epsilons[0]), _array(scales[s]), _array(y[part]))
            for i, (product, target) in enumerate(zip(products, out, strict=True)):
                if product is not None and target is not None:
                    _linear(y[part], linears[2 * i : 2 * i + 2], product[s])
                    if i < 2:
                        how = _array(norms[1 + i]), _float(epsilons[1 + i])
                        _kernels().turned(_array(product[s]), how, (_array(cos[s]), _array(sin[s])), _array(target[s]))
        ctx.save_for_backward(x, cos, sin, scales, *normed, *weights)
        ctx.epsilons = epsilons
        ctx.set_materialize_grads(False)
        return x, *out

    @staticmethod
    def backward(ctx: Any, d_residual: Tensor | None, *d_out: Tensor | None):  # type: ignore[override]
        x, cos, sin, scales, *saved = ctx.saved_tensors
        normed, norms, linears = saved[:2], saved[2:5], saved[5:]
        d_norms, d_linears = _zeros(norms), _zeros(linears, ctx.needs_input_grad[7:])
        given = [None if d is None else d.contiguous() for d in d_out]
        d_residual = torch.zeros_like(x) if d_residual is None else d_residual.contiguous()
        d_x, y, d_y = torch.empty_like(x), _scratch(x, x.shape[1]), _scratch(x, x.shape[1])
        turned_back = [None if d is None else _scratch(x, d.shape[1]) for d in given[:2]]
        for s, part in _blocks(x):
            _kernels().normed_again(_array(x[s]), _array(norms[0]), _array(scales[s]), _array(y[part]))
            grads = [None if d is None else d[s] for d in given]
            for i, back in enumerate(turned_back):
                if back is not None:
                    how = _array(norms[1 + i]), _float(ctx.epsilons[1 + i])
                    heads = _array(grads[i] if normed[i] is None else normed[i][s])
                    turn, into = (_array(cos[s]), _array(sin[s])), (_array(back[part]), _array(d_norms[1 + i]))
                    _kernels().turned_back(_array(grads[i]), heads, how, turn, *into)
                    grads[i] = back[part]
            _linears_back(y[part], grads, linears, d_linears, d_y[part])
            weight, scale, d_norm = _array(norms[0]), _array(scales[s]), _array(d_norms[0])
            residual, target = _array(d_residual[s]), _array(d_x[s])
            _kernels().normed_back(_array(x[s]), weight, scale, _array(d_y[part]), residual, target, d_norm)
        return d_x, None, None, None, *d_norms, *d_linears


class Feed(torch.autograd.Function):
    """x [R, K], o [R, H * Dv] -> [R, K]. weights: of the norm; then weight and bias of output, gate, up, down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Tensor, epsilon: float, *weights: Tensor | None):
        norm, *linears = weights
        h, out, scales = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x))
        gate, up = (x.new_empty(len(x), len(w)) for w in (linears[2], linears[4]) if w is not None)
        z, fed = _scratch(x, x.shape[1]), _scratch(x, gate.shape[1])
        for s, part in _blocks(x):
            _linear(o[s], linears[:2], h[s], onto=x[s])
            _kernels().normed(_array(h[s]), _array(norm), _float(epsilon), _array(scales[s]), _array(z[part]))
            _linear(z[part], linears[2:4], gate[s])
            _linear(z[part], linears[4:6], up[s])
            _kernels().gated(_array(gate[s]), _array(up[s]), _array(fed[part]))
            _linear(fed[part], linears[6:], out[s], onto=h[s])
        ctx.save_for_backward(o, h, scales, gate, up, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # type: ignore[override]
        o, h, scales, gate, up, norm, *linears = ctx.saved_tensors
        grad = grad.contiguous()
        (d_norm,), d_linears = _zeros([norm]), _zeros(linears, ctx.needs_input_grad[4:])
        d_h, d_o = torch.empty_like(h), torch.empty_like(o)
        z, d_z = _scratch(h, h.shape[1]), _scratch(h, h.shape[1])
        fed, d_gate, d_up = (_scratch(h, gate.shape[1]) for _ in range(3))
        for s, part in _blocks(h):
            _kernels().normed_again(_array(h[s]), _array(norm), _array(scales[s]), _array(z[part]))
            torch.mm(grad[s], linears[6], out=d_up[part])  # as yet the gradient of `fed`
            both = _array(d_up[part]), _array(fed[part]), _array(d_gate[part])
            _kernels().gated_back(_array(gate[s]), _array(up[s]), *both)
            _add_weights(fed[part], grad[s], d_linears[6:])
            _linears_back(z[part], [d_gate[part], d_up[part]], linears[2:6], d_linears[2:6], d_z[part])
            given = _array(d_z[part]), _array(grad[s]), _array(d_h[s])
            _kernels().normed_back(_array(h[s]), _array(norm), _array(scales[s]), *given, _array(d_norm))
            _linears_back(o[s], [d_h[s]], linears[:2], d_linears[:2], d_o[s])
        return d_h, d_o, None, d_norm, *d_linears


def _kernels() -> Any:
    return numba_code("posttrain.trainer.layers_numba")


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of a block, and the rows of scratch that are its own."""
    for start in range(0, len(x), BLOCK):
        stop = min(start + BLOCK, len(x))
        yield slice(start, stop), slice(0, stop - start)


def _scratch(x: Tensor, width: int) -> Tensor:
    return x.new_empty(min(BLOCK, len(x)), width)


def _array(x: Tensor | None) -> NDArray[np.float32]:
    return NOTHING if x is None else x.detach().numpy()


def _float(number: float) -> np.float32:
    return np.float32(number)


def _zeros(weights: Weights, wanted: Sequence[bool] | None = None) -> list[Tensor | None]:
    wanted = [True] * len(weights) if wanted is None else wanted
    return [torch.zeros_like(w) if w is not None and ask else None for w, ask in zip(weights, wanted, strict=True)]


def _linear(x: Tensor, linear: Weights, out: Tensor, *, onto: Tensor | None = None) -> None:
    """out = onto + x W^T + b"""
    weight, bias = linear
    assert weight is not None
    if onto is not None:
        torch.addmm(onto, x, weight.t(), out=out)
        if bias is not None:
            out += bias
    elif bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def _add_weights(x: Tensor, grad: Tensor, d_linear: Weights) -> None:
    """To the gradients of a linear's weight and bias, where these are wanted."""
    d_weight, d_bias = d_linear
    if d_weight is not None:
        d_weight.addmm_(grad.t(), x)
    if d_bias is not None:
        d_bias += grad.sum(0)


def _linears_back(x: Tensor, grads: Weights, linears: Weights, d_linears: Weights, d_x: Tensor) -> None:
    """The backward pass of linears with one input; those without a gradient were not used."""
    beta = 0
    for i, grad in enumerate(grads):
        weight = linears[2 * i]
        if grad is not None and weight is not None:
            _add_weights(x, grad, d_linears[2 * i : 2 * i + 2])
            d_x.addmm_(grad, weight, beta=beta)
            beta = 1
    if beta == 0:
        d_x.zero_()
