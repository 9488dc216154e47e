"""RMS normalisation, one block per row (spec/model.md 4.2).

    y[r, d] = x[r, d] w[d] / sqrt(mean_d x[r, d]^2 + eps)

    out  [rows, dim]     f32  written whole        w  [dim]  f32
    x    [rows, stride]  f32  read twice; the second pass hits L2

grid (rows,)   block 256   shared 32 B   any dim
The sum is f32: 256 strided partial sums, then warps, then the eight of them in order.
"""

import math

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int64

from ds4d.gpu.jit import kernel
from ds4d.gpu.kernels import ptx, warp

BLOCK = 256
WARPS = BLOCK // 32


def rmsnorm_ref(x, w, eps):
    """[rows, dim] f64."""
    x = x.astype(np.float64)
    return x * w / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


@kernel("f4* out, f4* x, f4* w, i4 dim, i4 stride, f4 eps", block=BLOCK)
def rmsnorm_kernel(out, x, w, dim, stride, eps):
    ptx.let_next_begin()
    tid, row = cuda.threadIdx.x, int64(cuda.blockIdx.x)
    to, base = row * dim, row * stride
    partial = cuda.shared.array(WARPS, float32)
    acc = float32(0)
    ptx.wait_for_front()
    for d in range(tid, dim, BLOCK):
        acc = ptx.fma(x[base + d], x[base + d], acc)
    acc = warp.total(acc)
    if tid % 32 == 0:
        partial[tid // 32] = acc
    cuda.syncthreads()  # all eight partials are visible
    total = float32(0)
    for i in range(WARPS):  # every thread adds eight numbers: cheaper than a broadcast
        total += partial[i]
    scale = float32(1) / math.sqrt(total / float32(dim) + eps)
    for d in range(tid, dim, BLOCK):
        out[to + d] = x[base + d] * scale * w[d]


def rmsnorm(stream, out, x, w, *, n_rows, dim, eps, stride=None, dependent=False):
    """Enqueue on `stream`."""
    stride = dim if stride is None else stride
    rmsnorm_kernel.launch(stream, n_rows, BLOCK, out, x, w, dim, stride, eps, dependent=dependent)
