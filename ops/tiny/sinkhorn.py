"""The hyper-connections' two operations, with their exact gradients (spec/model.md 4.3).

**sinkhorn**, the matrix that mixes the streams:

    M = softmax_k(C) + eps;  columns;  then (n - 1) times rows, columns:  M = M / (sum + eps)

Left to autograd, 39 normalisations of 4 x 4 matrices would be some two hundred launches a sublayer
and as many saved copies. Here the forward keeps M and its 39 x 4 divisors, and the backward walks
the divisions back: with y = x / s,  dx = (dy - sum(dy y)) / s  and  x = y s.
One Triton program takes 128 tokens.

**step**, everything between two sublayers but that matrix, of the streams X [4, D] of a token:

    X'[k] = post[k] y + sum_j M[j, k] X[j]         what the last sublayer gave, y, enters
    z     = fn X' / rms(X')                        24 numbers, of which pre, post and M are made
    h     = norm x / rms(x),  x = sum_j pre[j] X'[j],  pre[j] = sigmoid(scale z[j] + base[j]) + eps

A token's streams, in bf16 or f32, are by far the largest thing in the model, and memory is what
both kernels wait for: one reads X and y and writes X' and h, one reads X, y and the two gradients
and writes the two others. They walk over the channels a few at a time. What a token needs from all
of its channels follows from few sums: the norms of X' and x from the ten products of two streams
that the forward keeps, the gates' gradients from those and four products with the gradient of h.
The backward makes X' again, for what is left of a token in a cache is cheap, and memory is not.
`end` is the first line alone, behind the last layer.

Without a GPU the same steps run in torch.
"""

import math
import os

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_USE_TRITON = triton is not None and not os.environ.get("TINY_NO_TRITON")
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # what triton.jit went by just above


def ready(x: Tensor) -> bool:
    """Whether kernels can work on x."""
    return _USE_TRITON and (x.is_cuda or _INTERPRETED)


# --- sinkhorn ------------------------------------------------------------------------------------

if triton is not None:

    @triton.jit
    def _forward(comb, out, divisors, n, eps: tl.constexpr, N_ITER: tl.constexpr, B: tl.constexpr):
        t = tl.program_id(0) * B + tl.arange(0, B)
        i = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        div = t[:, None] * (8 * N_ITER - 4) + i[None, :]
        inside = t < n
        inside3, inside2 = inside[:, None, None], inside[:, None]
        m = tl.load(comb + at, mask=inside3, other=0.0)
        m = tl.exp(m - tl.max(m, axis=2)[:, :, None])
        m = m / tl.sum(m, axis=2)[:, :, None] + eps
        s = tl.sum(m, axis=1) + eps
        m = m / s[:, None, :]
        tl.store(divisors + div, s, mask=inside2)
        for k in range(N_ITER - 1):
            r = tl.sum(m, axis=2) + eps
            m = m / r[:, :, None]
            tl.store(divisors + div + 8 * k + 4, r, mask=inside2)
            s = tl.sum(m, axis=1) + eps
            m = m / s[:, None, :]
            tl.store(divisors + div + 8 * k + 8, s, mask=inside2)
        tl.store(out + at, m, mask=inside3)

    @triton.jit
    def _backward(
        grad, out, divisors, d_comb, n, eps: tl.constexpr, N_ITER: tl.constexpr, B: tl.constexpr
    ):
        t = tl.program_id(0) * B + tl.arange(0, B)
        i = tl.arange(0, 4)
        at = t[:, None, None] * 16 + i[None, :, None] * 4 + i[None, None, :]
        div = t[:, None] * (8 * N_ITER - 4) + i[None, :]
        inside = t < n
        inside3, inside2 = inside[:, None, None], inside[:, None]
        y = tl.load(out + at, mask=inside3, other=0.0)
        g = tl.load(grad + at, mask=inside3, other=0.0)
        for j in range(N_ITER - 1):
            k = N_ITER - 2 - j
            s = tl.load(divisors + div + 8 * k + 8, mask=inside2, other=1.0)
            g = (g - tl.sum(g * y, axis=1)[:, None, :]) / s[:, None, :]
            y = y * s[:, None, :]
            r = tl.load(divisors + div + 8 * k + 4, mask=inside2, other=1.0)
            g = (g - tl.sum(g * y, axis=2)[:, :, None]) / r[:, :, None]
            y = y * r[:, :, None]
        s = tl.load(divisors + div, mask=inside2, other=1.0)
        g = (g - tl.sum(g * y, axis=1)[:, None, :]) / s[:, None, :]
        p = y * s[:, None, :] - eps  # the softmax
        g = p * (g - tl.sum(g * p, axis=2)[:, :, None])
        tl.store(d_comb + at, g, mask=inside3)


