"""The container: typed values, the walk over a header's bytes, and the layout of a new header.

    "GGUF"  u32 version  u64 n_tensors  u64 n_keys
    n_keys    x  string key, u32 kind, value            string = u64 length, bytes
    n_tensors x  string name, u32 ndim, u64 ne[ndim], u32 ggml type, u64 offset
    padding to the alignment, then the data; offsets count from there, each tensor padded

All numbers are little-endian. The walk trusts nothing: every length is held against the bytes that
are there before it is used, no memory is taken on the word of a count, and the header as a whole is
bounded. It knows no key but `general.alignment`; what the keys mean is `schema`'s.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ds4d.errors import ModelFileError
from ds4d.model.quants import Quant

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
HEADER_LIMIT = 32 << 20
"""Bytes that metadata and tensor directory may take: six times what Flash needs, and little enough
to be walked in a second whatever it holds. It bounds counts of any kind."""

NAME_LIMIT = 65_535
MAX_DIMS = 4
_LEAST_KEY_BYTES = 8 + 1 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


class Kind(IntEnum):
    """Types of metadata values."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


DTYPES: dict[Kind, np.dtype[Any]] = {
    Kind.U8: np.dtype("u1"),
    Kind.I8: np.dtype("i1"),
    Kind.U16: np.dtype("<u2"),
    Kind.I16: np.dtype("<i2"),
    Kind.U32: np.dtype("<u4"),
    Kind.I32: np.dtype("<i4"),
    Kind.F32: np.dtype("<f4"),
    Kind.BOOL: np.dtype("?"),
    Kind.U64: np.dtype("<u8"),
    Kind.I64: np.dtype("<i8"),
    Kind.F64: np.dtype("<f8"),
}
"""Of scalars and of array elements."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Typed:
    """A value with its type in the file: of a scalar, or of the elements of an array."""

    kind: Kind
    value: Any  # int, float, bool or str; a sequence or ndarray of them if `is_array`
    is_array: bool = False


def u32(value: int) -> Typed:
    return Typed(Kind.U32, value)


def f32(value: float) -> Typed:
    return Typed(Kind.F32, value)


def boolean(value: bool) -> Typed:
    return Typed(Kind.BOOL, value)


def string(value: str) -> Typed:
    return Typed(Kind.STRING, value)


def array(kind: Kind, values: Sequence[Any]) -> Typed:
    return Typed(kind, values, is_array=True)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is NumPy order, the reverse of the file's `ne`."""

    name: str
    quant: Quant
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    n_bytes: int  # without the padding behind it


@dataclass(frozen=True, slots=True)
class Field:
    """Where a metadata value lies in the header; decoded when somebody asks."""

    kind: Kind  # of the scalar or of the elements
    is_array: bool
    count: int  # 1 for a scalar
    start: int  # of the first element
    end: int

    @property
    def type_name(self) -> str:
        name = self.kind.name.lower()
        return f"array of {name}" if self.is_array else name


class Metadata(Mapping[str, Any]):
    """Key to value: int, float, bool or str; an ndarray (a copy) or a list of str for arrays.

    Values are decoded at each access, so `metadata["tokenizer.ggml.tokens"]` costs what it says.
    """

    def __init__(self, data: memoryview, fields: dict[str, Field]) -> None:
        self._data = data
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        if field.kind is Kind.STRING:
            texts = self._texts(field)
            return texts if field.is_array else texts[0]
        values = np.frombuffer(self._data, DTYPES[field.kind], field.count, field.start)
        return values.copy() if field.is_array else values[0].item()

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def field(self, key: str) -> Field | None:
        """Type and count of a value without decoding it."""
        return self._fields.get(key)

    def release(self) -> None:
        """Let go of the mapped file; values cannot be read afterwards."""
        self._data.release()

    def _texts(self, field: Field) -> list[str]:
        data = bytes(self._data[field.start : field.end])
        texts: list[str] = []
        length_at, position = _U64.unpack_from, 0
        for _ in range(field.count):
            begin = position + 8
            position = begin + length_at(data, position)[0]
            texts.append(data[begin:position].decode())
        return texts


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    data_start: int


