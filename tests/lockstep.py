"""A GPU for tests, in Python: runs a kernel's source thread by thread, for small shapes.

Every thread is a greenlet. It runs until it meets others: at a barrier, a shuffle, a tensor core's
instruction. What would go unnoticed on a GPU most of the time fails here: threads of a warp that
meet at different instructions or not at all, an index outside its array, a wide access off its
alignment. Blocks and threads run in an order drawn at random, shared and local memory begin as
rubbish, so a missing barrier or a read before a write gives another result.

Rounding is the GPU's where NumPy's is: single operations of float32. `exp` and the like differ in
the last bits, as the reference does.
"""

from __future__ import annotations

import math
import random
import sys
import types as python_types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda as real_cuda
from numba.cuda import types as numba_types

from ds4d.gpu.kernels import ptx as real_ptx

if TYPE_CHECKING:
    import numpy.typing as npt

    from ds4d.gpu.jit import Kernel

    Array = npt.NDArray[Any]

WARP = 32
U4 = np.uint32


class Fault(AssertionError):
    """The kernel did what a GPU would not do, or not do twice alike."""


class Memory:
    """An array as kernels see it: an element by its index, no bounds but the array's."""

    def __init__(self, array: Array, name: str = "?") -> None:
        if not array.flags.c_contiguous:
            raise Fault(f"{name} is not contiguous")
        self.flat, self.name = array.reshape(-1), name
        self.bytes = self.flat.view(np.uint8)

    def _at(self, i: Any) -> int:
        if not 0 <= i < self.flat.size:
            raise Fault(f"{self.name}[{i}] of {self.flat.size}, line {_line()}")
        return int(i)

    def __getitem__(self, i: Any) -> Any:
        value = self.flat[self._at(i)]
        return value if self.flat.dtype.kind == "f" else int(value)

    def __setitem__(self, i: Any, value: Any) -> None:
        dtype = self.flat.dtype
        if dtype.kind in "iu":
            if isinstance(value, float | np.floating):
                raise Fault(f"{value} goes into {self.name}, of {dtype}, line {_line()}")
            value = _wrapped(int(value), dtype)
        self.flat[self._at(i)] = value

    def span(self, i: Any, n: int) -> Array:
        """`n` bytes from element `i` on, aligned to as many."""
        start = int(i) * self.flat.itemsize
        if start % n or not 0 <= start <= self.bytes.size - n:
            raise Fault(
                f"{n} bytes at {self.name}[{i}] of {self.flat.size} {self.flat.dtype},"
                f" line {_line()}"
            )
        return self.bytes[start : start + n]


class Shared(Memory):
    pass


def _line() -> int:
    """Of the kernel's source."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame.f_lineno


@dataclass(eq=False, slots=True)
class Thread:
    number: int
    block: tuple[int, int, int]
    size: int
    grid: tuple[int, int, int]
    shared: dict[Any, Memory]
    dynamic: Array
    runs: Any = None
    waits: tuple[Any, ...] | None = None  # ("block",) or ("warp", what, line, payload)
    answer: Any = None
    done: bool = False
    local: dict[Any, Array] = field(default_factory=dict)


def _me() -> Thread:
    return getcurrent().thread  # type: ignore[no-any-return]


def _meet(*what: Any) -> Any:
    me = _me()
    me.waits = what
    getcurrent().parent.switch()
    answer, me.answer = me.answer, None
    return answer


# -- the names that kernels use ----------------------------------------------------------------


@dataclass(frozen=True)
class _Three:
    x: int
    y: int
    z: int


class _Scalar:
    """A type of Numba's, called to convert. Whole numbers are Python's from then on: Numba's
    arithmetic on them has 64 bits whatever they came from, and kernels convert where it matters."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)

    def __call__(self, x: Any) -> Any:
        if self.dtype.kind == "f":
            return self.dtype.type(x)
        whole = math.trunc(float(x)) if isinstance(x, float | np.floating) else int(x)
        return _wrapped(whole, self.dtype)


