"""Embedding and stream expansion: every residual stream of a row begins as its id's embedding.

X[r, s, :] = table[token[r], :]      table [V, width] f32 or f16 (spec/model.md 4.1)
"""

from ds4d.cpu.jit import F4, I8, U2, N, kernel, share
from ds4d.cpu.kernels.simd import widen


def embed_ref(table, tokens, streams):
    """X [n, streams, width] f32."""
    return table[tokens].astype("f4")[:, None].repeat(streams, axis=1)


@kernel
def embed_f16(
    tid: N,
    n_threads: N,
    step: I8,
    token: I8,  # [rows]
    table: U2,  # [V, width]
    width: N,
    X: F4,  # [rows, streams, stored]
    streams: N,
    stored: N,
):
    for row in share(step[0], tid, n_threads):
        for s in range(streams):
            for k in range(width):
                X[(row * streams + s) * stored + k] = widen(table[token[row] * width + k])


@kernel
def embed_f32(
    tid: N,
    n_threads: N,
    step: I8,
    token: I8,  # [rows]
    table: F4,  # [V, width]
    width: N,
    X: F4,  # [rows, streams, stored]
    streams: N,
    stored: N,
):
    for row in share(step[0], tid, n_threads):
        for s in range(streams):
            for k in range(width):
                X[(row * streams + s) * stored + k] = table[token[row] * width + k]