def shown(name: str) -> str:
    """A name as an error sentence may hold it: printable, not longer than a line."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def read_header(path: str, data: memoryview, size: int) -> Header:
    """Walk the header at the start of `data`, the first `min(size, HEADER_LIMIT)` bytes of a file
    of `size` bytes. Checks all that needs no knowledge of the model, the extents of the tensors
    included. Raises ModelFileError."""
    cursor = _Cursor(path, data, size)
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        cursor.fail(f"begins with {magic!r}, expected {MAGIC!r}: not a GGUF file")
    version = cursor.u32("the version")
    if version != VERSION:
        cursor.fail(f"GGUF version is {version}, expected {VERSION}")
    n_tensors = cursor.u64("the tensor count")
    n_keys = cursor.u64("the key count")
    cursor.hold(n_keys, _LEAST_KEY_BYTES, "keys")
    cursor.hold(n_tensors, _LEAST_TENSOR_BYTES, "tensors")

    fields: dict[str, Field] = {}
    for i in range(n_keys):
        key = cursor.name(f"key {i}")
        if key in fields:
            cursor.fail(f"key {shown(key)} occurs twice")
        fields[key] = cursor.value(f"key {shown(key)}")
    metadata = Metadata(data, fields)
    alignment = _alignment(cursor, metadata)
    records = [_tensor_record(cursor, i) for i in range(n_tensors)]
    data_start = round_up(cursor.position, alignment)
    tensors = _place(cursor, records, data_start, alignment, size)
    return Header(metadata, tensors, data_start)


def _alignment(cursor: _Cursor, metadata: Metadata) -> int:
    field = metadata.field(ALIGNMENT_KEY)
    if field is None:
        return ALIGNMENT
    if field.is_array or field.kind is not Kind.U32:
        cursor.fail(f"key {ALIGNMENT_KEY} has type {field.type_name}, expected u32")
    value: int = metadata[ALIGNMENT_KEY]
    # 8 so that a mapped tensor may be viewed as any type; beyond a page it would serve nothing.
    if not 8 <= value <= 65_536 or value & (value - 1):
        cursor.fail(f"key {ALIGNMENT_KEY} is {value}, expected a power of two from 8 to 65536")
    return value


def _tensor_record(cursor: _Cursor, i: int) -> TensorInfo:
    name = cursor.name(f"name of tensor {i}")
    what = f"tensor {shown(name)}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.fail(f"{what} has {n_dims} dimensions, expected 1 to {MAX_DIMS}")
    ne = [cursor.u64(what) for _ in range(n_dims)]
    type_id = cursor.u32(what)
    offset = cursor.u64(what)
    shape = tuple(reversed(ne))
    if 0 in ne:
        cursor.fail(f"{what} has shape {list(shape)}, expected no empty axis")
    try:
        quant = Quant(type_id)
    except ValueError:
        known = ", ".join(f"{q.value} {q.name}" for q in Quant)
        cursor.fail(f"{what} has ggml type {type_id}, expected one of {known}")
    if shape[-1] % quant.block:
        cursor.fail(
            f"{what} has rows of {shape[-1]}, expected a multiple of {quant.block} for {quant.name}"
        )
    return TensorInfo(name, quant, shape, offset, quant.n_bytes(shape))


def _place(
    cursor: _Cursor, records: list[TensorInfo], data_start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Absolute offsets, each tensor aligned, inside the file with its padding, alone there."""
    tensors: dict[str, TensorInfo] = {}
    for t in records:
        if t.name in tensors:
            cursor.fail(f"tensor {shown(t.name)} occurs twice")
        if t.offset % alignment:
            cursor.fail(
                f"tensor {shown(t.name)} has offset {t.offset}, expected a multiple of {alignment}"
            )
        offset = data_start + t.offset
        end = offset + round_up(t.n_bytes, alignment)
        if end > size:
            cursor.fail(
                f"tensor {shown(t.name)} ends at byte {end}, but the file has {size}: "
                "expected all of its data and padding inside"
            )
        tensors[t.name] = TensorInfo(t.name, t.quant, t.shape, offset, t.n_bytes)
    end, before = data_start, ""
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if t.offset < end:
            cursor.fail(
                f"tensor {shown(t.name)} begins at byte {t.offset}, expected it behind tensor "
                f"{shown(before)}, which ends at byte {end}"
            )
        end, before = t.offset + t.n_bytes, t.name
    return tensors