def _wrapped(x: int, dtype: Any) -> int:
    size = 8 * dtype.itemsize
    x &= (1 << size) - 1
    return x - (1 << size) if dtype.kind == "i" and x >> (size - 1) else x


_TYPES = {
    getattr(numba_types, name): _Scalar(name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
                 "float32", "float64")
}  # fmt: skip


def _rubbish(n: int, dtype: Any) -> Array:
    return np.frombuffer(random.randbytes(n * dtype.itemsize), dtype).copy()


class _SharedArrays:
    @staticmethod
    def array(n: int, dtype: Any, alignment: int = 0) -> Memory:
        me, dtype = _me(), dtype.dtype
        if n == 0:
            return Shared(me.dynamic.view(dtype), "dynamic shared memory")
        frame = sys._getframe(1)
        key = (frame.f_code, frame.f_lasti)  # a place in the code is one array
        if key not in me.shared:
            me.shared[key] = Shared(_rubbish(n, dtype), f"shared array of line {frame.f_lineno}")
        return me.shared[key]


class _LocalArrays:
    @staticmethod
    def array(n: int, dtype: Any) -> Memory:
        return Memory(_rubbish(n, dtype.dtype), "local array")


class _Cuda:
    shared, local = _SharedArrays, _LocalArrays

    @property
    def threadIdx(self) -> _Three:
        return _Three(_me().number, 0, 0)

    @property
    def blockIdx(self) -> _Three:
        return _Three(*_me().block)

    @property
    def blockDim(self) -> _Three:
        return _Three(_me().size, 1, 1)

    @property
    def gridDim(self) -> _Three:
        return _Three(*_me().grid)

    @property
    def laneid(self) -> int:
        return _me().number % WARP

    @staticmethod
    def grid(_dimensions: int) -> int:
        me = _me()
        return me.block[0] * me.size + me.number

    @staticmethod
    def syncthreads() -> None:
        _meet("block", _line())

    @staticmethod
    def syncwarp(_mask: int = 0xFFFFFFFF) -> None:
        _meet("warp", "sync", _line(), None)

    @staticmethod
    def threadfence() -> None:
        pass

    @staticmethod
    def shfl_xor_sync(_mask: int, value: Any, other: int) -> Any:
        return _shuffle(value, (_me().number % WARP) ^ int(other))

    @staticmethod
    def shfl_sync(_mask: int, value: Any, source: int) -> Any:
        return _shuffle(value, int(source) % WARP)

    @staticmethod
    def shfl_up_sync(_mask: int, value: Any, by: int) -> Any:
        lane = _me().number % WARP
        return _shuffle(value, lane - int(by) if lane >= by else lane)

    @staticmethod
    def shfl_down_sync(_mask: int, value: Any, by: int) -> Any:
        lane = _me().number % WARP
        return _shuffle(value, lane + int(by) if lane + by < WARP else lane)

    @staticmethod
    def ballot_sync(_mask: int, predicate: Any) -> Any:
        values = _meet("warp", "values", _line(), bool(predicate))
        bits = sum(1 << i for i, v in enumerate(values) if v)
        return _wrapped(bits, np.dtype("i4"))  # Numba's is signed

    @staticmethod
    def popc(x: Any) -> int:
        return int(x).bit_count() if int(x) >= 0 else (int(x) & 0xFFFFFFFF).bit_count()

    @staticmethod
    def ffs(x: Any) -> int:
        x = int(x) & 0xFFFFFFFFFFFFFFFF
        return (x & -x).bit_length()

    @staticmethod
    def clz(x: Any) -> int:
        return 32 - (int(x) & 0xFFFFFFFF).bit_length()


def _shuffle(value: Any, source: int) -> Any:
    return _meet("warp", "values", _line(), value)[source]


class _Math:
    """`math` for float32: the result stays one."""

    pi, inf = math.pi, math.inf

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, {"fabs": "abs"}.get(name, name))
        return lambda *x: function(*x)


def _words(span: Array) -> tuple[Any, ...]:
    return tuple(span.view(U4).tolist())


