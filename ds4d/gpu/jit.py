"""Kernels from source to a loaded function: declared at import, compiled when a device opens.

    @kernel("f4* out, f4* x, i4 n, f4 by")
    def scale(out, x, n, by):
        i = cuda.grid(1)
        if i < n:
            out[i] = x[i] * by

Declaring needs no GPU. `build` makes a cubin, from the folder of cubins or by Numba, NVVM and
nvJitLink, and needs none either; a `DeviceStream` launches what its device has `Loaded`. What a
kernel knows at compile time are the numbers in its closure, so a family is a function of them:

    @cache
    def scale_by(factor):
        @kernel("f4* out, f4* x, i4 n")
        def scale(out, x, n): ...
        return scale

Contraction is off (spec/numerics.md 3): `x * y + z` rounds twice, and where once is wanted stands
`ptx.fma`. Numba has no switch for it, but NVVM has. A cubin is named by a hash over the kernel's
source and those of all modules under `ds4d.gpu` that it sees, its constants, the chip and the
versions of the compilers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import re
import sys
import types as python_types
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numba import cuda
from numba.cuda import types

from ds4d.errors import DeviceError
from ds4d.files import written_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# The letters of signatures, as NumPy names its types; a `*` behind makes a pointer.
SCALARS = {
    "i1": types.int8, "u1": types.uint8, "i2": types.int16, "u2": types.uint16,
    "i4": types.int32, "u4": types.uint32, "i8": types.int64, "u8": types.uint64,
    "f4": types.float32, "f8": types.float64,
}  # fmt: skip
VERSIONED = ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
PACKAGE = "ds4d.gpu"
SHARED_FREE = 48 * 1024  # bytes of dynamic shared memory that need no leave


@dataclass(frozen=True, slots=True)
class Chip:
    """What code is made for: a compute capability, with its own instructions (`a`)."""

    major: int
    minor: int

    @property
    def arch(self) -> str:
        return f"sm_{self.major}{self.minor}a"


H200, GB10 = Chip(9, 0), Chip(12, 1)


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel, and what a block of it takes."""

    code: bytes
    shared_bytes: int  # static, of a block
    registers: int  # of a thread
    stack_bytes: int  # of a thread: local arrays that did not stay in registers
    spill_bytes: int


class Kernel:
    """A declared kernel. `parameters` are (name, letters) as in its signature."""

    def __init__(
        self,
        function: Callable[..., None],
        signature: str,
        block: int | None,
        resident: int | None = None,
    ) -> None:
        self.function = function
        self.name = function.__name__
        self.parameters = [_parameter(p, self.name) for p in signature.split(",")]
        names = [name for name, _ in self.parameters]
        if names != list(inspect.signature(function).parameters):
            raise TypeError(f"kernel {self.name} takes other parameters than {signature!r}")
        self.block = block  # threads, if launches always have as many
        self.resident = resident  # of such blocks that an SM shall hold at once

    def __repr__(self) -> str:
        return f"<kernel {self.title}>"

    @property
    def constants(self) -> dict[str, int | float | bool | str]:
        """The numbers in its closure, and in those of the device functions that stand there."""
        return {k: v for k, v in self._closure() if isinstance(v, int | float | bool | str)}

    def _closure(self) -> list[tuple[str, Any]]:
        """Names and numbers, a name as often as functions have it; and those functions' names."""
        found: list[tuple[str, Any]] = []
        todo = [self.function]
        while todo:
            function = todo.pop()
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                value = cell.cell_contents
                if isinstance(value, int | float | bool | str):
                    found.append((name, value))
                elif hasattr(value, "py_func"):
                    found.append((name, (value.py_func.__qualname__,)))
                    todo.append(value.py_func)
        return found

    @property
    def title(self) -> str:
        """For people: its name with its constants."""
        inside = ", ".join(f"{k}={v}" for k, v in self.constants.items())
        return f"{self.name}[{inside}]" if inside else self.name

    def key(self, chip: Chip) -> str:
        """Name of its cubin."""
        digest = hashlib.sha256()
        for part in (
            chip.arch, self.name, repr(self.parameters), repr(self._closure()),
            repr((self.block, self.resident)),
            *_versions(), *sources(self.function.__module__),
        ):  # fmt: skip
            digest.update(part.encode() + b"\0")
        return f"{self.name}-{chip.arch}-{digest.hexdigest()[:24]}"

    def compile(self, chip: Chip) -> Cubin:
        """Without a GPU, in 0.1 to 3 s."""
        return assemble(self.ptx(chip), chip)

    def ptx(self, chip: Chip) -> str:
        kinds = [letters for _, letters in self.parameters]
        signature = types.void(*(_type(letters) for letters in kinds))
        bounds = tuple(n for n in (self.block, self.resident) if n is not None) or None
        cc = (chip.major, chip.minor, "a")
        with _compiling_for(cc):
            text, _ = cuda.compile(
                self.function,
                signature,
                cc=cc,
                device=False,
                abi="numba",
                output="ptx",
                launch_bounds=bounds,
            )
        found = re.findall(r"\.entry\s+(\S+?)\(", text)
        if len(found) != 1:
            raise RuntimeError(f"kernel {self.name} has entries {found}, expected one")
        return str(text).replace(found[0], self.name)  # a name that a profiler can show

    def launch(
        self,
        stream: Stream,
        grid: int | tuple[int, ...],
        block: int,
        *arguments: Any,
        shared: int = 0,
        dependent: bool = False,
    ) -> None:
        """Enqueue on `stream`. Buffers, addresses and numbers in the order of the signature.
        `shared`: bytes of dynamic shared memory. `dependent`: it may begin before the kernel in
        front has ended (`ptx.wait_for_front`)."""
        assert len(arguments) == len(self.parameters), (self.name, len(arguments))
        assert self.block in (None, block), (self.name, block)
        stream.launch(self, grid, block, arguments, shared=shared, dependent=dependent)


