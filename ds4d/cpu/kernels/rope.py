"""Rotary embedding: turn the trailing pairs of a vector by position times frequency.

    (u, v) -> (u cos a - v sin a, u sin a + v cos a),   a = f32(pos) f32(f_i) in f32

Sine and cosine of that f32 angle are taken in f64 and rounded (spec/model.md 4.5), once per row of
a step: `angles` fills a table [rows, 4, 2, pairs] f32 of cosines and sines that all layers use.

    set 0   sliding layers' frequencies at the row's position
    set 1   compressed layers' frequencies at it
    set 2   the same at the first position of the ratio-4 window that the row completes, if it does
    set 3   the same for ratio 128
"""

import math

import numpy as np

from ds4d.cpu.jit import F4, I8, N, helper, kernel, share
from ds4d.cpu.kernels.simd import at


def rope_ref(x, pos, frequencies, inverse=False):
    """y like x [n, ..., dim] f64; pos [n]."""
    pairs = len(frequencies)
    angle = np.float32(pos)[:, None] * np.float32(frequencies)
    angle = angle.astype(np.float64).reshape(len(pos), *[1] * (x.ndim - 2), pairs)
    cos, sin = np.cos(angle), np.sin(angle) * (-1 if inverse else 1)
    y = x.astype(np.float64)
    u, v = x[..., -2 * pairs :: 2], x[..., -2 * pairs + 1 :: 2]
    y[..., -2 * pairs :: 2], y[..., -2 * pairs + 1 :: 2] = u * cos - v * sin, u * sin + v * cos
    return y


@kernel
def angles(
    tid: N,
    n_threads: N,
    step: I8,
    pos: I8,  # [rows]
    plain: F4,  # [pairs] frequencies of sliding layers
    yarn: F4,  # [pairs] of the others
    pairs: N,
    turns: F4,  # [rows, 4, 2, pairs]
):
    for row in share(step[0], tid, n_threads):
        for kind in range(4):
            p = pos[row]
            if kind >= 2:
                ratio = 4 if kind == 2 else 128
                if (p + 1) % ratio != 0:
                    continue
                p = p + 1 - ratio
            to = turn_of(turns, row, kind, pairs)
            for i in range(pairs):
                angle = np.float64(np.float32(p) * (plain[i] if kind == 0 else yarn[i]))
                to[i] = np.float32(math.cos(angle))
                to[pairs + i] = np.float32(math.sin(angle))


@helper
def turn_of(turns, row, kind, pairs):
    """[2, pairs]: cosines and sines of a row's set `kind`."""
    return at(turns, (row * 4 + kind) * 2 * pairs)


@helper
def rotate(x, table, pairs, sign):
    """In place on x [2 * pairs]; table [2, pairs]; sign -1 turns back."""
    for i in range(pairs):
        cos, sin = table[i], table[pairs + i] * sign
        u, v = x[2 * i], x[2 * i + 1]
        x[2 * i] = u * cos - v * sin
        x[2 * i + 1] = u * sin + v * cos
