"""Products with quantised weights as both engines must compute them (spec/numerics.md 1).

The activation is rounded to int8 in blocks along the input, the integer part of a block is exact,
and it becomes a float once per block:

    y[o] = sum_blocks float(sum_i w_i q_i) * (d_w * d_x)

The sum over blocks runs in ascending order, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.model import quants
from ds4d.model.quants import Quant, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    F32 = npt.NDArray[np.float32]
    F64 = npt.NDArray[np.float64]

WHOLE = (0, 1)


def part_of(tensor: Tensor, part: tuple[int, int]) -> Tensor:
    """The i-th of m equal parts of `tensor` [..., in], a matrix [rows / m, in]."""
    i, m = part
    n_rows = math.prod(tensor.shape[:-1]) // m
    n_bytes = len(tensor.data) // m
    data = tensor.data[i * n_bytes : (i + 1) * n_bytes]
    return Tensor(tensor.name, tensor.quant, (n_rows, tensor.shape[-1]), data)


def quantize_activations(x: Array, block: int) -> tuple[F32, F32]:
    """`x` [..., n] to integers [..., n / block, block] (held as f32) and d [..., n / block]:
    `d = max|x| / 127`, `q = rint(x / d)`, ties to even; an all-zero block has d = 0."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    d = np.abs(blocks).max(-1) / np.float32(127)
    q = np.rint(blocks / np.where(d > 0, d, np.float32(1))[..., None])
    return q, d


def integer_terms(tensor: Tensor) -> list[tuple[F32, F64]]:
    """A weight [out, in] as a sum of one or two terms `scale * integers`, block by block: scale
    [blocks, out] f32, integers [blocks, out, block] (held as f64, which is exact)."""
    quant = tensor.quant
    raw = tensor.data.reshape(-1, quant.block_bytes)  # [out * blocks, block_bytes]
    if quant is Quant.MXFP4:  # an E8M0 byte; values are halves of its power
        scale = np.ldexp(np.float32(1), raw[:, 0].astype(np.int32) - 128)
        return [_term(tensor, raw, scale)]
    terms = []
    for at, unit in _SCALES[quant].items():
        scale = raw[:, at : at + 2].copy().view("<f2")[:, 0] * np.float32(unit)
        alone = raw.copy()  # with the other scale at zero, what is left is this one's term
        for other in _SCALES[quant].keys() - {at}:
            alone[:, other : other + 2] = 0
        terms.append(_term(tensor, alone, scale))
    return terms


_SCALES: dict[Quant, dict[int, float]] = {
    Quant.Q8_0: {0: 1},
    Quant.IQ2_XXS: {0: 1 / 8},  # d / 8 * (2 s + 1) * grid
    Quant.Q2_K: {80: 1, 82: -1},  # d * s q  -  dmin * m
    Quant.Q4_K: {0: 1, 2: -1},
}
"""Of each type, the F16 scales by their place in a block, and what of one counts as 1."""


def _term(tensor: Tensor, raw: npt.NDArray[np.uint8], scale: F32) -> tuple[F32, F64]:
    """`raw` [out * blocks, block_bytes] over `scale` [out * blocks], with axes as above."""
    out, block = tensor.shape[0], tensor.quant.activation_block
    values = quants.dequantize(replace(tensor, data=raw.reshape(-1)), np.float64)
    integers = np.rint(values.reshape(-1, block) / np.where(scale != 0, scale, 1)[:, None])
    return (
        np.ascontiguousarray(scale.reshape(out, -1).T),
        np.ascontiguousarray(integers.reshape(out, -1, block).swapaxes(0, 1)),
    )


def rounded_product(terms: list[tuple[F32, F64]], x: Array, block: int) -> Array:
    """y [n, out] in x's dtype of `x` [n, in] and a weight's `integer_terms`."""
    q, d = quantize_activations(x, block)  # [n, blocks, block], [n, blocks]
    y: Array = np.zeros((len(x), terms[0][0].shape[1]), x.dtype)
    for b in range(q.shape[1]):
        for scale, integers in terms:
            dot = q[:, b].astype(np.float64) @ integers[b].T  # exact: below 2^53
            y += dot.astype(x.dtype) * (scale[b] * d[:, b, None])
    return y


def plain_product(w: Array, x: Array) -> Array:
    """y [n, out] of `x` [n, in] and `w` [out, in]: one row at a time, so that a row's bits do not
    depend on how many there are."""
    y: Array = (x[:, None] @ w.T)[:, 0]
    return y
