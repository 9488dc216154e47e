"""Queries of the indexer, laid out for the products of `score` (spec/model.md 4.8).

    query = fp4(hadamard(turn(q)))   where index rows are FP4 (`rows.round_index_query`)
    query = turn(q)                  where they are halves

    q       [R, stride]               f32  heads x dim of it are read, once
    turns   [R, 4, 2, pairs]          f32  set 1
    pos     [R]                       i32  -1 in idle rows
    codes   [R, 8 tiles, dim]         i8   halves << shift, in the order below; written whole for
    scales  [R, 8 tiles, dim / 32]    f32  rows that select: heads up to 8 tiles are zeros
    query   [R, heads, dim]           f32  where rows are halves, instead of codes and scales

A channel is 2 codes scales: codes count halves, and so do those of keys, so `scales` is a quarter
of the power of two. Of a block of 32 with exponent e, shift = min(e - least e of the head,
SHIFT_MOST) has gone from the power to the codes. A block with a NaN or an infinity has the scale
NaN, and so will have its scores.

Codes of a row: for each tile of 8 heads and chunk of 16 bytes, lane 4 g + t of a warp finds its own
16 bytes. With each = dim / 32, they are those of head g: words t each .. t each + each - 1 of 8
channels, in order. So a lane's words come from one place, as a key's do, and the channels of a
block are spread over products, which level vectors do not mind. dim = 32 has chunks of 8 bytes.

grid (tiles, R)   block 256, a warp a head   no shared memory   dim 32, 64, 128 or 256
halves: grid (R,)   block 256   any dim
Hadamard: strides 1, 2, 4, ..., then the scale, as in `rows.hadamard`. Floor at Flash: 32 KB of q
and 8 KB of codes a row; what it takes is the latency of a load and 10 shuffles.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import kernel
from ds4d.gpu.kernels import ptx, rope, rows
from ds4d.gpu.kernels.index import SHIFT_MOST
from ds4d.model import rows as model_rows

BLOCK = 256
ALL = 0xFFFFFFFF
DIMS = (32, 64, 128, 256)  # of FP4 rows


def tiles_of(heads):
    """Tiles of 8 heads."""
    return -(-heads // 8)


def query_ref(q, turns):
    """(codes [R, heads, dim] in natural order, exponents [R, heads, dim / 32] after the shift) of
    q [R, heads, dim]. The value is codes / 2 times 2^(exponent - 127)."""
    turned = model_rows.hadamard(rope.turn_ref(q, turns[:, 1]))
    packed, e = model_rows.encode_fp4(turned)
    values = model_rows.decode_fp4(packed, np.full_like(e, 127))
    shift = np.minimum(e - e.min(-1, keepdims=True), SHIFT_MOST).astype(np.int64)
    codes = (2 * values).astype(np.int64) << np.repeat(shift, 32, axis=-1)
    return codes.astype(np.int8), e - shift


def order(heads, dim):
    """[8 tiles, dim] of int: head * dim + channel of each byte of a row's codes."""
    tiles, each = tiles_of(heads), dim // 32
    chunk = min(4, 2 * each)  # words
    at = np.arange(8 * tiles * dim).reshape(tiles, 2 * each // chunk, 8, 4, chunk, 4)
    tile, c, g, t, word, byte = np.unravel_index(at, at.shape)
    word = c * chunk + word
    k = 8 * (t * each + word // 2) + 4 * (word % 2) + byte
    return ((8 * tile + g) * dim + k).reshape(8 * tiles, dim)


@cache
def fp4_kernel(dim):
    assert dim in DIMS, f"FP4 index rows of {dim} channels"
    each = dim // 32
    chunk = min(4, 2 * each)  # words of a lane's chunk
    chunks = 2 * each // chunk
    transform, scaling = rows.hadamard(dim), rows.fp4_scaling(dim)

    @kernel(
        "i1* codes, f4* scales, f4* q, i4 stride, f4* turns, i4* pos, i4 heads, i4 pairs, i4 top_k",
        block=BLOCK,
    )
    def index_query_fp4(codes, scales, q, stride, turns, pos, heads, pairs, top_k):
        ptx.let_next_begin()
        ptx.wait_for_front()
        tile, row = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        if (pos[row] + 1) >> 2 <= top_k:
            return
        g, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        head, all_heads = 8 * tile + g, 8 * int64(cuda.gridDim.x)
        x = cuda.local.array(each, float32)
        for i in range(each):
            x[i] = float32(0)
        if head < heads:
            for i in range(each):
                x[i] = q[row * stride + head * dim + each * lane + i]
        plain, table = dim - 2 * pairs, rope.turn_of(row, 1, pairs)
        if each == 1:
            other = cuda.shfl_xor_sync(ALL, x[0], 1)
            if lane >= plain:
                at = table + (lane - plain) // 2
                u = other if lane % 2 else x[0]
                v = x[0] if lane % 2 else other
                u, v = rope.turn(u, v, turns[at], turns[at + pairs])
                x[0] = v if lane % 2 else u
        else:
            for i in range(each // 2):
                k = each * lane + 2 * i
                if k >= plain:
                    at = table + (k - plain) // 2
                    u, v = rope.turn(x[2 * i], x[2 * i + 1], turns[at], turns[at + pairs])
                    x[2 * i] = u
                    x[2 * i + 1] = v
        transform(x, lane)
        exponent = int32(scaling(x))
        least = -ptx.most(int32(-exponent))
        shift = int32(0) if exponent == 255 else min(exponent - least, SHIFT_MOST)
        for i in range(each):
            k = each * lane + i
            word, t = k // 8 % each * 2 + k // 4 % 2, k // 8 // each
            place = (tile * chunks + word // chunk) * 32 + 4 * g + t
            at = (place * chunk + word % chunk) * 4 + k % 4
            codes[row * all_heads * dim + at] = rows.fp4_count(x[i]) << shift
        if each * lane % 32 == 0:
            bits = uint32(exponent - shift) << 23 | (0x400000 if exponent == 255 else 0)
            at = (row * all_heads + head) * each + each * lane // 32
            scales[at] = float32(0.25) * ptx.as_f4(uint32(bits))

    return index_query_fp4


@kernel(
    "f4* query, f4* q, i4 stride, f4* turns, i4* pos, i4 heads, i4 dim, i4 pairs, i4 top_k",
    block=BLOCK,
)
def index_query_f32(query, q, stride, turns, pos, heads, dim, pairs, top_k):
    ptx.let_next_begin()
    ptx.wait_for_front()
    row = int64(cuda.blockIdx.x)
    if (pos[row] + 1) >> 2 <= top_k:
        return
    plain, table = dim - 2 * pairs, rope.turn_of(row, 1, pairs)
    to = row * heads * dim
    for i in range(cuda.threadIdx.x, heads * dim, BLOCK):
        k = i % dim - plain
        if k < 0:
            query[to + i] = q[row * stride + i]
        elif k % 2 == 0:
            at = table + k // 2
            u, v = q[row * stride + i], q[row * stride + i + 1]
            u, v = rope.turn(u, v, turns[at], turns[at + pairs])
            query[to + i] = u
            query[to + i + 1] = v


def index_query(
    stream, codes, scales, q, turns, pos, *,
    n_rows, stride, heads, dim, pairs, top_k, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`, where index rows are FP4."""
    fp4_kernel(dim).launch(
        stream, (tiles_of(heads), n_rows), BLOCK, codes, scales, q, stride, turns, pos, heads,
        pairs, top_k, dependent=dependent,
    )  # fmt: skip


def index_query_floats(
    stream, query, q, turns, pos, *,
    n_rows, stride, heads, dim, pairs, top_k, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`, where index rows are halves."""
    index_query_f32.launch(
        stream, n_rows, BLOCK, query, q, stride, turns, pos, heads, dim, pairs, top_k,
        dependent=dependent,
    )  # fmt: skip
