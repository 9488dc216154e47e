"""Write a model file: whole beside its name, synced, renamed, so that a reader never sees half."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds4d.files import written_whole
from ds4d.model.gguf.container import ALIGNMENT, layout

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from ds4d.model.gguf.container import Typed
    from ds4d.model.quants import Quant, Tensor


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Typed],
    tensors: Iterable[Tensor],
    *,
    alignment: int = ALIGNMENT,
    table: Sequence[tuple[str, Quant, tuple[int, ...]]] | None = None,
) -> None:
    """Write `tensors` in their order. The header stands in front of the data and names them all:
    with `table` (name, quant, shape of each) they are taken one at a time, else held at once.

    Raises ValueError for what no reader would take, OSError as the file system does; then no file
    of that name is made or changed.
    """
    if table is None:
        tensors = list(tensors)
        table = [(t.name, t.quant, t.shape) for t in tensors]
    header, placed, n_bytes = layout(metadata, table, alignment)
    with written_whole(Path(path)) as out:
        out.write(header)
        for tensor, place in zip(tensors, placed, strict=True):
            if (tensor.name, tensor.quant, tensor.shape) != (place.name, place.quant, place.shape):
                raise ValueError(f"tensor {tensor.name} comes where the table has {place.name}")
            if tensor.data.nbytes != place.n_bytes:
                raise ValueError(
                    f"tensor {tensor.name} has {tensor.data.nbytes} bytes, expected {place.n_bytes}"
                )
            out.seek(place.offset)
            out.write(np.ascontiguousarray(tensor.data).data)
        out.truncate(n_bytes)  # the last tensor's padding


def write_header(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Typed],
    table: Sequence[tuple[str, Quant, tuple[int, ...]]],
    *,
    alignment: int = ALIGNMENT,
) -> None:
    """A file of full length whose tensors are holes: it costs the header's bytes of disk and reads
    as zeros. For measuring what opening costs, and admission, without weights."""
    header, _, n_bytes = layout(metadata, table, alignment)
    with written_whole(Path(path)) as out:
        out.write(header)
        out.truncate(n_bytes)
