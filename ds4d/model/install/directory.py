"""The models directory: what is installed, which of it is current, and its record.

Owns `model.json`, the two links, the locks and what the daemon asks (`resolve`, `check`). A record
is made by an installation and believed from then on; what is in the files is `verify`'s.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from ds4d.errors import ConfigError, ModelFileError, TemporaryError, UsageError
from ds4d.files import sync_directory, written_whole
from ds4d.model.install.files import make_directory, sha256_of, size_of
from ds4d.model.install.manifest import NAME, Bytes, Digest, Name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Report = Callable[[str, float], None]

RECORD, TEXTS, DRAFTER = "model.json", "prompt.json", "drafter.gguf"
CURRENT: Final = "current"
PREVIOUS: Final = "previous"
FORMAT = 1
UNFINISHED = ".part"
LOCK_S = 10.0  # for what takes a moment; an installation is not waited for

How = Literal["none", "size", "full"]
Which = Literal["current", "previous"]
Checked = Literal["sha256", "size", "nothing"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a target as it was installed."""

    file: Name
    size: Bytes
    sha256: Digest | None  # as computed then
    checked: Checked  # what of it was compared with what had been published
    against: str | None  # who says so
    release: str | None  # None: unknown
    source: str
    installed_at: str  # UTC, ISO 8601


class Drafter(Item, frozen=True, kw_only=True):
    identity: Literal["matches", "unknown"]  # to the target, by what its metadata says


