"""Instructions that Numba has no name for: wide loads, tensor cores, conversions, one rounding.

Pointers and shared arrays are named by themselves and an index of elements: `load16(x, i)` reads
the 16 bytes that begin at x[i], which must lie at a multiple of 16. What each does on a CPU stands
in `tests/lockstep.py`, under the same names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic
from numba.cuda.types import float32, int32, int64, uint16, uint32, void

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
LLVM = {float32: F32, int32: I32, uint32: I32, uint16: I16}


# -- how an instruction becomes a function ---------------------------------------------------


def _asm(
    name: str, text: str, out: Any, arguments: Sequence[Any], constraints: str, *, effect: bool
) -> Any:
    """`text` with `arguments` by value. `out`: one type, (type, n) for a tuple, or void."""
    kinds = ", ".join(f"a{i}" for i in range(len(arguments)))
    result = types.UniTuple(*out) if isinstance(out, tuple) else out

    def typed(_typing: Any, *given: Any) -> Any:
        def code(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            kinds = [LLVM.get(a, I64) for a in arguments]
            return _call(context, builder, text, constraints, out, kinds, values, effect=effect)

        return result(*arguments), code

    # Numba looks at the number of parameters, so the function needs as many by name.
    space: dict[str, Any] = {"typed": typed}
    exec(f"def {name}(typing{', ' if kinds else ''}{kinds}): return typed(typing)", space)
    return intrinsic(space[name])


def _call(
    context: Any,
    builder: Any,
    text: str,
    constraints: str,
    out: Any,
    kinds: Sequence[Any],
    values: Sequence[Any],
    *,
    effect: bool,
) -> Any:
    if out is void:
        function = ir.FunctionType(ir.VoidType(), kinds)
        builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), values)
        return context.get_dummy_value()
    if not isinstance(out, tuple):
        function = ir.FunctionType(LLVM[out], kinds)
        return builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), values)
    kind, n = LLVM[out[0]], out[1]
    struct = ir.LiteralStructType([kind] * n)
    function = ir.FunctionType(struct, kinds)
    found = builder.call(ir.InlineAsm(function, text, constraints, side_effect=effect), values)
    result = ir.Constant(ir.ArrayType(kind, n), ir.Undefined)
    for i in range(n):
        result = builder.insert_value(result, builder.extract_value(found, i), i)
    return result


def _place(context: Any, builder: Any, kind: Any, value: Any, index: Any) -> Any:
    """Pointer to an element of a pointer's or a one-dimensional array's."""
    data = value
    if not isinstance(kind, types.CPointer):
        data = context.make_array(kind)(context, builder, value).data
    return builder.gep(data, [index])


def _of_memory(n_words: int, text: str | None) -> Callable[..., Any]:
    """A load of n words: by `text`, or where it is None as LLVM sees fit for the address space."""

    def load(_typing: Any, array: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = _place(context, builder, signature.args[0], *values)
            if text is not None:
                constraints = ",".join(["=r"] * n_words) + ",l"
                address = builder.ptrtoint(place, I64)
                return _call(context, builder, text, constraints, (uint32, n_words), [I64],
                             [address], effect=True)  # fmt: skip
            vector = builder.load(builder.bitcast(place, ir.VectorType(I32, n_words).as_pointer()))
            vector.align = 4 * n_words
            result = ir.Constant(ir.ArrayType(I32, n_words), ir.Undefined)
            for i in range(n_words):
                word = builder.extract_element(vector, ir.Constant(I32, i))
                result = builder.insert_value(result, word, i)
            return result

        return types.UniTuple(uint32, n_words)(array, int64), code

    return load


def _to_memory(n_words: int) -> Callable[..., Any]:
    def store(array: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            place = _place(context, builder, signature.args[0], *values[:2])
            vector = ir.Constant(ir.VectorType(I32, n_words), ir.Undefined)
            for i in range(n_words):
                vector = builder.insert_element(vector, values[2 + i], ir.Constant(I32, i))
            to = builder.bitcast(place, ir.VectorType(I32, n_words).as_pointer())
            builder.store(vector, to).align = 4 * n_words
            return context.get_dummy_value()

        return void(array, int64, *[uint32] * n_words), code

    return store


# -- memory ------------------------------------------------------------------------------------

_load16, _load8 = _of_memory(4, None), _of_memory(2, None)
_stream16 = _of_memory(4, "ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4];")
_stream8 = _of_memory(2, "ld.global.nc.L1::no_allocate.v2.u32 {$0,$1}, [$2];")
_store16, _store8, _store4 = _to_memory(4), _to_memory(2), _to_memory(1)


@intrinsic
def load16(typing, array, index):
    """(u4, u4, u4, u4) at array[index], of global or shared memory."""
    return _load16(typing, array, index)


@intrinsic
def load8(typing, array, index):
    """(u4, u4) at array[index]."""
    return _load8(typing, array, index)


@intrinsic
def stream16(typing, array, index):
    """(u4, u4, u4, u4) of global memory that no kernel writes and that is read once: weights."""
    return _stream16(typing, array, index)


@intrinsic
def stream8(typing, array, index):
    """(u4, u4), as stream16."""
    return _stream8(typing, array, index)


@intrinsic
def store16(typing, array, index, a, b, c, d):
    return _store16(array)


@intrinsic
def store8(typing, array, index, a, b):
    return _store8(array)


@intrinsic
def arrive(typing, counter, index):
    """Add one to counter[index] (u4) and return what was there. What a thread wrote before is seen
    by the one that arrives last; a block puts `cuda.syncthreads()` in front."""

    def code(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], *values)
        text = "atom.add.acq_rel.gpu.global.u32 $0, [$1], 1;"
        address = builder.ptrtoint(place, I64)
        return _call(
            context, builder, text, "=r,l,~{memory}", uint32, [I64], [address], effect=True
        )

    return uint32(counter, int64), code


@intrinsic
def store4(typing, array, index, a):
    """A word at array[index], which lies at a multiple of 4."""
    return _store4(array)


_load4 = _of_memory(1, None)


@intrinsic
def load4(typing, array, index):
    """(u4,) at array[index], which lies at a multiple of 4."""
    return _load4(typing, array, index)


@intrinsic
def floats(typing, array, index):
    """(f4, f4, f4, f4) at array[index], as load16."""

    def code(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], *values)
        vector = builder.load(builder.bitcast(place, ir.VectorType(F32, 4).as_pointer()))
        vector.align = 16
        result = ir.Constant(ir.ArrayType(F32, 4), ir.Undefined)
        for i in range(4):
            each = builder.extract_element(vector, ir.Constant(I32, i))
            result = builder.insert_value(result, each, i)
        return result

    return types.UniTuple(float32, 4)(array, int64), code


@intrinsic
def keep(typing, array, index, a, b, c, d):
    """Four floats to array[index], as store16."""

    def code(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], *values[:2])
        vector = ir.Constant(ir.VectorType(F32, 4), ir.Undefined)
        for i in range(4):
            vector = builder.insert_element(vector, values[2 + i], ir.Constant(I32, i))
        to = builder.bitcast(place, ir.VectorType(F32, 4).as_pointer())
        builder.store(vector, to).align = 16
        return context.get_dummy_value()

    return void(array, int64, *[float32] * 4), code


@intrinsic
def add(typing, array, index, x):
    """array[index] += x, whole, of 32 or 64 bits in global or shared memory, whoever else adds."""

    def code(context, builder, signature, values):
        place = _place(context, builder, signature.args[0], *values[:2])
        builder.atomic_rmw("add", place, values[2], "monotonic")
        return context.get_dummy_value()

    return void(array, int64, array.dtype), code


# -- arithmetic --------------------------------------------------------------------------------

fma = _asm("fma", "fma.rn.f32 $0, $1, $2, $3;", float32, [float32] * 3, "=f,f,f,f", effect=False)
"""x * y + z, rounded once."""

rint = _asm("rint", "cvt.rni.s32.f32 $0, $1;", int32, [float32], "=r,f", effect=False)
"""To the nearest integer, ties to even."""

dp4a = _asm("dp4a", "dp4a.s32.s32 $0, $1, $2, $3;", int32, [int32] * 3, "=r,r,r,r", effect=False)
"""c + the products of four signed bytes of a and b."""

prmt = _asm("prmt", "prmt.b32 $0, $1, $2, $3;", uint32, [uint32] * 3, "=r,r,r,r", effect=False)
"""Four bytes out of the eight of (a, b), by the low three bits of the selector's low nibbles."""

