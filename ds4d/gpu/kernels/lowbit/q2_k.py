"""Q2_K for tensor cores (spec/model.md 3): 16 outputs x 256 inputs are a record of 1,344 bytes, as
many as in the file.

    x = d s q - dmin m        q of 2 bits; s and m of 4 bits for 16 inputs

Lane 4 g + t of a warp holds inputs 8 t .. 8 t + 7 of each group of 32, of outputs g and g + 8, in
the file's own bytes: one has two bits of each of the four groups of its half of the inputs.

    byte 0      [half][lane][2][g, g + 8][4]     u8   codes; [2]: inputs 8 t .., then 8 t + 4 ..
    byte 1024   [g][2][g, g + 8][group]          u8   s | m << 4; [2]: of inputs 0 .. 15, 16 .. 31
    byte 1280   [g][g, g + 8][2]                 f16  d, dmin

A code times its scale still fits a byte, 3 * 15, so the tensor core sums s q over the whole block
with nothing to do between groups. Odd groups keep their codes where they stand, two bits up: 180
fits an unsigned byte, and a sum of their own is divided by 4 at the end. The minima are products
too: m, four times in a word.

Integers: |sum s q x| <= 256 * 180 * 127 < 2^23.
"""

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

BLOCK_BYTES = 84  # of the file, 256 weights of an output
RECORD = 16 * BLOCK_BYTES
WORDS = 14  # that a lane holds of a record
AHEAD = 2  # records of a tile whose loads are in flight together, at most
TABLE = 16  # bytes of shared memory: none is used


def weights_ref(raw):
    """s q [rows, n_in] i64, m [rows, n_in] i64, d and dmin [rows, n_in / 256] f32, of raw
    [rows, blocks, 84]."""
    rows, blocks = raw.shape[:2]
    packed = raw[..., 16:80].reshape(rows, blocks, 2, 1, 32)
    q = (packed >> np.arange(0, 8, 2, np.uint8)[:, None] & 3).reshape(rows, blocks, 16, 16)
    s = raw[..., :16, None].astype(np.int64)
    d, least = (
        np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)
        for at in (80, 82)
    )
    m = np.broadcast_to(s >> 4, q.shape)
    return ((s & 15) * q).reshape(rows, -1), m.reshape(rows, -1), d, least


def pack(raw):
    """Records [tiles, blocks, RECORD] u8 of the file's bytes [16 tiles, blocks, 84]."""
    raw = np.asarray(raw, np.uint8)
    tiles, blocks = len(raw) // 16, raw.shape[1]
    raw = raw.reshape(tiles, 2, 8, blocks, BLOCK_BYTES).swapaxes(1, 3)  # tile, block, g, half
    out = np.empty((tiles, blocks, RECORD), np.uint8)
    codes = raw[..., 16:80].reshape(tiles, blocks, 8, 2, 2, 4, 2, 4)
    out[..., :1024] = codes.transpose(0, 1, 4, 2, 5, 6, 3, 7).reshape(tiles, blocks, 1024)
    scales = raw[..., :16].reshape(tiles, blocks, 8, 2, 8, 2)
    out[..., 1024:1280] = scales.transpose(0, 1, 2, 5, 3, 4).reshape(tiles, blocks, 256)
    out[..., 1280:] = raw[..., 80:].reshape(tiles, blocks, 64)
    return out


def unpack(packed):
    """The file's bytes of `pack`'s records."""
    tiles, blocks = packed.shape[:2]
    raw = np.empty((tiles, blocks, 8, 2, BLOCK_BYTES), np.uint8)
    codes = packed[..., :1024].reshape(tiles, blocks, 2, 8, 4, 2, 2, 4)
    raw[..., 16:80] = codes.transpose(0, 1, 3, 6, 2, 4, 5, 7).reshape(tiles, blocks, 8, 2, 64)
    scales = packed[..., 1024:1280].reshape(tiles, blocks, 8, 2, 2, 8)
    raw[..., :16] = scales.transpose(0, 1, 2, 4, 5, 3).reshape(tiles, blocks, 8, 2, 16)
    raw[..., 80:] = packed[..., 1280:].reshape(tiles, blocks, 8, 2, 4)
    return np.ascontiguousarray(raw.swapaxes(1, 3)).reshape(16 * tiles, blocks, BLOCK_BYTES)


# -- operands ----------------------------------------------------------------------------------


@device
def load(words, to, w, place, lane):
    """A lane's words of the record at byte `place`: codes of both halves, scales, d and dmin."""
    for half in range(2):
        x = ptx.stream16(w, place + half * 512 + lane * 16)
        for i in range(4):
            words[to + 4 * half + i] = x[i]
    x = ptx.stream16(w, place + 1024 + (lane >> 2) * 32 + (lane >> 1 & 1) * 16)
    for i in range(4):
        words[to + 8 + i] = x[i]
    y = ptx.stream8(w, place + 1280 + (lane >> 2) * 8)
    words[to + 12], words[to + 13] = y[0], y[1]


@device
def fill(table, tid):
    """There is no table."""


