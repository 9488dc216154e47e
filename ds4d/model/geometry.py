"""The model as numbers. Flash, Pro, ds4-tiny and the random test models are values of `Geometry`.

Nothing here knows files: `gguf.open_model` builds one from metadata, `synth.geometry` from a name.
Symbols in brackets are those of spec/model.md 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

E4M3_BLOCK = 64
FP4_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes and constants of one model. Lengths are counts of elements unless a unit is named.

    A constructed value is not yet checked: `check()` says what does not fit together.
    """

    name: str = ""
    n_layers: int  # [L]
    width: int  # [D]
    n_vocab: int  # [V]
    n_heads: int  # [H]
    head_dim: int  # [d], the trailing rope_dim of it rotated
    rope_dim: int
    q_rank: int
    out_groups: int  # [G]
    out_rank: int  # per group
    window: int  # raw rows visible to a token, itself included
    ratios: tuple[int, ...]  # per layer: 0, 4 or 128
    n_experts: int  # [E]
    n_experts_used: int  # [k]
    n_shared_experts: int
    expert_width: int  # [I], routed and shared
    n_hash_layers: int  # the first layers route by token id
    expert_scale: float
    expert_clamp: tuple[float, ...]  # per layer
    shared_clamp: tuple[float, ...]  # per layer
    index_heads: int
    index_dim: int
    index_top_k: int
    streams: int  # hyper-connection residual streams [n]
    sinkhorn_iterations: int
    hyper_eps: float
    rms_eps: float
    rope_theta: float  # sliding layers
    rope_theta_compressed: float  # ratio-4 and ratio-128 layers
    yarn_factor: float
    yarn_original_context: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    context: int  # positions that the model was made for

    @property
    def nope_dim(self) -> int:
        """Leading, unrotated channels of a head."""
        return self.head_dim - self.rope_dim

    @property
    def mix_dim(self) -> int:
        """Rows of a hyper-connection function: pre, post and the square mixing matrix."""
        return 2 * self.streams + self.streams * self.streams

    @property
    def rows_are_e4m3(self) -> bool:
        """Whether raw and compressed rows follow spec/model.md 4.11a (else F16)."""
        return self.nope_dim > 0 and self.nope_dim % E4M3_BLOCK == 0

    @property
    def index_rows_are_fp4(self) -> bool:
        """Whether indexer rows follow spec/model.md 4.11b (else F16)."""
        dim = self.index_dim
        return dim % FP4_BLOCK == 0 and dim & (dim - 1) == 0

    @property
    def page_tokens(self) -> int:
        """Positions in a page: 2,048 for long contexts, 256 for small models (spec/engine.md 2)."""
        return 2048 if self.context >= 65536 else 256

    @property
    def pages_per_segment(self) -> int:
        return 8 if self.context >= 65536 else 2

    @cached_property
    def frequencies(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Angle per position of each pair: (sliding, compressed layers); spec/model.md 4.5."""
        pairs = self.rope_dim // 2
        plain = tuple(self.rope_theta ** (-i / pairs) for i in range(pairs))

        def correction(beta: float) -> float:
            turns = self.yarn_original_context / (2 * math.pi * beta)
            return self.rope_dim * math.log(turns) / (2 * math.log(self.rope_theta_compressed))

        low = max(math.floor(correction(self.yarn_beta_fast)), 0)
        high = min(math.ceil(correction(self.yarn_beta_slow)), self.rope_dim - 1)
        span = max(high - low, 0.001)
        yarn = []
        for i in range(pairs):
            g = self.rope_theta_compressed ** (-i / pairs)
            t = min(max((i - low) / span, 0.0), 1.0)
            yarn.append(g * (1 - t) + g / self.yarn_factor * t)
        return plain, tuple(yarn)

    def compressor_width(self, layer: int, dim: int | None = None) -> int:
        """Columns of a compressor's projections: two series for ratio 4, one for ratio 128."""
        dim = self.head_dim if dim is None else dim
        return 2 * dim if self.ratios[layer] == 4 else dim

    def hashed(self, layer: int) -> bool:
        """Whether `layer` routes by a table of token ids instead of scores."""
        return layer < self.n_hash_layers

    def check(self) -> str | None:
        """None if the sizes fit together, else one sentence that names the offending sizes."""
        positive = (
            "n_layers width n_vocab n_heads head_dim rope_dim q_rank out_groups out_rank window "
            "n_experts n_experts_used expert_width streams sinkhorn_iterations "
            "yarn_original_context context"
        ).split()
        for field in positive:
            if getattr(self, field) < 1:
                return f"{field} is {getattr(self, field)}, expected at least 1"
        for field in ("ratios", "expert_clamp", "shared_clamp"):
            if len(getattr(self, field)) != self.n_layers:
                return f"{field} has {len(getattr(self, field))} entries, expected {self.n_layers}"
        for layer, ratio in enumerate(self.ratios):
            if ratio not in (0, 4, 128):
                return f"ratio of layer {layer} is {ratio}, expected 0, 4 or 128"
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            return f"rope_dim {self.rope_dim} is odd or above head_dim {self.head_dim}"
        if self.n_heads % self.out_groups:
            return f"{self.n_heads} heads do not divide into {self.out_groups} output groups"
        if self.n_experts_used > self.n_experts:
            return f"{self.n_experts_used} experts used of {self.n_experts}"
        if self.n_shared_experts != 1:
            return f"{self.n_shared_experts} shared experts, expected 1"
        if not 0 <= self.n_hash_layers <= self.n_layers:
            return f"{self.n_hash_layers} hash layers of {self.n_layers}"
        if 4 in self.ratios:
            if min(self.index_heads, self.index_dim, self.index_top_k) < 1:
                return "a ratio-4 layer needs indexer heads, width and top_k of at least 1"
            if self.index_dim < self.rope_dim:
                return f"indexer width {self.index_dim} is below rope_dim {self.rope_dim}"
        for field in ("expert_scale", "hyper_eps", "rms_eps", "yarn_factor", "yarn_beta_slow"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                return f"{field} is {value}, expected a positive number"
        for field in ("rope_theta", "rope_theta_compressed"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 1):
                return f"{field} is {value}, expected a number above 1"
        fast, slow = self.yarn_beta_fast, self.yarn_beta_slow
        if not (math.isfinite(fast) and fast >= slow):
            return f"yarn_beta_fast is {fast}, expected at least yarn_beta_slow {slow}"
        for field in ("expert_clamp", "shared_clamp"):
            for layer, value in enumerate(getattr(self, field)):
                if not (math.isfinite(value) and value > 0):
                    return f"{field} of layer {layer} is {value}, expected a positive number"
        return None
