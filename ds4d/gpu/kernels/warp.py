"""What the 32 threads of a warp do together. All of them have to be there.

Sums pair lanes 16 apart, then 8, 4, 2, 1: one order, the same in every lane.
"""

from numba import cuda

from ds4d.gpu.jit import device

ALL = 0xFFFFFFFF


@device
def total(x):
    """The sum over the lanes, in every lane."""
    for i in range(5):
        x += cuda.shfl_xor_sync(ALL, x, 16 >> i)
    return x


@device
def greatest(x):
    """The maximum over the lanes, in every lane."""
    for i in range(5):
        other = cuda.shfl_xor_sync(ALL, x, 16 >> i)
        x = other if other > x else x
    return x


@device
def halve(acc, n, upper, lanes):
    """The first n of acc [2 n]: of the two halves one is kept, and its other sum added."""
    for i in range(n):
        give = acc[i] if upper else acc[n + i]
        keep = acc[n + i] if upper else acc[i]
        acc[i] = keep + cuda.shfl_xor_sync(ALL, give, lanes)
