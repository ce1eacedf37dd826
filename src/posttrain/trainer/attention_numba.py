"""Causal attention of many segments, forward and backward, compiled by numba: the equations of `causal.py`.

Rows hold all heads side by side, as projections give them: nothing is transposed. A segment may stand behind a prefix,
rows that it shares with others; what reaches these adds up. Scores live for a block of queries of one key head, and are
computed again in the backward pass from the logarithm of their sum of exponentials. Everything is float32; R is the
number of rows, D and Dv the widths of a head, H query and G key heads.

    S = scaling * log2(e) * Q K^T,  L = log2 sum 2^S,  P = 2^(S - L),  O = P V
    dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(dO * O)),  dQ = scaling * dS K,  dK = scaling * dS^T Q
"""

from __future__ import annotations

import numpy as np

from posttrain.trainer.blas_numba import LOG2_E, ONE, ZERO, compiled, exp2, product

QUERY_BLOCK = 64  # queries of a key head at a time


@compiled
def attend(sgemm, qkv, segments, how, scratch, out):
    """out: O [R, H * Dv], already 0 where nothing is read, and L [R, H].

    qkv: [R, H * D], [R, G * D], [R, G * Dv]. segments [n, 4]: first row and length of the prefix, of the segment.
    how: heads, key heads, scaling, window, and which rows are read (bool [R]; empty for all).
    scratch: see `scratch_sizes`.
    """
    for s in range(len(segments)):
        for head in range(how[1]):
            for first in range(0, segments[s, 3], QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, segments[s, 3])
                if _is_read(how[4], segments[s, 2] + first, segments[s, 2] + last):
                    _attend_block(sgemm, qkv, (segments[s], head, first, last), how, scratch, out)


@compiled
def attend_backward(sgemm, qkv, segments, how, scratch, out, grad, grads):
    """grads: of qkv, all 0 before, from `grad`, that of O; the others as in `attend`."""
    for s in range(len(segments)):
        for head in range(how[1]):
            for first in range(0, segments[s, 3], QUERY_BLOCK):
                last = min(first + QUERY_BLOCK, segments[s, 3])
                if _is_read(how[4], segments[s, 2] + first, segments[s, 2] + last):
                    _backward_block(sgemm, qkv, (segments[s], head, first, last), how, scratch, (out, grad), grads)


@compiled
def _is_read(read, first, last):
    return len(read) == 0 or read[first:last].any()


@compiled
def _parts(place, how):
    """Rows of the prefix and of the segment whose keys a block sees: ((first, count), (first, count))."""
    segment, _, first, last = place
    low = max(0, segment[1] + first - how[3] + 1)
    behind = max(0, low - segment[1])
    return (segment[0] + min(low, segment[1]), max(0, segment[1] - low)), (segment[2] + behind, last - behind)


@compiled
def _gather(rows, place, each, width, block):
    """The rows of a block's queries, one after the other for each of its heads."""
    segment, head, first, last = place
    span = each * width
    for i in range(last - first):
        block[i * span : (i + 1) * span] = rows[segment[2] + first + i, head * span : (head + 1) * span]


@compiled
def _by_keys(sgemm, block, keys, head, parts, scores, alpha):
    """scores = alpha * block K^T; block: (address, rows, width), scores: (address, keys)."""
    count, width = block[1], block[2]
    for part in range(2):
        first, many = parts[part]
        if many > 0:
            w = (keys.ctypes.data + 4 * (first * keys.shape[1] + head * width), keys.shape[1], True)
            into = (scores[0] + 4 * part * parts[0][1], scores[1])
            product(sgemm, (count, many, width), (block[0], width, False), w, into, (alpha, ZERO))


@compiled
def _of_keys(sgemm, scores, keys, head, parts, block, alpha):
    """block = alpha * scores K"""
    count, width = block[1], block[2]
    beta = ZERO
    for part in range(2):
        first, many = parts[part]
        if many > 0:
            w = (keys.ctypes.data + 4 * (first * keys.shape[1] + head * width), keys.shape[1], False)
            x = (scores[0] + 4 * part * parts[0][1], scores[1], False)
            product(sgemm, (count, width, many), x, w, (block[0], width), (alpha, beta))
            beta = ONE


@compiled
def _to_keys(sgemm, scores, block, keys, head, parts, alpha):
    """K += alpha * scores^T block"""
    count, width = block[1], block[2]
    for part in range(2):
        first, many = parts[part]
        if many > 0:
            into = (keys.ctypes.data + 4 * (first * keys.shape[1] + head * width), keys.shape[1])
            x = (scores[0] + 4 * part * parts[0][1], scores[1], True)
            product(sgemm, (many, width, count), x, (block[0], width, False), into, (alpha, ONE))