@device
def add(acc, to, words, first, b, d0, d1, table):
    """acc[to ..] += a record's products with b [16], whose scales are d0 and d1: those of outputs
    g, g, g + 8, g + 8 with columns 2 t, 2 t + 1, 2 t, 2 t + 1."""
    # Of even groups, of odd ones times 4, and of the minima.
    e0, e1, e2, e3 = int32(0), int32(0), int32(0), int32(0)
    o0, o1, o2, o3 = int32(0), int32(0), int32(0), int32(0)
    m0, m1, m2, m3 = int32(0), int32(0), int32(0), int32(0)
    zero = uint32(0)
    for half in range(2):
        x0, x1 = words[first + 4 * half], words[first + 4 * half + 1]
        x2, x3 = words[first + 4 * half + 2], words[first + 4 * half + 3]
        s, s8 = words[first + 8 + half], words[first + 10 + half]
        m, m8 = uint32(s >> 4 & 0x0F0F0F0F), uint32(s8 >> 4 & 0x0F0F0F0F)
        s, s8 = uint32(s & 0x0F0F0F0F), uint32(s8 & 0x0F0F0F0F)
        for j in range(2):  # groups 4 half + 2 j and the next
            at = 8 * half + 4 * j
            by = ptx.prmt(s, zero, uint32(0x4440 + 2 * j))
            by8 = ptx.prmt(s8, zero, uint32(0x4440 + 2 * j))
            e0, e1, e2, e3 = ptx.mma_u8(
                uint32((x0 & 0x03030303) * by), uint32((x1 & 0x03030303) * by8),
                uint32((x2 & 0x03030303) * by), uint32((x3 & 0x03030303) * by8),
                b[at], b[at + 1], e0, e1, e2, e3,
            )  # fmt: skip
            by = ptx.prmt(s, zero, uint32(0x4441 + 2 * j))
            by8 = ptx.prmt(s8, zero, uint32(0x4441 + 2 * j))
            o0, o1, o2, o3 = ptx.mma_u8(
                uint32((x0 & 0x0C0C0C0C) * by), uint32((x1 & 0x0C0C0C0C) * by8),
                uint32((x2 & 0x0C0C0C0C) * by), uint32((x3 & 0x0C0C0C0C) * by8),
                b[at + 2], b[at + 3], o0, o1, o2, o3,
            )  # fmt: skip
            for i in range(2):
                four, four8 = (
                    ptx.prmt(m, zero, uint32(0x1111 * (2 * j + i))),
                    ptx.prmt(m8, zero, uint32(0x1111 * (2 * j + i))),
                )
                m0, m1, m2, m3 = ptx.mma_u8(
                    four, four8, four, four8, b[at + 2 * i], b[at + 2 * i + 1], m0, m1, m2, m3
                )
            x0, x1 = uint32(x0 >> 4), uint32(x1 >> 4)
            x2, x3 = uint32(x2 >> 4), uint32(x3 >> 4)
    d, least = ptx.halves(words[first + 12])
    acc[to] = ptx.fma(float32(int32(e0 + (o0 >> 2))), d * d0, acc[to])
    acc[to] = ptx.fma(float32(m0), -least * d0, acc[to])
    acc[to + 1] = ptx.fma(float32(int32(e1 + (o1 >> 2))), d * d1, acc[to + 1])
    acc[to + 1] = ptx.fma(float32(m1), -least * d1, acc[to + 1])
    d, least = ptx.halves(words[first + 13])
    acc[to + 2] = ptx.fma(float32(int32(e2 + (o2 >> 2))), d * d0, acc[to + 2])
    acc[to + 2] = ptx.fma(float32(m2), -least * d0, acc[to + 2])
    acc[to + 3] = ptx.fma(float32(int32(e3 + (o3 >> 2))), d * d1, acc[to + 3])
    acc[to + 3] = ptx.fma(float32(m3), -least * d1, acc[to + 3])


# -- repacking ---------------------------------------------------------------------------------


@kernel("u1* out, u4* raw, i4 blocks", block=32)
def repack(out, raw, blocks):
    """As `pack`. Grid (tiles, blocks)."""
    lane, g, t = cuda.threadIdx.x, cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
    tile, b = int64(cuda.blockIdx.x), cuda.blockIdx.y
    at = ((tile * 16 + g) * blocks + b) * 21  # words of the file
    at8 = at + 8 * int64(blocks) * 21
    place = (tile * blocks + b) * RECORD
    for half in range(2):
        of = 4 + 8 * half + 2 * t
        ptx.store16(
            out, place + half * 512 + lane * 16,
            raw[at + of], raw[at8 + of], raw[at + of + 1], raw[at8 + of + 1],
        )  # fmt: skip
    # Lane t has bytes u, u + 2, u + 4, .. of 16: of output g (t < 2) or g + 8.
    of, u = (at if t < 2 else at8), t & 1
    pick = uint32(0x7531 if u == 1 else 0x6420)
    low = ptx.prmt(raw[of], raw[of + 1], pick)
    high = ptx.prmt(raw[of + 2], raw[of + 3], pick)
    ptx.store8(out, place + 1024 + g * 32 + u * 16 + (t >> 1) * 8, low, high)
    if t < 2:
        ptx.store4(out, place + 1280 + g * 8 + t * 4, raw[(at if t == 0 else at8) + 20])
