"""Products with Q8_0 weights on tensor cores, for 8 to 32 rows at once (spec/numerics.md 1, 3).

    y[r, o] = sum over blocks b of 32 inputs:  float(q[b, r] . w[o, b])  *  (d_w[o, b] * d[b, r])

    y  [R, stride]                     f4  outputs, n_out padded to 16 of them written
    w  [tiles, blocks, 32 lanes, 16]   u1  codes: a tile is 16 outputs, a block 32 inputs; read once
    s  [tiles, blocks / 4, 8, 4, 2]    u2  F16 d_w of outputs g and g + 8, four blocks a load; once
    q  [n / 32, R, 32]  i1             activations: read by every tile, from the caches
    d  [n / 32, R]      f4             their scales, likewise

`blocks` is n_in / 32 padded to a multiple of 4; padding is zero and is not multiplied. Byte 4 i + j
of lane 4 g + t is code 8 t + j of output g (i = 0), of g + 8 (1), code 8 t + 4 + j of g (2), of
g + 8 (3): the four operands of `ptx.mma_s8`, with k ordered alike on both sides. A GGUF block of
34 bytes is 2 of s and 32 of w, so nothing grows but what n_out and n_in are padded by.

Matrices that share an input are one weight, their rows concatenated. A grouped product is one too:
outputs of group i read the blocks of q from i * step / 32 on.

grid (tiles of a group, groups)   block 32 * split   shared 512 * TILES * split bytes, or none
Order: a warp adds its part of the blocks in ascending order, a fused multiply-add each, then the
parts are added in ascending order to 0. `parts_of` divides by the weight's shape alone, and rows
are columns of the tensor core's product, so a row's bits depend on nothing beside it.
Idle rows cost nothing; what comes of them is read by nobody.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint16, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

TILE = 16  # outputs
REPACK_BLOCK = 256


# -- layout ------------------------------------------------------------------------------------


def padded(n, to):
    return -(-n // to) * to


def sizes_q8_0(n_out, n_in):
    """Bytes of w and of s."""
    elements = padded(n_out, TILE) * padded(n_in, 128)
    return elements, elements // 16


def pack_q8_0(raw, n_out, n_in):
    """w and s of a GGUF tensor's bytes [n_out, n_in / 32, 34]."""
    raw = np.asarray(raw, np.uint8).reshape(n_out, n_in // 32, 34)
    rows, blocks = padded(n_out, TILE), padded(n_in, 128) // 32
    if (rows, blocks) != raw.shape[:2]:
        whole = np.zeros((rows, blocks, 34), np.uint8)
        whole[:n_out, : n_in // 32] = raw
        raw = whole
    tiles = rows // TILE
    # tile, which of g and g + 8, g, block, t, which half of a lane's eight codes, code
    codes = raw[:, :, 2:].reshape(tiles, 2, 8, blocks, 4, 2, 4)
    w = codes.transpose(0, 3, 2, 4, 5, 1, 6).reshape(tiles, blocks, 32, 16)
    scales = np.ascontiguousarray(raw[:, :, :2]).view("<u2").reshape(tiles, 2, 8, blocks // 4, 4)
    s = scales.transpose(0, 3, 2, 4, 1)
    return np.ascontiguousarray(w), np.ascontiguousarray(s)


def unpack_q8_0(w, s, n_out, n_in):
    """The bytes [n_out, n_in / 32, 34] of which `pack_q8_0` makes w and s."""
    tiles, blocks = w.shape[:2]
    raw = np.empty((tiles * TILE, blocks, 34), np.uint8)
    codes = w.reshape(tiles, blocks, 8, 4, 2, 2, 4).transpose(0, 5, 2, 1, 3, 4, 6)
    raw[:, :, 2:] = codes.reshape(tiles * TILE, blocks, 32)
    scales = s.transpose(0, 4, 2, 1, 3).reshape(tiles * TILE, blocks)
    raw[:, :, :2] = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    return np.ascontiguousarray(raw[:n_out, : n_in // 32])


def parts_of(n_in, n_out):
    """Warps that share a tile's inputs: 1, 2, 4, 8 or 16, and each has a multiple of 4 blocks.

    Doubled while a warp would have more than 32 blocks, or while there are fewer than 4096 warps
    (about 32 on each SM of an H200) and a warp keeps 8 blocks, whose loads are all in flight
    together. More than 8 only where tiles are fewer than the SMs. These are the divisions with
    which `tools/probe_mma_rows.py` reached 3 to 4.25 TB/s.
    """
    blocks, tiles, split = padded(n_in, 128) // 32, padded(n_out, TILE) // TILE, 1
    most = 8 if tiles > 128 else 16
    while split < most and blocks % (8 * split) == 0:
        part = blocks // split
        if part <= 32 and (part < 16 or tiles * split >= 4096):
            break
        split *= 2
    return split


# -- reference ---------------------------------------------------------------------------------


def product_ref(raw, q, d, *, n_out, n_in, groups=1, step=None):
    """y [R, n_out padded to 16], with the kernel's roundings."""
    step = n_in if step is None else step
    raw = np.asarray(raw, np.uint8).reshape(n_out, n_in // 32, 34)
    codes = raw[:, :, 2:].view(np.int8).astype(np.int64)
    by = np.ascontiguousarray(raw[:, :, :2]).view("<f2")[..., 0].astype(np.float32)
    blocks, rows, each = n_in // 32, q.shape[1], n_out // groups
    part = padded(n_in, 128) // 32 // parts_of(n_in, n_out)
    y = np.zeros((rows, padded(n_out, TILE)), np.float32)
    for group in range(groups):
        own = slice(group * each, (group + 1) * each)
        for first in range(0, blocks, part):
            acc = np.zeros((rows, each), np.float32)
            for b in range(first, min(first + part, blocks)):
                dot = q[group * step // 32 + b].astype(np.int64) @ codes[own, b].T
                scale = d[group * step // 32 + b][:, None] * by[own, b]
                # float64 holds the product of two float32 exactly
                acc = (dot.astype(np.float64) * scale + acc).astype(np.float32)
            y[:, own] += acc
    return y


# -- product -----------------------------------------------------------------------------------


@device
def block_q8_0(words, scales, u):
    """Block u of those a lane holds: the tensor core's operand, d_w of outputs g and of g + 8."""
    low, high = ptx.halves(scales[u])
    return words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3], low, high


@cache
def product_q8_0(tiles, split, ahead, ragged):
    """`tiles`: rows / 8. `ahead`: blocks whose loads are in flight together, 4 or 8, of which a
    warp's part is a multiple. `ragged`: n_in is no multiple of 128."""
    rows, sums = 8 * tiles, 4 * tiles
    n_words, n_shared, quads = 4 * ahead, split * sums * 32, ahead // 4

    # Sixteen warps on an SM: else the compiler would load all activations of a chunk at once,
    # into 210 registers at 32 rows, and leave few warps to wait for weights.
    @kernel(
        "f4* y, u1* w, u2* s, i1* q, f4* d, i4 blocks, i4 step, i4 stride",
        block=32 * split,
        resident=16 // split,
    )
    def product_q8_0(y, w, s, q, d, blocks, step, stride):
        ptx.let_next_begin()
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        g, t = lane >> 2, lane & 3
        tile = int64(cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
        stored = (blocks + 3) >> 2 << 2
        part = stored // split
        first = warp * part
        # Where this lane's words of block 0 begin, of either operand.
        at_w = (tile * stored + first) * 512 + lane * 16
        at_s = (tile * stored + first) * 16 + g * 8
        front = (int64(cuda.blockIdx.y) * step + first) * rows
        at_q, at_d = (front + g) * 32 + t * 8, front + t * 2

        words = cuda.local.array(n_words, uint32)
        scales = cuda.local.array(ahead, uint32)
        acc = cuda.local.array(sums, float32)
        for i in range(sums):
            acc[i] = float32(0)
        for c in range(0, part, ahead):
            for u in range(ahead):
                four = ptx.stream16(w, at_w + (c + u) * 512)
                for i in range(4):
                    words[4 * u + i] = four[i]
            for u in range(quads):
                four = ptx.stream16(s, at_s + (c + 4 * u) * 16)
                for i in range(4):
                    scales[4 * u + i] = four[i]
            if c == 0:
                ptx.wait_for_front()  # which made the activations, but no weights
            for u in range(ahead):
                if not ragged or first + c + u < blocks:
                    a0, a1, a2, a3, low, high = block_q8_0(words, scales, u)
                    for n in range(tiles):
                        place = (c + u) * rows + 8 * n
                        b0, b1 = ptx.load8(q, at_q + place * 32)
                        d0, d1 = ptx.load8(d, at_d + place)
                        left, right = ptx.as_f4(d0), ptx.as_f4(d1)
                        zero = int32(0)
                        dot = ptx.mma_s8(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
                        i = 4 * n
                        acc[i] = ptx.fma(float32(dot[0]), low * left, acc[i])
                        acc[i + 1] = ptx.fma(float32(dot[1]), low * right, acc[i + 1])
                        acc[i + 2] = ptx.fma(float32(dot[2]), high * left, acc[i + 2])
                        acc[i + 3] = ptx.fma(float32(dot[3]), high * right, acc[i + 3])

        # Sum i of a lane is row 8 (i / 4) + 2 t + i % 2, output g of the tile, or g + 8 if i & 2.
        at_y = int64(t) * 2 * stride + tile * 16 + g
        if split == 1:
            for i in range(sums):
                row, output = 8 * (i >> 2) + (i & 1), 8 * (i >> 1 & 1)
                y[at_y + row * stride + output] = acc[i]
        else:
            parts = cuda.shared.array(n_shared, float32)
            for i in range(sums):
                parts[(warp * sums + i) * 32 + lane] = acc[i]
            cuda.syncthreads()  # every part is visible
            for i in range(warp, sums, split):
                total = float32(0)
                for k in range(split):
                    total += parts[(k * sums + i) * 32 + lane]
                row, output = 8 * (i >> 2) + (i & 1), 8 * (i >> 1 & 1)
                y[at_y + row * stride + output] = total

    return product_q8_0


def kernel_for(n_in, n_out, n_rows):
    """The kernel of a weight, and the threads of its blocks. `n_out` counts all groups."""
    split, stored = parts_of(n_in, n_out), padded(n_in, 128) // 32
    ahead = 8 if stored // split % 8 == 0 else 4
    return product_q8_0(n_rows // 8, split, ahead, n_in % 128 != 0), 32 * split


# -- repacking on the device -------------------------------------------------------------------


@kernel("u1* w, u2* s, u2* raw, i4 n_out, i4 blocks, i4 first_tile", block=REPACK_BLOCK)
def repack_q8_0(w, s, raw, n_out, blocks, first_tile):
    """A warp makes the 512 bytes of a tile's block, and the 16 scales of that."""
    lane = cuda.threadIdx.x & 31
    b = int64(cuda.blockIdx.y) * (REPACK_BLOCK // 32) + (cuda.threadIdx.x >> 5)
    stored = (int64(blocks) + 3) >> 2 << 2
    if b < stored:
        g, t = lane >> 2, lane & 3
        words = cuda.local.array(4, uint32)
        for half in range(2):
            o = int64(cuda.blockIdx.x) * 16 + half * 8 + g
            for k in range(2):
                word = uint32(0)
                if o < n_out and b < blocks:
                    # A block is 17 halves, the first its scale; a lane's eight codes are four.
                    at = (o * blocks + b) * 17 + 1 + t * 4 + k * 2
                    word = uint32(raw[at] | uint32(raw[at + 1]) << 16)
                words[2 * k + half] = word
        tile = int64(first_tile) + cuda.blockIdx.x
        ptx.store16(w, ((tile * stored + b) * 32 + lane) * 16, words[0], words[1], words[2],
                    words[3])  # fmt: skip
        if lane < 16:
            o = int64(cuda.blockIdx.x) * 16 + lane
            value = uint16(0)
            if o < n_out and b < blocks:
                value = raw[(o * blocks + b) * 17]
            at = ((tile * stored + b) >> 2) * 64 + (lane & 7) * 8 + (b & 3) * 2 + (lane >> 3)
            s[at] = value


# -- launching ---------------------------------------------------------------------------------


def product(
    stream, y, w, s, q, d, *, n_rows, n_out, n_in, groups=1, step=None, stride=None,
    dependent=False,
):  # fmt: skip
    """y [n_rows, stride] of q and d, blocks of 32. `n_in` is what one output reads, `step` from
    one group's first input to the next one's; a group has n_out / groups outputs. `n_rows` is R."""
    step, stride = n_in if step is None else step, padded(n_out, TILE) if stride is None else stride
    assert n_rows in (8, 16, 24, 32), n_rows
    assert n_in % 32 == 0 and step % 32 == 0, (n_in, step)
    assert groups == 1 or n_out % (groups * TILE) == 0, (n_out, groups)
    assert stride >= padded(n_out, TILE), (stride, n_out)
    chosen, block = kernel_for(n_in, n_out, n_rows)
    chosen.launch(stream, (padded(n_out, TILE) // TILE // groups, groups), block, y, w, s, q, d,
                  n_in // 32, step // 32, stride, dependent=dependent)  # fmt: skip


def repack(stream, w, s, raw, *, n_out, n_in, first=0):
    """The bytes of a GGUF tensor [n_out, n_in], on the device, into outputs `first`.. of w and s.
    Of matrices that become one weight, all but the last have a multiple of 16 outputs."""
    assert first % TILE == 0 and n_in % 32 == 0, (first, n_in)
    grid = padded(n_out, TILE) // TILE, -(-padded(n_in, 128) // 32 * 32 // REPACK_BLOCK)
    repack_q8_0.launch(stream, grid, REPACK_BLOCK, w, s, raw, n_out, n_in // 32, first // TILE)
