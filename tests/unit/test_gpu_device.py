"""Opening a GPU and its buffers, without one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ds4d.errors import (
    ConfigError,
    DeviceError,
    Ds4Error,
    MemoryRefusedError,
    OutOfMemory,
    TemporaryError,
)
from ds4d.gpu import device
from ds4d.gpu.buffers import ALIGNMENT, Buffer, Buffers, needed_bytes
from ds4d.gpu.device import Facts, open_gpu

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
H200 = Facts(0, "NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, False, 132, "580.95.05")
GB10 = Facts(0, "NVIDIA GB10", (12, 1), 121 * GIB, 110 * GIB, True, 48, "580.95.05")


class FakeMemory:
    """Device memory that is the host's, at an address of its own."""

    def __init__(self, n_bytes: int) -> None:
        self.address = 0x7F00_0000_0000
        self.bytes = np.zeros(n_bytes, np.uint8)
        self.freed = 0

    def write(self, offset: int, data: Any) -> None:
        self.bytes[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    def read(self, offset: int, into: Any) -> None:
        flat = into.reshape(-1).view(np.uint8)
        flat[:] = self.bytes[offset : offset + into.nbytes]

    def free(self) -> None:
        self.freed += 1


@dataclass
class FakeCuda:
    gpus: list[Facts] = field(default_factory=lambda: [H200])
    version: str | None = "580.95.05"
    used: list[int] = field(default_factory=list)

    def driver(self) -> str | None:
        return self.version

    def count(self) -> int:
        return len(self.gpus)

    def use(self, index: int) -> Facts:
        self.used.append(index)
        return self.gpus[index]

    def allocate(self, n_bytes: int) -> FakeMemory:
        return FakeMemory(n_bytes)


# -- opening -----------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [H200, GB10, replace(GB10, capability=(12, 0))])
def test_a_gpu_that_will_do_is_opened(facts: Facts) -> None:
    cuda = FakeCuda([facts])
    assert open_gpu(cuda, need_bytes=facts.free_bytes) == facts
    assert cuda.used == [0]


def test_facts_read_as_a_line() -> None:
    assert str(GB10) == (
        "NVIDIA GB10, compute capability 12.1, 48 SMs, 110.0 GiB of 121.0 GiB shared with the host "
        "free, driver 580.95.05"
    )


@pytest.mark.parametrize(
    ("cuda", "need_bytes", "kind", "says"),
    [
        (FakeCuda(version=None), 0, DeviceError, ["no NVIDIA driver", "580 or later", "install"]),
        (FakeCuda(version="570.211.01"), 0, ConfigError, ["570.211.01", "580 or later", "update"]),
        (FakeCuda(version="odd"), 0, ConfigError, ["odd", "580 or later"]),
        (
            FakeCuda([]),
            0,
            DeviceError,
            ["580.95.05", "no GPU", "nvidia-smi", "CUDA_VISIBLE_DEVICES"],
        ),
        (
            FakeCuda([replace(H200, name="Tesla T4", capability=(7, 5))]),
            0,
            ConfigError,
            ["GPU 0, Tesla T4,", "7.5", "9.0", "12.x", "CUDA_VISIBLE_DEVICES", "CPU"],
        ),
        (FakeCuda([replace(H200, capability=(10, 0))]), 0, ConfigError, ["10.0", "9.0", "12.x"]),
        (
            FakeCuda(),
            141 * GIB,
            MemoryRefusedError,
            ["140.0 GiB", "141.0 GiB", "lower model.context"],
        ),
        (
            FakeCuda([replace(H200, free_bytes=20 * GIB)]),
            87 * GIB,
            TemporaryError,
            ["20.0 GiB", "140.0 GiB", "87.0 GiB", "nvidia-smi", "stop what else uses it"],
        ),
        (FakeCuda([GB10]), 115 * GIB, TemporaryError, ["110.0 GiB", "115.0 GiB", "free -h"]),
    ],
)
def test_one_that_will_not_says_what_is_there_what_is_needed_and_what_to_do(
    cuda: FakeCuda, need_bytes: int, kind: type[Ds4Error], says: list[str]
) -> None:
    with pytest.raises(kind) as raised:
        open_gpu(cuda, need_bytes=need_bytes)
    text = str(raised.value)
    assert [part for part in says if part not in text] == [], text
    assert not text.endswith(".") and "\n" not in text


def test_only_a_gpu_that_is_there_can_be_chosen() -> None:
    cuda = FakeCuda([H200, GB10])
    assert open_gpu(cuda, 1) == GB10
    for index in (-1, 2):
        with pytest.raises(ConfigError, match=rf"no GPU {index}: .* 0 to 1"):
            open_gpu(cuda, index)
    assert cuda.used == [1]  # nothing is touched that will not be used


def test_without_the_driver_no_gpu_is_asked_for() -> None:
    cuda = FakeCuda(version="550.1")
    with pytest.raises(ConfigError):
        open_gpu(cuda)
    assert cuda.used == []


def test_a_missing_extra_says_how_to_install_it() -> None:
    def load(name: str) -> object:
        if name == "cuda.core":
            raise ModuleNotFoundError("No module named 'cuda.core'", name="cuda.core")
        return None

    with pytest.raises(ConfigError, match=r"\(cuda\.core\): pip install ds4d\[cuda\]$"):
        device.installed(load)


def test_the_extra_without_a_driver_finds_none() -> None:
    pynvml: Any = pytest.importorskip("pynvml")
    pytest.importorskip("cuda.core")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(DeviceError, match="no NVIDIA driver is loaded"):
            open_gpu(device.installed())
    else:
        pynvml.nvmlShutdown()
        version = device.installed().driver()
        assert version is not None and version.split(".")[0].isdigit()


def test_unified_memory_counts_what_the_kernel_would_give_back(tmp_path: Path) -> None:
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:  100 kB\nMemFree:   1 kB\nMemAvailable:   64 kB\n")
    assert device._available(table) == 64 * 1024
    table.write_text("MemTotal:  100 kB\n")
    assert device._available(table) == 0
    assert device._available(tmp_path / "none") == 0


# -- buffers -----------------------------------------------------------------------------------


def fill(buffers: Buffers) -> None:
    buffers.add("x", (8, 100), np.float32)
    buffers.add("none", (0, 3), "i4")
    buffers.add("q", (3, 8, 32), np.int8)
    buffers.add("scalar", (), "u8")


def test_a_dry_run_says_what_to_promise() -> None:
    n = needed_bytes(fill)
    assert n == 3328 + 768 + 256
    buffers = Buffers(FakeMemory, n)
    fill(buffers)
    assert buffers.used_bytes == buffers.promised_bytes == n


def test_buffers_are_aligned_apart_and_as_described() -> None:
    buffers = Buffers(FakeMemory, needed_bytes(fill))
    fill(buffers)
    assert [b.name for b in buffers] == ["x", "none", "q", "scalar"] and len(buffers) == 4
    end = 0x7F00_0000_0000
    for each in buffers:
        assert int(each) % ALIGNMENT == 0 and int(each) >= end
        end = int(each) + each.nbytes
    x = buffers["x"]
    assert x.shape == (8, 100) and x.dtype == np.float32 and x.nbytes == 3200
    assert repr(x) == "<buffer x [8, 100] float32 at 0x7f0000000000>"


def test_a_buffer_is_an_argument_of_a_launch() -> None:
    """cuda.core takes integers for pointers."""
    buffers = Buffers(FakeMemory, 256)
    x = buffers.add("x", (1,), "f4")
    assert isinstance(x, int) and x == 0x7F00_0000_0000
    handler = pytest.importorskip("cuda.core._kernel_arg_handler")
    handler.ParamHolder((x,))


def test_beyond_the_promise_nothing_is_added() -> None:
    buffers = Buffers(FakeMemory, 512)
    buffers.add("x", (1,), "f4")
    with pytest.raises(OutOfMemory, match=r"buffer y takes 260 bytes, and of 512 promised 256 are"):
        buffers.add("y", (65,), "f4")
    assert buffers.used_bytes == 256 and len(buffers) == 1
    assert buffers.add("z", (64,), "f4").nbytes == 256  # what fits still does


def test_copies_come_back_and_touch_no_neighbour() -> None:
    buffers = Buffers(FakeMemory, needed_bytes(fill))
    fill(buffers)
    assert not buffers["x"].read().any()  # zeroed
    x = np.arange(800, dtype="f4").reshape(8, 100)
    q = np.arange(768).astype("i1").reshape(3, 8, 32)
    buffers["x"].write(x)
    buffers["q"].write(q[:, ::-1])  # not contiguous
    buffers["scalar"].write(np.uint64(7))
    assert (buffers["x"].read() == x).all()
    assert (buffers["q"].read() == q[:, ::-1]).all()
    assert buffers["scalar"].read() == 7
    with pytest.raises(AssertionError):
        buffers["x"].write(x.T)
    with pytest.raises(AssertionError):
        buffers["x"].write(x.astype("f8"))


def test_a_dry_run_holds_nothing() -> None:
    dry = Buffers(None)
    made = dry.add("x", (1,), "f4")
    assert isinstance(made, Buffer)
    for copy in (made.read, lambda: made.write(np.zeros(1, "f4"))):
        with pytest.raises(AssertionError):
            copy()
    dry.close()


def test_a_name_is_taken_once() -> None:
    buffers = Buffers(None)
    buffers.add("x", (1,), "f4")
    with pytest.raises(AssertionError):
        buffers.add("x", (1,), "f4")


def test_memory_is_given_back_once() -> None:
    memory = FakeMemory(256)
    buffers = Buffers(lambda _: memory, 256)
    buffers.close()
    buffers.close()
    assert memory.freed == 1


def test_nothing_promised_allocates_nothing() -> None:
    def refuse(n_bytes: int) -> FakeMemory:
        raise AssertionError(n_bytes)

    assert len(Buffers(refuse, 0)) == 0
