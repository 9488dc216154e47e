"""IQ2_XXS for tensor cores (spec/model.md 3): 16 outputs x 256 inputs are a record of 1,056 bytes,
as many as in the file.

    x = d/8 (2 s + 1) sign magnitude        s for 32 inputs, magnitudes 8, 25 or 43 in runs of eight

Lane 4 g + t of a warp holds run t (inputs 8 t .. 8 t + 7) of each group of 32, of outputs g and
g + 8. Its sixteen runs are numbered by a word i and a place c in it: (i, c) is group 2 i + c / 2 of
output g + 8 (c % 2).

    byte 0      [lane][i][c]  u8   indices into the grid
    byte 512    [lane][i]     u32  signs: bit 4 e + c is element e's of run c, 1 for minus
    byte 1024   [g][2]        f16  d of outputs g and g + 8

The eighth sign of a run is the parity of the others, so its bit has room for a bit of a scale: it
holds sign ^ bit c of the scale n(lane, i), which is s of group 4 (t / 2) + 2 (i % 2) + t % 2 of
output g + 8 (i / 2). All bits of a run together are then even but for that scale's bit: the
exclusive or of a word's eight nibbles is the scale, and the fix of the eighth signs at once.

A table in shared memory has eight nibbles for every index: where in eight bytes each magnitude
stands. The signs are or-ed into them, and `prmt` picks signed bytes. A sign is bit 0 of its nibble
for places 0 and 1 and bit 2 for 2 and 3, so there are two tables and two sets of eight bytes. Each
table is kept COPIES times, side by side: lanes that read different words of one bank would wait for
each other, with 16 copies for one other lane at most, instead of three or four.

On an H200 a warp has about 32 instructions for 16 x 32 weights (132 bytes), and these bound it: one
a cycle on every scheduler would be 3.8 TB/s.

Integers: |sum (2 s + 1) dot32| <= 8 * 31 * 32 * 43 * 127 < 2^26.
"""

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx
from ds4d.model.grid import CODES, GRID, SIGNS

ALL = 0xFFFFFFFF
BLOCK_BYTES = 66  # of the file, 256 weights of an output
RECORD = 16 * BLOCK_BYTES
WORDS = 9  # that a lane holds of a record
AHEAD = 2  # records of a tile whose loads are in flight together
COPIES = 16  # 4, 8 or 16
QUADS = COPIES // 4
SECOND = 4 * 256 * COPIES  # byte where the table for signs at bit 2 begins
CHOICES = 2 * SECOND  # and the bytes that nibbles choose from
TABLE = CHOICES + 16  # bytes of shared memory
SHIFT = 1 + COPIES.bit_length()  # a table has 1 << SHIFT bytes for an index
INDEX = 255 << SHIFT
# Bytes that a nibble chooses from: sign at bit 0 and magnitude above it, sign at bit 2.
LOW, LOW_REST = 0xE719F808, 0x0000D52B
HIGH, HIGH_REST = 0x002B1908, 0x00D5E7F8

NIBBLES = ((CODES[:, None].astype(np.uint32) >> np.arange(0, 16, 2, np.uint32) & 3)
           << np.arange(0, 32, 4, np.uint32)).sum(1, dtype=np.uint32)  # fmt: skip

