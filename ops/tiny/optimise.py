"""The optimisers of ds4-tiny: Muon for matrices, Adam for the rest, on gradients in one buffer.

Everything stays on the device and reads the learning rate from there, so that a step can be
captured in a graph. Owns rates, clipping and what happens to a step that is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ops.tiny.model import Tiny

ADAM_RATES = {  # by the end of the tensor's name, the first that fits
    "token_embd.weight": 4e-3, "output.weight": 2e-3, "fn.weight": 1e-3,
    "ffn_gate_inp.weight": 2e-3, "ape.weight": 3e-3, "": 3e-3,
}  # fmt: skip
MUON_RATE, MUON_DECAY, MOMENTUM = 0.02, 0.02, 0.95
BETAS, EPS = (0.9, 0.98), 1e-10
CLIP = 1.0


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """About U V^T of every matrix [n, rows <= columns]: five Newton-Schulz steps in bf16, with the
    usual quintic coefficients (Muon)."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x


class Optimiser:
    """Gradients as views of `flat` [n + extra] f32, and one step on them. `extra` more numbers at
    its end travel with the gradients from device to device."""

    def __init__(self, model: Tiny, extra: int = 0) -> None:
        named = [(n, model.tensor(n)) for n in model.names() if model.tensor(n).requires_grad]
        self.params = [p for _, p in named]
        device = self.params[0].device
        sizes = [p.numel() for p in self.params]
        self.flat = torch.zeros(sum(sizes) + extra, device=device)
        parts = self.flat.split([*sizes, extra])
        self.grads = [g.view(p.shape) for g, p in zip(parts, self.params, strict=False)]
        self.extra = parts[-1]
        self.body = self.flat[: sum(sizes)]
        self.rate = torch.zeros((), device=device)  # share of the full rates
        self.broken = torch.zeros((), device=device)  # steps that were not finite
        self.norm = torch.zeros((), device=device)
        self.muon: dict[tuple[int, ...], list[int]] = {}
        self.adam: list[tuple[int, float]] = []
        for i, (name, p) in enumerate(named):
            end = next(e for e in ADAM_RATES if name.endswith(e))
            if p.dim() > 1 and end == "":
                self.muon.setdefault(tuple(p.shape[-2:]), []).append(i)
            else:
                self.adam.append((i, ADAM_RATES[end]))
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(self.params[i]) for i, _ in self.adam]
        self.steps = torch.zeros((), device=device)

    @torch.no_grad()
    def take(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Gradients as autograd gave them, into the buffer."""
        have = [(g, to) for g, to in zip(grads, self.grads, strict=True) if g is not None]
        torch._foreach_copy_([to for _, to in have], [g for g, _ in have])

    @torch.no_grad()
    def step(self) -> None:
        """One step. A gradient that is not finite changes nothing but is counted."""
        norm = self.body.norm()
        finite = torch.isfinite(norm)
        self.broken += (~finite).float()
        self.norm.copy_(norm)
        self.body.nan_to_num_(0.0, 0.0, 0.0)
        self.body.mul_(torch.where(finite, (CLIP / (norm + 1e-6)).clamp(max=1.0), 0.0))
        self._muon()
        self._adam()

    def _muon(self) -> None:
        for (rows, columns), at in self.muon.items():
            params, grads = [self.params[i] for i in at], [self.grads[i] for i in at]
            momenta = [self.first[i] for i in at]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(grads, momenta, MOMENTUM)
            stacked = torch.cat([a.reshape(-1, rows, columns) for a in ahead])
            tall = rows > columns
            made = orthogonal(stacked.mT if tall else stacked)
            made = (made.mT if tall else made).float() * max(1.0, rows / columns) ** 0.5
            made = made * (self.rate * -MUON_RATE)
            sizes = [p.numel() // (rows * columns) for p in params]
            steps = [s.view(p.shape) for s, p in zip(made.split(sizes), params, strict=True)]
            torch._foreach_mul_(params, 1 - self.rate * (MUON_RATE * MUON_DECAY))
            torch._foreach_add_(params, steps)

    def _adam(self) -> None:
        self.steps += 1
        at = [i for i, _ in self.adam]
        grads = [self.grads[i] for i in at]
        first = [self.first[i] for i in at]
        torch._foreach_lerp_(first, grads, 1 - BETAS[0])
        torch._foreach_mul_(self.second, BETAS[1])
        torch._foreach_addcmul_(self.second, grads, grads, 1 - BETAS[1])
        scale = torch.sqrt(1 - BETAS[1] ** self.steps) / (1 - BETAS[0] ** self.steps)
        divisors = torch._foreach_sqrt(self.second)
        torch._foreach_add_(divisors, EPS)
        steps = torch._foreach_div(first, divisors)
        torch._foreach_mul_(steps, [-rate for _, rate in self.adam])
        torch._foreach_mul_(steps, scale * self.rate)
        torch._foreach_add_([self.params[i] for i in at], steps)
