"""What is right and what is wrong about one target, line by line.

Everything that would keep a daemon from serving it is wrong; what it can do without is a note. The
digests are computed only when asked for, because that reads all of every file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ds4d.errors import ModelFileError
from ds4d.model import gguf
from ds4d.model.install import directory, drafter, encoder

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from ds4d.model.install.directory import Item, Record
    from ds4d.model.install.encoder import Blocks
    from ds4d.model.install.telling import Teller

    _Found = Generator["Finding", None, bool]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "note", "wrong"]
    text: str


def findings(path: Path, blocks: Blocks, hashing: Teller | None) -> Iterator[Finding]:
    """About the target in the directory `path`; with digests if there is somebody to tell how far
    `hashing` is."""
    try:
        record = directory.read_record(path)
    except ModelFileError as error:
        yield Finding("wrong", str(error))
        return
    sound = yield from _file(path, "model", record, hashing)
    if sound:
        yield from _table(path, record)
    yield from _texts(path, blocks)
    if record.drafter is None:
        yield Finding("ok", "drafter: none")
        return
    sound = yield from _file(path, "drafter", record.drafter, hashing)
    if sound:
        yield from _drafter(path, record, record.drafter)


def demand(path: Path, blocks: Blocks) -> None:
    """Raises ModelFileError for the first thing that is wrong, short of digests."""
    for finding in findings(path, blocks, None):
        if finding.level == "wrong":
            raise ModelFileError(finding.text)


def checked(item: Item) -> str:
    """How the file was checked when it was installed."""
    if item.checked == "sha256":
        return f"size and sha256 as in {item.against}"
    if item.checked == "size":
        return f"size only, as in {item.against}: no digest was known"
    return "nothing was known to compare it with"


def _file(path: Path, what: str, item: Item, hashing: Teller | None) -> _Found:
    """Returns whether the file is sound so far."""
    try:
        directory.check_size(path / item.file, item)
        yield Finding("ok", f"{what}: {item.file} has {item.size:,} bytes")
        if hashing is None:
            return True
        if item.sha256 is None:
            yield Finding("note", f"{what}: no digest is recorded, so its bytes were not compared")
            return True
        with hashing.bar(f"{what}, sha256", item.size) as bar:
            directory.check_digest(path / item.file, item, bar.at)
        yield Finding("ok", f"{what}: sha256 is {item.sha256}, as installed ({checked(item)})")
    except ModelFileError as error:
        yield Finding("wrong", str(error))
        return False
    return True


def _table(path: Path, record: Record) -> Iterator[Finding]:
    try:
        with gguf.open_model(path / record.file) as model:
            n, name = len(model.tensors), model.geometry.name or "unnamed"
        yield Finding("ok", f"model: {name}, {n} tensors, keys and table are sound")
    except ModelFileError as error:
        yield Finding("wrong", str(error))


def _texts(path: Path, blocks: Blocks) -> Iterator[Finding]:
    if not (path / directory.TEXTS).exists():
        yield Finding("note", f"texts: no {directory.TEXTS}; {WITHOUT_TEXTS}")
        return
    try:
        encoder.check(path / directory.TEXTS, blocks)
        yield Finding("ok", f"texts: all {len(blocks)} are the release's, to the byte")
    except ModelFileError as error:
        yield Finding("wrong", str(error))


def _drafter(path: Path, record: Record, item: directory.Drafter) -> Iterator[Finding]:
    try:
        with gguf.open_model(path / record.file) as model:
            identity = drafter.compare(path / item.file, model, record.release)
    except ModelFileError as error:
        yield Finding("wrong", str(error))
        return
    if identity == "matches":
        yield Finding("ok", "drafter: was made for this model")
    else:
        yield Finding("note", f"drafter: {UNKNOWN_DRAFTER}")


WITHOUT_TEXTS = (
    "prompts carry ds4-tiny's texts, which the release was not trained with, and the daemon warns "
    "of it; `ds4d model install --encoder FILE --name NAME` takes them from the release's encoder "
    "file"
)
UNKNOWN_DRAFTER = (
    "its shapes fit, but it does not say which target it was made for (unknown): one for another "
    "release of the same shape costs speed, never a token"
)