class _Cursor:
    """A position in the header. Every step says what it reads, for the error that may follow."""

    def __init__(self, path: str, data: memoryview, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {what}")

    def short(self, what: str) -> NoReturn:
        """The header ends before `what` does."""
        if self.size > len(self.data):
            self.fail(f"{what} runs past the {HEADER_LIMIT} bytes that a header may take")
        self.fail(f"the file ends after {self.size} bytes, inside {what}")

    def advance(self, n: int, what: str) -> int:
        """Step over `n` bytes; where they begin."""
        start = self.position
        if n > len(self.data) - start:
            self.short(what)
        self.position = start + n
        return start

    def take(self, n: int, what: str) -> bytes:
        start = self.advance(n, what)
        return bytes(self.data[start : start + n])

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.advance(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.advance(8, what))[0]
        return value

    def hold(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count whose items cannot lie in the rest of the header."""
        room = len(self.data) - self.position
        if count * least_bytes > room:
            self.fail(
                f"claims {count} {what} of at least {least_bytes} bytes, "
                f"but {room} bytes are left for them"
            )

    def name(self, what: str) -> str:
        length = self.u64(what)
        if not 1 <= length <= NAME_LIMIT:
            self.fail(f"{what} has {length} bytes, expected 1 to {NAME_LIMIT}")
        return self.text(length, what)

    def text(self, length: int, what: str) -> str:
        raw = self.take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {raw[:40]!r}")

    def value(self, what: str) -> Field:
        kind = self.kind(self.u32(what), what)
        if kind is not Kind.ARRAY:
            return self.elements(kind, 1, what, is_array=False)
        kind = self.kind(self.u32(what), what)
        if kind is Kind.ARRAY:
            self.fail(f"{what} is an array of arrays, expected an array of scalars or strings")
        return self.elements(kind, self.u64(what), what, is_array=True)

    def kind(self, number: int, what: str) -> Kind:
        try:
            return Kind(number)
        except ValueError:
            self.fail(f"{what} has value type {number}, expected 0 to {max(Kind).value}")

    def elements(self, kind: Kind, count: int, what: str, *, is_array: bool) -> Field:
        start = self.position
        if kind is Kind.STRING and is_array:
            self.hold(count, 8, f"strings in {what}")
            self.skip_strings(count, what)
        elif kind is Kind.STRING:
            self.text(self.u64(what), what)
        else:
            self.hold(count, DTYPES[kind].itemsize, f"elements in {what}")
            self.advance(count * DTYPES[kind].itemsize, what)
            if kind is Kind.BOOL:
                largest = int(np.frombuffer(self.data, np.uint8, count, start).max(initial=0))
                if largest > 1:
                    self.fail(f"{what} holds the byte {largest}, expected a bool of 0 or 1")
        return Field(kind, is_array, count, start, self.position)

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings, each of them UTF-8. Tight, because a vocabulary has a quarter
        of a million; nothing is kept, because the count is the file's word."""
        data, length_at, position = self.data, _U64.unpack_from, self.position
        end, i = len(data), 0
        try:
            for i in range(count):  # noqa: B007  (the messages name it)
                begin = position + 8
                position = begin + length_at(data, position)[0]
                if position > end:
                    break
                str(data[begin:position], "utf-8")
        except struct.error:
            position = end + 1
        except UnicodeDecodeError:
            self.fail(f"string {i} of {what} is not UTF-8")
        if position > end:
            self.short(f"string {i} of {what}")
        self.position = position


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def layout(
    metadata: Mapping[str, Typed],
    table: Sequence[tuple[str, Quant, tuple[int, ...]]],
    alignment: int = ALIGNMENT,
) -> tuple[bytes, list[TensorInfo], int]:
    """A header with its padding, the tensors of `table` (name, quant, shape) placed behind it in
    that order, and the bytes of the whole file. `general.alignment` is added where it is not 32.

    Raises ValueError for what no reader would take: an empty, long or doubled name, a shape that
    does not suit its type, a value outside of its type, an alignment of its own in `metadata`.
    """
    if ALIGNMENT_KEY in metadata:
        raise ValueError(f"{ALIGNMENT_KEY} follows from the argument")
    if alignment != ALIGNMENT:
        metadata = {ALIGNMENT_KEY: u32(alignment), **metadata}
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(table), len(metadata))]
    for key, typed in metadata.items():
        parts += (_string(key), _encoded(key, typed))
    relative, placed, seen = 0, [], set()
    for name, quant, shape in table:
        if not 1 <= len(name.encode()) <= NAME_LIMIT or name in seen:
            raise ValueError(f"tensor name {name!r} is empty, too long or used twice")
        if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1 or shape[-1] % quant.block:
            raise ValueError(f"tensor {name} has shape {shape}, which {quant.name} cannot hold")
        seen.add(name)
        parts += (
            _string(name),
            struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)),
            struct.pack("<IQ", quant, relative),
        )
        placed.append(TensorInfo(name, quant, shape, relative, quant.n_bytes(shape)))
        relative += round_up(placed[-1].n_bytes, alignment)
    header = b"".join(parts)
    start = round_up(len(header), alignment)
    tensors = [TensorInfo(t.name, t.quant, t.shape, start + t.offset, t.n_bytes) for t in placed]
    return header.ljust(start, b"\0"), tensors, start + relative


def _string(text: str) -> bytes:
    raw = text.encode()
    return _U64.pack(len(raw)) + raw


def _encoded(key: str, typed: Typed) -> bytes:
    values = typed.value if typed.is_array else [typed.value]
    if typed.kind is Kind.STRING:
        body = b"".join(_string(text) for text in values)
    else:
        wanted = DTYPES[typed.kind]
        given = np.asarray(values)
        out = given.astype(wanted)
        if wanted.kind in "ui" and not (given.dtype.kind in "uib" and np.array_equal(given, out)):
            if given.size:
                raise ValueError(f"key {key} holds {typed.value}, which is no {typed.kind.name}")
        body = out.tobytes()
    if not typed.is_array:
        return _U32.pack(typed.kind) + body
    return struct.pack("<IIQ", Kind.ARRAY, typed.kind, len(values)) + body