class _Ptx:
    @staticmethod
    def load16(m: Memory, i: Any) -> tuple[Any, ...]:
        return _words(m.span(i, 16))

    @staticmethod
    def load8(m: Memory, i: Any) -> tuple[Any, ...]:
        return _words(m.span(i, 8))

    @staticmethod
    def stream16(m: Memory, i: Any) -> tuple[Any, ...]:
        if isinstance(m, Shared):
            raise Fault("stream16 reads global memory")
        return _words(m.span(i, 16))

    @staticmethod
    def stream8(m: Memory, i: Any) -> tuple[Any, ...]:
        if isinstance(m, Shared):
            raise Fault("stream8 reads global memory")
        return _words(m.span(i, 8))

    @staticmethod
    def store16(m: Memory, i: Any, *words: Any) -> None:
        m.span(i, 16).view(U4)[:] = [_u4(w) for w in words]

    @staticmethod
    def store8(m: Memory, i: Any, *words: Any) -> None:
        m.span(i, 8).view(U4)[:] = [_u4(w) for w in words]

    @staticmethod
    def store4(m: Memory, i: Any, word: Any) -> None:
        m.span(i, 4).view(U4)[0] = _u4(word)

    @staticmethod
    def load4(m: Memory, i: Any) -> tuple[Any, ...]:
        return _words(m.span(i, 4))

    @staticmethod
    def floats(m: Memory, i: Any) -> tuple[Any, ...]:
        return tuple(m.span(i, 16).view(np.float32))

    @staticmethod
    def keep(m: Memory, i: Any, *values: Any) -> None:
        m.span(i, 16).view(np.float32)[:] = values

    @staticmethod
    def arrive(m: Memory, i: Any) -> Any:
        before = m[i]
        m[i] = int(before) + 1
        return before

    @staticmethod
    def add(m: Memory, i: Any, x: Any) -> None:
        m[i] = m[i] + int(x)

    @staticmethod
    def fma(x: Any, y: Any, z: Any) -> Any:
        # Exact in double precision but for the last addition; twice rounded in one case of 2^29.
        return np.float32(np.float64(x) * np.float64(y) + np.float64(z))

    @staticmethod
    def rint(x: Any) -> Any:
        return int(np.rint(x)) if np.isfinite(x) else 0

    @staticmethod
    def dp4a(a: Any, b: Any, c: Any) -> Any:
        return int(c) + int(_s1(a) @ _s1(b))

    @staticmethod
    def prmt(a: Any, b: Any, selector: Any) -> Any:
        both = np.array([_u4(a), _u4(b)], U4).view(np.uint8)
        out = []
        for i in range(4):
            nibble = int(_u4(selector)) >> 4 * i & 15
            byte = int(both[nibble & 7])
            out.append(255 * (byte >> 7) if nibble & 8 else byte)
        return int(np.array(out, np.uint8).view(U4)[0])

    @staticmethod
    def mma_s8(*words: Any) -> tuple[Any, ...]:
        return _mma(words, np.int8)

    @staticmethod
    def mma_u8(*words: Any) -> tuple[Any, ...]:
        return _mma(words, np.uint8)

    @staticmethod
    def most(x: Any) -> Any:
        return max(_wrapped(int(v), np.dtype("i4")) for v in _meet("warp", "values", _line(), x))

    @staticmethod
    def as_u4(x: Any) -> Any:
        return int(np.float32(x).view(U4))

    @staticmethod
    def as_f4(x: Any) -> Any:
        return _u4(x).view(np.float32)

    @staticmethod
    def halves(x: Any) -> tuple[Any, ...]:
        return tuple(np.array([_u4(x)], U4).view(np.float16).astype(np.float32))

    @staticmethod
    def widen(x: Any) -> Any:
        return np.float32(np.uint16(x).view(np.float16))

    @staticmethod
    def narrow(x: Any) -> Any:
        return int(np.float16(x).view(np.uint16))

    @staticmethod
    def e4m3x4(x: Any) -> tuple[Any, ...]:
        from ds4d.model.rows import E4M3_VALUES

        return tuple(E4M3_VALUES[np.array([_u4(x)], U4).view(np.uint8)])

    @staticmethod
    def to_e4m3x2(a: Any, b: Any) -> Any:
        return _e4m3(a) | _e4m3(b) << 8

    @staticmethod
    def let_next_begin() -> None:
        pass

    @staticmethod
    def wait_for_front() -> None:
        pass