@torch.library.custom_op("tiny::sinkhorn", mutates_args=())
def _sinkhorn(comb: Tensor, n_iterations: int) -> tuple[Tensor, Tensor]:
    """M [n, 4, 4] f32 and its divisors [n, 2 n_iterations - 1, 4] of logits `comb` [n, 4, 4]."""
    comb = comb.contiguous()
    n = comb.shape[0]
    divisors = torch.empty(n, 2 * n_iterations - 1, 4, device=comb.device)
    if ready(comb):
        m = torch.empty_like(comb)
        _forward[(triton.cdiv(n, 128),)](comb, m, divisors, n, EPS, n_iterations, 128)
        return m, divisors
    m = torch.softmax(comb, 2) + EPS
    for k in range(2 * n_iterations - 1):
        s = m.sum(1 if k % 2 == 0 else 2) + EPS
        m = m / (s[:, None, :] if k % 2 == 0 else s[:, :, None])
        divisors[:, k] = s
    return m, divisors


@torch.library.custom_op("tiny::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward(grad: Tensor, m: Tensor, divisors: Tensor, n_iterations: int) -> Tensor:
    grad = grad.contiguous()
    n = m.shape[0]
    if ready(m):
        out = torch.empty_like(m)
        _backward[(triton.cdiv(n, 128),)](grad, m, divisors, out, n, EPS, n_iterations, 128)
        return out
    y = m
    for k in reversed(range(2 * n_iterations - 1)):
        axis = 1 if k % 2 == 0 else 2
        s = divisors[:, k].unsqueeze(axis)
        grad = (grad - (grad * y).sum(axis, keepdim=True)) / s
        y = y * s
    p = y - EPS
    return p * (grad - (grad * p).sum(2, keepdim=True))


@_sinkhorn.register_fake
def _(comb, n_iterations):
    return torch.empty_like(comb), comb.new_empty(comb.shape[0], 2 * n_iterations - 1, 4)


@_sinkhorn_backward.register_fake
def _(grad, m, divisors, n_iterations):
    return torch.empty_like(m)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output)
    ctx.n_iterations = inputs[1]


def _gradient(ctx, grad_m, grad_divisors):
    return torch.ops.tiny.sinkhorn_backward(grad_m, *ctx.saved_tensors, ctx.n_iterations), None


_sinkhorn.register_autograd(_gradient, setup_context=_setup)


def sinkhorn(comb: Tensor, n_iterations: int) -> Tensor:
    """M [n, 4, 4] of the logits `comb` [n, 4, 4] f32, [source, destination]."""
    return torch.ops.tiny.sinkhorn(comb, n_iterations)[0]


# --- the step between two sublayers --------------------------------------------------------------