mma_s8 = _asm(
    "mma_s8",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    (int32, 4),
    [uint32] * 6 + [int32] * 4,
    "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
    effect=True,
)
"""c + A B of a warp, int8 to int32: A [16, 32], B [32, 8]. With lane = 4 g + t, a lane holds

    a0 A[g, 4t..]   a1 A[g + 8, 4t..]   a2 A[g, 16 + 4t..]   a3 A[g + 8, 16 + 4t..]
    b0 B[4t.., g]   b1 B[16 + 4t.., g]                       four bytes each
    c0, c1 C[g, 2t], C[g, 2t + 1]        c2, c3 C[g + 8, 2t], C[g + 8, 2t + 1]

The sum over k is exact, so both operands may order k as they like, if alike."""

mma_u8 = _asm(
    "mma_u8",
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
    "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    (int32, 4),
    [uint32] * 6 + [int32] * 4,
    "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
    effect=True,
)
"""As mma_s8, with the bytes of A unsigned."""

most = _asm("most", "redux.sync.max.s32 $0, $1, 0xffffffff;", int32, [int32], "=r,r", effect=True)
"""The greatest int32 of a warp, in every lane: one instruction. All lanes have to be there."""

# -- conversions -------------------------------------------------------------------------------

as_u4 = _asm("as_u4", "mov.b32 $0, $1;", uint32, [float32], "=r,f", effect=False)
as_f4 = _asm("as_f4", "mov.b32 $0, $1;", float32, [uint32], "=f,r", effect=False)

