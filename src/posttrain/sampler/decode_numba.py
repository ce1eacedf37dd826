"""One decoder layer for one new token of each of many sequences, compiled by numba.

No interpreter lock is held, nothing is allocated but scratch, and matrix products are those of the BLAS that torch
brings along. Everything is float32; R is the number of sequences, D the width of a head, H query and G key heads.
"""

from __future__ import annotations

import numpy as np

from posttrain.sampler import randomness
from posttrain.trainer.blas_numba import HIGHEST, LOG2_E, ONE, ZERO, compiled, exp2, product

GOLDEN = np.uint64(randomness.GOLDEN)
ROUNDS = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in randomness.ROUNDS)


@compiled
def _linear(sgemm, x, w, bias, beta, out):
    """out = x @ w^T + bias + beta * out"""
    sizes = (x.shape[0], w.shape[0], w.shape[1])
    into = (out.ctypes.data, out.shape[1])
    product(sgemm, sizes, (x.ctypes.data, x.shape[1], False), (w.ctypes.data, w.shape[1], True), into, (ONE, beta))
    if len(bias) > 0:
        for r in range(out.shape[0]):
            for c in range(out.shape[1]):
                out[r, c] += bias[c]


@compiled
def _normed(x, weight, eps, out):
    for r in range(x.shape[0]):
        row, target = x[r], out[r]
        square = ZERO
        for c in range(len(row)):
            square += row[c] * row[c]
        scale = ONE / np.sqrt(square / np.float32(len(row)) + eps)
        for c in range(len(row)):
            target[c] = row[c] * scale * weight[c]


