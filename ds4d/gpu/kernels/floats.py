"""Products with F16 and F32 weights: router, compressors, indexer (spec/numerics.md 1 and 3).

    y[r, o] = sum_k w[o, k] x[r, k]      weights widened to f32, fused multiply-adds in f32

    y        [R, n_out']             f32  rows below n_rows written, others left as they are
    w        [n_out' n_in]           f16 or f32, packed (`pack`), read once from memory
    x        [R, n_in]               f32  read once a tile and split, from L2: 4 rows at a time
    n_rows   [1]                     i32  how many of the R rows are real: the first ones
    part     [splits, n_out' / 16, R / 8, 128]  f32  sums of the splits; unused if there is one
    arrived  [n_out' / 16, R / 8]    u32  zeros, before and after; unused if there is one split

n_out' is n_out padded to 16, n_in a multiple of 64. Matrices that share an input are packed as one.

grid (R / 8, n_out' / 16, splits)   block 32 x warps   shared 512 B a warp
A block makes 16 outputs of 8 rows over its split of the input, each warp over as many steps of 64
inputs. Splits and warps follow from the weight's shape (`plan`): enough blocks for a large GPU.
Tiles of rows are neighbours in the grid, so the second finds the weights in L2.

Lane 8 o + j holds outputs o, 4 + o, 8 + o, 12 + o and inputs 4 j .. 4 j + 3, 32 + 4 j .. 35 + 4 j
of a step: a weight serves all rows from registers, an x serves four outputs, and the lanes' loads
of x are one line of 128 bytes. Weights of the first steps are on their way before x is looked at.

Order of the sum of one output: a lane's inputs ascending, then lanes j and j ^ 4, ^ 2, ^ 1, then
warps ascending, then splits ascending, by the block that arrives last. Rows 4 .. 7 of a tile are
left out where none of them is real; what stands in rows that are not does not matter.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx
from ds4d.gpu.kernels.warp import halve

TILE, STEP, ROWS = 16, 64, 8
SUMS = TILE * ROWS  # of a block
BLOCKS = 128  # one to an SM of the H200, which has 132
WARPS = 16  # of an SM: with 128 registers a thread


def product_ref(w, x):
    """[R, n_out] f64."""
    return x.astype(np.float64) @ w.astype(np.float64).T


def padded(n_out):
    return -(-n_out // TILE) * TILE


def plan(n_out, n_in):
    """(splits, warps of a block)."""
    assert n_in % STEP == 0, n_in
    tiles, steps, splits = padded(n_out) // TILE, n_in // STEP, 1
    # Without splits nothing waits for the last block; with them small blocks hide that from others.
    while steps % (2 * splits) == 0 and (
        tiles * splits < BLOCKS or (splits > 1 and steps // splits > WARPS)
    ):
        splits *= 2
    warps = WARPS if splits == 1 else WARPS // 2
    while steps // splits % warps:
        warps //= 2
    return splits, warps


def pack(*matrices):
    """Words [n_out' n_in / 2] (f16) or [n_out' n_in] (f32) of f16 or f32 matrices [n_out, n_in],
    one below the other: tiles of 16 outputs, of these steps of 64 inputs, of these

        f16   4 u   32 lanes   8 inputs                  output 4 u + o, lane 8 o + j:
        f32   4 u   2 i   32 lanes   4 inputs            inputs 32 i + 4 j .. 32 i + 4 j + 3

    Zeros where n_out is no multiple of 16; else not a byte more than in the file.
    """
    w = np.concatenate(matrices)
    n_out, n_in = w.shape
    out = np.zeros((padded(n_out), n_in), w.dtype)
    out[:n_out] = w
    cut = out.reshape(-1, 4, 4, n_in // STEP, 2, 8, 4)  # tile, u, o, step, i, j, input
    return np.ascontiguousarray(cut.transpose(_order(w.dtype))).reshape(-1).view("u4")


def unpack(words, n_out, n_in, dtype):
    """[n_out, n_in]: the inverse."""
    tiles, steps, order = padded(n_out) // TILE, n_in // STEP, _order(np.dtype(dtype))
    sizes = np.array([tiles, 4, 4, steps, 2, 8, 4])[list(order)]
    cut = words.view(dtype).reshape(sizes).transpose(np.argsort(order))
    return np.ascontiguousarray(cut).reshape(-1, n_in)[:n_out]


def _order(dtype):
    return (0, 3, 1, 2, 5, 4, 6) if dtype == np.float16 else (0, 3, 1, 4, 2, 5, 6)


@device
def _fetch(raw, w, at, n):
    """A lane's words of a step."""
    for q in range(n // 4):
        v = ptx.stream16(w, at + 128 * q)
        raw[4 * q], raw[4 * q + 1], raw[4 * q + 2], raw[4 * q + 3] = v[0], v[1], v[2], v[3]


@device
def _row(acc, f, row, x, at):
    """Eight inputs of one row into its sums of four outputs."""
    v, w = ptx.load16(x, at), ptx.load16(x, at + 32)
    x0, x1, x2, x3 = ptx.as_f4(v[0]), ptx.as_f4(v[1]), ptx.as_f4(v[2]), ptx.as_f4(v[3])
    x4, x5, x6, x7 = ptx.as_f4(w[0]), ptx.as_f4(w[1]), ptx.as_f4(w[2]), ptx.as_f4(w[3])
    for u in range(4):
        s = ptx.fma(f[8 * u], x0, acc[8 * u + row])
        s = ptx.fma(f[8 * u + 1], x1, s)
        s = ptx.fma(f[8 * u + 2], x2, s)
        s = ptx.fma(f[8 * u + 3], x3, s)
        s = ptx.fma(f[8 * u + 4], x4, s)
        s = ptx.fma(f[8 * u + 5], x5, s)
        s = ptx.fma(f[8 * u + 6], x6, s)
        acc[8 * u + row] = ptx.fma(f[8 * u + 7], x7, s)


@cache
def product_kernel(n_in, splits, warps, half):
    """`half`: weights are f16."""
    words = 512 if half else 1024  # of a step
    held = words // 32  # by a lane
    steps = n_in // STEP
    per_split = steps // splits
    per_warp = per_split // warps
    block, n_red = 32 * warps, warps * SUMS

    @kernel(
        "f4* y, u4* w, f4* x, i4* n_rows, f4* part, u4* arrived, i4 stride, i4 n_tiles",
        block=block,
        resident=32 * WARPS // block,
    )
    def floats_product(y, w, x, n_rows, part, arrived, stride, n_tiles):
        ptx.let_next_begin()
        tid = cuda.threadIdx.x
        lane, warp = tid % 32, tid // 32
        j, o = lane % 8, lane // 8
        above, tile, split = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.blockIdx.z
        red = cuda.shared.array(n_red, float32)
        raw = cuda.local.array(held, uint32)
        f = cuda.local.array(32, float32)  # of four outputs 8 inputs each
        acc = cuda.local.array(32, float32)  # of four outputs 8 rows each
        first = split * per_split + warp * per_warp
        at = (tile * steps + first) * words + 4 * lane
        _fetch(raw, w, at, held)
        for i in range(32):
            acc[i] = float32(0)

        ptx.wait_for_front()  # x and n_rows are written
        n = n_rows[0] - ROWS * above
        if n <= 0:
            return
        at_x = ROWS * above * n_in + first * STEP + 4 * j
        for step in range(per_warp):
            for i in range(held):
                if half:
                    pair = ptx.halves(raw[i])
                    f[2 * i], f[2 * i + 1] = pair[0], pair[1]
                else:
                    f[i] = ptx.as_f4(raw[i])
            if step + 1 < per_warp:
                at += words
                _fetch(raw, w, at, held)
            _row(acc, f, 0, x, at_x)
            _row(acc, f, 1, x, at_x + n_in)
            _row(acc, f, 2, x, at_x + 2 * n_in)
            _row(acc, f, 3, x, at_x + 3 * n_in)
            if n > 4:
                _row(acc, f, 4, x, at_x + 4 * n_in)
                _row(acc, f, 5, x, at_x + 5 * n_in)
                _row(acc, f, 6, x, at_x + 6 * n_in)
                _row(acc, f, 7, x, at_x + 7 * n_in)
            at_x += STEP

        halve(acc, 16, j & 4 != 0, 4)
        halve(acc, 8, j & 2 != 0, 2)
        halve(acc, 4, j & 1 != 0, 1)
        for i in range(4):  # lane j has sums 4 j .. 4 j + 3 of the 32
            row, out = 4 * (j & 1) + i, 4 * (j >> 1) + o
            red[warp * SUMS + row * TILE + out] = acc[i]
        cuda.syncthreads()  # the warps' sums are visible
        for i in range(tid, SUMS, block):
            total = red[i]
            for k in range(1, warps):
                total += red[k * SUMS + i]
            if splits > 1:
                place = (split * n_tiles + tile) * cuda.gridDim.x + above
                part[place * SUMS + i] = total
            elif i // TILE < n:
                y[(8 * above + i // TILE) * stride + tile * TILE + i % TILE] = total
        if splits > 1:
            last = cuda.shared.array(1, int32)
            cuda.syncthreads()  # the block's part is written
            here = tile * cuda.gridDim.x + above
            if tid == 0:
                last[0] = int32(ptx.arrive(arrived, here) == splits - 1)
            cuda.syncthreads()  # all know whether this block came last
            if last[0] == 1:
                if tid == 0:
                    arrived[here] = uint32(0)
                for i in range(tid, SUMS, block):
                    total = part[here * SUMS + i]
                    for k in range(1, splits):
                        total += part[(k * n_tiles * cuda.gridDim.x + here) * SUMS + i]
                    if i // TILE < n:
                        y[(8 * above + i // TILE) * stride + tile * TILE + i % TILE] = total

    return floats_product


def product_scratch(rows, n_out, n_in):
    """Numbers of `part` and of `arrived`."""
    splits, _ = plan(n_out, n_in)
    places = padded(n_out) // TILE * (rows // ROWS)
    return (splits * places * SUMS, places) if splits > 1 else (0, 0)


def product_grid(rows, n_out, n_in):
    splits, warps = plan(n_out, n_in)
    return (rows // ROWS, padded(n_out) // TILE, splits), 32 * warps


def product(stream, y, w, x, n_rows, part, arrived, *, rows, n_out, n_in, half, dependent=False):
    """Enqueue on `stream`. y [rows, padded(n_out)]."""
    assert rows % ROWS == 0, rows
    grid, block = product_grid(rows, n_out, n_in)
    product_kernel(n_in, *plan(n_out, n_in), half).launch(
        stream, grid, block, y, w, x, n_rows, part, arrived, padded(n_out), grid[1],
        dependent=dependent,
    )  # fmt: skip
