"""Vectors of sixteen lanes, raw pointers and a few instructions that Numba's language lacks.

    f32x16, i32x16, i8x64   values in registers; + - * / on the first, + on the second
    i1(t, k), f4(t, k) ...  word k of a table as a pointer; p[i] reads and writes
    fma, rint, ...          one LLVM instruction each, on a scalar or on every lane

Sixteen lanes are the layout of packed weights and of every blocked sum, whatever the machine's
width is: LLVM splits a vector into what the processor has, so the order of additions, and with it
every bit, is the same with 128, 256 or 512-bit registers. Nothing here is contracted or reordered:
a fused multiply-add happens where `fma` is written.

`dot4` is the one operation with two code paths: the VNNI instruction where the processor has it,
else widening multiplications. Both are exact, hence equal. `PORTABLE` forces the second.
"""

import operator

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, register_model

LANES = 16
WORDS_MAX = 24  # arguments of a kernel
PORTABLE = False

BYTE, SHORT, INT, LONG = (ir.IntType(n) for n in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()


class Vector(types.Type):
    """A Numba type whose values are one LLVM vector."""

    def __init__(self, name, element, count):
        super().__init__(name=name)
        self.llvm = ir.VectorType(element, count)


f32x16 = Vector("f32x16", FLOAT, LANES)
i32x16 = Vector("i32x16", INT, LANES)
i8x64 = Vector("i8x64", BYTE, 4 * LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


def _operator(op, lowerings):
    """Let Numba's `op` work on pairs of vectors of one type."""
    name = op.__name__

    @infer_global(op)
    class _Template(ConcreteTemplate):
        key = op
        cases = tuple(signature(t, t, t) for t in lowerings)

    for kind, instruction in lowerings.items():

        def lower(context, builder, sig, args, instruction=instruction):
            return getattr(builder, instruction)(*args)

        lower.__name__ = f"vector_{name}"
        lower_builtin(op, kind, kind)(lower)


_operator(operator.add, {f32x16: "fadd", i32x16: "add"})
_operator(operator.sub, {f32x16: "fsub", i32x16: "sub"})
_operator(operator.mul, {f32x16: "fmul"})
_operator(operator.truediv, {f32x16: "fdiv"})


# -- helpers of the code generators -------------------------------------------------------------


def _call(builder, name, result, *args):
    """Call an LLVM intrinsic or an external C function by name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    module = builder.module
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return builder.call(function, args)


def _suffix(kind):
    return "f32" if kind == FLOAT else f"v{kind.count}f32"


def _load(builder, pointer, kind, align):
    value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
    value.align = align
    return value


def _splat(builder, value, count):
    kind = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, count), [0] * count))


def _pick(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT, len(lanes)), list(lanes)))


def _constant(kind, value):
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


# -- pointers -----------------------------------------------------------------------------------


def _pointer(element):
    kind = types.CPointer(element)

    @intrinsic
    def take(typing, table, index):
        """Word `index` of a table of words as a pointer to `element`."""

        def code(context, builder, sig, values):
            table, i = values
            address = builder.load(builder.gep(table, [i]))
            return builder.inttoptr(address, context.get_value_type(kind))

        return kind(types.CPointer(types.int64), types.int64), code

    return take


i1, i4, f4 = _pointer(types.int8), _pointer(types.int32), _pointer(types.float32)


def _cast(element):
    kind = types.CPointer(element)

    @intrinsic
    def cast(typing, value):
        """A pointer of another type, or an address, as a pointer to `element`."""

        def code(context, builder, sig, values):
            wanted = context.get_value_type(kind)
            if isinstance(value, types.Integer):
                return builder.inttoptr(values[0], wanted)
            return builder.bitcast(values[0], wanted)

        return kind(value), code

    return cast


as_i1 = _cast(types.int8)
as_i4 = _cast(types.int32)
as_u1 = _cast(types.uint8)
as_u2 = _cast(types.uint16)
as_f4 = _cast(types.float32)
as_i8 = _cast(types.int64)


@intrinsic
def address_of(typing, pointer):
    """A pointer as a number."""

    def code(context, builder, sig, values):
        return builder.ptrtoint(values[0], LONG)

    return types.int64(pointer), code


@intrinsic
def at(typing, pointer, offset):
    """The pointer `offset` elements further."""

    def code(context, builder, sig, values):
        return builder.gep(values[0], [values[1]])

    return pointer(pointer, types.int64), code


def scratch(n):
    """A function that gives its caller [n] f32 of stack, 64-byte aligned, until it returns. Each
    call in the source is its own room."""

    @intrinsic
    def room(typing):
        def code(context, builder, sig, values):
            with builder.goto_entry_block():
                made = builder.alloca(FLOAT, size=INT(n))
            made.align = 64
            return made

        return types.CPointer(types.float32)(), code

    return room


# -- loads and stores ---------------------------------------------------------------------------


@intrinsic
def load(typing, pointer, i):
    """f32x16 of p[i : i + 16] of an f4, or of a u2 of halves, widened."""
    halves = pointer.dtype == types.uint16

    def code(context, builder, sig, values):
        start = builder.gep(values[0], [values[1]])
        if not halves:
            return _load(builder, start, f32x16.llvm, 4)
        return builder.fpext(_load(builder, start, ir.VectorType(HALF, LANES), 2), f32x16.llvm)

    return f32x16(pointer, types.int64), code


@intrinsic
def half_at(typing, pointer, i):
    """The float32 of the half in bytes i and i + 1."""

    def code(context, builder, sig, values):
        start = builder.gep(values[0], [values[1]])
        return builder.fpext(_load(builder, start, HALF, 1), FLOAT)

    return types.float32(pointer, types.int64), code


@intrinsic
def load64(typing, pointer, i):
    """i8x64 of p[i : i + 64]."""

    def code(context, builder, sig, values):
        return _load(builder, builder.gep(values[0], [values[1]]), i8x64.llvm, 1)

    return i8x64(pointer, types.int64), code


@intrinsic
def load4(typing, pointer, i):
    """i8x64 of p[i : i + 4], repeated in every lane of four."""

    def code(context, builder, sig, values):
        four = _load(builder, builder.gep(values[0], [values[1]]), INT, 1)
        return builder.bitcast(_splat(builder, four, LANES), i8x64.llvm)

    return i8x64(pointer, types.int64), code


@intrinsic
def store(typing, pointer, i, value):
    """p[i : i + 16] = value, f32."""

    def code(context, builder, sig, values):
        start = builder.gep(values[0], [values[1]])
        target = builder.bitcast(start, f32x16.llvm.as_pointer())
        builder.store(values[2], target, align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, f32x16), code


@intrinsic
def store_bytes(typing, pointer, i, value):
    """p[i : i + 16] = value, whole numbers within int8."""

    def code(context, builder, sig, values):
        start = builder.gep(values[0], [values[1]])
        narrow = ir.VectorType(BYTE, LANES)
        whole = builder.trunc(builder.fptosi(values[2], i32x16.llvm), narrow)
        builder.store(whole, builder.bitcast(start, narrow.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, f32x16), code


@intrinsic
def load_ints(typing, pointer, i):
    """i32x16 of p[i : i + 16] of an i4."""

    def code(context, builder, sig, values):
        return _load(builder, builder.gep(values[0], [values[1]]), i32x16.llvm, 4)

    return i32x16(pointer, types.int64), code


@intrinsic
def load_e4m3(typing, pointer, i):
    """f32x16 of sixteen e4m3 codes, over 256: as halves their exponent is short by 8."""

    def code(context, builder, sig, values):
        shorts = ir.VectorType(SHORT, LANES)
        codes = _load(builder, builder.gep(values[0], [values[1]]), ir.VectorType(BYTE, LANES), 1)
        wide = builder.sext(codes, shorts)  # the sign is in bits 7 to 15
        rest = builder.and_(builder.shl(wide, _constant(shorts, 7)), _constant(shorts, 0x3F80))
        half = builder.or_(rest, builder.and_(wide, _constant(shorts, -0x8000)))
        return builder.fpext(builder.bitcast(half, ir.VectorType(HALF, LANES)), f32x16.llvm)

    return f32x16(pointer, types.int64), code


@intrinsic
def spread_fp4(typing, source, i, target):
    """target[0 : 32] = 16 + twice the values of the 32 FP4 codes in source[i : i + 16], the codes
    of low nibbles first, then those of high ones.

    Twice a magnitude is 0 1 2 3 4 6 8 12: the code, +1 from 5, +1 more from 6, +3 more from 7.
    """

    def code(context, builder, sig, values):
        block = ir.VectorType(BYTE, LANES)
        packed = _load(builder, builder.gep(values[0], [values[1]]), block, 1)

        def c(value):
            return _constant(block, value)

        for part, nibbles in enumerate((builder.and_(packed, c(15)), builder.lshr(packed, c(4)))):
            v = builder.and_(nibbles, c(7))
            m = v
            for bound, step in ((5, 1), (6, 1), (7, 3)):
                over = builder.icmp_unsigned(">=", v, c(bound))
                m = builder.add(m, builder.select(over, c(step), c(0)))
            negative = builder.icmp_unsigned(">=", nibbles, c(8))
            signed = builder.select(negative, builder.sub(c(16), m), builder.add(c(16), m))
            start = builder.gep(values[2], [LONG(LANES * part)])
            builder.store(signed, builder.bitcast(start, block.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(source, types.int64, target), code


@intrinsic
def splat(typing, value):
    """A float32 or int32 in every lane."""
    kind = f32x16 if value == types.float32 else i32x16

    def code(context, builder, sig, values):
        return _splat(builder, values[0], LANES)

    return kind(value), code


# -- arithmetic ---------------------------------------------------------------------------------


def _elementwise(name, n, doc):
    """One LLVM instruction on float32 or f32x16."""

    def typed(*kinds):
        def code(context, builder, sig, values):
            kind = values[0].type
            return _call(builder, f"llvm.{name}.{_suffix(kind)}", kind, *values)

        return kinds[0](*kinds), code

    if n == 1:

        @intrinsic
        def one(typing, a):
            return typed(a)

        made = one
    elif n == 2:

        @intrinsic
        def two(typing, a, b):
            return typed(a, b)

        made = two
    else:

        @intrinsic
        def three(typing, a, b, c):
            return typed(a, b, c)

        made = three
    made.__doc__ = doc
    return made


fma = _elementwise("fma", 3, "a * b + c, rounded once.")
rint = _elementwise("rint", 1, "The nearest integer, ties to even.")
sqrt = _elementwise("sqrt", 1, "Square root, correctly rounded.")
magnitude = _elementwise("fabs", 1, "|a|.")


def _choice(predicate, doc):
    @intrinsic
    def choose(typing, a, b):
        def code(context, builder, sig, values):
            x, y = values
            return builder.select(builder.fcmp_ordered(predicate, y, x), y, x)

        return a(a, b), code

    choose.__doc__ = doc
    return choose


greater = _choice(">", "b where it is greater, else a; so a NaN in `a` stays.")
lesser = _choice("<", "b where it is less, else a; so a NaN in `a` stays.")


@intrinsic
def crest(typing, a, b):
    """The greater of |a| and |b| by lane, compared as integers, so that a NaN wins."""

    def code(context, builder, sig, values):
        x, y = (_absolute_bits(builder, v) for v in values)
        return builder.bitcast(builder.select(builder.icmp_signed(">", x, y), x, y), f32x16.llvm)

    return f32x16(f32x16, f32x16), code


@intrinsic
def peak(typing, a):
    """The greatest |lane|, or NaN if there is one."""

    def code(context, builder, sig, values):
        x = _absolute_bits(builder, values[0])
        return builder.bitcast(_call(builder, "llvm.vector.reduce.smax.v16i32", INT, x), FLOAT)

    return types.float32(f32x16), code


def _absolute_bits(builder, value):
    return builder.and_(builder.bitcast(value, i32x16.llvm), _constant(i32x16.llvm, 0x7FFFFFFF))


@intrinsic
def to_float(typing, a):
    """int32 to float32, a scalar or every lane."""
    kind = f32x16 if a == i32x16 else types.float32

    def code(context, builder, sig, values):
        return builder.sitofp(values[0], context.get_value_type(sig.return_type))

    return kind(a), code


@intrinsic
def bits(typing, a):
    """The int32 with the bits of a float32."""

    def code(context, builder, sig, values):
        return builder.bitcast(values[0], INT)

    return types.int32(types.float32), code


@intrinsic
def from_bits(typing, a):
    """The float32 with the bits of an int32."""

    def code(context, builder, sig, values):
        return builder.bitcast(values[0], FLOAT)

    return types.float32(types.int32), code


@intrinsic
def widen(typing, a):
    """The float32 of a half, given as the bits of a uint16."""

    def code(context, builder, sig, values):
        return builder.fpext(builder.bitcast(values[0], HALF), FLOAT)

    return types.float32(types.uint16), code


@intrinsic
def narrow(typing, a):
    """The bits of the half nearest to a float32, ties to even."""

    def code(context, builder, sig, values):
        return builder.bitcast(builder.fptrunc(values[0], HALF), SHORT)

    return types.uint16(types.float32), code


_LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
# exp(r) on |r| <= ln 2 / 2: minimax coefficients of r^2 .. r^7, lowest last.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits


@intrinsic
def exp(typing, a):
    """e^a on a scalar or on every lane, within 2 ulp; clamped to [-87, 88], NaN stays NaN.

    a = n ln 2 + r, a polynomial in r, times 2^n by adding n to the exponent field.
    """

    def code(context, builder, sig, values):
        x = values[0]
        kind = x.type
        integers = ir.VectorType(INT, kind.count) if kind != FLOAT else INT

        def c(value):
            return _constant(kind, float(np.float32(value)))

        def fused(p, q, r):
            return _call(builder, f"llvm.fma.{_suffix(kind)}", kind, p, q, r)

        for predicate, bound in (("<", -87.0), (">", 88.0)):
            x = builder.select(builder.fcmp_ordered(predicate, x, c(bound)), c(bound), x)
        shifted = fused(x, c(_LOG2E), c(_ROUND))
        n = builder.fsub(shifted, c(_ROUND))
        r = fused(n, c(-_LN2_HIGH), x)
        r = fused(n, c(-_LN2_LOW), r)
        p = c(_EXP[0])
        for coefficient in _EXP[1:]:
            p = fused(p, r, c(coefficient))
        p = builder.fadd(fused(p, builder.fmul(r, r), r), c(1.0))
        field = builder.shl(builder.bitcast(shifted, integers), _constant(integers, 23))
        return builder.bitcast(builder.add(builder.bitcast(p, integers), field), kind)

    return a(a), code


def _exchange(distance):
    @intrinsic
    def exchange(typing, a):
        """Lane i of the result is lane i xor `distance`."""

        def code(context, builder, sig, values):
            return _pick(builder, values[0], values[0], [i ^ distance for i in range(LANES)])

        return f32x16(f32x16), code

    return exchange


exchange_1, exchange_2, exchange_4, exchange_8 = (_exchange(n) for n in (1, 2, 4, 8))


@intrinsic
def total(typing, a):
    """Sum of the lanes of an f32x16: halves onto halves, lane i + lane i + 8, then 4, 2, 1."""

    def code(context, builder, sig, values):
        x, n = values[0], LANES
        while n > 1:
            n //= 2
            x = builder.fadd(_pick(builder, x, x, range(n)), _pick(builder, x, x, range(n, 2 * n)))
        return builder.extract_element(x, INT(0))

    return types.float32(f32x16), code


@intrinsic
def totals(typing, a, b, c, d):
    """`total` of each of four, with the same additions, in lanes 0 to 3; the rest repeats them."""

    def code(context, builder, sig, values):
        def fold(x, y, n):
            """Runs of n lanes of x and y, each run's halves added."""
            runs = [range(start, start + n // 2) for start in range(0, 2 * LANES, n)]
            low = [i for run in runs for i in run]
            return builder.fadd(
                _pick(builder, x, y, low), _pick(builder, x, y, [i + n // 2 for i in low])
            )

        x, y = fold(*values[:2], 16), fold(*values[2:], 16)
        x = fold(x, y, 8)
        x = fold(x, x, 4)
        return fold(x, x, 2)

    return f32x16(*[f32x16] * 4), code


@intrinsic
def dot4(typing, acc, u, s):
    """acc + in each lane the dot product of four unsigned bytes of `u` and four signed of `s`."""

    def code(context, builder, sig, values):
        return _dot4(builder, *values)

    return i32x16(i32x16, i8x64, i8x64), code


def vnni_bits():
    """The widest vpdpbusd that this processor has, in bits: 512, 256, or 0 for none, also where
    Numba was told to compile for another processor."""
    if PORTABLE or numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        return 0
    have = llvm.get_host_cpu_features()
    if have.get("avx512vnni") and have.get("avx512f"):
        return 512
    if (have.get("avx512vnni") and have.get("avx512vl")) or have.get("avxvnni"):
        return 256
    return 0


def _dot4(builder, acc, u, s):
    width = vnni_bits()
    if width == 0:
        return _dot4_portable(builder, acc, u, s)
    parts, lanes = 512 // width, width // 32
    bytes_type = ir.VectorType(BYTE, 4 * lanes)
    kind = ir.VectorType(INT, lanes)
    # LLVM 22 gave the two byte operands their own type; before, all three were vectors of int32.
    operand = bytes_type if llvm.llvm_version_info[0] >= 22 else kind
    sums = []
    for part in range(parts):
        some = range(4 * lanes * part, 4 * lanes * (part + 1))
        a = _pick(builder, acc, acc, range(lanes * part, lanes * (part + 1)))
        b, c = (builder.bitcast(_pick(builder, v, v, some), operand) for v in (u, s))
        sums.append(_call(builder, f"llvm.x86.avx512.vpdpbusd.{width}", kind, a, b, c))
    return sums[0] if parts == 1 else _pick(builder, sums[0], sums[1], range(LANES))


def _dot4_portable(builder, acc, u, s):
    """Bytes widened to 16 bits; pairs of products added as int32, which x86 has one instruction
    for, then pairs of pairs."""
    shorts, pairs = ir.VectorType(SHORT, 4 * LANES), ir.VectorType(INT, 2 * LANES)
    wide = builder.zext(u, shorts), builder.sext(s, shorts)
    even, odd = (
        builder.mul(
            *(builder.sext(_pick(builder, v, v, range(k, 4 * LANES, 2)), pairs) for v in wide)
        )
        for k in (0, 1)
    )
    two = builder.add(even, odd)
    even, odd = (_pick(builder, two, two, range(k, 2 * LANES, 2)) for k in (0, 1))
    return builder.add(acc, builder.add(even, odd))


# -- between threads ----------------------------------------------------------------------------


@intrinsic
def call_tile(typing, address, w, n_out, n_in, act, rows, n_rows, out, stride):
    """Call the product tile compiled at `address`; see `product.py` for its arguments."""

    def code(context, builder, sig, values):
        pointers = (BYTE, None, None, LONG, LONG, None, FLOAT, None)
        kinds = [p.as_pointer() if p else LONG for p in pointers]
        function = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        given = [
            builder.inttoptr(v, k) if v.type == LONG and k != LONG else v
            for v, k in zip(values[1:], kinds, strict=True)
        ]
        builder.call(function, given)
        return context.get_dummy_value()

    word = types.int64
    table, floats = types.CPointer(types.int64), types.CPointer(types.float32)
    return types.void(word, word, word, word, table, table, word, floats, word), code


@intrinsic
def call_kernel(typing, address, words, n, tid, n_threads):
    """Call the compiled kernel at `address` with tid, n_threads and the `n` words at `words`."""

    def code(context, builder, sig, values):
        target, table, n, *first = values
        table = builder.inttoptr(table, LONG.as_pointer())
        end = builder.append_basic_block("called")
        choice = builder.switch(n, end)
        for count in range(1, WORDS_MAX + 1):
            block = builder.append_basic_block(f"words_{count}")
            choice.add_case(LONG(count), block)
            builder.position_at_end(block)
            kind = ir.FunctionType(ir.VoidType(), [LONG] * (2 + count))
            given = [builder.load(builder.gep(table, [LONG(i)])) for i in range(count)]
            builder.call(builder.inttoptr(target, kind.as_pointer()), [*first, *given])
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, word, word, word, word), code


@intrinsic
def atomic_add(typing, pointer, i, value):
    """p[i] += value as one indivisible step; the value before."""

    def code(context, builder, sig, values):
        where = builder.gep(values[0], [values[1]])
        return builder.atomic_rmw("add", where, values[2], "acq_rel")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), code


@intrinsic
def atomic_load(typing, pointer, i):
    """p[i], not before what other threads wrote ahead of it is visible."""

    def code(context, builder, sig, values):
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "acquire", 8)

    return types.int64(types.CPointer(types.int64), types.int64), code
