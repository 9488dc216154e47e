"""A source to a file: over any number of cuts and restarts, hashed on the way.

The file grows under its own name, in a directory that nobody takes for finished; beside it
`.NAME.state` says which version of the source its bytes are of, and how many of them would survive
a crash of the machine. A restart hashes what is there and goes on behind it. Bytes of two versions
are never mixed: a source that has changed, or that cannot say whether it has while no digest is
known, is fetched from its start again. Knows neither HTTP nor what the file is for.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import msgspec

from ds4d.errors import ModelFileError, TemporaryError, UsageError
from ds4d.files import NEW_MODE, written_whole
from ds4d.model.install.files import is_full, sha256_of
from ds4d.model.install.sources import Cut

if TYPE_CHECKING:
    from collections.abc import Callable

    from ds4d.model.install.sources import Source, Stream
    from ds4d.model.install.telling import Bar, Teller

SYNC_BYTES = 256 << 20  # what a crash of the machine may cost
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is known of a file before it is there; None: nothing."""

    what: str = "file"  # in the progress
    size: int | None = None  # bytes
    sha256: str | None = None
    begins: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetched:
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often a source may fail in a row without a byte that was not there before."""

    attempts: int = 8
    first_wait_s: float = 1.0  # doubled from attempt to attempt
    longest_wait_s: float = 30.0
    longest_asked_s: float = 300.0  # of what a server may ask for
    sleep: Callable[[float], None] = time.sleep

    def pause(self, where: str, cut: Cut, failures: int, teller: Teller) -> None:
        """Before another attempt, after so many failures in a row. Raises TemporaryError when
        there have been enough."""
        if failures >= self.attempts:
            raise TemporaryError(
                f"{where}: {cut}; given up after {failures} attempts that brought nothing new; "
                "what is there is kept, and the same command goes on from it"
            )
        wait_s = min(self.first_wait_s * 2**failures, self.longest_wait_s)
        wait_s = max(wait_s, min(cut.wait_s, self.longest_asked_s))
        count = f" ({failures} of {self.attempts} without progress)" if failures else ""
        teller.note(f"{where}: {cut}; trying again in {wait_s:g} s{count}")
        self.sleep(wait_s)


def patiently(source: Source, teller: Teller, patience: Patience, ask: Callable[[Source], T]) -> T:
    """What `ask` makes of the source, asked again after a Cut. Raises as `ask`, and
    TemporaryError."""
    failures = 0
    while True:
        try:
            return ask(source)
        except Cut as cut:
            failures += 1
            patience.pause(source.where, cut, failures, teller)


def fetch(
    source: Source, path: Path, expected: Expected, teller: Teller, patience: Patience
) -> Fetched:
    """Make `path` whole, from where an earlier attempt left it.

    Raises ModelFileError for what is not the file that was expected, TemporaryError for a source
    or a disk with which the same call may succeed later, UsageError for a source that refuses.
    """
    try:
        return _fetch(source, path, expected, teller, patience)
    except OSError as error:
        if not is_full(error):
            raise
        before = _read_state(path)
        whole = expected.size or (before and before.total)
        there = kept(path)
        rest = f"{whole - there:,} more bytes are" if whole else "more space is"
        raise TemporaryError(
            f"{path.parent}: the disk is full after {there:,} bytes of {path.name}: {rest} "
            "needed; what is there is kept, and the same command goes on from it"
        ) from None


def kept(path: Path) -> int:
    """Bytes of an unfinished file that a further `fetch` may find useful."""
    if not _state_of(path).exists():
        return 0
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_state(path: Path) -> bool:
    """Whether that is what `fetch` has noted about some file."""
    return path.name.startswith(".") and path.name.endswith(".state")


def forget_state(path: Path) -> None:
    """The file at `path` is no longer what a `fetch` has left."""
    _state_of(path).unlink(missing_ok=True)


def _fetch(
    source: Source, path: Path, expected: Expected, teller: Teller, patience: Patience
) -> Fetched:
    part = _Part(path, source.where, expected, teller)
    try:
        with teller.bar(expected.what, expected.size or part.total, part.n_bytes) as bar:
            _fill(part, source, expected, teller, patience, bar)
        digest = part.digest()
        if expected.sha256 not in (None, digest):
            part.refuse(digest)
            raise ModelFileError(
                f"{source.where}: has sha256 {digest}, expected {expected.sha256}: not installed; "
                f"its bytes are kept in {path} in case that the expected one was mistyped, else "
                "the next attempt fetches them again"
            )
        return Fetched(part.n_bytes, digest)
    finally:
        part.close()


def _fill(
    part: _Part, source: Source, expected: Expected, teller: Teller, patience: Patience, bar: Bar
) -> None:
    """Attempts until the part is whole."""
    most, failures = part.n_bytes, 0
    while not part.whole(expected):
        try:
            if part.n_bytes and part.version is None and expected.sha256 is None:
                teller.note(f"{source.where}: does not say which version it is: starting over")
                part.start_over()
            stream = source.open(part.n_bytes, part.version)
            try:
                _meet(part, stream, source, expected, teller)
                bar.total = expected.size or part.total
                _pour(part, stream, source, expected, bar)
            finally:
                stream.close()
        except Cut as cut:
            failures = 0 if part.n_bytes > most else failures + 1
            most = max(most, part.n_bytes)
            patience.pause(source.where, cut, failures, teller)


def _meet(part: _Part, stream: Stream, source: Source, expected: Expected, teller: Teller) -> None:
    """See that the stream goes on where the part ends, in the same version of the file."""
    _agree(stream.total, source, expected)
    changed = part.n_bytes > 0 and part.differs(stream)
    if part.n_bytes and (changed or stream.offset == 0):
        teller.note(
            f"{source.where}: "
            + ("has changed" if changed else "cannot go on in the middle")
            + f": starting over, {part.n_bytes:,} bytes were of no use"
        )
        part.start_over()
    if stream.offset != part.n_bytes:
        raise Cut(f"answered from byte {stream.offset:,} on instead of {part.n_bytes:,}")
    part.of(stream)


def _agree(total: int | None, source: Source, expected: Expected) -> None:
    if total == 0:
        raise ModelFileError(f"{source.where}: is empty")
    if None not in (total, expected.size) and total != expected.size:
        raise ModelFileError(f"{source.where}: has {total:,} bytes, expected {expected.size:,}")


def _pour(part: _Part, stream: Stream, source: Source, expected: Expected, bar: Bar) -> None:
    whole = expected.size or part.total
    while data := stream.read():
        if whole is not None and part.n_bytes + len(data) > whole:
            part.start_over()
            raise ModelFileError(f"{source.where}: sends more than {whole:,} bytes")
        if part.n_bytes < len(expected.begins):
            _recognise(part, data, source, expected.begins)
        part.write(data)
        bar.at(part.n_bytes)
    if whole is None:
        _agree(part.n_bytes, source, expected)
        part.total = part.n_bytes  # it ended as it should, and that is all that is known
    elif part.n_bytes < whole:
        raise Cut(f"ended after {part.n_bytes:,} of {whole:,} bytes")


def _recognise(part: _Part, data: bytes, source: Source, begins: bytes) -> None:
    """Refuse at the first bytes what cannot be the file, such as a page that asks to log in."""
    head = data[: len(begins) - part.n_bytes]
    if head != begins[part.n_bytes :][: len(head)]:
        part.start_over()
        raise ModelFileError(f"{source.where}: begins with {data[:16]!r}, expected {begins!r}")


class _State(msgspec.Struct, kw_only=True):
    """What is remembered of an unfinished file."""

    source: str
    boot: str  # of the machine, when it was written
    version: str | None = None
    total: int | None = None
    synced: int = 0  # bytes that are on the disk for certain
    refused: str | None = None  # the digest of a whole file that was not the expected one


class _Part:
    """The unfinished file: what is in it, and the digest of that."""

    def __init__(self, path: Path, source: str, expected: Expected, teller: Teller) -> None:
        self.n_bytes = 0
        self._path = path
        self._state = _State(source=source, boot=_boot())
        self._hasher = hashlib.sha256()
        self._file: IO[bytes] | None = None
        before = _read_state(path)
        if before is None or not self._is_of_use(before, expected, teller):
            self.start_over()
            return
        if before.source != source:
            before.source, before.version = source, None  # it calls its versions otherwise
        self._state = before
        try:
            self._go_on(expected.what, teller)
        except BaseException:
            self._drop()
            raise

    @property
    def version(self) -> str | None:
        return self._state.version

    @property
    def total(self) -> int | None:
        return self._state.total

    @total.setter
    def total(self, n_bytes: int) -> None:
        self._state.total = n_bytes

    def whole(self, expected: Expected) -> bool:
        return self.n_bytes > 0 and self.n_bytes == (expected.size or self.total)

    def differs(self, stream: Stream) -> bool:
        """Whether the stream is of another version of the file: by its name for it, or by its
        length."""
        mine = (self._state.version, self._state.total)
        return self.n_bytes > (stream.total or self.n_bytes) or any(
            None not in pair and pair[0] != pair[1]
            for pair in zip(mine, (stream.version, stream.total), strict=True)
        )

    def of(self, stream: Stream) -> None:
        """Note what the bytes to come are of."""
        self._state.version = stream.version or self._state.version
        self._state.total = stream.total or self._state.total
        self._remember()

    def write(self, data: bytes) -> None:
        assert self._file is not None
        view = memoryview(data)
        while view:
            n = self._file.write(view)  # unbuffered: a full disk takes less than it was given
            self._hasher.update(view[:n])
            self.n_bytes += n
            view = view[n:]
        if self.n_bytes - self._state.synced >= SYNC_BYTES:
            self._sync()

    def digest(self) -> str:
        self._sync()
        return self._hasher.hexdigest()

    def refuse(self, digest: str) -> None:
        self._state.refused = digest
        self._remember()

    def start_over(self) -> None:
        """Make the file anew: the old one may be a link to somebody's original."""
        self._drop()
        self._path.unlink(missing_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        os.fchmod(descriptor, NEW_MODE)
        self._state = _State(source=self._state.source, boot=self._state.boot)
        self._hasher = hashlib.sha256()
        self.n_bytes = 0
        self._remember()

    def close(self) -> None:
        """Keep what is there; on a full disk the state of before has to do."""
        if self._file is not None:
            with suppress(OSError):
                self._sync()
        self._drop()

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_of_use(self, before: _State, expected: Expected, teller: Teller) -> bool:
        status = self._path.lstat()
        if before.source != self._state.source and expected.sha256 is None:
            raise UsageError(
                f"{self._path}: holds {status.st_size:,} bytes from {before.source}, and no digest "
                "is known by which those of another source could go on: take the same source, "
                f"another --name, or forget them with `ds4d model remove {self._path.parent.name}`"
            )
        if None not in (before.refused, expected.sha256) and before.refused != expected.sha256:
            teller.note(f"{self._path.name}: was refused for its sha256: fetching it again")
            return False
        limit = expected.size or before.total
        return limit is None or status.st_size <= limit

    def _go_on(self, what: str, teller: Teller) -> None:
        """Take over what is there, up to where it is certain."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._path, flags), "wb", buffering=0)
        self.n_bytes = os.fstat(self._file.fileno()).st_size
        if self._state.boot != _boot():
            # The machine went down: the file may be longer than what reached the disk.
            self.n_bytes = min(self.n_bytes, self._state.synced)
            self._file.truncate(self.n_bytes)
            self._state.boot = _boot()
        if self.n_bytes:
            with teller.bar(f"{what}, hashing what is there", self.n_bytes) as bar:
                self._hasher = sha256_of(self._path, bar.at)
        self._remember()

    def _sync(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._state.synced = self.n_bytes
        self._remember()

    def _remember(self) -> None:
        with written_whole(_state_of(self._path)) as out:
            out.write(msgspec.json.encode(self._state))


def _state_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.state")


def _read_state(path: Path) -> _State | None:
    """None: nothing is known of the file, so nothing in it can be used."""
    try:
        status = path.lstat()
        if not path.is_file() or path.is_symlink() or status.st_nlink != 1:
            return None  # a link to an original, from an installation with --link
        return msgspec.json.decode(_state_of(path).read_bytes(), type=_State)
    except (OSError, msgspec.MsgspecError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return f"unknown, {os.urandom(8).hex()}"  # equal to no other
