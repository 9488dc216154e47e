"""Kernels from source to address: declared at import, compiled or loaded when an engine opens.

A kernel is a C function whose parameters are words of 64 bits: pointers, counts, the bits of a
float. The first two are the number of the thread and of threads; each call does its `share` of the
work. A tile is what a product calls for sixteen outputs (`kernels/product.py`). Both are reached
by address, so a program can name them in a table, a file's quant types decide which of them are
compiled at all, and each compiles and is cached by itself.

    @kernel
    def scale(tid: N, n_threads: N, y: F4, n: N, by: R):
        for i in share(n, tid, n_threads):
            y[i] *= real(by)

The cache on disk is Numba's, in a folder of our own. Numba looks at a function's own file alone to
see whether it changed, which misses a changed callee; so the folder's name is a hash over all
kernel sources, the versions of Numba and llvmlite, and the processor. Folders that no start has
used for a month go.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite
import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ds4d.model import grid, layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

N = types.int64  # a count, an index, an address
R = types.int64  # the bits of a float32; `real` reads them
I1, U1, U2, I4, F4, I8 = (
    types.CPointer(t)
    for t in (types.int8, types.uint8, types.uint16, types.int32, types.float32, types.int64)
)
TABLE, WORD = I8, N
KERNEL = types.void(I8, N, N)
TILE = types.void(I1, N, N, I8, I8, N, F4, N)

UNUSED_S = 30 * 86_400.0


class Kernel:
    """A declared kernel or tile. `address` exists once `prepare` has seen it; `parameters` are the
    names behind the thread's number and the number of threads."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self.function = function
        self.name = function.__name__
        self.signature = signature
        self.parameters = tuple(inspect.signature(function).parameters)[2:]
        self._compiled: Any = None

    @property
    def address(self) -> int:
        if self._compiled is None:
            raise RuntimeError(f"kernel {self.name} was not prepared")
        return int(self._compiled.address)

    def prepare(self, folder: Path | None) -> None:
        """Load from `folder` or compile into it; None: compile and forget."""
        if self._compiled is not None:
            return
        try:
            self._compiled = self._declare(folder)
        except Exception:  # a damaged file raises whatever unpickling it happens to raise
            if folder is None:
                raise
            forget(folder, self.name)
            try:
                self._compiled = self._declare(folder)
            except OSError:  # the disk is full: a cache is no reason not to start
                self._compiled = self._declare(None)

    def _declare(self, folder: Path | None) -> Any:
        with cache_in(folder):
            declare = numba.cfunc(self.signature, cache=folder is not None, error_model="numpy")
            return declare(self.function)


def kernel(function: Callable[..., None]) -> Kernel:
    """By annotations as above; a function without any takes a table of words, tid, n_threads."""
    kinds = tuple(function.__annotations__.values())
    return Kernel(function, types.void(*kinds) if kinds else KERNEL)


def tile(function: Callable[..., None]) -> Kernel:
    return Kernel(function, TILE)


def helper(function: Callable[..., Any]) -> Any:
    """A function that kernels call; it is compiled into each of them."""
    return numba.njit(error_model="numpy")(function)


@helper
def share(n: int, tid: int, n_threads: int) -> range:
    """The part of range(n) that is thread `tid`'s."""
    return range(n * tid // n_threads, n * (tid + 1) // n_threads)


@intrinsic  # type: ignore[untyped-decorator]
def real(typing: Any, word: Any) -> Any:
    """The float32 whose bits an R parameter holds."""

    def code(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.bitcast(builder.trunc(values[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), code


def prepare(
    kernels: Iterable[Kernel],
    cache_dir: Path | None,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Make every kernel callable. `progress` gets a name and the share done, 0 to 1."""
    wanted = list(dict.fromkeys(kernels))
    folder = cache_folder(cache_dir)
    for i, each in enumerate(wanted):
        if progress is not None:
            progress(each.name, i / len(wanted))
        each.prepare(folder)
    if progress is not None:
        progress("kernels", 1.0)


def cache_folder(cache_dir: Path | None) -> Path | None:
    """Where this version's kernels lie in `cache_dir`; made if need be. Its time of modification
    says when it was used last; those of other versions that are too old are removed."""
    if cache_dir is None:
        return None
    folder = cache_dir / f"kernels-{source_key()}"
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # not ours, or another start was faster: tidying stops nobody
        os.utime(folder)
        for other in cache_dir.glob("kernels-*"):
            if time.time() - other.stat().st_mtime > UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def forget(folder: Path, name: str) -> None:
    """Delete what Numba stored for the function `name`."""
    for path in folder.rglob(f"*.{name}-*.nb?"):
        path.unlink(missing_ok=True)


def source_key() -> str:
    """Sixteen hex digits over everything that decides what a kernel compiles to."""
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__)
    for path in (
        here,
        Path(grid.__file__),
        Path(layout.__file__),
        *sorted((here.parent / "kernels").glob("*.py")),
    ):
        digest.update(path.read_bytes())
    features = sorted(k for k, on in llvm.get_host_cpu_features().items() if on)
    facts = (numba.__version__, llvmlite.__version__, llvm.get_host_cpu_name(), features)
    digest.update(repr(facts).encode())
    return digest.hexdigest()


@contextmanager
def cache_in(folder: Path | None) -> Iterator[None]:
    """Numba reads its cache directory when a function is declared."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder or "")
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
