"""The middle of the experts, between their two products, with its exact gradient.

    mid[e, c] = w[e] silu(min(a[e, c], clamp)) clip(b[e, c], -clamp, clamp)

of a token's gate a and up b [E, C] and weights w [E], then rounded to int8 blocks of 32 channels
(spec/numerics.md 1), through which the gradient goes straight. As in torch, it goes through a clamp
inside and at the bounds.

Memory is what it waits for, so both ways read everything once. A program takes some tokens of one
expert. The backward makes the middle again, writes both gradients into the one array that the
product's own gradient needs, and has the gradient of w on the way, a sum over channels.

Without a GPU the same steps run in torch.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ops.tiny.sinkhorn import ready

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

Q8 = 32  # channels of an int8 block


def _reference(ab: Tensor, w: Tensor, clamp: float, rounded: bool) -> Tensor:
    a, b = ab.float().chunk(2, -1)
    mid = F.silu(a.clamp(max=clamp)) * b.clamp(-clamp, clamp)
    mid = (mid.unflatten(-1, (w.shape[-1], -1)) * w[..., None]).flatten(-2)
    if rounded:
        x = mid.detach().unflatten(-1, (-1, Q8))
        d = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-20)
        mid = mid + ((torch.round(x / d) * d).flatten(-2) - mid).detach()
    return mid.to(ab.dtype)


if triton is not None:
    NAN = tl.constexpr(tl.PropagateNan.ALL)  # stays one, as in torch's clamp

    @triton.jit
    def _forward(
        AB, W, MID, n, clamp: tl.constexpr, E: tl.constexpr, C: tl.constexpr, ROUNDED: tl.constexpr,
        N: tl.constexpr, Q: tl.constexpr,
    ):  # fmt: skip
        """N tokens of one expert, its channels in blocks of Q."""
        e, t = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
        inside = (t < n)[:, None, None]
        c = (tl.arange(0, C // Q) * Q)[None, :, None] + tl.arange(0, Q)[None, None, :]
        at = AB + (t * (2 * E * C))[:, None, None] + e * C + c
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at + E * C, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(W + t * E + e, mask=t < n, other=0.0)[:, None, None]
        a = tl.minimum(a, clamp, propagate_nan=NAN)
        mid = a * tl.sigmoid(a) * tl.clamp(b, -clamp, clamp, propagate_nan=NAN) * w
        if ROUNDED:
            d = tl.maximum(tl.max(tl.abs(mid), 2) / 127, 1e-20)[:, :, None]
            # Nothing is left behind the point of 1.5 * 2^23 and a bit: that rounds, ties to even.
            mid = ((mid / d + 12582912.0) - 12582912.0) * d
        at = MID + (t * (E * C))[:, None, None] + e * C + c
        tl.store(at, mid.to(MID.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward(
        G, AB, W, D_AB, D_W, n, clamp: tl.constexpr, E: tl.constexpr, C: tl.constexpr,
        N: tl.constexpr,
    ):  # fmt: skip
        """N tokens of one expert; G: of the middle."""
        e, t = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
        inside, c = (t < n)[:, None], e * C + tl.arange(0, C)[None, :]
        a_at = (t * (2 * E * C))[:, None] + c
        a = tl.load(AB + a_at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(AB + a_at + E * C, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(G + (t * (E * C))[:, None] + c, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(W + t * E + e, mask=t < n, other=0.0)[:, None]
        x = tl.minimum(a, clamp, propagate_nan=NAN)
        y = tl.clamp(b, -clamp, clamp, propagate_nan=NAN)
        s = tl.sigmoid(x)
        silu = x * s
        dw = tl.sum(g * silu * y, 1)
        g = g * w
        da = tl.where(a > clamp, 0.0, g * y * (s + silu * (1 - s)))
        db = tl.where(tl.abs(b) > clamp, 0.0, g * silu)
        tl.store(D_AB + a_at, da.to(D_AB.dtype.element_ty), mask=inside)
        tl.store(D_AB + a_at + E * C, db.to(D_AB.dtype.element_ty), mask=inside)
        tl.store(D_W + t * E + e, dw, mask=t < n)


# Tokens and warps of a program, 8 channels a thread; `python -m ops.tiny.probe` times others.
TILES = {"forward": (8, 4), "backward": (8, 4)}


@torch.library.custom_op("tiny::middle", mutates_args=())
def _middle(ab: Tensor, w: Tensor, clamp: float, rounded: bool) -> Tensor:
    """mid [n, E C] in the type of ab [n, 2 E C]; w [n, E] f32."""
    ab, w = ab.contiguous(), w.contiguous()
    n, n_experts = w.shape
    inner = ab.shape[1] // (2 * n_experts)
    mid = ab.new_empty(n, n_experts * inner)
    tokens, warps = TILES["forward"]
    grid = n_experts, triton.cdiv(n, tokens)
    _forward[grid](ab, w, mid, n, clamp, n_experts, inner, rounded, tokens, Q8, num_warps=warps)
    return mid


@torch.library.custom_op("tiny::middle_backward", mutates_args=())
def _middle_backward(grad: Tensor, ab: Tensor, w: Tensor, clamp: float) -> tuple[Tensor, Tensor]:
    """Of ab, in its type, and of w."""
    grad, ab, w = grad.contiguous(), ab.contiguous(), w.contiguous()
    n, n_experts = w.shape
    inner = ab.shape[1] // (2 * n_experts)
    d_ab, d_w = torch.empty_like(ab), torch.empty_like(w)
    tokens, warps = TILES["backward"]
    grid = n_experts, triton.cdiv(n, tokens)
    _backward[grid](grad, ab, w, d_ab, d_w, n, clamp, n_experts, inner, tokens, num_warps=warps)
    return d_ab, d_w


@_middle.register_fake
def _(ab, w, clamp, rounded):
    return ab.new_empty(len(ab), ab.shape[1] // 2)


@_middle_backward.register_fake
def _(grad, ab, w, clamp):
    return ab.new_empty(ab.shape), w.new_empty(w.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.clamp = inputs[2]


def _gradient(ctx, grad):
    return *torch.ops.tiny.middle_backward(grad, *ctx.saved_tensors, ctx.clamp), None, None


_middle.register_autograd(_gradient, setup_context=_setup)


def middle(ab: Tensor, w: Tensor, clamp: float, rounded: bool) -> Tensor:
    """The middle [n, E C] in the type of ab; `rounded`: to int8 blocks.

    ab [n, 2 E C] bf16 or f32: the gates of all E experts, then their ups, C channels each (a power
    of two, at least 32); w [n, E] f32."""
    if not ready(ab):
        return _reference(ab, w, clamp, rounded)
    return torch.ops.tiny.middle(ab, w, clamp, rounded)
