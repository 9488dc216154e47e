"""Measures this processor's ceilings: bytes read, int8 and float32 products per second.

For benchmarks only; `bench.py` knows this class as `Ceilings`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from ds4d.cpu import jit
from ds4d.cpu.kernels import floor

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
TRIAL_S = 0.02
TRIALS = 5


class CpuCeilings:
    """With `n_threads` threads, each the best of several trials: a ceiling is what was reached
    when nobody interfered."""

    def __init__(self, n_threads: int, cache_dir: Path | None = None) -> None:
        self.n_threads = n_threads
        jit.prepare(floor.KERNELS, cache_dir)

    def read_bytes_s(self, n_bytes: int) -> float:
        """Over a buffer of `n_bytes`, read again and again: in the cache if it fits there."""
        chunks = max(n_bytes // floor.CHUNK, 1)
        buffer = np.ones(chunks * floor.CHUNK // 4, np.float32)
        return self._rate(floor.read, buffer, chunks) * buffer.nbytes

    def int8_macs_s(self) -> float:
        buffer = np.ones(floor.L1_BYTES, np.int8)
        return self._rate(floor.dot, buffer, 0) * buffer.size * self.n_threads

    def f32_macs_s(self) -> float:
        buffer = np.ones(floor.L1_BYTES // 4, np.float32)
        return self._rate(floor.fused, buffer, 0) * buffer.size * self.n_threads

    def _rate(self, kernel: jit.Kernel, buffer: npt.NDArray[np.generic], chunks: int) -> float:
        """Passes per second."""
        out = np.zeros((self.n_threads, 16), np.float32)
        passes, seconds = 1, 0.0
        while True:
            args = np.array([buffer.ctypes.data, chunks, passes, out.ctypes.data], np.int64)
            seconds = self._run(kernel, args)
            if seconds > TRIAL_S / 2:
                break
            passes = max(2 * passes, round(passes * min(TRIAL_S / max(seconds, 1e-6), 100)))
        for _ in range(TRIALS):
            seconds = min(seconds, self._run(kernel, args))
        return passes / seconds

    def _run(self, kernel: jit.Kernel, args: npt.NDArray[np.int64]) -> float:
        """Seconds from the moment when all threads stand ready until the last is done."""
        call = CALL(kernel.address)  # ctypes lets the interpreter lock go
        ready = threading.Barrier(self.n_threads + 1)

        def work(tid: int) -> None:
            ready.wait()
            call(args.ctypes.data, tid, self.n_threads)

        threads = [threading.Thread(target=work, args=(tid,)) for tid in range(self.n_threads)]
        for thread in threads:
            thread.start()
        ready.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began
