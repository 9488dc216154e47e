"""Block formats: how a tensor's bytes become numbers (spec/model.md 3), in readable NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Quant(IntEnum):
    """ggml type ids that this program reads."""

    F32 = 0
    F16 = 1
    Q8_0 = 8
    Q2_K = 10
    Q4_K = 12
    IQ2_XXS = 16
    I32 = 26
    BF16 = 30
    MXFP4 = 39

    @property
    def block(self) -> int:
        """Elements in a block."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def activation_block(self) -> int:
        """Elements per int8 activation block of a product with this type; 0: activations stay f32
        (spec/numerics.md 1)."""
        return _ACTIVATION_BLOCK.get(self, 0)

    def n_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of `shape` (NumPy order; the last axis is a multiple of `block`)."""
        elements = 1
        for n in shape:
            elements *= n
        return elements // self.block * self.block_bytes


_BLOCKS = {
    Quant.F32: (1, 4),
    Quant.F16: (1, 2),
    Quant.Q8_0: (32, 34),
    Quant.Q2_K: (256, 84),
    Quant.Q4_K: (256, 144),
    Quant.IQ2_XXS: (256, 66),
    Quant.I32: (1, 4),
    Quant.BF16: (1, 2),
    Quant.MXFP4: (32, 17),
}
_ACTIVATION_BLOCK = {
    Quant.Q8_0: 32,
    Quant.MXFP4: 32,
    Quant.IQ2_XXS: 256,
    Quant.Q2_K: 256,
    Quant.Q4_K: 256,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor as its raw bytes. `shape` is NumPy order (the reverse of GGUF's `ne`)."""

    name: str
    quant: Quant
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # [quant.n_bytes(shape)], contiguous