halves = _asm(
    "halves",
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    (float32, 2),
    [uint32],
    "=f,=f,r",
    effect=False,
)
"""The two F16 of a word, the lower one first."""

widen = _asm("widen", "cvt.f32.f16 $0, $1;", float32, [uint16], "=f,h", effect=False)
narrow = _asm("narrow", "cvt.rn.f16.f32 $0, $1;", uint16, [float32], "=h,f", effect=False)
"""To the bits of an F16, ties to even."""

e4m3x4 = _asm(
    "e4m3x4",
    "{ .reg .b16 a, b, c, d; .reg .b32 lo, hi; mov.b32 {a, b}, $4; "
    "cvt.rn.f16x2.e4m3x2 lo, a; cvt.rn.f16x2.e4m3x2 hi, b; "
    "mov.b32 {a, c}, lo; cvt.f32.f16 $0, a; cvt.f32.f16 $1, c; "
    "mov.b32 {b, d}, hi; cvt.f32.f16 $2, b; cvt.f32.f16 $3, d; }",
    (float32, 4),
    [uint32],
    "=f,=f,=f,=f,r",
    effect=False,
)
"""Values of four e4m3 codes, the lowest byte first."""

to_e4m3x2 = _asm(
    "to_e4m3x2", "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", uint16, [float32] * 2, "=h,f,f",
    effect=False,
)  # fmt: skip
"""Codes of two floats, the first in the lower byte; ties to even, beyond 448 to 448."""

# -- between kernels ---------------------------------------------------------------------------

let_next_begin = _asm(
    "let_next_begin", "griddepcontrol.launch_dependents;", void, [], "~{memory}", effect=True
)
"""The kernel behind may start, if it was launched `dependent`: it sees nothing of ours yet."""

wait_for_front = _asm("wait_for_front", "griddepcontrol.wait;", void, [], "~{memory}", effect=True)
"""Until the kernel in front has ended and its writes are seen. Weights may be loaded before."""