@compiled
def _seen(place, how, i):
    """Of a block's keys, those that its i-th query sees: (first, last)."""
    segment, _, first, _ = place
    end = segment[1] + first + i + 1  # counted from the beginning of the prefix
    low = max(0, segment[1] + first - how[3] + 1)
    return max(0, end - how[3]) - low, end - low


@compiled
def _attend_block(sgemm, qkv, place, how, scratch, out):
    segment, head, first, last = place
    each, parts = how[0] // how[1], _parts(place, how)
    width, value_width = qkv[1].shape[1] // how[1], qkv[2].shape[1] // how[1]
    block, sums, scores = scratch[0], scratch[1], scratch[2]
    count, keys = each * (last - first), parts[0][1] + parts[1][1]
    table = (scores.ctypes.data, keys)
    _gather(qkv[0], place, each, width, block)
    _by_keys(sgemm, (block.ctypes.data, count, width), qkv[1], head, parts, table, how[2] * LOG2_E)
    for i in range(count):
        seen = _seen(place, how, i // each)
        row = segment[2] + first + i // each
        out[1][row, head * each + i % each] = _exponentials(scores[i * keys : (i + 1) * keys], seen, scratch[4], i)
    _of_keys(sgemm, table, qkv[2], head, parts, (sums.ctypes.data, count, value_width), ONE)
    for i in range(count):
        start = (head * each + i % each) * value_width
        target = out[0][segment[2] + first + i // each, start : start + value_width]
        found, inverse = sums[i * value_width : (i + 1) * value_width], scratch[4][i]
        for d in range(value_width):
            target[d] = found[d] * inverse


@compiled
def _exponentials(row, seen, inverses, i):
    """row = 2^(row - its largest) of what is seen, 0 elsewhere; 1 / its sum is noted; returns L."""
    row[: seen[0]] = ZERO
    row[seen[1] :] = ZERO
    part = row[seen[0] : seen[1]]
    top = part[0]
    for t in range(len(part)):
        top = max(top, part[t])
    total = ZERO
    for t in range(len(part)):
        part[t] = exp2(part[t] - top)
        total += part[t]
    inverses[i] = ONE / total
    return top + np.log2(total)


@compiled
def _backward_block(sgemm, qkv, place, how, scratch, outs, grads):
    segment, head, first, last = place
    each, parts = how[0] // how[1], _parts(place, how)
    width, value_width = qkv[1].shape[1] // how[1], qkv[2].shape[1] // how[1]
    block, d_out, scores, d_scores, along = scratch
    count, keys = each * (last - first), parts[0][1] + parts[1][1]
    table, d_table = (scores.ctypes.data, keys), (d_scores.ctypes.data, keys)
    queries, d_outs = (block.ctypes.data, count, width), (d_out.ctypes.data, count, value_width)
    _gather(outs[0][0], place, each, value_width, block)
    _gather(outs[1], place, each, value_width, d_out)
    for i in range(count):
        along[i] = _dot(block[i * value_width : (i + 1) * value_width], d_out[i * value_width : (i + 1) * value_width])
    _gather(qkv[0], place, each, width, block)
    _by_keys(sgemm, queries, qkv[1], head, parts, table, how[2] * LOG2_E)
    _by_keys(sgemm, d_outs, qkv[2], head, parts, d_table, ONE)
    for i in range(count):
        log_sum = outs[0][1][segment[2] + first + i // each, head * each + i % each]
        span = slice(i * keys, (i + 1) * keys)
        _score_gradient(scores[span], d_scores[span], _seen(place, how, i // each), log_sum, along[i])
    _to_keys(sgemm, table, d_outs, grads[2], head, parts, ONE)
    _to_keys(sgemm, d_table, queries, grads[1], head, parts, how[2])
    _of_keys(sgemm, d_table, qkv[1], head, parts, queries, how[2])
    span = each * width
    for i in range(last - first):
        grads[0][segment[2] + first + i, head * span : (head + 1) * span] = block[i * span : (i + 1) * span]


@compiled
def _dot(a, b):
    total = ZERO
    for d in range(len(a)):
        total += a[d] * b[d]
    return total


@compiled
def _score_gradient(scores, d_scores, seen, log_sum, along):
    """scores become P, and d_scores, until now dP, become dS."""
    scores[: seen[0]] = ZERO
    scores[seen[1] :] = ZERO
    d_scores[: seen[0]] = ZERO
    d_scores[seen[1] :] = ZERO
    p, d_p = scores[seen[0] : seen[1]], d_scores[seen[0] : seen[1]]
    for t in range(len(p)):
        p[t] = exp2(p[t] - log_sum)
        d_p[t] = p[t] * (d_p[t] - along)