class Stream(Protocol):
    """What launchers enqueue on."""

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int,
        dependent: bool,
    ) -> None: ...


class Launched(NamedTuple):
    kernel: Kernel
    block: int
    shared: int  # bytes of dynamic shared memory


class Listing:
    """A stream on which nothing runs: what is launched is noted. So the launches themselves say
    which kernels a model needs, and how many nodes its graph will have."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int,
        dependent: bool,
    ) -> None:
        self.launched.append(Launched(kernel, block, shared))


class DeviceStream:
    """A stream of a device, to run now, or the builder of a graph, to capture."""

    def __init__(self, loaded: Loaded, handle: Any) -> None:
        """`handle`: a Stream or a GraphBuilder of cuda.core's."""
        self._loaded, self._handle = loaded, handle

    def launch(
        self,
        kernel: Kernel,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        *,
        shared: int,
        dependent: bool,
    ) -> None:
        from cuda.core import LaunchConfig, launch

        config = LaunchConfig(
            grid=grid, block=block, shmem_size=shared, programmatic_stream_serialization=dependent
        )
        kinds = (letters for _, letters in kernel.parameters)
        words = [_argument(a, letters) for a, letters in zip(arguments, kinds, strict=True)]
        launch(self._handle, config, self._loaded.get(kernel, shared), *words)


class Loaded:
    """What a device has in its memory of kernels. On the thread that owns it, its context
    current."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._kernels: dict[Kernel, Any] = {}
        self._shared: dict[Kernel, int] = {}  # bytes that a launch may ask for

    def add(self, kernel: Kernel, cubin: bytes) -> None:
        from cuda.core import ObjectCode

        self._kernels[kernel] = ObjectCode.from_cubin(cubin).get_kernel(kernel.name)

    def get(self, kernel: Kernel, shared: int) -> Any:
        """Beyond 48 KiB of dynamic shared memory a kernel needs leave first."""
        found = self._kernels[kernel]
        if shared > max(self._shared.get(kernel, 0), SHARED_FREE):
            from cuda.bindings import driver

            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(most, shared, found.handle, self.device_id)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise DeviceError(
                    f"kernel {kernel.title} wants {shared:,} bytes of shared memory and the GPU"
                    f" said {error.name}"
                )
            self._shared[kernel] = shared
        return found


def assemble(ptx: str, chip: Chip) -> Cubin:
    """Machine code of a kernel's PTX."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=chip.arch, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    code = bytes(linker.link("cubin").code)
    arrays = re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+\S+\[(\d+)\]", ptx)
    return Cubin(code, sum(map(int, arrays)), *_resources(linker.get_info_log()))


