"""Sinkhorn's mixing matrix with its exact gradient, as one operation (spec/model.md 4.3).

    M = softmax_k(C) + eps;  columns;  then (n - 1) times rows, columns:  M = M / (sum + eps)

Left to autograd, 39 normalisations of 4 x 4 matrices would be some two hundred launches a sublayer
and as many saved copies. Here the forward keeps M and its 39 x 4 divisors, and the backward walks
the divisions back: with y = x / s,  dx = (dy - sum(dy y)) / s  and  x = y s.
One Triton program takes 128 tokens; without a GPU the same steps run in torch.
"""

from __future__ import annotations

import os

import torch

EPS = 1e-6

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

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


_USE_TRITON = triton is not None and not os.environ.get("TINY_NO_TRITON")


def _ready(x: torch.Tensor) -> bool:
    return _USE_TRITON and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@torch.library.custom_op("tiny::sinkhorn", mutates_args=())
def _sinkhorn(comb: torch.Tensor, n_iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """M [n, 4, 4] f32 and its divisors [n, 2 n_iterations - 1, 4] of logits `comb` [n, 4, 4]."""
    comb = comb.contiguous()
    n = comb.shape[0]
    divisors = torch.empty(n, 2 * n_iterations - 1, 4, device=comb.device)
    if _ready(comb):
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
def _sinkhorn_backward(
    grad: torch.Tensor, m: torch.Tensor, divisors: torch.Tensor, n_iterations: int
) -> torch.Tensor:
    grad = grad.contiguous()
    n = m.shape[0]
    if _ready(m):
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


def sinkhorn(comb: torch.Tensor, n_iterations: int) -> torch.Tensor:
    """M [n, 4, 4] of the logits `comb` [n, 4, 4] f32, [source, destination]."""
    return torch.ops.tiny.sinkhorn(comb, n_iterations)[0]
