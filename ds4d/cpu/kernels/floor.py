"""What the machine can do at most, next to which products are judged.

    read   adds up a buffer, once per pass: as fast as bytes come from where they lie
    dot    int8 products in registers, weights from the first cache: `simd.dot4` and nothing else
    fma    the same for float32

No kernel that multiplies what it reads can be faster than the slower of its two limits. Eight sums
are in flight, so that no instruction waits for the one before. The sums are stored, else LLVM
would leave the loops out.
"""

import numpy as np

from ds4d.cpu.jit import kernel
from ds4d.cpu.kernels.simd import dot4, f4, fma, i1, load, load64, splat, store, to_float

CHUNK = 512  # bytes that one turn of a loop reads
L1_BYTES = 4096


@kernel
def read(args, tid, n_threads):
    """0 buffer, 1 its chunks of 512 bytes, 2 passes, 3 out [n_threads, 16] f32."""
    p = f4(args, 0)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.float32(0))
    for _ in range(args[2]):
        for c in range(args[1] * tid // n_threads, args[1] * (tid + 1) // n_threads):
            i = 128 * c
            s0, s1 = s0 + load(p, i), s1 + load(p, i + 16)
            s2, s3 = s2 + load(p, i + 32), s3 + load(p, i + 48)
            s4, s5 = s4 + load(p, i + 64), s5 + load(p, i + 80)
            s6, s7 = s6 + load(p, i + 96), s7 + load(p, i + 112)
    store(f4(args, 3), 16 * tid, ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)))


@kernel
def dot(args, tid, n_threads):
    """0 buffer [4096] bytes, 2 passes, 3 out [n_threads, 16] f32. 4,096 products a pass."""
    p = i1(args, 0)
    x = load64(p, 0)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.int32(0))
    for _ in range(args[2]):
        for i in range(0, L1_BYTES, CHUNK):
            s0, s1 = dot4(s0, load64(p, i), x), dot4(s1, load64(p, i + 64), x)
            s2, s3 = dot4(s2, load64(p, i + 128), x), dot4(s3, load64(p, i + 192), x)
            s4, s5 = dot4(s4, load64(p, i + 256), x), dot4(s5, load64(p, i + 320), x)
            s6, s7 = dot4(s6, load64(p, i + 384), x), dot4(s7, load64(p, i + 448), x)
    sums = ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))
    store(f4(args, 3), 16 * tid, to_float(sums))


@kernel
def fused(args, tid, n_threads):
    """0 buffer [1024] f32, 2 passes, 3 out [n_threads, 16] f32. 1,024 products a pass."""
    p = f4(args, 0)
    x = load(p, 0)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = splat(np.float32(0))
    for _ in range(args[2]):
        for i in range(0, L1_BYTES // 4, CHUNK // 4):
            s0, s1 = fma(load(p, i), x, s0), fma(load(p, i + 16), x, s1)
            s2, s3 = fma(load(p, i + 32), x, s2), fma(load(p, i + 48), x, s3)
            s4, s5 = fma(load(p, i + 64), x, s4), fma(load(p, i + 80), x, s5)
            s6, s7 = fma(load(p, i + 96), x, s6), fma(load(p, i + 112), x, s7)
    store(f4(args, 3), 16 * tid, ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)))


KERNELS = (read, dot, fused)