@compiled
def _place(query, key, value, turn, norms, cache, places, turned):
    """Heads get their norms and are turned to their positions: keys, and values, into the cache, queries into `turned`,
    scaled. norms: (of queries, of keys, epsilon, scaling)."""
    keys, values = cache
    width = keys.shape[3]
    for r in range(len(query)):
        row, at, cos, sin = places[0][r], places[1][r] - 1, turn[0][r], turn[1][r]
        for head in range(keys.shape[1]):
            part = slice(head * width, (head + 1) * width)
            _normed_head(key[r, part], norms[1], norms[2])
            _turned(key[r, part], cos, sin, ONE, keys[row, head, at])
            values[row, head, at] = value[r, part]
        for head in range(query.shape[1] // width):
            part = slice(head * width, (head + 1) * width)
            _normed_head(query[r, part], norms[0], norms[2])
            _turned(query[r, part], cos, sin, norms[3], turned[r, part])


@compiled
def _normed_head(head, weight, eps):
    """In place; an empty weight stands for no norm."""
    if len(weight) == 0:
        return
    square = ZERO
    for d in range(len(head)):
        square += head[d] * head[d]
    scale = ONE / np.sqrt(square / np.float32(len(head)) + eps)
    for d in range(len(head)):
        head[d] *= scale * weight[d]


@compiled
def _turned(head, cos, sin, scale, out):
    half = len(head) // 2
    for d in range(half):
        a, b = head[d], head[d + half]
        out[d] = (a * cos[d] - b * sin[d]) * scale
        out[d + half] = (b * cos[d + half] + a * sin[d + half]) * scale


@compiled
def _exponentials(x, top):
    """x = e^(x - top) in place, their sum returned; x <= top. What is below e^-87 becomes that instead of less."""
    total = ZERO
    for i in range(len(x)):
        x[i] = exp2((x[i] - top) * LOG2_E)
        total += x[i]
    return total


@compiled
def _gated(gate, up):
    """gate = silu(gate) * up, with silu(z) = z / (1 + e^-z); below -87, where it is 0, e^-z is kept finite."""
    for r in range(gate.shape[0]):
        row, other = gate[r], up[r]
        for c in range(len(row)):
            row[c] = row[c] / (ONE + exp2(min(-row[c] * LOG2_E, HIGHEST))) * other[c]


@compiled
def _attend(sgemm, query, cache, places, window, scratch, out):
    """out [R, H * D] of queries [R, H * D], turned and scaled; see `layer_step` for the others."""
    for family in range(len(places[2])):
        for head in range(cache[0].shape[1]):
            _attend_together(sgemm, query, cache, places, window, scratch, out, (family, head))


@compiled
def _attend_together(sgemm, query, cache, places, window, scratch, out, which):
    """The queries of one family to one key head. What they share is two products, of queries with its keys and of
    weights with its values; the rest is done query by query."""
    keys, values = cache
    rows, ends, families = places
    block, sums, scores = scratch
    head, (first, last, shared) = which[1], families[which[0]]
    width = keys.shape[3]
    each = query.shape[1] // (keys.shape[1] * width)
    count = (last - first) * each
    for i in range(count):
        place = (head * each + i % each) * width
        block[i] = query[first + i // each, place : place + width]
    into = (scores.ctypes.data, scores.shape[1])
    if shared > 0:
        common = (keys[rows[first], head].ctypes.data, width, True)
        product(sgemm, (count, shared, width), (block.ctypes.data, width, False), common, into, (ONE, ZERO))
    for i in range(count):
        r = first + i // each
        past = keys[rows[r], head, : ends[r]], values[rows[r], head, : ends[r]]
        _follow(block[i], past, max(shared, ends[r] - window), shared, scores[i], sums[i])
    if shared > 0:
        common = (values[rows[first], head].ctypes.data, width, False)
        weights = (scores.ctypes.data, scores.shape[1], False)
        product(sgemm, (count, width, shared), weights, common, (sums.ctypes.data, width), (ONE, ONE))
    for i in range(count):
        place = (head * each + i % each) * width
        out[first + i // each, place : place + width] = sums[i]


@compiled
def _follow(query, past, start, shared, scores, total):
    """The softmax over `scores` of the shared keys, already there, and of the keys from `start`; total = what it gives
    of the values from `start`. In the end the scores of shared keys are weights."""
    keys, values = past
    end = len(keys)
    for t in range(start, end):
        score = ZERO
        for d in range(len(query)):
            score += query[d] * keys[t, d]
        scores[t] = score
    begin = 0 if shared > 0 else start
    seen = scores[begin:end]
    top = seen[0]
    for t in range(len(seen)):
        top = max(top, seen[t])
    inverse = ONE / _exponentials(seen, top)
    for t in range(len(seen)):
        seen[t] *= inverse
    total[:] = ZERO
    for t in range(start, end):
        weight = scores[t]
        for d in range(len(total)):
            total[d] += weight * values[t, d]


@compiled
def layer_step(sgemm, x, turn, weights, cache, places, how, scratch):
    """x [R, K] becomes what the layer makes of it; the new keys and values are written to the cache.

    turn: cosines and sines [R, D].
    weights: norms (before attention, of queries, of keys, before the MLP; those of heads may be empty), their epsilon,
        attention's weights (query, key, value, output) and biases, the MLP's (gate, up, down) and its biases.
    cache: keys and values [rows, G, capacity, D].
    places: the row of each sequence, its length with the new token, and families [n, 3] (first, last, shared):
        sequences first..last follow the same `shared` tokens, whose keys are read in the row of the first.
    how: scaling of scores, window. scratch: see `CompiledDecoder`.
    """
    norms, eps, attention, biases, mlp, mlp_biases = weights
    y, query, turned, key, value, gate, up, block, sums, scores = scratch
    _normed(x, norms[0], eps, y)
    _linear(sgemm, y, attention[0], biases[0], ZERO, query)
    _linear(sgemm, y, attention[1], biases[1], ZERO, key)
    _linear(sgemm, y, attention[2], biases[2], ZERO, value)
    _place(query, key, value, turn, (norms[1], norms[2], eps, how[0]), cache, places, turned)
    _attend(sgemm, turned, cache, places, how[1], (block, sums, scores), query)
    _linear(sgemm, query, attention[3], biases[3], ONE, x)
    _normed(x, norms[3], eps, y)
    _linear(sgemm, y, mlp[0], mlp_biases[0], ZERO, gate)
    _linear(sgemm, y, mlp[1], mlp_biases[1], ZERO, up)
    _gated(gate, up)
    _linear(sgemm, gate, mlp[2], mlp_biases[2], ONE, x)


@compiled
def draw_tokens(logits, temperatures, greedy, streams, counts, ids, logprobs):
    """`draw` without truncation: ids and logprobs [R] from logits [R, V], which are overwritten.

    streams, counts: what `randomness.uniforms` takes. A row with a logit that is not finite has NaN for its log-prob.
    """
    weights = np.empty(logits.shape[1], np.float32)
    for r in range(len(ids)):
        row = logits[r]
        scale = ONE / temperatures[r]
        top, broken = row[0] * scale, False
        for v in range(len(row)):
            row[v] *= scale
            broken |= row[v] != row[v]
            top = max(top, row[v])
        weights[:] = row
        _exponentials(weights, top)
        total = np.float64(0)
        for v in range(len(row)):
            total += np.float64(weights[v])
        chosen = _first_at(row, top) if greedy[r] else _reached(weights, _uniform(streams[r], counts[r]) * total)
        ids[r] = chosen
        logprobs[r] = row[chosen] - top - np.log(total) if not broken and top < np.inf else np.nan


@compiled
def _first_at(row, top):
    for v in range(len(row)):
        if row[v] >= top:
            return v
    return 0


@compiled
def _reached(weights, target):
    """The first index whose running sum exceeds `target`; the last with any weight, should rounding leave none."""
    running = np.float64(0)
    last = 0
    for v in range(len(weights)):
        if weights[v] > ZERO:
            last = v
            running += np.float64(weights[v])
            if running > target:
                break
    return last


@compiled
def _uniform(stream, count):
    """`randomness.uniforms` of one token."""
    bits = np.uint64(stream) + np.uint64(count + 1) * GOLDEN
    for shift, factor in ROUNDS:
        bits = (bits ^ (bits >> shift)) * factor
    bits ^= bits >> np.uint64(31)
    return np.float64(bits >> np.uint64(11)) * 2.0**-53