def _u4(x: Any) -> Any:
    return U4(int(x) & 0xFFFFFFFF)


def _s1(x: Any) -> Array:
    return np.array([_u4(x)], U4).view(np.int8).astype(np.int64)


def _mma(words: tuple[Any, ...], kind: Any) -> tuple[Any, ...]:
    lanes = _meet("warp", "values", _line(), words)
    if len(lanes) == WARP:  # the first lane to go on computes for all of them
        held = np.array([[int(w) & 0xFFFFFFFF for w in lane[:6]] for lane in lanes], U4)
        held_bytes = held.view(np.uint8).reshape(8, 4, 6, 4)  # g, t, operand, byte
        a = held_bytes[:, :, :4].reshape(8, 4, 2, 2, 4).transpose(3, 0, 2, 1, 4).reshape(16, 32)
        b = held_bytes[:, :, 4:].transpose(2, 1, 3, 0).reshape(32, 8)
        lanes.append(a.view(kind).astype(np.int64) @ b.view(np.int8).astype(np.int64))
    g, t = _me().number % WARP // 4, _me().number % 4
    c = lanes[WARP]
    mine = c[g, 2 * t], c[g, 2 * t + 1], c[g + 8, 2 * t], c[g + 8, 2 * t + 1]
    return tuple(int(x) + int(y) for x, y in zip(words[6:], mine, strict=True))


def _e4m3(x: Any) -> int:
    if np.isnan(x):
        return 0x7F
    from ds4d.model.rows import E4M3_VALUES

    sign = 0x80 if np.signbit(x) else 0
    m = min(abs(float(x)), 448.0)
    values = E4M3_VALUES[:127].astype(np.float64)
    high = int(np.searchsorted(values, m))
    if high == 0:
        return sign
    low = high - 1
    below, above = m - values[low], values[high] - m
    code = low if below < above or (below == above and low % 2 == 0) else high
    return sign | code


# -- a kernel's function with these names ------------------------------------------------------

_BY_IDENTITY: dict[int, Any] = {
    id(real_cuda): _Cuda(), id(real_ptx): _Ptx(), id(math): _Math(),
    **{id(t): f for t, f in _TYPES.items()},
    **{id(getattr(real_ptx, n)): getattr(_Ptx, n) for n in dir(_Ptx)
       if not n.startswith("_") and hasattr(real_ptx, n)},
}  # fmt: skip


class _Module:
    """A module of device functions."""

    def __init__(self, module: python_types.ModuleType, cache: dict[int, Any]) -> None:
        self._module, self._cache = module, cache

    def __getattr__(self, name: str) -> Any:
        return _stand_in(getattr(self._module, name), self._cache)


def _stand_in(value: Any, cache: dict[int, Any]) -> Any:
    try:
        if id(value) in _BY_IDENTITY:
            return _BY_IDENTITY[id(value)]
    except TypeError:
        return value
    if hasattr(value, "py_func"):
        return _rebuilt(value.py_func, cache)
    if isinstance(value, python_types.ModuleType) and value.__name__.startswith("ds4d.gpu"):
        return _Module(value, cache)
    if isinstance(value, np.ndarray):
        return Memory(np.ascontiguousarray(value), "a constant")
    return value


def _rebuilt(function: Any, cache: dict[int, Any]) -> Any:
    if id(function) in cache:
        return cache[id(function)]
    space: dict[str, Any] = {}
    out = python_types.FunctionType(
        function.__code__, space, function.__name__, function.__defaults__,
        tuple(python_types.CellType(_stand_in(c.cell_contents, cache))
              for c in function.__closure__ or ()),
    )  # fmt: skip
    cache[id(function)] = out
    names = _names(function.__code__)
    for name, value in function.__globals__.items():
        if name in names:
            space[name] = _stand_in(value, cache)
    return out