def kernel(
    signature: str, *, block: int | None = None, resident: int | None = None
) -> Callable[..., Kernel]:
    """Declare: "f4* out, i4 n" names parameters behind their types. `block`: threads of every
    launch, which lets the compiler give each more registers; `resident`: but so few that an SM
    holds as many blocks at once."""
    return lambda function: Kernel(function, signature, block, resident)


def device(function: Callable[..., Any]) -> Any:
    """A function that kernels call; NVVM compiles it into each of them."""
    return cuda.jit(device=True, forceinline=True)(function)


def spliced(function: Callable[..., Any]) -> Any:
    """As `device`, put in by Numba, which takes three times as long: for functions that declare
    shared arrays, whose names would collide."""
    return cuda.jit(device=True, inline="always")(function)


# -- cubins ------------------------------------------------------------------------------------


def build(
    kernels: Iterable[Kernel],
    chip: Chip,
    folder: Path | None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[Kernel, bytes]:
    """Every kernel's cubin, from `folder` or compiled into it. None: compile and forget."""
    wanted = list(dict.fromkeys(kernels))
    found: dict[Kernel, bytes] = {}
    for i, each in enumerate(wanted):
        path = None if folder is None else folder / f"{each.key(chip)}.cubin"
        code = None if path is None else _read(path)
        if code is None:
            code = each.compile(chip).code
            if path is not None:
                _keep(path, code)
        found[each] = code
        if progress is not None:
            progress(each.name, (i + 1) / len(wanted))
    return found


def _read(path: Path) -> bytes | None:
    """A file with its own hash in front, so that a damaged one is compiled anew."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _keep(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as out:
            out.write(hashlib.sha256(code).digest() + code)
    except OSError:  # the disk is full or read-only: a cache is no reason not to start
        return


@cache
def sources(module: str) -> tuple[str, ...]:
    """Text of a module and of all below PACKAGE whose names it holds, in order of their names."""
    found: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for value in vars(sys.modules[name]).values():
            owner = value.__name__ if isinstance(value, python_types.ModuleType) else getattr(
                value, "__module__", None)  # fmt: skip
            if isinstance(owner, str) and (owner + ".").startswith(PACKAGE + "."):
                todo.append(owner)
    return tuple(Path(str(sys.modules[n].__file__)).read_text("utf-8") for n in sorted(found))


@cache
def _versions() -> tuple[str, ...]:
    out = []
    for name in VERSIONED:
        try:
            out.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            out.append(f"{name} from elsewhere")
    return tuple(out)


# -- compiling ---------------------------------------------------------------------------------


@contextmanager
def _compiling_for(cc: tuple[int, int, str]) -> Iterator[None]:
    """Two names of numba-cuda 0.30 stand for something else meanwhile: device functions ask the
    driver for a compute capability, of which there may be none; and NVVM contracts by default."""
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import nvvm

    ask, make = dispatcher.get_current_device, nvvm.compile_ir
    dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=cc)
    nvvm.compile_ir = lambda text, **options: make(text, **(options | {"fma": False}))
    try:
        yield
    finally:
        dispatcher.get_current_device, nvvm.compile_ir = ask, make


def _parameter(text: str, kernel: str) -> tuple[str, str]:
    letters, _, name = text.strip().rpartition(" ")
    if letters.rstrip("*") not in SCALARS or not name.isidentifier():
        raise TypeError(f"kernel {kernel}: {text.strip()!r} is no parameter, expected 'f4* x'")
    return name, letters


def _type(letters: str) -> Any:
    scalar = SCALARS[letters.rstrip("*")]
    return types.CPointer(scalar) if letters.endswith("*") else scalar


def _argument(value: Any, letters: str) -> Any:
    """As `cuda.core.launch` wants it: buffers and addresses as they are, numbers with a type."""
    import numpy as np

    if letters.endswith("*"):
        return value
    return np.dtype(letters).type(value)


def _resources(log: str) -> tuple[int, int, int]:
    """Registers, stack and spilled bytes that `ptxas -v` tells."""
    used = re.search(r"Used (\d+) registers", log)
    stack = re.search(r"(\d+) bytes stack frame", log)
    if used is None or stack is None:
        raise RuntimeError(f"ptxas told no registers: {log!r}")
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return int(used[1]), int(stack[1]), spilled