# Which run a lane's word i and place c hold, and whose scale is in word i: [4 t, 4 i, 4 c].
_T, _I, _C = np.ogrid[:4, :4, :4]
_GROUP, _HALF = 2 * _I + _C // 2 + 0 * _T, _C % 2 + 0 * (_I + _T)
_SCALE_GROUP, _SCALE_HALF = (
    (4 * (_T // 2) + 2 * (_I % 2) + _T % 2)[..., 0],
    (_I // 2 + 0 * _T)[..., 0],
)


def weights_ref(raw):
    """(2 s + 1) x signed magnitude [rows, n_in] i64, no minima, d / 8 [rows, n_in / 256] f32, of
    raw [rows, blocks, 66]."""
    rows, blocks = raw.shape[:2]
    index, signs, s = _fields(raw)
    minus = SIGNS[signs][..., None] >> np.arange(8) & 1
    w = GRID[index].astype(np.int64) * (1 - 2 * minus.astype(np.int64))
    w *= (2 * s.astype(np.int64) + 1)[..., None, None]
    d = np.ascontiguousarray(raw[..., :2]).view("<f2")[..., 0].astype(np.float32)
    return w.reshape(rows, blocks * 256), None, d * np.float32(0.125), None


def _fields(raw):
    """Of each group: index [.., 8, 4], signs [.., 8, 4] of 7 bits, s [.., 8]."""
    groups = np.ascontiguousarray(raw[..., 2:]).reshape(*raw.shape[:-1], 8, 8)
    control = groups[..., 4:].copy().view("<u4")
    return groups[..., :4], control >> np.arange(0, 28, 7, np.uint32) & 127, control[..., 0] >> 28


def pack(raw):
    """Records [tiles, blocks, RECORD] u8 of the file's bytes [16 tiles, blocks, 66]."""
    raw = np.asarray(raw, np.uint8)
    tiles, blocks = len(raw) // 16, raw.shape[1]
    index, signs, s = (
        f.reshape(tiles, 2, 8, blocks, *f.shape[2:]).swapaxes(1, 3) for f in _fields(raw)
    )  # [tiles, blocks, g, half, ..]
    run = (slice(None),) * 3 + (_HALF, _GROUP, _T + 0 * (_I + _C))
    bits = s[:, :, :, _SCALE_HALF, _SCALE_GROUP][..., None] >> np.arange(4, dtype=np.uint32) & 1
    eight = SIGNS[signs[run]] ^ (bits << 7).astype(np.uint8)  # [tiles, blocks, g, t, i, c]
    spread = eight[..., None].astype(np.uint32) >> np.arange(8, dtype=np.uint32) & 1
    to = np.arange(4, dtype=np.uint32)[:, None] + np.arange(0, 32, 4, np.uint32)
    words = np.bitwise_or.reduce(spread << to, axis=(-2, -1))  # [tiles, blocks, g, t, i]
    d = np.ascontiguousarray(raw[..., :2]).reshape(tiles, 2, 8, blocks, 2).transpose(0, 3, 2, 1, 4)
    out = np.empty((tiles, blocks, RECORD), np.uint8)
    out[..., :512] = index[run].reshape(tiles, blocks, 512)
    out[..., 512:1024] = words.astype("<u4").reshape(tiles, blocks, 128).view(np.uint8)
    out[..., 1024:] = d.reshape(tiles, blocks, 32)
    return out


def unpack(packed):
    """The file's bytes of `pack`'s records."""
    tiles, blocks = packed.shape[:2]
    words = np.ascontiguousarray(packed[..., 512:1024]).view("<u4").reshape(tiles, blocks, 8, 4, 4)
    bit = (
        words[..., None, None]
        >> (np.arange(4, dtype=np.uint32)[:, None] + np.arange(0, 32, 4, np.uint32))
        & 1
    )  # [tiles, blocks, g, t, i, c, e]
    scale = np.bitwise_or.reduce(
        np.bitwise_xor.reduce(bit, -1) << np.arange(4, dtype=np.uint32), -1
    )
    seven = np.bitwise_or.reduce(bit[..., :7] << np.arange(7, dtype=np.uint32), -1)
    index = np.empty((tiles, blocks, 8, 2, 8, 4), np.uint8)
    control = np.zeros((tiles, blocks, 8, 2, 8), np.uint32)
    for t, i in np.ndindex(4, 4):
        control[:, :, :, i // 2, 4 * (t // 2) + 2 * (i % 2) + t % 2] |= scale[..., t, i] << 28
        for c in range(4):
            of = packed[..., :512].reshape(tiles, blocks, 8, 4, 4, 4)[..., t, i, c]
            index[:, :, :, c % 2, 2 * i + c // 2, t] = of
            control[:, :, :, c % 2, 2 * i + c // 2] |= seven[..., t, i, c] << np.uint32(7 * t)
    d = packed[..., 1024:].reshape(tiles, blocks, 8, 2, 2)
    raw = np.empty((tiles, blocks, 8, 2, BLOCK_BYTES), np.uint8)
    raw[..., :2] = d
    groups = raw[..., 2:].reshape(tiles, blocks, 8, 2, 8, 8)
    groups[..., :4] = index
    groups[..., 4:] = control.astype("<u4")[..., None].view(np.uint8)
    raw[..., 2:] = groups.reshape(tiles, blocks, 8, 2, 64)
    return np.ascontiguousarray(raw.transpose(0, 3, 2, 1, 4)).reshape(16 * tiles, blocks, -1)


# -- operands ----------------------------------------------------------------------------------


@device
def load(words, to, w, place, lane):
    """A lane's words of the record at byte `place`: indices, signs, d."""
    x, s = ptx.stream16(w, place + lane * 16), ptx.stream16(w, place + 512 + lane * 16)
    for i in range(4):
        words[to + i], words[to + 4 + i] = x[i], s[i]
    words[to + 8] = ptx.load4(w, place + 1024 + (lane >> 2) * 4)[0]


@device
def fill(table, tid):
    """By all threads of a block; a barrier has to follow. It stays a loop, which keeps the loads of
    weights in front of it: among straight code the compiler moves them to where they are used."""
    at, block = uint32(tid), uint32(cuda.blockDim.x)
    while at < 256:
        # A shuffle with itself: else the compiler reads the constant anew for each copy.
        x = uint32(cuda.shfl_sync(ALL, int32(NIBBLES[at]), tid & 31))
        for i in range(QUADS):
            # Neighbours begin at different copies, so that eight of them reach all banks.
            place = uint32((at << SHIFT) + (i + (at >> (7 - SHIFT)) & (QUADS - 1)) * 16)
            ptx.store16(table, SECOND + place, x, x, x, x)
            y = uint32(x << 1)
            ptx.store16(table, place, y, y, y, y)
        at = uint32(at + block)
    if tid == 0:
        one = uint32(0x01010101)
        ptx.store16(table, CHOICES, uint32(LOW), uint32(HIGH), one, one)


@device
def scales(z, lane, one):
    """2 s + 1 of output g's even and odd groups and of g + 8's, a byte each. `z`: a lane's, whose
    byte i has word i's in the upper nibble."""
    t = lane & 3
    mine = uint32(z >> (4 - 4 * (t & 1)))  # even lanes' go into the lower nibbles
    pair = uint32(mine | uint32(cuda.shfl_xor_sync(ALL, int32(mine), 1)))
    other = uint32(cuda.shfl_xor_sync(ALL, int32(pair), 2))
    low = ptx.prmt(pair, other, uint32(0x5410 if t < 2 else 0x1054))
    high = ptx.prmt(pair, other, uint32(0x7632 if t < 2 else 0x3276))
    return (
        uint32(uint32(low << 1) & 0x1E1E1E1E | one), uint32(low >> 3 & 0x1E1E1E1E | one),
        uint32(uint32(high << 1) & 0x1E1E1E1E | one), uint32(high >> 3 & 0x1E1E1E1E | one),
    )  # fmt: skip


@device
def add(acc, to, words, first, b, d0, d1, table):
    """acc[to ..] += a record's products with b [16], whose scales are d0 and d1: those of outputs
    g, g, g + 8, g + 8 with columns 2 t, 2 t + 1, 2 t, 2 t + 1."""
    lane = cuda.threadIdx.x & 31
    signs, sums = cuda.local.array(4, uint32), cuda.local.array(4, int32)
    for i in range(4):
        signs[i], sums[i] = words[first + 4 + i], int32(0)

    # The nibbles of word i are xor-ed: halves, bytes, nibbles. Byte i's upper nibble is left.
    p = uint32(ptx.prmt(signs[0], signs[1], uint32(0x5410))
               ^ ptx.prmt(signs[0], signs[1], uint32(0x7632)))  # fmt: skip
    q = uint32(ptx.prmt(signs[2], signs[3], uint32(0x5410))
               ^ ptx.prmt(signs[2], signs[3], uint32(0x7632)))  # fmt: skip
    p = uint32(ptx.prmt(p, q, uint32(0x6420)) ^ ptx.prmt(p, q, uint32(0x7531)))
    z = uint32((p ^ uint32(p << 4)) & 0xF0F0F0F0)
    for i in range(4):
        signs[i] = uint32(signs[i] ^ (uint32(z << (24 - 8 * i)) & 0xF0000000))

    # From memory, or the compiler would copy the constants for each use.
    low, high, one, _ = ptx.load16(table, CHOICES)
    low_rest, high_rest = uint32(LOW_REST), uint32(HIGH_REST)
    even, odd, even8, odd8 = scales(z, lane, one)
    copy, zero = uint32((lane & (COPIES - 1)) << 2), uint32(0)
    second = uint32(copy | SECOND)
    for i in range(4):
        x, s = words[first + i], signs[i]
        h = uint32(s >> 1)
        byte = uint32(0x4440 + i)

        # Places 0 and 1: group 2 i of outputs g and g + 8.
        u = ptx.load4(table, uint32(uint32(x << SHIFT) & INDEX | copy))[0]
        v = ptx.load4(table, uint32(uint32(x >> (8 - SHIFT)) & INDEX | copy))[0]
        u, v = uint32(u | s & 0x11111111), uint32(v | h & 0x11111111)
        dot = ptx.mma_s8(
            ptx.prmt(low, low_rest, u), ptx.prmt(low, low_rest, v),
            ptx.prmt(low, low_rest, uint32(u >> 16)), ptx.prmt(low, low_rest, uint32(v >> 16)),
            b[4 * i], b[4 * i + 1], int32(0), int32(0), int32(0), int32(0),
        )  # fmt: skip
        by, by8 = int32(ptx.prmt(even, zero, byte)), int32(ptx.prmt(even8, zero, byte))
        sums[0] = int32(sums[0] + dot[0] * by)
        sums[1] = int32(sums[1] + dot[1] * by)
        sums[2] = int32(sums[2] + dot[2] * by8)
        sums[3] = int32(sums[3] + dot[3] * by8)

        # Places 2 and 3: group 2 i + 1.
        u = ptx.load4(table, uint32(uint32(x >> (16 - SHIFT)) & INDEX | second))[0]
        v = ptx.load4(table, uint32(uint32(x >> (24 - SHIFT)) & INDEX | second))[0]
        u, v = uint32(u | s & 0x44444444), uint32(v | h & 0x44444444)
        dot = ptx.mma_s8(
            ptx.prmt(high, high_rest, u), ptx.prmt(high, high_rest, v),
            ptx.prmt(high, high_rest, uint32(u >> 16)), ptx.prmt(high, high_rest, uint32(v >> 16)),
            b[4 * i + 2], b[4 * i + 3], int32(0), int32(0), int32(0), int32(0),
        )  # fmt: skip
        by, by8 = int32(ptx.prmt(odd, zero, byte)), int32(ptx.prmt(odd8, zero, byte))
        sums[0] = int32(sums[0] + dot[0] * by)
        sums[1] = int32(sums[1] + dot[1] * by)
        sums[2] = int32(sums[2] + dot[2] * by8)
        sums[3] = int32(sums[3] + dot[3] * by8)

    d, d8 = ptx.halves(words[first + 8])
    d, d8 = d * float32(0.125), d8 * float32(0.125)
    acc[to] = ptx.fma(float32(sums[0]), d * d0, acc[to])
    acc[to + 1] = ptx.fma(float32(sums[1]), d * d1, acc[to + 1])
    acc[to + 2] = ptx.fma(float32(sums[2]), d8 * d0, acc[to + 2])
    acc[to + 3] = ptx.fma(float32(sums[3]), d8 * d1, acc[to + 3])


# -- repacking ---------------------------------------------------------------------------------


@kernel("u1* out, u2* raw, i4 blocks", block=32)
def repack(out, raw, blocks):
    """As `pack`. Grid (tiles, blocks)."""
    lane, g, t = cuda.threadIdx.x, cuda.threadIdx.x >> 2, cuda.threadIdx.x & 3
    tile, b = int64(cuda.blockIdx.x), cuda.blockIdx.y
    index, signs = cuda.local.array(4, uint32), cuda.local.array(4, uint32)
    for i in range(4):
        at = ((tile * 16 + g + 8 * (i >> 1)) * blocks + b) * 33
        at += 1 + 4 * (4 * (t >> 1) + 2 * (i & 1) + (t & 1))  # of the group whose scale it is
        scale = raw[at + 3] >> 12
        x, s = uint32(0), uint32(0)
        for c in range(4):
            at = ((tile * 16 + g + 8 * (c & 1)) * blocks + b) * 33 + 1 + 4 * (2 * i + (c >> 1))
            x = uint32(x | (raw[at + (t >> 1)] >> 8 * (t & 1) & 255) << 8 * c)
            eight = (raw[at + 2] | raw[at + 3] << 16) >> 7 * t & 127
            odd = cuda.popc(uint32(eight)) ^ scale >> c
            eight |= (odd & 1) << 7
            for e in range(8):
                s = uint32(s | (eight >> e & 1) << (4 * e + c))
        index[i], signs[i] = x, s
    place = (tile * blocks + b) * RECORD
    ptx.store16(out, place + lane * 16, index[0], index[1], index[2], index[3])
    ptx.store16(out, place + 512 + lane * 16, signs[0], signs[1], signs[2], signs[3])
    if lane < 8:
        at = ((tile * 16 + lane) * blocks + b) * 33
        d, d8 = raw[at], raw[at + 8 * int64(blocks) * 33]
        ptx.store4(out, place + 1024 + lane * 4, uint32(d | d8 << 16))