def _names(code: Any) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            found |= _names(constant)
    return found


# -- running -----------------------------------------------------------------------------------


def run(
    kernel: Kernel,
    grid: int | tuple[int, ...],
    block: int,
    *arguments: Any,
    shared: int = 0,
    seed: int = 0,
) -> None:
    """Run every block. Arrays among `arguments` are changed in place and must have the dtypes of
    the signature."""
    if isinstance(grid, int):
        grid = (grid,)
    dimensions = (*grid, 1, 1)[:3]
    assert kernel.block in (None, block), f"{kernel} is launched with {block} threads"
    given = []
    for (name, letters), a in zip(kernel.parameters, arguments, strict=True):
        if letters.endswith("*"):
            wanted = np.dtype(letters.rstrip("*"))
            if a.dtype != wanted:
                raise Fault(f"{name} is {a.dtype}, expected {wanted}")
            given.append(Memory(a, name))
        else:
            given.append(np.dtype(letters).type(a) if letters[0] == "f" else int(a))
    function = _rebuilt(kernel.function, {})
    chance = random.Random(seed)
    blocks = [
        (x, y, z)
        for z in range(dimensions[2])
        for y in range(dimensions[1])
        for x in range(dimensions[0])
    ]
    chance.shuffle(blocks)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
        for each in blocks:
            _run_block(function, given, each, block, dimensions, shared, chance)


def _run_block(
    function: Any,
    given: list[Any],
    block: tuple[int, int, int],
    size: int,
    grid: tuple[int, ...],
    shared: int,
    chance: random.Random,
) -> None:
    arrays: dict[Any, Memory] = {}
    dynamic = _rubbish(shared, np.dtype(np.uint8))
    threads = [Thread(i, block, size, grid, arrays, dynamic) for i in range(size)]  # type: ignore[arg-type]

    def start(thread: Thread) -> Any:
        def body() -> None:
            # A greenlet has a context of its own, and NumPy keeps this there.
            with np.errstate(over="ignore", divide="ignore", invalid="ignore", under="ignore"):
                function(*given)
            thread.done = True

        g = greenlet(body)
        g.thread = thread
        return g

    for t in threads:
        t.runs = start(t)
    ready = list(threads)
    while ready:
        chance.shuffle(ready)
        for t in ready:
            t.waits = None
            t.runs.switch()
        ready = _released(threads)
    late = [t for t in threads if not t.done]
    if late:
        where = {(t.waits[0], t.waits[1] if t.waits[0] == "block" else t.waits[2]) for t in late
                 if t.waits}  # fmt: skip
        raise Fault(f"block {block}: {len(late)} threads wait for ever, at {sorted(where)}")


def _released(threads: list[Thread]) -> list[Thread]:
    """Warps that have met, or all threads at the block's barrier."""
    ready: list[Thread] = []
    for first in range(0, len(threads), WARP):
        warp = threads[first : first + WARP]
        live = [t for t in warp if not t.done]
        if not live or any(t.waits is None or t.waits[0] != "warp" for t in live):
            continue
        places = {t.waits[1:3] for t in live}  # type: ignore[index]
        if len(places) > 1:
            raise Fault(f"threads of a warp meet at different places: {sorted(places)}")
        if len(live) < min(WARP, len(warp)):
            raise Fault(f"{len(warp) - len(live)} threads of a warp have ended before {places}")
        values = [t.waits[3] for t in warp]  # type: ignore[index]
        for t in live:
            t.answer = values
        ready += live
    if ready:
        return ready
    live = [t for t in threads if not t.done]
    if live and all(t.waits is not None and t.waits[0] == "block" for t in live):
        if len(live) < len(threads):
            raise Fault("threads have ended before a barrier of their block")
        places = {t.waits[1] for t in live}  # type: ignore[index]
        if len(places) > 1:
            raise Fault(f"threads of a block meet at different barriers: lines {sorted(places)}")
        return live
    return []
