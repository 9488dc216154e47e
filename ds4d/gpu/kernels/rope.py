"""Rotary embedding: turn the trailing pairs of a vector by position times frequency.

    (u, v) -> (u cos a - v sin a, u sin a + v cos a),   a = f32(pos) f32(f_i) in f32

Sine and cosine of that f32 angle are taken in double precision and rounded (spec/model.md 4.5),
once per row of a pass, into a table that all layers read:

    set 0   sliding layers' frequencies at the row's position
    set 1   compressed layers' frequencies at it
    set 2   the same at the first position of the ratio-4 window in which the row lies
    set 3   the same for ratio 128

    turns  [R, 4, 2, pairs]  f32  written but for idle rows: cosines, then sines
    pos    [R]               i32  -1 in idle rows
    plain  [pairs]           f32  frequencies of sliding layers
    yarn   [pairs]           f32  of the others

grid (R,)   block 128   no shared memory   positions up to 2^20, any pairs
An angle is reduced to within pi / 4 by subtracting a multiple of pi / 2 in two parts; the first has
33 bits, so that the product is exact. What is left is within 2^-53 of the true angle.
Nothing is summed.
"""

import numpy as np
from numba import cuda
from numba.cuda.types import float32, float64, int64

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

BLOCK = 128

TWO_OVER_PI = 0.6366197723675814
HALF_PI_HIGH, HALF_PI_LOW = 1.5707963267341256, 6.077100506506192e-11
TO_INTEGER = 1.5 * 2.0**52  # added to a double below 2^51, it leaves no place for a fraction

# Minimax polynomials on +-pi / 4, those of fdlibm: sin r = r + r z S(z), cos r = 1 - z/2 + z z C(z)
# with z = r r, both within one rounding of a double.
S0, S1, S2 = -1.66666666666666324348e-01, 8.33333333332248946124e-03, -1.98412698298579493134e-04
S3, S4, S5 = 2.75573137070700676789e-06, -2.50507602534068634195e-08, 1.58969099521155010221e-10
C0, C1, C2 = 4.16666666666666019037e-02, -1.38888888888741095749e-03, 2.48015872894767294178e-05
C3, C4, C5 = -2.75573143513906633035e-07, 2.08757232129817482790e-09, -1.13596475577881948265e-11


def angles_ref(pos, plain, yarn):
    """turns [R, 4, 2, pairs] f32; zeros in idle rows."""
    p = np.maximum(pos, 0)
    out = np.zeros((len(pos), 4, 2, len(plain)), np.float32)
    for kind, at in enumerate((p, p, p - p % 4, p - p % 128)):
        angle = np.float32(at)[:, None] * np.float32(yarn if kind else plain)
        out[:, kind, 0] = np.cos(angle.astype(np.float64))
        out[:, kind, 1] = np.sin(angle.astype(np.float64))
    out[np.asarray(pos) < 0] = 0
    return out


def turn_ref(x, turns, *, back=False):
    """x [n, ..., dim] with its trailing pairs turned by turns [n, 2, pairs], in f32."""
    pairs = turns.shape[-1]
    cos, sin = (turns[:, i].reshape(len(x), *[1] * (x.ndim - 2), pairs) for i in range(2))
    sin = -sin if back else sin
    y = x.astype(np.float32)
    u, v = y[..., -2 * pairs :: 2].copy(), y[..., -2 * pairs + 1 :: 2].copy()
    y[..., -2 * pairs :: 2], y[..., -2 * pairs + 1 :: 2] = u * cos - v * sin, u * sin + v * cos
    return y


# -- for other kernels -------------------------------------------------------------------------


@device
def turn_of(row, kind, pairs):
    """Where in `turns` the cosines of a row's set `kind` begin; its sines lie `pairs` behind."""
    return (int64(row) * 4 + kind) * 2 * pairs


@device
def turn(u, v, cos, sin):
    """The pair, turned. Each product and each sum is rounded."""
    return u * cos - v * sin, u * sin + v * cos


@device
def turn_back(u, v, cos, sin):
    """The pair, turned by the negative angle: the bits of `turn` with -sin."""
    return u * cos + v * sin, v * cos - u * sin


# -- the table ---------------------------------------------------------------------------------


@device
def cos_sin(angle):
    """Cosine and sine, f32, of an angle f32 of 0 .. 2^20: each is the double's, rounded."""
    a = float64(angle)
    n = (a * TWO_OVER_PI + TO_INTEGER) - TO_INTEGER
    r = (a - n * HALF_PI_HIGH) - n * HALF_PI_LOW
    z = r * r
    s = r + r * z * (S0 + z * (S1 + z * (S2 + z * (S3 + z * (S4 + z * S5)))))
    c = (1.0 - 0.5 * z) + z * z * (C0 + z * (C1 + z * (C2 + z * (C3 + z * (C4 + z * C5)))))
    quarter = int64(n) & 3
    cos, sin = float32(c), float32(s)
    if quarter & 1:
        cos, sin = sin, cos
    if quarter == 1 or quarter == 2:
        cos = -cos
    if quarter >= 2:
        sin = -sin
    return cos, sin


@kernel("f4* turns, i4* pos, f4* plain, f4* yarn, i4 pairs", block=BLOCK)
def angles_kernel(turns, pos, plain, yarn, pairs):
    ptx.let_next_begin()
    ptx.wait_for_front()
    row = int64(cuda.blockIdx.x)
    p = pos[row]
    if p < 0:
        return
    for k in range(cuda.threadIdx.x, 4 * pairs, BLOCK):
        kind, i = k // pairs, k % pairs
        frequency = plain[i] if kind == 0 else yarn[i]
        at = p
        if kind == 2:
            at = p - p % 4
        elif kind == 3:
            at = p - p % 128
        cos, sin = cos_sin(float32(at) * frequency)
        to = turn_of(row, kind, pairs) + i
        turns[to] = cos
        turns[to + pairs] = sin


def angles(stream, turns, pos, plain, yarn, *, n_rows, pairs, dependent=False):
    """Enqueue on `stream`, once a pass, in front of whatever turns anything."""
    angles_kernel.launch(stream, n_rows, BLOCK, turns, pos, plain, yarn, pairs, dependent=dependent)
