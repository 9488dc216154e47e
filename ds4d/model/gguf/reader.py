"""Open a model file: map it, check everything, hand out views.

After `open_model` returns, header, keys, geometry and the tensor table are known to be sound; the
values inside tensors are not read (token tables and non-finite weights are the engine's to check).
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from typing import TYPE_CHECKING

import numpy as np

from ds4d.errors import ModelFileError
from ds4d.model.gguf import schema
from ds4d.model.gguf.container import HEADER_LIMIT, read_header, shown
from ds4d.model.quants import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from ds4d.model.geometry import Geometry
    from ds4d.model.gguf.container import Header, Metadata, TensorInfo
    from ds4d.model.gguf.schema import Defaults, Vocabulary


class ModelFile:
    """A checked model file, memory-mapped and read-only. A context manager.

    `tensors` holds every tensor of the file; those that the model does not use are harmless. Views
    given out by `tensor` keep the mapping alive beyond `close`. While it is mapped the file may be
    replaced, as `write` does it, but not cut short: the kernel ends a process that reads beyond.
    """

    def __init__(
        self, path: str, mapped: mmap.mmap, header: Header, geometry: Geometry, defaults: Defaults
    ) -> None:
        self.path = path
        self.geometry = geometry
        self.defaults = defaults
        self.metadata: Metadata = header.metadata
        self.tensors: Mapping[str, TensorInfo] = header.tensors
        self.n_bytes = len(mapped)  # of the file
        self._mapped: mmap.mmap | None = mapped

    def tensor(self, name: str) -> Tensor:
        """The tensor's bytes, uint8 [n_bytes], not copied. Raises KeyError for an unknown name."""
        if self._mapped is None:
            raise ValueError(f"{self.path} is closed")
        t = self.tensors[name]
        data = np.frombuffer(self._mapped, np.uint8, t.n_bytes, t.offset)
        return Tensor(t.name, t.quant, t.shape, data)

    def vocabulary(self) -> Vocabulary:
        """Decoded anew at each call."""
        return schema.read_vocabulary(self.metadata)

    def close(self) -> None:
        """Give the mapping back, at the latest when the last view of it is gone."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            self.metadata.release()
            try:
                mapped.close()
            except BufferError:
                pass  # views are in use: the mapping goes with the last of them

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_model(path: str | os.PathLike[str]) -> ModelFile:
    """Map and check `path`. Raises ModelFileError, one sentence that names the file, the key or
    tensor, what was expected and what was found."""
    name = os.fspath(path)
    mapped = _map(name)
    view = memoryview(mapped)[: min(len(mapped), HEADER_LIMIT)]
    try:
        header = read_header(name, view, len(mapped))
        geometry = schema.read_geometry(name, header.metadata)
        schema.check_tokenizer(name, header.metadata, geometry.n_vocab)
        defaults = schema.read_defaults(name, header.metadata)
        _check_tensors(name, geometry, header.tensors)
    except BaseException:
        view.release()
        mapped.close()
        raise
    return ModelFile(name, mapped, header, geometry, defaults)


def _map(path: str) -> mmap.mmap:
    try:
        # Not blocking: a FIFO would otherwise wait for its writer before we could refuse it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = {
            errno.ENOENT: "no such file",
            errno.EACCES: "permission denied, expected a file that this user may read",
        }.get(error.errno or 0, os.strerror(error.errno or 0))
        raise ModelFileError(f"{path}: {reason}") from None
    except ValueError:  # a NUL in the name
        raise ModelFileError(f"{shown(path)}: not a file name") from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: is a directory, expected a GGUF file")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is not a regular file, expected a GGUF file")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: is empty, expected a GGUF file")
        try:
            return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: it shrank meanwhile
            raise ModelFileError(f"{path}: cannot be mapped into memory: {error}") from None
    finally:
        os.close(descriptor)


def _check_tensors(path: str, geometry: Geometry, tensors: Mapping[str, TensorInfo]) -> None:
    for name, shape, quants, required in schema.expected_tensors(geometry):
        found = tensors.get(name)
        if found is None:
            if required:
                raise ModelFileError(f"{path}: tensor {name} is missing, expected {_shape(shape)}")
            continue
        if found.shape != shape:
            raise ModelFileError(
                f"{path}: tensor {name} has shape {_shape(found.shape)}, expected {_shape(shape)}"
            )
        if found.quant not in quants:
            allowed = " or ".join(q.name for q in sorted(quants))
            raise ModelFileError(
                f"{path}: tensor {name} has type {found.quant.name}, expected {allowed}"
            )
    # Engines quantise the input of both once, so the two must want the same blocks.
    for layer in range(geometry.n_layers):
        gate, up = (tensors[f"blk.{layer}.ffn_{kind}_exps.weight"] for kind in ("gate", "up"))
        if gate.quant != up.quant:
            raise ModelFileError(
                f"{path}: tensor {up.name} has type {up.quant.name}, "
                f"expected {gate.quant.name} as {gate.name}"
            )


def _shape(shape: tuple[int, ...]) -> str:
    """As GGUF tools print it reversed: rows first, as in NumPy."""
    return "[" + ", ".join(map(str, shape)) + "]"