def mix(X: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the streams [..., S, D], written out: [..., D]."""
    out = X[..., 0, :] * weights[..., 0, None]
    for j in range(1, X.shape[-2]):
        out = out + X[..., j, :] * weights[..., j, None]
    return out


def _end_reference(X: Tensor, y: Tensor, post: Tensor, M: Tensor) -> Tensor:
    a, y = X.float(), y.float()
    new = [post[..., k, None] * y + mix(a, M[..., k]) for k in range(X.shape[-2])]
    return torch.stack(new, -2).to(X.dtype)


def _step_reference(
    X: Tensor, y: Tensor, post: Tensor, M: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    norm: Tensor, rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = _end_reference(X, y, post, M)
    a = out.float()
    flat = a.flatten(-2)
    z = F.linear(flat, fn.to(X.dtype).float())
    z = z * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    x = mix(a, torch.sigmoid(z[..., : X.shape[-2]] * scale + base) + hyper_eps)
    return out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps) * norm, z


if triton is not None:

    @triton.jit
    def _rows(A, t, inside, c, STRIDE: tl.constexpr):
        """Numbers c of every token, [N, C] in f32."""
        at = A + t[:, None] * STRIDE + c[None, :]
        return tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)

    @triton.jit
    def _streams(X, t, inside, c, D: tl.constexpr):
        """Channels c of a token's four streams, each [N, C] in f32."""
        return (
            _rows(X, t, inside, c, 4 * D), _rows(X, t, inside, D + c, 4 * D),
            _rows(X, t, inside, 2 * D + c, 4 * D), _rows(X, t, inside, 3 * D + c, 4 * D),
        )  # fmt: skip

    @triton.jit
    def _store(X, t, inside, c, x, STRIDE: tl.constexpr):
        at = X + t[:, None] * STRIDE + c[None, :]
        tl.store(at, x.to(X.dtype.element_ty), mask=inside[:, None])

    @triton.jit
    def _each(A, t, inside, k: tl.constexpr, STRIDE: tl.constexpr):
        """Number k of every token, as a column."""
        return tl.load(A + t * STRIDE + k, mask=inside, other=0.0)[:, None]

    @triton.jit
    def _four(A, t, inside, k: tl.constexpr, STRIDE: tl.constexpr):
        """Numbers k to k + 3 of every token, as columns."""
        return (
            _each(A, t, inside, k, STRIDE), _each(A, t, inside, k + 1, STRIDE),
            _each(A, t, inside, k + 2, STRIDE), _each(A, t, inside, k + 3, STRIDE),
        )  # fmt: skip

    @triton.jit
    def _entered(a, y, post, m, k: tl.constexpr, T: tl.constexpr):
        """Stream k of X', rounded to the type T of the streams; m: the rows of M."""
        x = post[k] * y + m[0][k] * a[0] + m[1][k] * a[1] + m[2][k] * a[2] + m[3][k] * a[3]
        return x.to(T).to(tl.float32)

    @triton.jit
    def _weighted(w, a):
        return w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3]

    @triton.jit
    def _partly(x, V: tl.constexpr):
        """Sums over V neighbours, [N, C / V]: those that one thread holds, so nothing is moved."""
        return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // V, V]), 2)

    @triton.jit
    def _more(s, x, a, V: tl.constexpr):
        """The four sums s with the products of x and a."""
        return (
            s[0] + _partly(x * a[0], V), s[1] + _partly(x * a[1], V),
            s[2] + _partly(x * a[2], V), s[3] + _partly(x * a[3], V),
        )  # fmt: skip

    @triton.jit
    def _store_four(A, t, inside, k: tl.constexpr, STRIDE: tl.constexpr, s):
        """Whole sums from partial ones, into numbers k to k + 3 of every token."""
        even = tl.join(tl.sum(s[0], 1), tl.sum(s[2], 1))
        odd = tl.join(tl.sum(s[1], 1), tl.sum(s[3], 1))
        _store(A, t, inside, k + tl.arange(0, 4), tl.reshape(tl.join(even, odd), [t.shape[0], 4]),
               STRIDE)  # fmt: skip

    @triton.jit
    def _rsqrt_mean(a, n: tl.constexpr, eps: tl.constexpr):
        return 1.0 / tl.sqrt(a / n + eps)

    @triton.jit
    def _gates(Z, SCALE, BASE, t, inside, NZ: tl.constexpr):
        z, scale = _four(Z, t, inside, 0, NZ), tl.load(SCALE)
        return (
            tl.sigmoid(z[0] * scale + tl.load(BASE)), tl.sigmoid(z[1] * scale + tl.load(BASE + 1)),
            tl.sigmoid(z[2] * scale + tl.load(BASE + 2)),
            tl.sigmoid(z[3] * scale + tl.load(BASE + 3)),
        )  # fmt: skip

    @triton.jit
    def _fn(FN, f, c, D: tl.constexpr, NZ: tl.constexpr):
        """fn for the inputs c, [F, C]."""
        return tl.load(FN + f[:, None] * (4 * D) + c[None, :], mask=(f < NZ)[:, None], other=0.0)

    @triton.jit
    def _gradient(
        G_X, t, inside, c, dz, FN, f, x, dx, pre, along, k: tl.constexpr, D: tl.constexpr,
        NZ: tl.constexpr,
    ):  # fmt: skip
        """Of stream k of X', all parts together."""
        # The product is turned round and comes before the load, since Triton lays out a sum like
        # what is loaded last, but like any product that is not: over all warps, a token in parts.
        w = tl.dot(_fn(FN, f, k * D + c, D, NZ).T, dz.T).T
        return _rows(G_X, t, inside, k * D + c, 4 * D) + pre[k] * dx - along * x[k] + w

    @triton.jit
    def _step_forward(
        X, Y, POST, M, FN, SCALE, BASE, NORM, X_OUT, H, Z, GRAM, n,
        rms_eps: tl.constexpr, hyper_eps: tl.constexpr, D: tl.constexpr, NZ: tl.constexpr,
        NEXT: tl.constexpr, N: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    ):  # fmt: skip
        """N tokens a program, C channels at a time; without NEXT only X_OUT is computed."""
        T: tl.constexpr = X_OUT.dtype.element_ty
        t = tl.program_id(0) * N + tl.arange(0, N)
        # 64 rows of fn, though it has 24: Hopper's products take no fewer, and for any other kind
        # of product Triton would have every warp make all of X' again.
        inside, f = t < n, tl.arange(0, 64)
        post = _four(POST, t, inside, 0, 4)
        m = (_four(M, t, inside, 0, 16), _four(M, t, inside, 4, 16),
             _four(M, t, inside, 8, 16), _four(M, t, inside, 12, 16))  # fmt: skip
        z, none = tl.zeros([64, N], tl.float32), tl.zeros([N, C // V], tl.float32)
        s0, s1 = (none, none, none, none), (none, none, none)
        s2, s3 = (none, none), none
        for i in range(0, D, C):
            c = i + tl.arange(0, C)
            a, y = _streams(X, t, inside, c, D), _rows(Y, t, inside, c, D)
            x = (_entered(a, y, post, m, 0, T), _entered(a, y, post, m, 1, T),
                 _entered(a, y, post, m, 2, T), _entered(a, y, post, m, 3, T))  # fmt: skip
            for k in tl.static_range(4):
                _store(X_OUT, t, inside, k * D + c, x[k], 4 * D)
                if NEXT:
                    z = tl.dot(_fn(FN, f, k * D + c, D, NZ), x[k].to(T).T, z)
            if NEXT:
                s0 = _more(s0, x[0], x, V)
                s1 = (s1[0] + _partly(x[1] * x[1], V), s1[1] + _partly(x[1] * x[2], V),
                      s1[2] + _partly(x[1] * x[3], V))  # fmt: skip
                s2 = (s2[0] + _partly(x[2] * x[2], V), s2[1] + _partly(x[2] * x[3], V))
                s3 = s3 + _partly(x[3] * x[3], V)
        if NEXT:
            _store_four(GRAM, t, inside, 0, 12, s0)
            _store_four(GRAM, t, inside, 4, 12, (s1[0], s1[1], s1[2], s2[0]))
            _store_four(GRAM, t, inside, 8, 12, (s2[1], s3, none, none))
            square = tl.sum(s0[0] + s1[0] + s2[0] + s3, 1)
            z = z * _rsqrt_mean(square, 4 * D, rms_eps)[None, :]
            tl.store(Z + t[None, :] * NZ + f[:, None], z, mask=inside[None, :] & (f < NZ)[:, None])
            tl.debug_barrier()  # what other threads stored is read below
            s = _gates(Z, SCALE, BASE, t, inside, NZ)
            pre = (s[0] + hyper_eps, s[1] + hyper_eps, s[2] + hyper_eps, s[3] + hyper_eps)
            square = _weighted(pre, _by_gram(GRAM, t, inside, pre))
            r = _rsqrt_mean(square, D, rms_eps)
            for i in range(0, D, C):
                c = i + tl.arange(0, C)
                x = _weighted(pre, _streams(X_OUT, t, inside, c, D))
                _store(H, t, inside, c, x * r * tl.load(NORM + c)[None, :], D)

    @triton.jit
    def _by_gram(GRAM, t, inside, w):
        """The products sum_c x x_k of x = sum_j w_j x_j, from those of the streams."""
        a, b = _four(GRAM, t, inside, 0, 12), _four(GRAM, t, inside, 4, 12)
        x23, x33 = _each(GRAM, t, inside, 8, 12), _each(GRAM, t, inside, 9, 12)
        return (
            _weighted(w, a),
            _weighted(w, (a[1], b[0], b[1], b[2])),
            _weighted(w, (a[2], b[1], b[3], x23)),
            _weighted(w, (a[3], b[2], x23, x33)),
        )

    @triton.jit
    def _step_backward(
        G_X, G_H, G_Z, X, Y, POST, M, FN, SCALE, BASE, NORM, Z, GRAM,
        D_X, D_Y, D_POST, D_M, D_Z, SUMS, n,
        rms_eps: tl.constexpr, hyper_eps: tl.constexpr, D: tl.constexpr, NZ: tl.constexpr,
        NEXT: tl.constexpr, N: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
    ):  # fmt: skip
        """D_Z: of fn X', which is z before its norm. SUMS [program, D + 8]: over the program's
        tokens, the gradients of norm [D], base [4] and scale [1]."""
        T: tl.constexpr = X.dtype.element_ty
        t = tl.program_id(0) * N + tl.arange(0, N)
        inside, f = t < n, tl.arange(0, 32)
        post = _four(POST, t, inside, 0, 4)
        m = (_four(M, t, inside, 0, 16), _four(M, t, inside, 4, 16),
             _four(M, t, inside, 8, 16), _four(M, t, inside, 12, 16))  # fmt: skip
        none = tl.zeros([N, C // V], tl.float32)
        if NEXT:
            s = _gates(Z, SCALE, BASE, t, inside, NZ)
            pre = (s[0] + hyper_eps, s[1] + hyper_eps, s[2] + hyper_eps, s[3] + hyper_eps)
            v = _by_gram(GRAM, t, inside, pre)
            r = _rsqrt_mean(_weighted(pre, v), D, rms_eps)
            e, sums = (none, none, none, none), SUMS + tl.program_id(0) * (D + 8)
            for i in range(0, D, C):
                c = i + tl.arange(0, C)
                a, y = _streams(X, t, inside, c, D), _rows(Y, t, inside, c, D)
                gh = _rows(G_H, t, inside, c, D)
                x = (_entered(a, y, post, m, 0, T), _entered(a, y, post, m, 1, T),
                     _entered(a, y, post, m, 2, T), _entered(a, y, post, m, 3, T))  # fmt: skip
                tl.store(sums + c, tl.sum(gh * _weighted(pre, x) * r, 0))
                e = _more(e, gh * tl.load(NORM + c)[None, :], x, V)
            e = (tl.sum(e[0], 1)[:, None], tl.sum(e[1], 1)[:, None],
                 tl.sum(e[2], 1)[:, None], tl.sum(e[3], 1)[:, None])  # fmt: skip
            # The gradient of x is r u - along_x x with u = norm g_h, and e_k = sum_c u x_k.
            along_x = r * r * r * _weighted(pre, e) / D
            z_at = t[:, None] * NZ + f[None, :]
            z_in = inside[:, None] & (f < NZ)[None, :]
            z = tl.load(Z + z_at, mask=z_in, other=0.0)
            dz = tl.load(G_Z + z_at, mask=z_in, other=0.0)
            scale, d_scale = tl.load(SCALE), 0.0
            for k in tl.static_range(4):
                gate = (r * e[k] - along_x * v[k]) * s[k] * (1 - s[k])
                tl.store(sums + D + k, tl.sum(tl.sum(gate, 1), 0))
                gate = tl.where((f == k)[None, :], gate, 0.0)
                d_scale += tl.sum(tl.sum(gate * z, 1), 0)
                dz += gate * scale
            tl.store(sums + D + 4, d_scale)
            square = _each(GRAM, t, inside, 0, 12) + _each(GRAM, t, inside, 4, 12)
            square += _each(GRAM, t, inside, 7, 12) + _each(GRAM, t, inside, 9, 12)
            r_z = _rsqrt_mean(square, 4 * D, rms_eps)
            along = tl.sum(dz * z, 1)[:, None] * r_z * r_z / (4 * D)
            dz = (dz * r_z).to(T)
            tl.store(D_Z + z_at, dz, mask=z_in)
        p = (none, none, none, none)
        q0, q1, q2, q3 = p, p, p, p
        for i in range(0, D, C):
            c = i + tl.arange(0, C)
            if NEXT:
                a, y = _streams(X, t, inside, c, D), _rows(Y, t, inside, c, D)
                x = (_entered(a, y, post, m, 0, T), _entered(a, y, post, m, 1, T),
                     _entered(a, y, post, m, 2, T), _entered(a, y, post, m, 3, T))  # fmt: skip
                mixed, gh = _weighted(pre, x), _rows(G_H, t, inside, c, D)
                dx = gh * tl.load(NORM + c)[None, :] * r - mixed * along_x
                g = (
                    _gradient(G_X, t, inside, c, dz, FN, f, x, dx, pre, along, 0, D, NZ),
                    _gradient(G_X, t, inside, c, dz, FN, f, x, dx, pre, along, 1, D, NZ),
                    _gradient(G_X, t, inside, c, dz, FN, f, x, dx, pre, along, 2, D, NZ),
                    _gradient(G_X, t, inside, c, dz, FN, f, x, dx, pre, along, 3, D, NZ),
                )
            else:
                g = _streams(G_X, t, inside, c, D)
            # X and y once more: cheaper than the registers to keep them.
            p = _more(p, _rows(Y, t, inside, c, D), g, V)
            _store(D_Y, t, inside, c, _weighted(post, g), D)
            q0 = _more(q0, _rows(X, t, inside, c, 4 * D), g, V)
            _store(D_X, t, inside, c, _weighted(m[0], g), 4 * D)
            q1 = _more(q1, _rows(X, t, inside, D + c, 4 * D), g, V)
            _store(D_X, t, inside, D + c, _weighted(m[1], g), 4 * D)
            q2 = _more(q2, _rows(X, t, inside, 2 * D + c, 4 * D), g, V)
            _store(D_X, t, inside, 2 * D + c, _weighted(m[2], g), 4 * D)
            q3 = _more(q3, _rows(X, t, inside, 3 * D + c, 4 * D), g, V)
            _store(D_X, t, inside, 3 * D + c, _weighted(m[3], g), 4 * D)
        _store_four(D_POST, t, inside, 0, 4, p)
        _store_four(D_M, t, inside, 0, 16, q0)
        _store_four(D_M, t, inside, 4, 16, q1)
        _store_four(D_M, t, inside, 8, 16, q2)
        _store_four(D_M, t, inside, 12, 16, q3)


# Tokens (16 is the fewest), channels at a time, warps and registers a thread of a program, as
# `python -m ops.tiny.probe` found best.
TILES = {"forward": (16, 64, 4, 128), "backward": (16, 64, 8, 128)}
SPLIT = 64  # parts into which the tokens are cut for the gradient of fn


def _cut(name: str, n: int, d: int) -> tuple[tuple[int], tuple[int, int, int], dict[str, int]]:
    """Grid, sizes of the tile and how it is launched, for n tokens of d channels."""
    tokens, channels, warps, registers = TILES[name]
    channels = math.gcd(channels, d)
    neighbours = max(1, min(8, tokens * channels // (32 * warps)))
    how = {"num_warps": warps, "num_stages": 1, "maxnreg": registers}
    return (triton.cdiv(n, tokens),), (tokens, channels, neighbours), how


@torch.library.custom_op("tiny::step", mutates_args=())
def _step_op(
    X: Tensor, y: Tensor, post: Tensor, M: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    norm: Tensor, rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """X' [n, 4, D] in the type of X; f32: h [n, D], z [n, 24] and the products of two streams of
    X' [n, 12] (00 01 02 03 11 12 13 22 23 33, 0, 0); with an empty fn only X'."""
    X, y, post, M = (a.contiguous() for a in (X, y, post, M))
    n, _, d = X.shape
    out, (h, z, gram) = torch.empty_like(X), _made(X, fn)
    grid, sizes, how = _cut("forward", n, d)
    _step_forward[grid](
        X, y, post, M, fn.to(X.dtype), scale, base, norm, out, h, z, gram, n, rms_eps, hyper_eps,
        d, len(fn), len(fn) > 0, *sizes, **how,
    )  # fmt: skip
    return out, h, z, gram


def _made(X: Tensor, fn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n = len(X) if len(fn) else 0
    h, z, gram = (X.new_empty(n, k, dtype=torch.float32) for k in (X.shape[2], len(fn), 12))
    return h, z, gram


@torch.library.custom_op("tiny::step_backward", mutates_args=())
def _step_backward_op(
    g_x: Tensor, g_h: Tensor, g_z: Tensor, X: Tensor, y: Tensor, post: Tensor, M: Tensor,
    fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, out: Tensor, z: Tensor, gram: Tensor,
    rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of X, y, post, M, fn, and in one tensor [D + 8] of norm [D], base [4], scale [1]."""
    g_x, g_h, g_z, X, y, post, M = (a.contiguous() for a in (g_x, g_h, g_z, X, y, post, M))
    n, _, d = X.shape
    dX, dy, d_post, dM = (torch.empty_like(a) for a in (X, y, post, M))
    grid, sizes, how = _cut("backward", n, d)
    dz, sums = torch.empty_like(z, dtype=X.dtype), z.new_empty(*grid, d + 8)
    _step_backward[grid](
        g_x, g_h, g_z, X, y, post, M, fn.to(X.dtype), scale, base, norm, z, gram, dX, dy, d_post,
        dM, dz, sums, n, rms_eps, hyper_eps, d, len(fn), len(fn) > 0, *sizes, **how,
    )  # fmt: skip
    if not len(fn):
        return dX, dy, d_post, dM, torch.empty_like(fn), sums.new_empty(d + 8)
    # Few outputs, many tokens: as one product it would keep only a few processors busy.
    k = SPLIT if n % SPLIT == 0 else 1
    d_fn = torch.bmm(dz.view(k, n // k, -1).mT, out.view(k, n // k, -1)).sum(0, dtype=fn.dtype)
    return dX, dy, d_post, dM, d_fn, sums.sum(0)


@_step_op.register_fake
def _(X, y, post, M, fn, scale, base, norm, rms_eps, hyper_eps):
    return X.new_empty(X.shape), *_made(X, fn)


@_step_backward_op.register_fake
def _(g_x, g_h, g_z, X, y, post, M, fn, scale, base, norm, out, z, gram, rms_eps, hyper_eps):
    sums = z.new_empty(X.shape[2] + 8)
    return *(a.new_empty(a.shape) for a in (X, y, post, M, fn)), sums


def _step_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], output[0], *output[2:])
    ctx.eps = inputs[8:]


def _step_gradient(ctx, g_x, g_h, g_z, g_gram):
    X, fn = ctx.saved_tensors[0], ctx.saved_tensors[4]
    *made, sums = torch.ops.tiny.step_backward(g_x, g_h, g_z, *ctx.saved_tensors, *ctx.eps)
    if not len(fn):
        return (*made[:4], *(None,) * 6)
    d_norm, d_base, d_scale, _ = sums.split((X.shape[2], 4, 1, 3))
    return (*made, d_scale, d_base, d_norm, None, None)


_step_op.register_autograd(_step_gradient, setup_context=_step_setup)


def step(
    X: Tensor, y: Tensor, post: Tensor, M: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    norm: Tensor, rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """X' [B, T, 4, D] in the type of X; h [B, T, D] and z [B, T, 24] in f32, of X' as rounded.

    X [B, T, 4, D] bf16 or f32, the type in which fn is multiplied too; y [B, T, D] of any type; in
    f32: post [B, T, 4]; M [B, T, 4, 4], [source, destination]; fn [24, 4 D]; scale [1] and base
    [4] of the gates that read; norm [D]."""
    if not ready(X):
        return _step_reference(X, y, post, M, fn, scale, base, norm, rms_eps, hyper_eps)
    flat = (a.flatten(0, 1) for a in (X, y, post, M))
    made = torch.ops.tiny.step(*flat, fn, scale, base, norm, rms_eps, hyper_eps)
    out, h, z = (a.unflatten(0, X.shape[:2]) for a in made[:3])
    return out, h, z


def end(X: Tensor, y: Tensor, post: Tensor, M: Tensor) -> Tensor:
    """X' alone, behind the last layer."""
    if not ready(X):
        return _end_reference(X, y, post, M)
    flat = (a.flatten(0, 1) for a in (X, y, post, M))
    none = post.new_empty(0)
    return torch.ops.tiny.step(*flat, none, none, none, none, 0.0, 0.0)[0].view(X.shape)