class Record(Item, frozen=True, kw_only=True):
    """The content of `model.json`."""

    format: int
    name: str
    drafter: Drafter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a daemon is to serve. Paths are resolved: a later switch does not mix two targets."""

    file: Path
    drafter: Path | None = None
    constants: Path | None = None  # the release's prompt texts
    record: Record | None = None  # None: a bare file, of which nothing is recorded


# For the daemon


def resolve(path: Path) -> Target:
    """The target behind `model.path`: a file, or a directory as an installation makes it. Raises
    ModelFileError, which says what makes or mends one."""
    try:
        real = path.resolve(strict=True)
        if not real.is_dir():
            return Target(file=real, constants=_texts_in(real.parent))
        if not (real / RECORD).exists():
            raise ModelFileError(_no_record(path, real))
        record = read_record(real)
        return Target(
            file=real / record.file,
            drafter=real / record.drafter.file if record.drafter else None,
            constants=_texts_in(real),
            record=record,
        )
    except (OSError, RuntimeError) as error:
        raise ModelFileError(_absent(path, error)) from None


def check(target: Target, how: How, report: Report) -> None:
    """Compare the files with the record: nothing, the sizes, or the digests too, which reads all
    of them; `report` is told which file and what share of it is done. Raises ModelFileError."""
    if how == "none":
        return
    record = target.record
    if record is None:
        if how == "full":
            raise ModelFileError(
                f"{target.file}: no digest is recorded of it, so it cannot be checked in full: "
                "`ds4d model install` records one"
            )
        return
    _check_file("model file", target.file, record, how, report)
    if target.drafter is not None and record.drafter is not None:
        _check_file("drafter", target.drafter, record.drafter, how, report)


def _check_file(what: str, path: Path, item: Item, how: How, report: Report) -> None:
    check_size(path, item)
    if how == "full":
        check_digest(path, item, lambda n: report(what, n / item.size))


def check_size(path: Path, item: Item) -> None:
    """Raises ModelFileError with both numbers."""
    n_bytes = size_of(path)
    if n_bytes != item.size:
        raise ModelFileError(f"{path}: has {n_bytes:,} bytes, recorded were {item.size:,}")


def check_digest(path: Path, item: Item, at: Callable[[int], None]) -> None:
    """Reads all of the file; `at` is told how many bytes. Raises ModelFileError with both."""
    if item.sha256 is None:
        raise ModelFileError(f"{path}: no digest is recorded of it")
    found = sha256_of(path, at).hexdigest()
    if found != item.sha256:
        raise ModelFileError(f"{path}: has sha256 {found}, recorded was {item.sha256}")


def read_record(directory: Path) -> Record:
    """Raises ModelFileError."""
    path = directory / RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ModelFileError(f"{path}: not a record of an installation: {error}") from None
    if record.format != FORMAT:
        raise ModelFileError(
            f"{path}: has format {record.format}, expected {FORMAT}: it was written by another "
            "version of ds4d"
        )
    return record


def _texts_in(directory: Path) -> Path | None:
    texts = directory / TEXTS
    return texts if texts.is_file() else None


def _absent(path: Path, error: OSError | RuntimeError) -> str:
    if isinstance(error, PermissionError):
        return (
            f"{path}: permission denied: the daemon's user must be let into every directory above "
            "it; a service sees none of the home directories (BindReadOnlyPaths= shows it one)"
        )
    if path.is_symlink():
        return (
            f"{path}: points to {os.readlink(path)}, which is not there: `ds4d model list` shows "
            "what is installed, `ds4d model use NAME` makes it current"
        )
    if path.name == CURRENT:
        return (
            f"{path}: no model is current: `ds4d model install SRC` gets one, `ds4d model use "
            "NAME` takes one that is installed"
        )
    if isinstance(error, OSError) and error.strerror:
        return f"{path}: {error.strerror}"
    return f"{path}: cannot be found: {error}"


def _no_record(path: Path, real: Path) -> str:
    if (real / CURRENT).is_symlink():
        return f"{path}: is the directory of all models, expected one of them: {path / CURRENT}"
    if real.name.endswith(UNFINISHED):
        return f"{path}: is not finished: the same `ds4d model install SRC` goes on with it"
    return (
        f"{path}: holds no {RECORD}: `ds4d model install FILE` makes a directory that can be "
        "served; a GGUF file can be named itself"
    )


# For the verbs


class Models:
    """One models directory, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """What is installed, sorted; whether it is sound is another question."""
        return sorted(p.name for p in self._directories() if not p.name.endswith(UNFINISHED))

    def unfinished(self) -> list[str]:
        """The same as it is being fetched: NAME.part."""
        return sorted(p.name for p in self._directories() if p.name.endswith(UNFINISHED))

    def directory(self, name: str) -> Path:
        """Raises UsageError for a name that is not installed."""
        if name not in self.names():
            known = ", ".join(self.names()) or "nothing"
            raise UsageError(f"{name}: is not installed in {self.path} (installed: {known})")
        return self.path / name

    def stage(self, name: str) -> Path:
        return self.path / f"{name}{UNFINISHED}"

    def named(self, which: Which) -> str | None:
        """The name that a link points to, whether or not it is there. Raises ConfigError for what
        is no link of ours."""
        link = self.path / which
        if not link.is_symlink():
            if link.exists():
                raise ConfigError(f"{link}: is not a symlink; move it away, ds4d makes its own")
            return None
        name = os.readlink(link)
        if not is_name(name):
            raise ConfigError(
                f"{link}: points to {name}, expected a name in the same directory; remove it, "
                "`ds4d model use NAME` makes it anew"
            )
        return name

    def switch(self, name: str) -> None:
        """Make `name` current; call it under `lock`. At no moment is there no current one, and
        what was current is noted as previous first, so that a crash between the two loses no way
        back to what runs."""
        before = self.named(CURRENT)
        if before == name:
            return
        if before is not None:
            self._point(PREVIOUS, before)
        self._point(CURRENT, name)
        sync_directory(self.path)

    def remove(self, name: str) -> None:
        """Call it under both locks. It vanishes under its name at once; deleting takes its time."""
        if self.named(PREVIOUS) == name:
            (self.path / PREVIOUS).unlink()
        doomed = self.path / f".{name}.removed"
        (self.path / name).rename(doomed)
        sync_directory(self.path)
        shutil.rmtree(doomed)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """For what takes a moment: links and names. Raises TemporaryError after 10 s."""
        with self._locked(".lock", LOCK_S):
            yield

    @contextmanager
    def installing(self) -> Iterator[None]:
        """For an hour of fetching, during which a rollback must be possible. Raises
        TemporaryError when another one is under way."""
        make_directory(self.path)
        with self._locked(".install.lock", 0.0):
            for doomed in self.path.glob(".*.removed"):
                shutil.rmtree(doomed)  # a removal was cut short
            yield

    @contextmanager
    def _locked(self, name: str, patience_s: float) -> Iterator[None]:
        path = self.path / name
        with path.open("a+", encoding="ascii") as file:
            deadline = time.monotonic() + patience_s
            while not _flock(file.fileno()):
                if time.monotonic() >= deadline:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise TemporaryError(
                        f"{self.path}: another `ds4d model` (process {holder}) works here: try "
                        "again when it is done"
                    )
                time.sleep(0.05)
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield  # the kernel drops the lock with the file, however we end

    def _directories(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        return [
            p
            for p in self.path.iterdir()
            if p.is_dir() and not p.is_symlink() and is_name(p.name.removesuffix(UNFINISHED))
        ]

    def _point(self, which: Which, name: str) -> None:
        temporary = self.path / f".{which}.tmp"
        temporary.unlink(missing_ok=True)  # of a switch that was cut short
        temporary.symlink_to(name)
        temporary.replace(self.path / which)


def is_name(text: str) -> bool:
    """Whether a target may be called so."""
    return (
        re.fullmatch(NAME, text) is not None
        and text not in (CURRENT, PREVIOUS)
        and not text.endswith(UNFINISHED)
    )


def write_record(directory: Path, record: Record) -> None:
    with written_whole(directory / RECORD) as out:
        out.write(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
