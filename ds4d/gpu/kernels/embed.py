"""Embedding: every residual stream of a row begins as its token's embedding (spec/model.md 4.1).

    X[r, s, d] = table[token[r], d]

    X      [R, streams, width]  f32  written once
    token  [R]                  i32  -1 in idle rows, whose streams stay as they are
    table  [V, width]           f16 or f32, rows of the file; only the tokens' rows are read, once

grid (R, pieces of 128 lanes)   block 128   no shared memory   width a multiple of 4
A lane holds 4 channels. Nothing is summed.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import int64

from ds4d.gpu.jit import kernel
from ds4d.gpu.kernels import ptx

BLOCK = 128


def embed_ref(table, token, streams):
    """X [R, streams, width] f32; zeros in idle rows."""
    rows = np.where(np.asarray(token)[:, None] < 0, 0, table[token]).astype("f4")
    return rows[:, None].repeat(streams, axis=1)


@cache
def embed_kernel(half):
    """`half`: the table is f16."""
    if half:

        @kernel("f4* X, i4* token, u2* table, i4 width, i4 streams", block=BLOCK)
        def embed_f16(X, token, table, width, streams):
            ptx.let_next_begin()
            d = 4 * int64(cuda.blockIdx.y * BLOCK + cuda.threadIdx.x)
            row = int64(cuda.blockIdx.x)
            ptx.wait_for_front()  # the token is known
            chosen = int64(token[row])
            if chosen >= 0 and d < width:
                v = ptx.stream8(table, chosen * width + d)
                a, b = ptx.halves(v[0]), ptx.halves(v[1])
                v0, v1, v2, v3 = ptx.as_u4(a[0]), ptx.as_u4(a[1]), ptx.as_u4(b[0]), ptx.as_u4(b[1])
                for s in range(streams):
                    ptx.store16(X, (row * streams + s) * width + d, v0, v1, v2, v3)

        return embed_f16

    @kernel("f4* X, i4* token, f4* table, i4 width, i4 streams", block=BLOCK)
    def embed_f32(X, token, table, width, streams):
        ptx.let_next_begin()
        d = 4 * int64(cuda.blockIdx.y * BLOCK + cuda.threadIdx.x)
        row = int64(cuda.blockIdx.x)
        ptx.wait_for_front()  # the token is known
        chosen = int64(token[row])
        if chosen >= 0 and d < width:
            v = ptx.stream16(table, chosen * width + d)
            for s in range(streams):
                ptx.store16(X, (row * streams + s) * width + d, v[0], v[1], v[2], v[3])

    return embed_f32


def embed_grid(rows, width):
    return rows, -(-width // (4 * BLOCK))


def embed(stream, X, token, table, *, rows, width, streams, half, dependent=False):
    """Enqueue on `stream`."""
    assert width % 4 == 0, width
    embed_kernel(half).launch(
        stream, embed_grid(rows, width), BLOCK, X, token, table, width, streams,
        dependent=dependent,
    )  # fmt: skip
