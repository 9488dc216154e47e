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

A token's streams are 4 kB, by far the largest thing in the model: one kernel reads X and y and
writes X' and h, one reads X, y and the two gradients and writes the two others. Both keep a token's
streams in registers and compute X' again rather than read it. `end` is the first line alone, behind
the last layer.

Without a GPU the same steps run in torch.
"""

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
    y = y.float()
    return torch.stack([post[..., k, None] * y + mix(X, M[..., k]) for k in range(X.shape[-2])], -2)


def _step_reference(
    X: Tensor, y: Tensor, post: Tensor, M: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    norm: Tensor, rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    X = _end_reference(X, y, post, M)
    flat = X.flatten(-2)
    z = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    x = mix(X, torch.sigmoid(z[..., : X.shape[-2]] * scale + base) + hyper_eps)
    return X, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps) * norm, z


if triton is not None:

    @triton.jit
    def _stream(X, t, inside, k: tl.constexpr, D: tl.constexpr):
        at = t[:, None] * (4 * D) + k * D + tl.arange(0, D)[None, :]
        return tl.load(X + at, mask=inside[:, None], other=0.0)

    @triton.jit
    def _each(X, t, inside, k: tl.constexpr, STRIDE: tl.constexpr):
        """Number k of every token, as a column."""
        return tl.load(X + t * STRIDE + k, mask=inside, other=0.0)[:, None]

    @triton.jit
    def _entered(POST, M, t, inside, y, a0, a1, a2, a3, k: tl.constexpr):
        x = _each(POST, t, inside, k, 4) * y
        x += _each(M, t, inside, k, 16) * a0 + _each(M, t, inside, 4 + k, 16) * a1
        return x + _each(M, t, inside, 8 + k, 16) * a2 + _each(M, t, inside, 12 + k, 16) * a3

    @triton.jit
    def _rsqrt_mean(a, n: tl.constexpr, eps: tl.constexpr):
        return 1.0 / tl.sqrt(a / n + eps)

    @triton.jit
    def _column(z, f, k: tl.constexpr):
        return tl.sum(tl.where((f == k)[None, :], z, 0.0), 1)[:, None]

    @triton.jit
    def _gate(z, SCALE, BASE, k: tl.constexpr):
        return tl.sigmoid(z * tl.load(SCALE) + tl.load(BASE + k))

    @triton.jit
    def _fn(FN, f, k: tl.constexpr, D: tl.constexpr, NZ: tl.constexpr):
        """The part of fn for stream k, [F, D]."""
        at = f[:, None] * (4 * D) + k * D + tl.arange(0, D)[None, :]
        return tl.load(FN + at, mask=(f < NZ)[:, None], other=0.0)

    @triton.jit
    def _step_forward(
        X, Y, POST, M, FN, SCALE, BASE, NORM, X_OUT, H, Z, n,
        rms_eps: tl.constexpr, hyper_eps: tl.constexpr, D: tl.constexpr, NZ: tl.constexpr,
        NEXT: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """N tokens a program; without NEXT only X_OUT is computed."""
        t = tl.program_id(0) * N + tl.arange(0, N)
        inside, c = t < n, tl.arange(0, D)
        y_at = t[:, None] * D + c[None, :]
        y = tl.load(Y + y_at, mask=inside[:, None], other=0.0).to(tl.float32)
        a0, a1 = _stream(X, t, inside, 0, D), _stream(X, t, inside, 1, D)
        a2, a3 = _stream(X, t, inside, 2, D), _stream(X, t, inside, 3, D)
        x0 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 0)
        x1 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 1)
        x2 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 2)
        x3 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 3)
        out = X_OUT + t[:, None] * (4 * D) + c[None, :]
        tl.store(out, x0, mask=inside[:, None])
        tl.store(out + D, x1, mask=inside[:, None])
        tl.store(out + 2 * D, x2, mask=inside[:, None])
        tl.store(out + 3 * D, x3, mask=inside[:, None])
        if NEXT:
            # Whole streams would not fit the registers as operands: they are read back in parts.
            tl.debug_barrier()
            f = tl.arange(0, 32)
            z = tl.zeros([N, 32], tl.float32)
            for i in range(0, 4 * D, K):
                part = i + tl.arange(0, K)
                x = tl.load(X_OUT + t[:, None] * (4 * D) + part[None, :],
                            mask=inside[:, None], other=0.0)  # fmt: skip
                w = tl.load(FN + f[None, :] * (4 * D) + part[:, None],
                            mask=(f < NZ)[None, :], other=0.0)  # fmt: skip
                z = tl.dot(x, w, z)
            r = _rsqrt_mean(tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 1), 4 * D, rms_eps)
            z = z * r[:, None]
            tl.store(Z + t[:, None] * NZ + f[None, :], z, mask=inside[:, None] & (f < NZ)[None, :])
            x = (_gate(_column(z, f, 0), SCALE, BASE, 0) + hyper_eps) * x0
            x += (_gate(_column(z, f, 1), SCALE, BASE, 1) + hyper_eps) * x1
            x += (_gate(_column(z, f, 2), SCALE, BASE, 2) + hyper_eps) * x2
            x += (_gate(_column(z, f, 3), SCALE, BASE, 3) + hyper_eps) * x3
            x = x * _rsqrt_mean(tl.sum(x * x, 1), D, rms_eps)[:, None]
            h = x * tl.load(NORM + c)[None, :]
            tl.store(H + y_at, h, mask=inside[:, None])

    @triton.jit
    def _put(a, value, at, k: tl.constexpr):
        """a with the column `value` in place k."""
        return tl.where((at == k)[None, :], value[:, None], a)

    @triton.jit
    def _step_backward(
        G_X, G_H, G_Z, X, Y, POST, M, FN, SCALE, BASE, NORM, Z,
        D_X, D_Y, D_POST, D_M, D_GATE, D_Z, D_NORM, n,
        rms_eps: tl.constexpr, hyper_eps: tl.constexpr, D: tl.constexpr, NZ: tl.constexpr,
        NEXT: tl.constexpr, N: tl.constexpr,
    ):  # fmt: skip
        """D_GATE: of the arguments of the sigmoids; D_Z: of fn X', which is z before its norm;
        D_NORM: summed over the program's tokens."""
        t = tl.program_id(0) * N + tl.arange(0, N)
        inside, c = t < n, tl.arange(0, D)
        y_at = t[:, None] * D + c[None, :]
        g0, g1 = _stream(G_X, t, inside, 0, D), _stream(G_X, t, inside, 1, D)
        g2, g3 = _stream(G_X, t, inside, 2, D), _stream(G_X, t, inside, 3, D)
        if NEXT:
            y = tl.load(Y + y_at, mask=inside[:, None], other=0.0).to(tl.float32)
            a0, a1 = _stream(X, t, inside, 0, D), _stream(X, t, inside, 1, D)
            a2, a3 = _stream(X, t, inside, 2, D), _stream(X, t, inside, 3, D)
            x0 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 0)
            x1 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 1)
            x2 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 2)
            x3 = _entered(POST, M, t, inside, y, a0, a1, a2, a3, 3)
            s0 = _gate(_each(Z, t, inside, 0, NZ), SCALE, BASE, 0)
            s1 = _gate(_each(Z, t, inside, 1, NZ), SCALE, BASE, 1)
            s2 = _gate(_each(Z, t, inside, 2, NZ), SCALE, BASE, 2)
            s3 = _gate(_each(Z, t, inside, 3, NZ), SCALE, BASE, 3)
            x = (s0 + hyper_eps) * x0 + (s1 + hyper_eps) * x1
            x += (s2 + hyper_eps) * x2 + (s3 + hyper_eps) * x3
            r = _rsqrt_mean(tl.sum(x * x, 1), D, rms_eps)[:, None]
            gh = tl.load(G_H + y_at, mask=inside[:, None], other=0.0)
            tl.store(D_NORM + tl.program_id(0) * D + c, tl.sum(gh * x * r, 0))
            u = gh * tl.load(NORM + c)[None, :]
            dx = r * u - x * (r * r * r * (tl.sum(u * x, 1)[:, None] / D))
            scale = tl.load(SCALE)
            q, f = tl.arange(0, 4), tl.arange(0, 32)
            gate = tl.zeros([N, 4], tl.float32)
            gate = _put(gate, tl.sum(dx * x0 * (s0 * (1 - s0)), 1), q, 0)
            gate = _put(gate, tl.sum(dx * x1 * (s1 * (1 - s1)), 1), q, 1)
            gate = _put(gate, tl.sum(dx * x2 * (s2 * (1 - s2)), 1), q, 2)
            gate = _put(gate, tl.sum(dx * x3 * (s3 * (1 - s3)), 1), q, 3)
            tl.store(D_GATE + t[:, None] * 4 + q[None, :], gate, mask=inside[:, None])
            z_at = t[:, None] * NZ + f[None, :]
            z_in = inside[:, None] & (f < NZ)[None, :]
            dz = tl.load(G_Z + z_at, mask=z_in, other=0.0)
            dz += tl.where((f == 0)[None, :], _column(gate, q, 0) * scale, 0.0)
            dz += tl.where((f == 1)[None, :], _column(gate, q, 1) * scale, 0.0)
            dz += tl.where((f == 2)[None, :], _column(gate, q, 2) * scale, 0.0)
            dz += tl.where((f == 3)[None, :], _column(gate, q, 3) * scale, 0.0)
            along = tl.sum(dz * tl.load(Z + z_at, mask=z_in, other=0.0), 1)[:, None]
            r = _rsqrt_mean(tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 1), 4 * D, rms_eps)
            r = r[:, None]
            along = along * r * r / (4 * D)
            dz = dz * r
            tl.store(D_Z + z_at, dz, mask=z_in)
            g0 += (s0 + hyper_eps) * dx - along * x0 + tl.dot(dz, _fn(FN, f, 0, D, NZ))
            g1 += (s1 + hyper_eps) * dx - along * x1 + tl.dot(dz, _fn(FN, f, 1, D, NZ))
            g2 += (s2 + hyper_eps) * dx - along * x2 + tl.dot(dz, _fn(FN, f, 2, D, NZ))
            g3 += (s3 + hyper_eps) * dx - along * x3 + tl.dot(dz, _fn(FN, f, 3, D, NZ))
        dy = _each(POST, t, inside, 0, 4) * g0 + _each(POST, t, inside, 1, 4) * g1
        dy += _each(POST, t, inside, 2, 4) * g2 + _each(POST, t, inside, 3, 4) * g3
        tl.store(D_Y + y_at, dy.to(D_Y.dtype.element_ty), mask=inside[:, None])
        y = tl.load(Y + y_at, mask=inside[:, None], other=0.0).to(tl.float32)
        q, i = tl.arange(0, 4), tl.arange(0, 16)
        post = tl.zeros([N, 4], tl.float32)
        post = _put(post, tl.sum(y * g0, 1), q, 0)
        post = _put(post, tl.sum(y * g1, 1), q, 1)
        post = _put(post, tl.sum(y * g2, 1), q, 2)
        post = _put(post, tl.sum(y * g3, 1), q, 3)
        tl.store(D_POST + t[:, None] * 4 + q[None, :], post, mask=inside[:, None])
        matrix = tl.zeros([N, 16], tl.float32)
        for j in tl.static_range(4):
            a = _stream(X, t, inside, j, D)  # again: cheaper than the registers to keep it
            matrix = _put(matrix, tl.sum(a * g0, 1), i, 4 * j)
            matrix = _put(matrix, tl.sum(a * g1, 1), i, 4 * j + 1)
            matrix = _put(matrix, tl.sum(a * g2, 1), i, 4 * j + 2)
            matrix = _put(matrix, tl.sum(a * g3, 1), i, 4 * j + 3)
            d = _each(M, t, inside, 4 * j, 16) * g0 + _each(M, t, inside, 4 * j + 1, 16) * g1
            d += _each(M, t, inside, 4 * j + 2, 16) * g2 + _each(M, t, inside, 4 * j + 3, 16) * g3
            tl.store(D_X + t[:, None] * (4 * D) + j * D + c[None, :], d, mask=inside[:, None])
        tl.store(D_M + t[:, None] * 16 + i[None, :], matrix, mask=inside[:, None])


