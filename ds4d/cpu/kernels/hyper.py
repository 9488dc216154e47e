"""Hyper-connections: several residual streams, mixed before and after each sublayer.

    z = (fn vec(X)) / sqrt( mean vec(X)² + eps )          [pre n | post n | comb n n]
    pre = sigmoid(z s0 + base) + eps_h    post = 2 sigmoid(z s1 + base)
    M = sinkhorn(z s2 + base)             x = sum_j pre_j X_j            h = rms(x; w)
    X'_k = post_k y + sum_j M[j, k] X_j                   (spec/model.md 4.3, 4.4)

The product fn vec(X) has run before (`product.py`); the reciprocal root is applied to its few
results. Sums over streams ascend. One row is one thread's work, but in `hyper_post`, where every
sixteen channels are.
"""

import numpy as np

from ds4d.cpu.jit import F4, I8, N, R, helper, kernel, real, share
from ds4d.cpu.kernels.activation import encode
from ds4d.cpu.kernels.norm import rms_row, rms_scale
from ds4d.cpu.kernels.simd import (
    at,
    exchange_1,
    exchange_2,
    exchange_4,
    exchange_8,
    exp,
    f4,
    fma,
    greater,
    load,
    scratch,
    splat,
    store,
)

ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
STREAMS_MAX = 16
_per_stream, _chunk_per_stream = scratch(STREAMS_MAX), scratch(STREAMS_MAX * 16)


def sinkhorn_ref(comb, iterations, eps):
    """M [n, n] f64 of logits [source, destination]."""
    e = np.exp(comb.astype(np.float64) - comb.max(1, keepdims=True))
    M = e / e.sum(1, keepdims=True) + eps
    M = M / (M.sum(0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        M = M / (M.sum(1, keepdims=True) + eps)
        M = M / (M.sum(0, keepdims=True) + eps)
    return M


@helper
def _sigmoid(x):
    return ONE / (ONE + exp(-x))


@helper
def _rows(M, n, eps):
    for j in range(n):
        s = ZERO
        for k in range(n):
            s += M[n * j + k]
        for k in range(n):
            M[n * j + k] /= s + eps


@helper
def _columns(M, n, eps):
    for k in range(n):
        s = ZERO
        for j in range(n):
            s += M[n * j + k]
        for j in range(n):
            M[n * j + k] /= s + eps


@helper
def _over_rows(v):
    """In every lane of a 4 x 4 matrix, the sum of its row."""
    v = v + exchange_1(v)
    return v + exchange_2(v)


@helper
def _over_columns(v):
    v = v + exchange_4(v)
    return v + exchange_8(v)


@helper
def _sinkhorn_four(M, iterations, eps):
    """Four streams, as in all published models: the matrix is one vector."""
    v, by = load(M, 0), splat(eps)
    high = greater(v, exchange_1(v))
    v = exp(v - greater(high, exchange_2(high)))
    v = v / _over_rows(v) + by
    v = v / (_over_columns(v) + by)
    for _ in range(iterations - 1):
        v = v / (_over_rows(v) + by)
        v = v / (_over_columns(v) + by)
    store(M, 0, v)


@helper
def sinkhorn(M, n, iterations, eps):
    """In place on logits M [n, n]."""
    if n == 4:
        _sinkhorn_four(M, iterations, eps)
        return
    for j in range(n):
        high = M[n * j]
        for k in range(1, n):
            high = max(high, M[n * j + k])
        for k in range(n):
            M[n * j + k] = exp(M[n * j + k] - high)
    _rows(M, n, ZERO)
    for i in range(n * n):
        M[i] += eps
    _columns(M, n, eps)
    for _ in range(iterations - 1):
        _rows(M, n, eps)
        _columns(M, n, eps)


@helper
def _mix(X, pre, x, n, width, stored):
    """x [width] = sum_j pre_j X_j."""
    for k in range(0, width, 16):
        acc = splat(pre[0]) * load(X, k)
        for j in range(1, n):
            acc = fma(splat(pre[j]), load(X, j * stored + k), acc)
        store(x, k, acc)


@helper
def _head_input(X, pre, w, act, row, n, width, stored, eps):
    """h = rms(sum_j pre_j X_j; w), and its int8 forms."""
    h = at(f4(act, 0), row * act[1])
    _mix(X, pre, h, n, width, stored)
    rms_row(h, w, h, width, eps)
    encode(act, row)


@kernel
def hyper_pre(
    tid: N,
    n_threads: N,
    step: I8,
    X: F4,  # [rows, n, stored]
    n: N,  # streams
    width: N,
    stored: N,
    z: F4,  # [rows, z_stride], fn vec(X)
    z_stride: N,
    scale: F4,  # [3]
    base: F4,  # [2 n + n n]
    hyper_eps: R,
    rms_eps: R,
    w: F4,  # [width]
    act: I8,  # of h
    iterations: N,
    post: F4,  # [rows, n]
    M: F4,  # [rows, n, n]
):
    pre, eps = _per_stream(), real(hyper_eps)
    for row in share(step[0], tid, n_threads):
        streams, mix = at(X, row * n * stored), at(z, row * z_stride)
        r = rms_scale(streams, n * stored, n * width, real(rms_eps))
        for i in range(n):
            pre[i] = _sigmoid(mix[i] * r * scale[0] + base[i]) + eps
            post[row * n + i] = TWO * _sigmoid(mix[n + i] * r * scale[1] + base[n + i])
        comb = at(M, row * n * n)
        for i in range(n * n):
            comb[i] = mix[2 * n + i] * r * scale[2] + base[2 * n + i]
        sinkhorn(comb, n, iterations, eps)
        _head_input(streams, pre, w, act, row, n, width, stored, real(rms_eps))


@kernel
def hyper_head(
    tid: N,
    n_threads: N,
    step: I8,
    X: F4,  # [rows, n, stored]
    n: N,
    width: N,
    stored: N,
    z: F4,  # [rows, z_stride], fn vec(X)
    z_stride: N,
    scale: F4,  # [1]
    base: F4,  # [n]
    hyper_eps: R,
    rms_eps: R,
    w: F4,
    act: I8,
):
    """The streams on their way out: as `hyper_pre`, without post and M."""
    pre = _per_stream()
    for row in share(step[0], tid, n_threads):
        streams, mix = at(X, row * n * stored), at(z, row * z_stride)
        r = rms_scale(streams, n * stored, n * width, real(rms_eps))
        for i in range(n):
            pre[i] = _sigmoid(mix[i] * r * scale[0] + base[i]) + real(hyper_eps)
        _head_input(streams, pre, w, act, row, n, width, stored, real(rms_eps))


@kernel
def hyper_post(
    tid: N,
    n_threads: N,
    step: I8,
    X: F4,  # [rows, n, stored], in place
    n: N,
    stored: N,
    y: F4,  # [rows, stored]
    post: F4,  # [rows, n]
    M: F4,  # [rows, n, n]
):
    new, chunks = _chunk_per_stream(), stored // 16
    for unit in share(step[0] * chunks, tid, n_threads):
        row, k = unit // chunks, unit % chunks * 16
        streams, mix = at(X, row * n * stored + k), at(M, row * n * n)
        v = load(y, row * stored + k)
        for to in range(n):
            acc = splat(post[row * n + to]) * v
            for j in range(n):
                acc = fma(splat(mix[j * n + to]), load(streams, j * stored), acc)
            store(new, 16 * to, acc)
        for to in range(n):
            store(streams, to * stored, load(new, 16 * to))
