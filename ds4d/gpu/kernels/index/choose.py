"""The top_k greatest scores of a row, ties to the lowest key, ascending (spec/numerics.md 3).

    scores   [R, stride]            f32  of keys 0 .. n - 1, n = (pos + 1) // 4, read once
    pos      [R]                    i32  -1 in idle rows
    chosen   [R, top_k]             i32  written whole where n > top_k, else left alone
    kept     [R, spans * top_k]     u32  scratch: what each span keeps, as integers that grow with
    kept_at  [R, spans * top_k]     i32  the score, and of which key
    arrived  [R]                    u32  zeros before and after

Keys are cut into spans of SPAN, one a block. The top_k of a span, and of the row's kept ones, are
found alike: what the row chooses lies in what spans keep, in the order of keys. Where one span
holds all keys its block writes `chosen`; else the block that arrives last does it, from what all
have kept. So 4,096 keys are one block's work, and 262,144 are 32 blocks' and then one's.

In a block, scores are integers in shared memory. They are looked at by eight bits from the top:
counts by integer atomics, whose order is free, then each warp finds for itself the digit at which,
from above, top_k is reached. What is above the integer thus found is taken, and of those that
equal it the first few, at places that a prefix sum over warps and lanes gives. -0 counts as 0. A
NaN counts by its bits: beyond infinity, or below -infinity if its sign is set.

grid (spans, R)   block 512   shared 4.2 KB + 4 (max(SPAN, spans * top_k) + top_k) bytes
Nothing is added but counts. Floor: 4 n bytes; bound by the seven passes over shared memory, and the
latency of their barriers.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import int32, int64, uint32

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx

BLOCK = 512
SPAN = 8192
DIGITS = 256  # of eight bits
N_DIGITS = 4  # of an integer
COUNTS = N_DIGITS * DIGITS
ALL = 0xFFFFFFFF
SIGN = 0x80000000


def choose_ref(scores, k):
    """[k] of the keys of the k greatest of scores [n], ascending."""
    bits = np.where(scores == 0, np.float32(0), scores).view(np.uint32)
    grows = np.where(bits & np.uint32(SIGN), ~bits, bits | np.uint32(SIGN))
    return np.sort(np.argsort(~grows, kind="stable")[:k]).astype(np.int32)


def spans_of(stride, span=SPAN):
    return max(1, -(-stride // span))


def room(stride, top_k, span=SPAN):
    """Integers that a block holds."""
    spans = spans_of(stride, span)
    return min(span, stride) if spans == 1 else max(span, spans * top_k)


@device
def integer(x):
    """32 bits that grow with x."""
    bits = ptx.as_u4(x)
    if bits == SIGN:  # -0
        bits = uint32(0)
    return uint32(bits ^ ALL) if bits & SIGN else uint32(bits | SIGN)


@device
def upto(x, lane):
    """The sum of an int32 over the lanes up to this one."""
    for i in range(5):
        other = cuda.shfl_up_sync(ALL, x, 1 << i)
        x = int32(x + other) if lane >= 1 << i else x
    return x


@cache
def choose_kernel(block, span):
    @device
    def take(values, n, k, places, digits, counts, sums):
        """Write to values[places + j] which of values[0 .. n) is the j-th of the k greatest, by
        the whole block. A barrier stands in front, and has to stand behind."""
        tid = cuda.threadIdx.x
        lane, mine = int32(tid % 32), int32(tid // 32)
        size = int32((n + block - 1) // block * 32)  # of a warp's share
        start = mine * size
        end = min(start + size, n)
        least, known = uint32(0), uint32(0)  # the k-th greatest, and the mask of its bits so far
        spare = int32(k)  # how many like it are wanted
        for step in range(digits):  # four, but not unrolled
            shift = 24 - 8 * step
            for i in range(start + lane, end, 32):
                value = ptx.load4(values, i)[0]
                if (value ^ least) & known == 0:
                    byte = ptx.prmt(value, uint32(0), uint32(0x4443 - step))
                    ptx.add(counts, DIGITS * step + byte, int32(1))
            cuda.syncthreads()  # all have counted
            at = DIGITS * step + 248 - 8 * lane  # of the lane's digits: lane 0 has the greatest
            c = cuda.local.array(8, int32)
            c[0], c[1], c[2], c[3] = ptx.load16(counts, at)
            c[4], c[5], c[6], c[7] = ptx.load16(counts, at + 4)
            own = int32(0)
            for i in range(8):
                own = int32(own + c[i])
            reached = upto(own, lane)
            left, passed = int32(spare - reached + own), int32(0)
            for i in range(7):  # pass a digit if more than it counts are wanted
                if passed == i and left > c[7 - i]:
                    left, passed = int32(left - c[7 - i]), int32(i + 1)
            source = cuda.ffs(uint32(cuda.ballot_sync(ALL, reached >= spare))) - 1
            digit = cuda.shfl_sync(ALL, int32(255 - 8 * lane - passed), source)
            spare = cuda.shfl_sync(ALL, left, source)
            least = uint32(least | uint32(digit) << shift)
            known = uint32(known | uint32(255) << shift)

        both = int32(0)  # above in the low half, equal in the high one: fewer than 2^15
        for i in range(start + lane, end, 32):
            value = ptx.load4(values, i)[0]
            both = int32(both + (1 if value > least else 0) + (65536 if value == least else 0))
        both = upto(both, lane)
        if lane == 31:
            sums[mine] = both
        cuda.syncthreads()  # the warps' sums are there
        before = upto(int32(sums[lane] if lane < mine else 0), lane)
        before = cuda.shfl_sync(ALL, before, 31)
        above, equal = int32(before & 0xFFFF), int32(before >> 16)
        earlier = (1 << lane) - 1
        for base in range(start, end, 32):
            i = base + lane
            value = ptx.load4(values, min(i, end - 1))[0]
            is_above, is_equal = i < end and value > least, i < end and value == least
            a = uint32(cuda.ballot_sync(ALL, is_above))
            e = uint32(cuda.ballot_sync(ALL, is_equal))
            a_before = above + cuda.popc(uint32(a & earlier))
            e_before = equal + cuda.popc(uint32(e & earlier))
            if is_above or (is_equal and e_before < spare):
                ptx.store4(values, places + a_before + min(e_before, spare), uint32(i))
            above = int32(above + cuda.popc(a))
            equal = int32(equal + cuda.popc(e))

    @kernel(
        "i4* chosen, u4* kept, i4* kept_at, u4* arrived, f4* scores, i4 stride, i4* pos,"
        "i4 places, i4 digits, i4 top_k",
        block=block,
    )
    def index_choose(chosen, kept, kept_at, arrived, scores, stride, pos, places, digits, top_k):
        ptx.let_next_begin()
        ptx.wait_for_front()
        mine, row = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        n = (pos[row] + 1) >> 2
        first = mine * span
        if n <= top_k or first >= n:
            return
        tid = cuda.threadIdx.x
        values = cuda.shared.array(0, uint32)
        counts = cuda.shared.array(COUNTS, int32, alignment=16)
        sums = cuda.shared.array(32, int32)
        turn = cuda.shared.array(1, int32)
        n_spans = (n + span - 1) // span
        keep = row * cuda.gridDim.x * top_k
        merging, count = False, min(span, n - first)
        while True:  # once for the span, and once more in the block that arrives last
            for i in range(tid, COUNTS, block):
                counts[i] = 0
            for i in range(tid, count, block):
                if merging:
                    ptx.store4(values, i, kept[keep + i])
                else:
                    ptx.store4(values, i, integer(scores[row * stride + first + i]))
            cuda.syncthreads()  # values are whole, counts are zero
            k = min(top_k, count)
            take(values, count, k, places, digits, counts, sums)
            cuda.syncthreads()  # places are whole
            if merging or n_spans == 1:
                for j in range(tid, k, block):
                    i = values[places + j]
                    chosen[row * top_k + j] = kept_at[keep + i] if merging else i
                return
            for j in range(tid, k, block):
                i = values[places + j]
                kept[keep + mine * top_k + j] = values[i]
                kept_at[keep + mine * top_k + j] = first + i
            cuda.syncthreads()  # all that the block keeps is written
            if tid == 0:
                turn[0] = ptx.arrive(arrived, row)
            cuda.syncthreads()  # `turn` is written
            if turn[0] + 1 != n_spans:
                return
            if tid == 0:
                arrived[row] = 0
            merging, count = True, (n_spans - 1) * top_k + min(top_k, n - (n_spans - 1) * span)

    return index_choose


def index_choose(
    stream, chosen, kept, kept_at, arrived, scores, pos, *,
    n_rows, stride, top_k, dependent=False,
):  # fmt: skip
    """Enqueue on `stream`. `stride`: scores of a row, enough for every row of the pass; it fixes
    the number of spans."""
    places = room(stride, top_k)
    assert top_k <= SPAN and places < 1 << 15, f"{top_k} of {stride} scores are too many"
    choose_kernel(BLOCK, SPAN).launch(
        stream, (spans_of(stride), n_rows), BLOCK, chosen, kept, kept_at, arrived, scores, stride,
        pos, places, N_DIGITS, top_k, shared=4 * (places + top_k), dependent=dependent,
    )  # fmt: skip