# Tokens and warps of a program, as `python -m ops.tiny.probe` found best; 16 is the fewest tokens.
TILES = {"forward": (16, 8), "backward": (16, 8)}
CHANNELS = 64  # read back at once for the product with fn
SPLIT = 64  # parts into which the tokens are cut for the gradient of fn


@torch.library.custom_op("tiny::step", mutates_args=())
def _step_op(
    X: Tensor, y: Tensor, post: Tensor, M: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    norm: Tensor, rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """X' [n, 4, D], h [n, D], z [n, 24]; with an empty fn only X'."""
    X, y, post, M = (a.contiguous() for a in (X, y, post, M))
    n, _, d = X.shape
    out, h = torch.empty_like(X), X.new_empty(n if len(fn) else 0, d)
    z = X.new_empty(len(h), len(fn))
    tokens, warps = TILES["forward"]
    _step_forward[(triton.cdiv(n, tokens),)](
        X, y, post, M, fn, scale, base, norm, out, h, z, n, rms_eps, hyper_eps, d, len(fn),
        len(fn) > 0, tokens, CHANNELS, num_warps=warps,
    )  # fmt: skip
    return out, h, z


@torch.library.custom_op("tiny::step_backward", mutates_args=())
def _step_backward_op(
    g_x: Tensor, g_h: Tensor, g_z: Tensor, X: Tensor, y: Tensor, post: Tensor, M: Tensor,
    fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, out: Tensor, z: Tensor,
    rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    g_x, g_h, g_z, X, y, post, M = (a.contiguous() for a in (g_x, g_h, g_z, X, y, post, M))
    n, _, d = X.shape
    dX, dy, d_post, dM = (torch.empty_like(a) for a in (X, y, post, M))
    tokens, warps = TILES["backward"]
    parts = triton.cdiv(n, tokens)
    gate, dz = X.new_empty(len(z), 4), torch.empty_like(z)
    d_norm = X.new_empty(parts if len(fn) else 0, d)
    _step_backward[(parts,)](
        g_x, g_h, g_z, X, y, post, M, fn, scale, base, norm, z, dX, dy, d_post, dM, gate, dz,
        d_norm, n, rms_eps, hyper_eps, d, len(fn), len(fn) > 0, tokens, num_warps=warps,
    )  # fmt: skip
    if not len(fn):
        return dX, dy, d_post, dM, *(torch.empty_like(a) for a in (fn, scale, base, norm))
    # Few outputs, many tokens: as one product it would keep only a few processors busy.
    k = SPLIT if n % SPLIT == 0 else 1
    d_fn = torch.bmm(dz.view(k, n // k, -1).mT, out.view(k, n // k, -1)).sum(0)
    d_scale = (gate * z[:, :4]).sum().view(scale.shape)
    return dX, dy, d_post, dM, d_fn, d_scale, gate.sum(0), d_norm.sum(0)


@_step_op.register_fake
def _(X, y, post, M, fn, scale, base, norm, rms_eps, hyper_eps):
    n, f = X.shape[0] if len(fn) else 0, len(fn)
    return X.new_empty(X.shape), X.new_empty(n, X.shape[2]), X.new_empty(n, f)


@_step_backward_op.register_fake
def _(g_x, g_h, g_z, X, y, post, M, fn, scale, base, norm, out, z, rms_eps, hyper_eps):
    return tuple(a.new_empty(a.shape) for a in (X, y, post, M, fn, scale, base, norm))


def _step_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], output[0], output[2])
    ctx.eps = inputs[8:]


def _step_gradient(ctx, g_x, g_h, g_z):
    made = torch.ops.tiny.step_backward(g_x, g_h, g_z, *ctx.saved_tensors, *ctx.eps)
    return (*made, None, None)


_step_op.register_autograd(_step_gradient, setup_context=_step_setup)


def step(
    X: Tensor, y: Tensor, post: Tensor, M: Tensor, fn: Tensor, scale: Tensor, base: Tensor,
    norm: Tensor, rms_eps: float, hyper_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """X' [B, T, 4, D], h [B, T, D] and z [B, T, 24], all f32.

    X [B, T, 4, D] f32; y [B, T, D] of any type; post [B, T, 4]; M [B, T, 4, 4], [source,
    destination]; fn [24, 4 D]; scale [1] and base [4] of the gates that read; norm [D]."""
    if not ready(X):
        return _step_reference(X, y, post, M, fn, scale, base, norm, rms_eps, hyper_eps)
    flat = (a.flatten(0, 1) for a in (X, y, post, M))
    made = torch.ops.tiny.step(*flat, fn, scale, base, norm, rms_eps, hyper_eps)
    out, h, z = (a.unflatten(0, X.shape[:2]) for a in made)
    return out, h, z


def end(X: Tensor, y: Tensor, post: Tensor, M: Tensor) -> Tensor:
    """X' alone, behind the last layer."""
    if not ready(X):
        return _end_reference(X, y, post, M)
    flat = (a.flatten(0, 1) for a in (X, y, post, M))
    none = X.new_empty(0)
    return torch.ops.tiny.step(*flat, none, none, none, none, 0.0, 0.0)[0].view(X.shape)
