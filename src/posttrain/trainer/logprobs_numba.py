"""Passes over logits for `kept.py`, compiled by numba: each once, a row while it is in the cache. Rows are float32."""

from __future__ import annotations

import numpy as np

from posttrain.trainer.blas_numba import LOG2_E, ONE, ZERO, compiled, exp2


@compiled
def take_logprobs(z, targets, factor, sums, logprobs, entropy):
    """z becomes e^(factor (z - max z)), sums what its rows add up to; log-probs of targets and, unless it is empty,
    entropies of the softmax of factor * z. factor > 0."""
    scale = factor * LOG2_E
    for i in range(len(z)):
        row = z[i]
        top = row[0]
        for c in range(len(row)):
            top = max(top, row[c])
        chosen = row[targets[i]]
        total, along = ZERO, ZERO
        for c in range(len(row)):
            y = (row[c] - top) * scale
            row[c] = exp2(y)
            total += row[c]
            along += row[c] * y
        sums[i] = total
        logprobs[i] = (chosen - top) * factor - np.log(total)
        if len(entropy) > 0:
            entropy[i] = np.log(total) - along / (total * LOG2_E)


@compiled
def give_logits(exponentials, targets, sums, grads, out):
    """out = grads (1[target] - p), the gradient of logits given that of log-probs."""
    for i in range(len(out)):
        row, target = exponentials[i], out[i]
        scale = -grads[i] * (ONE / sums[i])
        for c in range(len(row)):
            target[c] = row[c] * scale
        target[targets[i]] += grads[i]
