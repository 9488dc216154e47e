"""Opens the GPU, or says in one sentence why not and what to do.

    cuda = installed()                        # the `cuda` extra, or ConfigError
    facts = open_gpu(cuda, need_bytes=n)      # on the engine's thread (sched/thread.py)
    buffers = Buffers(cuda.allocate, n)

Which error it is says whether another start may help: a GPU or a driver of another kind is a
ConfigError, one that does not answer a DeviceError, memory that others use a TemporaryError, and
memory that is not there a MemoryRefusedError.

What is asked of CUDA stands in the protocol `Cuda`, so that tests can give other answers. Importing
this module needs neither a GPU nor the extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ds4d.errors import ConfigError, DeviceError, MemoryRefusedError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ds4d.gpu.buffers import Memory

DRIVER_LEAST = 580  # the first with CUDA 13
EXTRA = "pip install ds4d[cuda]"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Facts:
    """What a GPU is, when it was opened."""

    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    unified: bool  # it shares the host's memory
    n_sms: int
    driver: str

    @property
    def supported(self) -> bool:
        """Kernels are written for Hopper and for both kinds of Blackwell with 99 KiB of shared
        memory a block."""
        return self.capability == (9, 0) or self.capability[0] == 12

    def __str__(self) -> str:
        major, minor = self.capability
        shared = " shared with the host" if self.unified else ""
        return (
            f"{self.name}, compute capability {major}.{minor}, {self.n_sms} SMs,"
            f" {_gib(self.free_bytes)} of {_gib(self.total_bytes)}{shared} free,"
            f" driver {self.driver}"
        )


class Cuda(Protocol):
    """CUDA and NVML. All but `driver` on the thread that owns the GPU."""

    def driver(self) -> str | None:
        """Version of the NVIDIA driver, as `580.95.05`; None: there is none."""

    def count(self) -> int:
        """GPUs that this process may use."""

    def use(self, index: int) -> Facts:
        """Make the GPU's context the calling thread's."""

    def allocate(self, n_bytes: int) -> Memory:
        """Zeroed memory of the GPU in use. Raises DeviceError."""


def open_gpu(cuda: Cuda, index: int = 0, *, need_bytes: int = 0) -> Facts:
    """Make the GPU the calling thread's. Raises what the module says, with `need_bytes` the memory
    that must be free."""
    driver = cuda.driver()
    if driver is None:
        raise DeviceError(
            f"no NVIDIA driver is loaded: install version {DRIVER_LEAST} or later, or check that"
            " the container or the unit may see /dev/nvidia*"
        )
    if _leading(driver) < DRIVER_LEAST:
        raise ConfigError(
            f"the NVIDIA driver is {driver} and {DRIVER_LEAST} or later is needed, for CUDA 13:"
            " update it"
        )
    n = cuda.count()
    if n == 0:
        raise DeviceError(
            f"the NVIDIA driver {driver} shows no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    if not 0 <= index < n:
        raise ConfigError(f"there is no GPU {index}: those to choose from are 0 to {n - 1}")
    facts = cuda.use(index)
    who = f"GPU {index}, {facts.name},"
    if not facts.supported:
        major, minor = facts.capability
        raise ConfigError(
            f"{who} has compute capability {major}.{minor} and 9.0 (H100, H200, GH200) or 12.x"
            " (GB10, RTX 50, RTX PRO) is needed: choose another with CUDA_VISIBLE_DEVICES, or run"
            " on the CPU"
        )
    if facts.total_bytes < need_bytes:
        raise MemoryRefusedError(
            f"{who} has {_gib(facts.total_bytes)} of memory and {_gib(need_bytes)} are needed:"
            " lower model.context or prefill.chunk, or choose a GPU with more"
        )
    if facts.free_bytes < need_bytes:
        raise TemporaryError(
            f"{who} has {_gib(facts.free_bytes)} of its {_gib(facts.total_bytes)} of memory free"
            f" and {_gib(need_bytes)} are needed: stop what else uses it"
            f" ({'see free -h' if facts.unified else 'see nvidia-smi'}), or lower model.context or"
            " prefill.chunk"
        )
    return facts


def _leading(version: str) -> int:
    digits = version.partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB"


# -- the real one ------------------------------------------------------------------------------


def installed(load: Callable[[str], object] = import_module) -> Cuda:
    """What the `cuda` extra brings. Raises ConfigError where it, or a part of it, is missing."""
    try:
        for name in ("cuda.bindings", "cuda.core", "numba_cuda", "pynvml"):
            load(name)
    except ImportError as error:
        raise ConfigError(
            f"the GPU needs Python packages that are not installed ({error.name or error}): {EXTRA}"
        ) from error
    return _Installed()


class _Installed:
    """`Cuda` by cuda.core, cuda.bindings and NVML."""

    def driver(self) -> str | None:
        pynvml: Any = import_module("pynvml")  # it has no types
        try:
            pynvml.nvmlInit()
        except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
            return None
        except pynvml.NVMLError as error:
            raise DeviceError(
                f"the NVIDIA driver does not answer ({error}): if it was updated since the machine"
                " was started, start it again"
            ) from error
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()

    def count(self) -> int:
        from cuda.bindings import driver

        begun = driver.cuInit(0)[0]
        if begun == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            return 0
        _checked((begun,), "to begin")
        return int(_checked(driver.cuDeviceGetCount(), "to count GPUs"))

    def use(self, index: int) -> Facts:
        from cuda.bindings import driver
        from cuda.core import Device

        try:
            device = Device(index)
            device.set_current()  # makes the context: some hundred MiB, and it may be refused
            capability, properties = device.compute_capability, device.properties
            name, unified = str(device.name), bool(properties.integrated)
            n_sms = int(properties.multiprocessor_count)
        except Exception as error:  # whatever the bindings raise for an answer of the driver
            raise DeviceError(f"GPU {index} cannot be opened: {error}") from error
        free, total = _checked(driver.cuMemGetInfo(), "how much memory is free")
        if unified:  # the driver does not count what the kernel would give back
            free = min(max(free, _available()), total)
        return Facts(
            index=index,
            name=name if name.startswith("NVIDIA") else f"NVIDIA {name}",
            capability=(int(capability.major), int(capability.minor)),
            total_bytes=int(total),
            free_bytes=int(free),
            unified=unified,
            n_sms=n_sms,
            driver=self.driver() or "?",
        )

    def allocate(self, n_bytes: int) -> Memory:
        from cuda.bindings import driver

        address = int(_checked(driver.cuMemAlloc(n_bytes), f"for {n_bytes:,} bytes"))
        memory = _Allocated(address)
        _checked(driver.cuMemsetD8(address, 0, n_bytes), "to clear memory")
        return memory


class _Allocated:
    """`Memory` by cuMemAlloc. Copies are done when they return."""

    def __init__(self, address: int) -> None:
        self.address = address

    def write(self, offset: int, data: npt.NDArray[Any]) -> None:
        from cuda.bindings import driver

        data = np.ascontiguousarray(data)
        to = self.address + offset
        _checked(driver.cuMemcpyHtoD(to, data.ctypes.data, data.nbytes), "to copy to it")

    def read(self, offset: int, into: npt.NDArray[Any]) -> None:
        from cuda.bindings import driver

        assert into.flags.c_contiguous
        source = self.address + offset
        _checked(driver.cuMemcpyDtoH(into.ctypes.data, source, into.nbytes), "to copy from it")

    def free(self) -> None:
        from cuda.bindings import driver

        _checked(driver.cuMemFree(self.address), "to free memory")


def _checked(answer: tuple[Any, ...], asked: str) -> Any:
    """What cuda.bindings returned behind the error, which must be none."""
    from cuda.bindings import driver

    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the GPU was asked {asked} and said {answer[0].name}")
    values = answer[1:]
    return values[0] if len(values) == 1 else values


def _available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of host memory that can be had without swapping; 0 where nothing tells."""
    try:
        lines = meminfo.read_text("ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0
