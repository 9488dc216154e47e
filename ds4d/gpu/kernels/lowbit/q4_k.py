"""Q4_K for tensor cores (spec/model.md 3): 16 outputs x 256 inputs are a record of 2,304 bytes, as
many as in the file.

    x = d s q - dmin m        q of 4 bits; s and m of 6 bits for 32 inputs

Lane 4 g + t of a warp holds inputs 8 t .. 8 t + 7 of each group of 32, of outputs g and g + 8, in
the file's own bytes: one has four bits of each of two neighbouring groups.

    byte 0      [pair of groups][lane][2][g, g + 8][4]  u8   codes; [2]: 8 t .., then 8 t + 4 ..
    byte 2048   [g][g, g + 8][16]                       u8   the file's d, dmin and packed s and m

Odd groups keep their codes where they stand, four bits up, in unsigned bytes: their sums are their
own and divided by 16 at the end. The minima are products too: m, four times in a word.

Integers: |sum s dot32| <= 4 * 63 * 32 * 240 * 127 < 2^28 for the odd groups.
"""

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

BLOCK_BYTES = 144  # of the file, 256 weights of an output
RECORD = 16 * BLOCK_BYTES
WORDS = 24  # that a lane holds of a record
AHEAD = 1  # records of a tile whose loads are in flight together
TABLE = 16  # bytes of shared memory: none is used


def weights_ref(raw):
    """s q [rows, n_in] i64, m [rows, n_in] i64, d and dmin [rows, n_in / 256] f32, of raw
    [rows, blocks, 144]."""
    rows, blocks = raw.shape[:2]
    d, least = (
        np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)
        for at in (0, 2)
    )
    low, mid, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    s = np.concatenate([low & 63, high & 15 | low >> 6 << 4], -1).astype(np.int64)[..., None]
    m = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], -1).astype(np.int64)[..., None]
    packed = raw[..., 16:].reshape(rows, blocks, 4, 1, 32)
    q = (packed >> np.array([[0], [4]], np.uint8) & 15).reshape(rows, blocks, 8, 32)
    return (s * q).reshape(rows, -1), np.broadcast_to(m, q.shape).reshape(rows, -1), d, least


def pack(raw):
    """Records [tiles, blocks, RECORD] u8 of the file's bytes [16 tiles, blocks, 144]."""
    raw = np.asarray(raw, np.uint8)
    tiles, blocks = len(raw) // 16, raw.shape[1]
    raw = raw.reshape(tiles, 2, 8, blocks, BLOCK_BYTES).swapaxes(1, 3)  # tile, block, g, half
    out = np.empty((tiles, blocks, RECORD), np.uint8)
    codes = raw[..., 16:].reshape(tiles, blocks, 8, 2, 4, 4, 2, 4)
    out[..., :2048] = codes.transpose(0, 1, 4, 2, 5, 6, 3, 7).reshape(tiles, blocks, 2048)
    out[..., 2048:] = raw[..., :16].reshape(tiles, blocks, 256)
    return out


def unpack(packed):
    """The file's bytes of `pack`'s records."""
    tiles, blocks = packed.shape[:2]
    raw = np.empty((tiles, blocks, 8, 2, BLOCK_BYTES), np.uint8)
    codes = packed[..., :2048].reshape(tiles, blocks, 4, 8, 4, 2, 2, 4)
    raw[..., 16:] = codes.transpose(0, 1, 3, 6, 2, 4, 5, 7).reshape(tiles, blocks, 8, 2, 128)
    raw[..., :16] = packed[..., 2048:].reshape(tiles, blocks, 8, 2, 16)
    return np.ascontiguousarray(raw.swapaxes(1, 3)).reshape(16 * tiles, blocks, BLOCK_BYTES)


# -- operands ----------------------------------------------------------------------------------


@device
def load(words, to, w, place, lane):
    """A lane's words of the record at byte `place`: codes of four pairs of groups, then the heads
    of outputs g and g + 8."""
    for pair in range(4):
        x = ptx.stream16(w, place + pair * 512 + lane * 16)
        for i in range(4):
            words[to + 4 * pair + i] = x[i]
    for half in range(2):
        x = ptx.stream16(w, place + 2048 + (lane >> 2) * 32 + half * 16)
        for i in range(4):
            words[to + 16 + 4 * half + i] = x[i]


@device
def fill(table, tid):
    """There is no table."""


@device
def scales(a, b, c):
    """s of groups 0 .. 3 and 4 .. 7, then m of both, a byte each."""
    return (
        uint32(a & 0x3F3F3F3F), uint32(c & 0x0F0F0F0F | a >> 2 & 0x30303030),
        uint32(b & 0x3F3F3F3F), uint32(c >> 4 & 0x0F0F0F0F | b >> 2 & 0x30303030),
    )  # fmt: skip


