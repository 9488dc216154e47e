"""Hyper-connections: several residual streams, mixed before and after each sublayer.

    z = (fn vec(X)) / sqrt( mean vec(X)^2 + eps )          [pre n | post n | comb n n]
    pre = sigmoid(z s0 + base) + eps_h    post = 2 sigmoid(z s1 + base)
    M = sinkhorn(z s2 + base)             x = sum_j pre_j X_j            h = rms(x; w)
    X'_k = post_k y + sum_j M[j, k] X_j                   (spec/model.md 4.3, 4.4)

    X      [R, n, width]     f32  streams; read by each kernel once, updated in place
    fn     [slices, Z, 128]  f16 or f32, packed (`pack`), read once; Z = 2 n + n n, the head's n
    part   [slices, R, 32]   f32  each slice's share of fn vec(X), and at Z of the sum of squares
    y      [R, width]        f32  the sublayer's result
    h      [R, width]        f32  the sublayer's input
    post   [R, n]   M [R, n, n]   f32
    pos    [R]               i32  -1 in idle rows, of which nothing is written
    scale  [3] (the head's: [1])   base [Z]   w [width]   f32

A slice is 128 of the numbers of X: 128 / n channels in all n streams, n = 1, 2 or 4. Three kernels
work on slices, a block each:

    hyper_post            X' of X, post, M, y
    hyper_product         part of X
    hyper_post_product    both, for the next sublayer or the head: the same bits as one by one

The third is the one to use between sublayers. Both halves want the same numbers of X, which it
reads and writes once; a slice's fn (6 or 12 KB) is on its way before the sublayer in front has
ended; and a launch is saved. What speaks against fusing is only that all of z needs every slice.
The kernel behind adds the parts itself: that costs it one load of 14 KB a row, while a last block
here would cost everybody a round through the counters.

    hyper_pre             part to h, and beside it post and M in blocks of their own
    hyper_head            part to h

Sinkhorn's 39 divisions in a row take longer than h does. Where the graph can fork, launch
`hyper_pre` without them and `hyper_maps` beside the sublayer: nothing needs them before
`hyper_post`. Both give the same bits.

hyper_post, _product, _post_product   grid (slices,)   block 256   shared 512 B a row
hyper_pre (R, 2) or (R, 1), hyper_head (R,), hyper_maps (R,)   block 512   shared 4.1 or 2.1 KB

Orders: a lane's four inputs of a slice ascend, then lanes 16, 8, 4, 2, 1 apart; of slices every
sixteenth ascending, then the sixteen. Streams ascend. The mean square of x: a thread's channels
ascending (4 in a row, then 2048 on), then lanes, then warps ascending.
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int64

from ds4d.gpu.jit import device, kernel, spliced
from ds4d.gpu.kernels import ptx, warp
from ds4d.gpu.kernels.warp import ALL

SLICE, PART, ROWS = 128, 32, 8
BLOCK, WARPS = 256, 8  # of a slice
ROW_BLOCK, ROW_WARPS = 512, 16  # of a row
SHARES = ROW_WARPS * PART


# -- references --------------------------------------------------------------------------------


def sinkhorn_ref(comb, iterations, eps):
    """M [n, n] f64 of logits [source, destination]."""
    e = np.exp(comb.astype(np.float64) - comb.max(1, keepdims=True))
    M = e / e.sum(1, keepdims=True) + eps
    M = M / (M.sum(0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        M = M / (M.sum(1, keepdims=True) + eps)
        M = M / (M.sum(0, keepdims=True) + eps)
    return M


def hyper_pre_ref(X, fn, scale, base, w, *, iterations, hyper_eps, rms_eps):
    """h [R, width], post [R, n], M [R, n, n], f64. The head's fn gives h alone."""
    rows, n, _ = X.shape
    X = X.astype(np.float64)
    flat = X.reshape(rows, -1)
    z = flat @ fn.astype(np.float64).T / np.sqrt((flat * flat).mean(-1, keepdims=True) + rms_eps)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    pre = sigmoid(z[:, :n] * scale[0] + base[:n]) + hyper_eps
    x = (pre[:, :, None] * X).sum(1)
    h = x * w / np.sqrt((x * x).mean(-1, keepdims=True) + rms_eps)
    if len(fn) == n:
        return h
    post = 2 * sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (z[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(rows, n, n)
    return h, post, np.stack([sinkhorn_ref(c, iterations, hyper_eps) for c in comb])


def hyper_post_ref(X, y, post, M):
    """X' [R, n, width] f64."""
    X, M = X.astype(np.float64), M.astype(np.float64)
    return post[:, :, None] * y.astype(np.float64)[:, None] + np.einsum("rjk,rjd->rkd", M, X)


# -- the weight --------------------------------------------------------------------------------


def outputs(streams):
    """Z of a sublayer."""
    return 2 * streams + streams * streams


def n_slices(streams, width):
    assert streams in (1, 2, 4) and width * streams % SLICE == 0, (streams, width)
    return width * streams // SLICE


def pack(fn, streams):
    """[slices, Z, 128] of fn [Z, streams * width]: of a slice and output all its channels of
    stream 0, then of stream 1, ... Not a byte more than in the file."""
    Z, slices = len(fn), n_slices(streams, fn.shape[1] // streams)
    cut = fn.reshape(Z, streams, slices, SLICE // streams).transpose(2, 0, 1, 3)
    return np.ascontiguousarray(cut).reshape(slices, Z, SLICE)


def unpack(packed, streams):
    """The inverse."""
    slices, Z, _ = packed.shape
    cut = packed.reshape(slices, Z, streams, SLICE // streams).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(cut).reshape(Z, -1)


# -- slices ------------------------------------------------------------------------------------


@cache
def _mix(streams):
    channels = SLICE // streams
    quads = channels // 4

    @device
    def mix(X, y, post, M, at_x, row, width, slice_, lane):
        """Four channels of stream lane / quads of X', after all lanes have read theirs of X."""
        to, d = lane // quads, slice_ * channels + 4 * (lane % quads)
        v = ptx.floats(y, row * width + d)
        p = post[row * streams + to]
        a, b, c, e = p * v[0], p * v[1], p * v[2], p * v[3]
        for j in range(streams):
            m = M[(row * streams + j) * streams + to]
            v = ptx.floats(X, (row * streams + j) * width + d)
            a, b = ptx.fma(m, v[0], a), ptx.fma(m, v[1], b)
            c, e = ptx.fma(m, v[2], c), ptx.fma(m, v[3], e)
        cuda.syncwarp()  # no lane still reads what another is about to write
        ptx.keep(X, at_x, a, b, c, e)
        return a, b, c, e

    return mix


@device
def _fetch(w, fn, first, n, Z, slice_, lane, half):
    """A lane's weights, four inputs of n outputs."""
    for i in range(n):
        o = first + i
        if o < Z:
            at = (slice_ * Z + o) * SLICE + 4 * lane
            if half:
                v = ptx.stream8(fn, at // 2)
                a, b = ptx.halves(v[0]), ptx.halves(v[1])
                w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3] = a[0], a[1], b[0], b[1]
            else:
                v = ptx.stream16(fn, at)
                w[4 * i], w[4 * i + 1] = ptx.as_f4(v[0]), ptx.as_f4(v[1])
                w[4 * i + 2], w[4 * i + 3] = ptx.as_f4(v[2]), ptx.as_f4(v[3])
        else:
            for e in range(4):
                w[4 * i + e] = float32(0)


@device
def _dot(acc, w, xs, first, r, lane, n, squares):
    """One row's products with n outputs; the one numbered `squares` has x itself as its weight."""
    v = ptx.floats(xs, (first + r) * SLICE + 4 * lane)
    for i in range(n):
        own = i == squares
        s = (v[0] if own else w[4 * i]) * v[0]
        s = ptx.fma(v[1] if own else w[4 * i + 1], v[1], s)
        s = ptx.fma(v[2] if own else w[4 * i + 2], v[2], s)
        acc[r * n + i] = ptx.fma(v[3] if own else w[4 * i + 3], v[3], s)


def _slots(Z):
    """Outputs of a warp."""
    n = 1
    while WARPS * n < Z + 1:
        n *= 2
    return n


@cache
def _product(Z):
    """Products of a slice in shared memory, eight rows at a time. The eight warps share outputs
    and the sum of squares; of their 8 n sums every lane is left with one."""
    n = _slots(Z)
    V = ROWS * n
    assert V <= 32, Z

    @device
    def product(part, w, xs, pos, rows, slice_, lane, warp_):
        acc = cuda.local.array(V, float32)
        squares = Z - warp_ * n
        for first in range(0, rows, ROWS):
            live = pos[first + lane % ROWS] >= 0
            if cuda.ballot_sync(ALL, live) != 0:
                for r in range(ROWS):
                    _dot(acc, w, xs, first, r, lane, n, squares)
                # Lane 0 ends with sum 0, and so on: bit 4 of a lane chooses first.
                if V == 32:
                    warp.halve(acc, 16, lane & 16 != 0, 16)
                    warp.halve(acc, 8, lane & 8 != 0, 8)
                    warp.halve(acc, 4, lane & 4 != 0, 4)
                    warp.halve(acc, 2, lane & 2 != 0, 2)
                    warp.halve(acc, 1, lane & 1 != 0, 1)
                    value = lane
                elif V == 16:
                    warp.halve(acc, 8, lane & 16 != 0, 16)
                    warp.halve(acc, 4, lane & 8 != 0, 8)
                    warp.halve(acc, 2, lane & 4 != 0, 4)
                    warp.halve(acc, 1, lane & 2 != 0, 2)
                    acc[0] += cuda.shfl_xor_sync(ALL, acc[0], 1)
                    value = lane // 2
                else:
                    warp.halve(acc, 4, lane & 16 != 0, 16)
                    warp.halve(acc, 2, lane & 8 != 0, 8)
                    warp.halve(acc, 1, lane & 4 != 0, 4)
                    acc[0] += cuda.shfl_xor_sync(ALL, acc[0], 2)
                    acc[0] += cuda.shfl_xor_sync(ALL, acc[0], 1)
                    value = lane // 4
                row, o = first + value // n, warp_ * n + value % n
                if o <= Z and pos[row] >= 0:
                    part[(slice_ * rows + row) * PART + o] = acc[0]

    return product


@cache
def post_kernel(streams):
    mix = _mix(streams)
    quads = SLICE // streams // 4

    @kernel("f4* X, f4* y, f4* post, f4* M, i4* pos, i4 rows, i4 width", block=BLOCK)
    def hyper_post(X, y, post, M, pos, rows, width):
        ptx.let_next_begin()
        lane, first = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        slice_ = int64(cuda.blockIdx.x)
        own = lane // quads * width + slice_ * (4 * quads) + 4 * (lane % quads)
        ptx.wait_for_front()  # y, post and M are written
        for row in range(first, rows, WARPS):
            if pos[row] >= 0:
                mix(X, y, post, M, row * streams * width + own, row, width, slice_, lane)

    return hyper_post


@cache
def product_kernel(streams, Z, rows, half):
    product, n = _product(Z), _slots(Z)
    quads, n_xs, n_w = SLICE // streams // 4, rows * SLICE, 4 * n

    @kernel("f4* part, u4* fn, f4* X, i4* pos, i4 width", block=BLOCK)
    def hyper_product(part, fn, X, pos, width):
        ptx.let_next_begin()
        lane, warp_ = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        slice_ = int64(cuda.blockIdx.x)
        xs = cuda.shared.array(n_xs, float32)
        w = cuda.local.array(n_w, float32)
        _fetch(w, fn, warp_ * n, n, Z, slice_, lane, half)
        own = lane // quads * width + slice_ * (4 * quads) + 4 * (lane % quads)
        ptx.wait_for_front()  # X is written
        for row in range(warp_, rows, WARPS):
            if pos[row] >= 0:
                v = ptx.floats(X, row * streams * width + own)
                ptx.keep(xs, row * SLICE + 4 * lane, v[0], v[1], v[2], v[3])
        cuda.syncthreads()  # the slice of all rows is there
        product(part, w, xs, pos, rows, slice_, lane, warp_)

    return hyper_product


@cache
def post_product_kernel(streams, Z, rows, half):
    mix, product, n = _mix(streams), _product(Z), _slots(Z)
    quads, n_xs, n_w = SLICE // streams // 4, rows * SLICE, 4 * n

    @kernel("f4* part, u4* fn, f4* X, f4* y, f4* post, f4* M, i4* pos, i4 width", block=BLOCK)
    def hyper_post_product(part, fn, X, y, post, M, pos, width):
        ptx.let_next_begin()
        lane, warp_ = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        slice_ = int64(cuda.blockIdx.x)
        xs = cuda.shared.array(n_xs, float32)
        w = cuda.local.array(n_w, float32)
        _fetch(w, fn, warp_ * n, n, Z, slice_, lane, half)
        own = lane // quads * width + slice_ * (4 * quads) + 4 * (lane % quads)
        ptx.wait_for_front()  # y, post and M are written
        for row in range(warp_, rows, WARPS):
            if pos[row] >= 0:
                at = row * streams * width + own
                v = mix(X, y, post, M, at, row, width, slice_, lane)
                ptx.keep(xs, row * SLICE + 4 * lane, v[0], v[1], v[2], v[3])
        cuda.syncthreads()  # the slice of all rows is there
        product(part, w, xs, pos, rows, slice_, lane, warp_)

    return hyper_post_product


# -- rows --------------------------------------------------------------------------------------


@device
def _sigmoid(x):
    return float32(1) / (float32(1) + math.exp(-x))


@cache
def _outputs(count, Z):
    slices = count // SLICE
    turns, whole = -(-slices // ROW_WARPS), slices % ROW_WARPS == 0

    @spliced
    def z_of(part, rows, row, eps):
        """z of output `lane`, in the first warp. The whole block has to be there."""
        lane, warp_ = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
        shares = cuda.shared.array(SHARES, float32)
        acc = float32(0)
        for k in range(turns):
            s = k * ROW_WARPS + warp_
            if whole or s < slices:
                acc += part[(int64(s) * rows + row) * PART + lane]
        shares[warp_ * PART + lane] = acc
        cuda.syncthreads()  # the warps' shares are visible
        z = float32(0)
        if warp_ == 0:
            for k in range(ROW_WARPS):
                z += shares[k * PART + lane]
            squares = cuda.shfl_sync(ALL, z, Z)
            z *= float32(1) / math.sqrt(squares / float32(count) + eps)
        return z

    return z_of


@cache
def _maps(streams):
    """Post and M of a row, by its first warp."""
    n, log = streams, {1: 0, 2: 1, 4: 2}[streams]

    @device
    def maps(post, M, row, z, by_post, by_comb, own_base, hyper_eps, iterations, lane):
        if n <= lane < 2 * n:
            post[row * n + lane - n] = float32(2) * _sigmoid(z * by_post + own_base)
        logit = z * by_comb + own_base
        # Lane n j + k has M[j, k]. Further lanes repeat them: they take part in the shuffles.
        v = cuda.shfl_sync(ALL, logit, 2 * n + lane % (n * n))
        high = v
        for i in range(log):
            other = cuda.shfl_xor_sync(ALL, high, 1 << i)
            high = other if other > high else high
        v = math.exp(v - high)
        total = v
        for i in range(log):
            total += cuda.shfl_xor_sync(ALL, total, 1 << i)
        v = v / total + hyper_eps
        total = v
        for i in range(log):
            total += cuda.shfl_xor_sync(ALL, total, n << i)
        v = v / (total + hyper_eps)
        for _ in range(iterations - 1):
            total = v
            for i in range(log):
                total += cuda.shfl_xor_sync(ALL, total, 1 << i)
            v = v / (total + hyper_eps)
            total = v
            for i in range(log):
                total += cuda.shfl_xor_sync(ALL, total, n << i)
            v = v / (total + hyper_eps)
        if lane < n * n:
            M[row * n * n + lane] = v

    return maps


@cache
def _input(streams, width, Z):
    """h of a row, by its block."""
    per_thread = -(-width // (4 * ROW_BLOCK))
    n_x, n_mixed, z_of = per_thread * streams * 4, per_thread * 4, _outputs(streams * width, Z)

    @spliced
    def input_(h, g, part, X, scale, own_base, hyper_eps, rms_eps, rows, row):
        tid = cuda.threadIdx.x
        lane, warp_ = tid % 32, tid // 32
        pre = cuda.shared.array(streams, float32)
        squares = cuda.shared.array(ROW_WARPS, float32)
        xs = cuda.local.array(n_x, float32)
        mixed = cuda.local.array(n_mixed, float32)
        for c in range(per_thread):
            d = 4 * (c * ROW_BLOCK + tid)
            if d < width:
                for j in range(streams):
                    v = ptx.floats(X, (row * streams + j) * width + d)
                    at = 4 * (c * streams + j)
                    xs[at], xs[at + 1], xs[at + 2], xs[at + 3] = v[0], v[1], v[2], v[3]
        z = z_of(part, rows, row, rms_eps)
        if tid < streams:
            pre[tid] = _sigmoid(z * scale + own_base) + hyper_eps
        cuda.syncthreads()  # pre is visible
        acc = float32(0)
        for c in range(per_thread):
            if 4 * (c * ROW_BLOCK + tid) < width:
                for e in range(4):
                    x = pre[0] * xs[4 * c * streams + e]
                    for j in range(1, streams):
                        x = ptx.fma(pre[j], xs[4 * (c * streams + j) + e], x)
                    mixed[4 * c + e] = x
                    acc = ptx.fma(x, x, acc)
        acc = warp.total(acc)
        if lane == 0:
            squares[warp_] = acc
        cuda.syncthreads()  # the warps' squares are visible
        total = float32(0)
        for k in range(ROW_WARPS):
            total += squares[k]
        by = float32(1) / math.sqrt(total / float32(width) + rms_eps)
        for c in range(per_thread):
            d = 4 * (c * ROW_BLOCK + tid)
            if d < width:
                at = 4 * c
                a, b = mixed[at] * by * g[at], mixed[at + 1] * by * g[at + 1]
                e, f = mixed[at + 2] * by * g[at + 2], mixed[at + 3] * by * g[at + 3]
                ptx.keep(h, row * width + d, a, b, e, f)

    return input_


@cache
def _gains(width):
    per_thread = -(-width // (4 * ROW_BLOCK))

    @device
    def gains(g, w):
        """What the norm multiplies a thread's channels with."""
        for c in range(per_thread):
            d = 4 * (c * ROW_BLOCK + cuda.threadIdx.x)
            if d < width:
                v, at = ptx.floats(w, d), 4 * c
                g[at], g[at + 1], g[at + 2], g[at + 3] = v[0], v[1], v[2], v[3]

    return gains


@cache
def pre_kernel(streams, width):
    Z = outputs(streams)
    gains, n_g = _gains(width), 4 * -(-width // (4 * ROW_BLOCK))
    input_, maps, z_of = _input(streams, width, Z), _maps(streams), _outputs(streams * width, Z)

    @kernel(
        "f4* h, f4* post, f4* M, f4* part, f4* X, f4* w, f4* scale, f4* base, i4* pos, i4 rows,"
        "f4 hyper_eps, f4 rms_eps, i4 iterations",
        block=ROW_BLOCK,
    )
    def hyper_pre(h, post, M, part, X, w, scale, base, pos, rows, hyper_eps, rms_eps, iterations):
        ptx.let_next_begin()
        row, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x % 32
        g = cuda.local.array(n_g, float32)
        own_base = base[lane if lane < Z else 0]
        by_pre, by_post, by_comb = scale[0], scale[1], scale[2]
        if cuda.blockIdx.y == 0:
            gains(g, w)
        ptx.wait_for_front()  # part is written
        if pos[row] < 0:
            return
        if cuda.blockIdx.y == 0:
            input_(h, g, part, X, by_pre, own_base, hyper_eps, rms_eps, rows, row)
        else:
            z = z_of(part, rows, row, rms_eps)
            if cuda.threadIdx.x < 32:
                maps(post, M, row, z, by_post, by_comb, own_base, hyper_eps, iterations, lane)

    return hyper_pre


@cache
def maps_kernel(streams, width):
    Z = outputs(streams)
    maps, z_of = _maps(streams), _outputs(streams * width, Z)

    @kernel(
        "f4* post, f4* M, f4* part, f4* scale, f4* base, i4* pos, i4 rows,"
        "f4 hyper_eps, f4 rms_eps, i4 iterations",
        block=ROW_BLOCK,
    )
    def hyper_maps(post, M, part, scale, base, pos, rows, hyper_eps, rms_eps, iterations):
        ptx.let_next_begin()
        row, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x % 32
        own_base = base[lane if lane < Z else 0]
        by_post, by_comb = scale[1], scale[2]
        ptx.wait_for_front()  # part is written
        if pos[row] < 0:
            return
        z = z_of(part, rows, row, rms_eps)
        if cuda.threadIdx.x < 32:
            maps(post, M, row, z, by_post, by_comb, own_base, hyper_eps, iterations, lane)

    return hyper_maps


@cache
def head_kernel(streams, width):
    gains, n_g = _gains(width), 4 * -(-width // (4 * ROW_BLOCK))
    input_ = _input(streams, width, streams)

    @kernel(
        "f4* h, f4* part, f4* X, f4* w, f4* scale, f4* base, i4* pos, i4 rows,"
        "f4 hyper_eps, f4 rms_eps",
        block=ROW_BLOCK,
    )
    def hyper_head(h, part, X, w, scale, base, pos, rows, hyper_eps, rms_eps):
        ptx.let_next_begin()
        row, lane = int64(cuda.blockIdx.x), cuda.threadIdx.x % 32
        g = cuda.local.array(n_g, float32)
        own_base, by_pre = base[lane if lane < streams else 0], scale[0]
        gains(g, w)
        ptx.wait_for_front()  # part is written
        if pos[row] >= 0:
            input_(h, g, part, X, by_pre, own_base, hyper_eps, rms_eps, rows, row)

    return hyper_head


# -- launchers: each enqueues on `stream` ------------------------------------------------------


def hyper_post(stream, X, y, post, M, pos, *, rows, streams, width, dependent=False):
    post_kernel(streams).launch(
        stream, n_slices(streams, width), BLOCK, X, y, post, M, pos, rows, width,
        dependent=dependent,
    )  # fmt: skip


def hyper_product(stream, part, fn, X, pos, *, rows, streams, width, Z, half, dependent=False):
    """`Z`: outputs(streams), or streams for the head's fn. `half`: fn is f16."""
    product_kernel(streams, Z, rows, half).launch(
        stream, n_slices(streams, width), BLOCK, part, fn, X, pos, width, dependent=dependent
    )


def hyper_post_product(
    stream, part, fn, X, y, post, M, pos, *, rows, streams, width, Z, half, dependent=False
):
    post_product_kernel(streams, Z, rows, half).launch(
        stream, n_slices(streams, width), BLOCK, part, fn, X, y, post, M, pos, width,
        dependent=dependent,
    )  # fmt: skip


def hyper_pre(
    stream, h, post, M, part, X, w, scale, base, pos, *, rows, streams, width, hyper_eps, rms_eps,
    iterations, maps=True, dependent=False,
):  # fmt: skip
    """`maps`: post and M as well; else `hyper_maps` has to run."""
    pre_kernel(streams, width).launch(
        stream, (rows, 2 if maps else 1), ROW_BLOCK, h, post, M, part, X, w, scale, base, pos,
        rows, hyper_eps, rms_eps, iterations, dependent=dependent,
    )  # fmt: skip


def hyper_maps(
    stream, post, M, part, scale, base, pos, *, rows, streams, width, hyper_eps, rms_eps,
    iterations, dependent=False,
):  # fmt: skip
    maps_kernel(streams, width).launch(
        stream, rows, ROW_BLOCK, post, M, part, scale, base, pos, rows, hyper_eps, rms_eps,
        iterations, dependent=dependent,
    )  # fmt: skip


def hyper_head(
    stream, h, part, X, w, scale, base, pos, *, rows, streams, width, hyper_eps, rms_eps,
    dependent=False,
):  # fmt: skip
    head_kernel(streams, width).launch(
        stream, rows, ROW_BLOCK, h, part, X, w, scale, base, pos, rows, hyper_eps, rms_eps,
        dependent=dependent,
    )  # fmt: skip
