"""Weights as the product tiles want them (`kernels/product.py`), made once from a model's tensors.

F32, F16 and Q8_0 are laid out anew, sixteen outputs to a tile; BF16 becomes F32; the other types
stay the file's own bytes, which are shared with it where the outputs come in whole tiles. Exact
mode turns every weight into F32. What is laid out anew is read, and refused if it holds a value
that is not finite: in an indexer or a router's bias that would choose wrongly without a trace.
Knows shapes and bytes, not what a weight is for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels.product import TILES
from ds4d.errors import ModelFileError
from ds4d.model import quants
from ds4d.model.layout import pad
from ds4d.model.quants import Quant, Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.cpu.jit import Kernel

LANES = 16


@dataclass(frozen=True, slots=True)
class Weight:
    """`groups` matrices [n_out, n_in] in tiles. `data` is any array of tile_bytes a tile."""

    tile: Kernel
    data: npt.NDArray[Any]
    tile_bytes: int
    groups: int
    n_out: int
    n_in: int
    block: int  # of the int8 activations it wants; 0: floats

    @property
    def tiles(self) -> int:
        """Of one group."""
        return -(-self.n_out // LANES)

    def words(self) -> list[int]:
        """The table that kernels read (`kernels/product.py`); the tile must have been prepared."""
        data = int(self.data.ctypes.data)
        return [self.tile.address, data, self.tile_bytes, self.n_out, self.n_in, self.groups]

    @property
    def n_bytes(self) -> int:
        return self.tiles * self.groups * self.tile_bytes


def stored_as(quant: Quant, exact: bool) -> Quant:
    return Quant.F32 if exact or quant is Quant.BF16 else quant


def packed_bytes(
    tensor: Tensor, *, groups: int = 1, columns: tuple[int, int] | None = None, exact: bool = False
) -> int:
    """What `pack` will hold in memory for `tensor`, bytes."""
    n_out, n_in = math.prod(tensor.shape[:-1]) // groups, tensor.shape[-1]
    if columns is not None:
        n_in = n_in // columns[0] * columns[1]
    return groups * pad(n_out, LANES) * stored_as(tensor.quant, exact).n_bytes((n_in,))


def pack(
    tensor: Tensor, *, groups: int = 1, columns: tuple[int, int] | None = None, exact: bool = False
) -> Weight:
    """`tensor` [..., n_in], its rows cut into `groups`. `columns` (n, m): the inputs come in runs
    of n that the activation stores m apart; the weight is zero between (float types only).
    Raises ModelFileError, as `floats` and `vector` do."""
    quant = stored_as(tensor.quant, exact)
    n_out, n_in = math.prod(tensor.shape[:-1]) // groups, tensor.shape[-1]
    tiles = -(-n_out // LANES)
    if quant in (Quant.F32, Quant.F16):
        w = floats(tensor, quant).reshape(groups, n_out, n_in)
        if columns is not None and columns[0] != columns[1]:
            runs = w.reshape(groups, n_out, -1, columns[0])
            w = np.pad(runs, [(0, 0)] * 3 + [(0, columns[1] - columns[0])])
            w = w.reshape(groups, n_out, -1)
            n_in = w.shape[-1]
        padded = np.pad(w, [(0, 0), (0, tiles * LANES - n_out), (0, 0)])
        data = zeros((groups, tiles, n_in, LANES), w.dtype)
        data[:] = padded.reshape(groups, tiles, LANES, n_in).swapaxes(2, 3)
        tile_bytes = n_in * LANES * w.itemsize
    elif quant is Quant.Q8_0:
        blocks = tensor.data.reshape(groups, n_out, -1, Quant.Q8_0.block_bytes)
        _check_finite(tensor, np.ascontiguousarray(blocks[..., :2]).view("<f2"))
        blocks = np.pad(blocks, [(0, 0), (0, tiles * LANES - n_out), (0, 0), (0, 0)])
        blocks = blocks.reshape(groups, tiles, LANES, -1, Quant.Q8_0.block_bytes)
        data = zeros((groups, tiles, n_in // 32, LANES * 34), np.uint8)
        data[..., :32] = blocks[..., :2].swapaxes(2, 3).reshape(*data.shape[:3], 32)
        bytes_ = blocks[..., 2:].reshape(groups, tiles, LANES, -1, 8, 4) ^ np.uint8(0x80)
        data[..., 32:] = bytes_.transpose(0, 1, 3, 4, 2, 5).reshape(*data.shape[:3], 512)
        tile_bytes = n_in // 32 * LANES * 34
    else:
        row_bytes = quant.n_bytes((n_in,))
        data = tensor.data.reshape(groups, n_out, row_bytes)
        if n_out % LANES:
            data = np.pad(data, [(0, 0), (0, tiles * LANES - n_out), (0, 0)])
        tile_bytes = LANES * row_bytes
    return Weight(TILES[quant], data, tile_bytes, groups, n_out, n_in, quant.activation_block)


def floats(tensor: Tensor, quant: Quant = Quant.F32) -> npt.NDArray[Any]:
    """The values of `tensor`, as F32 or, if that is what it holds, as F16."""
    if tensor.quant is quant:
        values = tensor.data.view("<f2" if quant is Quant.F16 else "<f4").reshape(tensor.shape)
    else:
        values = np.asarray(quants.dequantize(tensor, np.float32))
    _check_finite(tensor, values)
    return values


def _check_finite(tensor: Tensor, values: npt.NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        raise ModelFileError(f"tensor {tensor.name} holds a value that is not finite")


def vector(tensor: Tensor) -> npt.NDArray[np.float32]:
    """A norm's weight or the like [..., n] f32, its last axis zero-padded to a multiple of 16."""
    values = floats(tensor)
    padded = zeros((*values.shape[:-1], pad(values.shape[-1])), np.float32)
    padded[..., : values.shape[-1]] = values
    return padded