@device
def add(acc, to, words, first, b, d0, d1, table):
    """acc[to ..] += a record's products with b [16], whose scales are d0 and d1: those of outputs
    g, g, g + 8, g + 8 with columns 2 t, 2 t + 1, 2 t, 2 t + 1."""
    # Of even groups, of odd ones times 16, and of the minima.
    even, odd = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        even[i], odd[i] = int32(0), int32(0)
    m0, m1, m2, m3 = int32(0), int32(0), int32(0), int32(0)
    zero, none = uint32(0), int32(0)
    s, s_, m, m_ = scales(words[first + 17], words[first + 18], words[first + 19])
    s8, s8_, m8, m8_ = scales(words[first + 21], words[first + 22], words[first + 23])
    for pair in range(4):
        if pair == 2:
            s, s8, m, m8 = s_, s8_, m_, m8_
        x0, x1 = words[first + 4 * pair], words[first + 4 * pair + 1]
        x2, x3 = words[first + 4 * pair + 2], words[first + 4 * pair + 3]
        b0, b1, b2, b3 = b[4 * pair], b[4 * pair + 1], b[4 * pair + 2], b[4 * pair + 3]
        at = 2 * (pair & 1)
        dot = ptx.mma_u8(
            uint32(x0 & 0x0F0F0F0F), uint32(x1 & 0x0F0F0F0F), uint32(x2 & 0x0F0F0F0F),
            uint32(x3 & 0x0F0F0F0F), b0, b1, none, none, none, none,
        )  # fmt: skip
        by = int32(ptx.prmt(s, zero, uint32(0x4440 + at)))
        by8 = int32(ptx.prmt(s8, zero, uint32(0x4440 + at)))
        even[0] = int32(even[0] + dot[0] * by)
        even[1] = int32(even[1] + dot[1] * by)
        even[2] = int32(even[2] + dot[2] * by8)
        even[3] = int32(even[3] + dot[3] * by8)
        dot = ptx.mma_u8(
            uint32(x0 & 0xF0F0F0F0), uint32(x1 & 0xF0F0F0F0), uint32(x2 & 0xF0F0F0F0),
            uint32(x3 & 0xF0F0F0F0), b2, b3, none, none, none, none,
        )  # fmt: skip
        by = int32(ptx.prmt(s, zero, uint32(0x4441 + at)))
        by8 = int32(ptx.prmt(s8, zero, uint32(0x4441 + at)))
        odd[0] = int32(odd[0] + dot[0] * by)
        odd[1] = int32(odd[1] + dot[1] * by)
        odd[2] = int32(odd[2] + dot[2] * by8)
        odd[3] = int32(odd[3] + dot[3] * by8)
        four = ptx.prmt(m, zero, uint32(0x1111 * at))
        four8 = ptx.prmt(m8, zero, uint32(0x1111 * at))
        m0, m1, m2, m3 = ptx.mma_u8(four, four8, four, four8, b0, b1, m0, m1, m2, m3)
        four = ptx.prmt(m, zero, uint32(0x1111 * (at + 1)))
        four8 = ptx.prmt(m8, zero, uint32(0x1111 * (at + 1)))
        m0, m1, m2, m3 = ptx.mma_u8(four, four8, four, four8, b2, b3, m0, m1, m2, m3)
    d, least = ptx.halves(words[first + 16])
    acc[to] = ptx.fma(float32(int32(even[0] + (odd[0] >> 4))), d * d0, acc[to])
    acc[to] = ptx.fma(float32(m0), -least * d0, acc[to])
    acc[to + 1] = ptx.fma(float32(int32(even[1] + (odd[1] >> 4))), d * d1, acc[to + 1])
    acc[to + 1] = ptx.fma(float32(m1), -least * d1, acc[to + 1])
    d, least = ptx.halves(words[first + 20])
    acc[to + 2] = ptx.fma(float32(int32(even[2] + (odd[2] >> 4))), d * d0, acc[to + 2])
    acc[to + 2] = ptx.fma(float32(m2), -least * d0, acc[to + 2])
    acc[to + 3] = ptx.fma(float32(int32(even[3] + (odd[3] >> 4))), d * d1, acc[to + 3])
    acc[to + 3] = ptx.fma(float32(m3), -least * d1, acc[to + 3])


# -- repacking ---------------------------------------------------------------------------------


@kernel("u1* out, u4* raw, i4 blocks", block=32)
def repack(out, raw, blocks):
    """As `pack`. Grid (tiles, blocks)."""
    lane, g, t = cuda.threadIdx.x, cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
    tile, b = int64(cuda.blockIdx.x), cuda.blockIdx.y
    at = ((tile * 16 + g) * blocks + b) * 36  # words of the file
    at8 = at + 8 * int64(blocks) * 36
    place = (tile * blocks + b) * RECORD
    for pair in range(4):
        of = 4 + 8 * pair + 2 * t
        ptx.store16(
            out, place + pair * 512 + lane * 16,
            raw[at + of], raw[at8 + of], raw[at + of + 1], raw[at8 + of + 1],
        )  # fmt: skip
    of = (at if t < 2 else at8) + 2 * (t & 1)
    ptx.store8(out, place + 2048 + g * 32 + t * 8, raw[of], raw[of + 1])
