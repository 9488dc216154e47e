"""The threads that replay a program. The caller is one of them; the others sleep between orders.

Sleeping is a POSIX semaphore, waited for in native code: a worker takes no time of the
interpreter, neither to wait nor to wake, and never its lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from ds4d.cpu.arrays import zeros
from ds4d.cpu.kernels import replay

if TYPE_CHECKING:
    from ds4d.cpu.program import Program

SEMAPHORE_BYTES = 64  # sem_t has 32 bytes with glibc on 64-bit machines, 16 with musl
WORD = ctypes.c_int64


class Team:
    """`n_threads` threads, of which the caller of `run` is the first. Not for two callers."""

    def __init__(self, program: Program, n_threads: int) -> None:
        self.n_threads = n_threads
        self._program = program
        self.words = zeros((replay.AT + n_threads,), np.int64)
        self._masks = zeros((n_threads, replay.MASK_BYTES), np.uint8)
        for cpu in os.sched_getaffinity(0):
            if cpu < 8 * replay.MASK_BYTES:
                self._masks[0, cpu >> 3] |= 1 << (cpu & 7)
        self.words[replay.MASKS] = self._masks.ctypes.data
        self.words[replay.PROGRAM] = program.table.ctypes.data
        self._replay = ctypes.CFUNCTYPE(None, WORD, WORD, WORD)(replay.replay.address)
        self._serve = ctypes.CFUNCTYPE(None, WORD, WORD, WORD, WORD)(replay.serve.address)
        libc = ctypes.CDLL(None)
        self._processor = libc.sched_getcpu
        self._wake = libc.sem_post
        self._wake.argtypes = (ctypes.c_void_p,)
        libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        room = zeros((n_threads, SEMAPHORE_BYTES), np.uint8)
        self._room = room
        self._semaphores = [int(room[tid].ctypes.data) for tid in range(1, n_threads)]
        self._workers = []
        for tid, semaphore in enumerate(self._semaphores, 1):
            if libc.sem_init(semaphore, 0, 0) != 0:
                raise OSError("the C library made no semaphore for a worker thread")
            worker = threading.Thread(
                target=self._work, args=(tid, semaphore), name=f"ds4d-cpu-{tid}", daemon=True
            )
            worker.start()
            self._workers.append(worker)

    def _work(self, tid: int, semaphore: int) -> None:
        """A bound method, so that what the native loop looks at lives as long as the thread."""
        self._serve(self._address, tid, self.n_threads, semaphore)

    @property
    def _address(self) -> int:
        return int(self.words.ctypes.data)

    @property
    def done(self) -> int:
        """Operations done since the start; grows while `run` runs. Any thread may read it."""
        return int(self.words[replay.DONE])

    def run(self, first: int, end: int) -> None:
        """Replay operations first .. end - 1, which end at a barrier. The interpreter's lock is
        free meanwhile."""
        words = self.words
        words[replay.FROM], words[replay.TO] = first, end
        words[replay.BASE] = words[replay.ARRIVED]
        words[replay.AT] = self._processor()
        for semaphore in self._semaphores:
            self._wake(semaphore)
        self._replay(self._address, 0, self.n_threads)

    def close(self) -> None:
        """Send the workers home and wait for them."""
        self.words[replay.HOME] = 1
        for semaphore in self._semaphores:
            self._wake(semaphore)
        for worker in self._workers:
            worker.join()
        self._workers, self._semaphores = [], []
