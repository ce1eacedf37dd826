"""What stands between the matrix products of a decoder layer, forward and backward, compiled by numba.

Rows are float32; gradients of weights add up. Equations: RMSNorm in `norms.py`;

    rotary    o = (a cos - b sin, b cos' + a sin') of the halves a, b of a head, cosines and sines of either half
    gate      f = g s u with s = 1 / (1 + e^-g),  du = df g s,  dg = df u s (1 + g (1 - s))
"""

from __future__ import annotations

import numpy as np

from posttrain.trainer.blas_numba import HIGHEST, LOG2_E, ONE, ZERO, compiled, exp2


@compiled
def normed(x, weight, eps, scales, y):
    """y = x r w; scales: r of every row, noted."""
    for i in range(len(x)):
        scales[i] = _scale_of(x[i], eps)
    normed_again(x, weight, scales, y)


@compiled
def normed_again(x, weight, scales, y):
    for i in range(len(x)):
        row, target, scale = x[i], y[i], scales[i]
        for c in range(len(row)):
            target[c] = row[c] * scale * weight[c]


@compiled
def normed_back(x, weight, scales, d_y, d_residual, d_x, d_weight):
    """d_x = d_residual + the gradient of x, given that of y."""
    for i in range(len(x)):
        row, given, other, target, scale = x[i], d_y[i], d_residual[i], d_x[i], scales[i]
        along = _along(row, weight, scale, given, d_weight)
        for c in range(len(row)):
            target[c] = other[c] + given[c] * weight[c] * scale - row[c] * along


@compiled
def _along(row, weight, scale, d_y, d_weight):
    """How much of the row itself its norm takes from its gradient; adds to the gradient of the weight."""
    along = ZERO
    for c in range(len(row)):
        product = d_y[c] * row[c]
        along += product * weight[c]
        d_weight[c] += product * scale
    return along * (scale * scale * scale / np.float32(len(row)))


@compiled
def turned(heads, norm, turn, out):
    """Heads side by side get their norm (weight, epsilon; no weight stands for none) and are turned by `turn`, cosines
    and sines [rows, D]. `heads` may be `out`."""
    width = turn[0].shape[1]
    for i in range(len(heads)):
        for start in range(0, heads.shape[1], width):
            a, target = heads[i, start : start + width], out[i, start : start + width]
            scale = _scale_of(a, norm[1]) if len(norm[0]) > 0 else ONE
            _turn(a, scale, norm[0], (turn[0][i], turn[1][i]), target)


@compiled
def _scale_of(row, eps):
    """r of a row, or of a head."""
    square = ZERO
    for c in range(len(row)):
        square += row[c] * row[c]
    return ONE / np.sqrt(square / np.float32(len(row)) + eps)


@compiled
def _turn(head, scale, weight, turn, out):
    half = len(head) // 2
    cos, sin = turn
    if len(weight) > 0:
        for d in range(half):
            a, b = head[d] * scale * weight[d], head[d + half] * scale * weight[d + half]
            out[d] = a * cos[d] - b * sin[d]
            out[d + half] = b * cos[d + half] + a * sin[d + half]
    else:
        for d in range(half):
            a, b = head[d], head[d + half]
            out[d] = a * cos[d] - b * sin[d]
            out[d + half] = b * cos[d + half] + a * sin[d + half]


@compiled
def turned_back(grads, heads, norm, turn, out, d_weight):
    """out: gradient of `heads`, given that of what `turned` made of them."""
    width = turn[0].shape[1]
    for i in range(len(grads)):
        for start in range(0, grads.shape[1], width):
            target = out[i, start : start + width]
            _turn_back(grads[i, start : start + width], (turn[0][i], turn[1][i]), target)
            if len(norm[0]) > 0:
                _head_back(heads[i, start : start + width], norm, target, d_weight)


@compiled
def _turn_back(grad, turn, out):
    half = len(grad) // 2
    cos, sin = turn
    for d in range(half):
        a, b = grad[d], grad[d + half]
        out[d] = a * cos[d] + b * sin[d + half]
        out[d + half] = b * cos[d + half] - a * sin[d]


@compiled
def _head_back(head, norm, grad, d_weight):
    """The backward pass of a head's norm, `grad` in place."""
    weight, scale = norm[0], _scale_of(head, norm[1])
    along = _along(head, weight, scale, grad, d_weight)
    for d in range(len(head)):
        grad[d] = grad[d] * weight[d] * scale - head[d] * along


@compiled
def gated(gate, up, out):
    for i in range(len(gate)):
        g, u, target = gate[i], up[i], out[i]
        for c in range(len(g)):
            target[c] = g[c] / (ONE + exp2(min(-g[c] * LOG2_E, HIGHEST))) * u[c]


@compiled
def gated_back(gate, up, grad, out, d_gate):
    """out: what `gated` gave. grad: until now its gradient, becomes that of `up`."""
    for i in range(len(gate)):
        g, u, d, f, d_g = gate[i], up[i], grad[i], out[i], d_gate[i]
        for c in range(len(g)):
            s = ONE / (ONE + exp2(min(-g[c] * LOG2_E, HIGHEST)))
            silu = g[c] * s
            f[c] = silu * u[c]
            d_g[c] = d[c] * u[c] * s * (ONE + g[c] - silu)
            d[c] *= silu
