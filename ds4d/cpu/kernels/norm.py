"""Root-mean-square normalisation of rows, and the int8 form of what comes out.

    y = x w / sqrt( mean x² + eps )

Rows are zero behind their `n` elements, up to a multiple of 16, and so are weights: loops run over
whole vectors. The sum of squares has sixteen lanes, added as `simd.total` does.
"""

import numpy as np

from ds4d.cpu.jit import F4, I8, N, R, helper, kernel, real, share
from ds4d.cpu.kernels.activation import encode
from ds4d.cpu.kernels.simd import at, f4, fma, load, splat, sqrt, store, total

ZERO, ONE = np.float32(0), np.float32(1)


def rms_ref(x, w, eps):
    """f64 y [..., n]."""
    x = x.astype(np.float64)
    return x * w / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@helper
def rms_scale(x, stored, n, eps):
    """1 / sqrt(mean of n squares + eps); x [stored], of which n are not padding."""
    squares = splat(ZERO)
    for k in range(0, stored, 16):
        v = load(x, k)
        squares = fma(v, v, squares)
    return ONE / sqrt(total(squares) / np.float32(n) + eps)


@helper
def rms_row(x, w, y, n, eps):
    """y = rms(x; w); y may be x."""
    scale = splat(rms_scale(x, n, n, eps))
    for k in range(0, n, 16):
        store(y, k, load(x, k) * scale * load(w, k))


@kernel
def rmsnorm(
    tid: N,
    n_threads: N,
    step: I8,
    x: F4,  # [rows, stride]
    stride: N,
    w: F4,  # [n]
    act: I8,  # of the result
    n: N,
    eps: R,
):
    y, width = f4(act, 0), act[1]
    for row in share(step[0], tid, n_threads):
        rms_row(at(x, row * stride), w, at(y, row * width), n, real(eps))
        encode(act, row)
