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
