"""The steps of an installation: plan, fetch, check, publish, switch.

Everything is made in `NAME.part` and becomes `NAME` by one rename when it is whole and checked, so
a directory under its name is always complete. What could be known before an hour of fetching is
asked first: names, sizes, free space, the encoder's texts. Does not know how it is called or shown.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ds4d.errors import ConfigError, ModelFileError, TemporaryError, UsageError
from ds4d.files import sync_directory, written_whole
from ds4d.model import gguf
from ds4d.model.install import directory, drafter, encoder, verify
from ds4d.model.install.directory import CURRENT, FORMAT, RECORD, TEXTS, Item, Record
from ds4d.model.install.fetch import Expected, fetch, forget_state, is_state, kept, patiently
from ds4d.model.install.files import make_directory, sha256_of
from ds4d.model.install.sources import FileSource, read_small

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    from ds4d.model.install.directory import Checked, Models
    from ds4d.model.install.encoder import Blocks
    from ds4d.model.install.fetch import Patience
    from ds4d.model.install.sources import Source
    from ds4d.model.install.telling import Teller

    What = Literal["model", "drafter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is known of a file beforehand, and who says so; all None: nothing."""

    size: int | None = None  # bytes
    sha256: str | None = None
    release: str | None = None
    against: str | None = None
    remedy: str = ""  # what helps against a wrong refusal


@dataclass(frozen=True, slots=True)
class Wanted:
    source: Source
    published: Published


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an operator asks for. Without a model the rest is added to the installed `name`."""

    name: str
    model: Wanted | None = None
    drafter: Wanted | None = None
    encoder: Source | None = None
    link: bool = False  # the model file is not copied
    use: bool = False  # make it current even if another one is


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One file to fetch."""

    what: What
    wanted: Wanted
    file: str  # as it will be called
    size: int | None  # None: nobody says
    there: int  # bytes of it that an earlier attempt has left

    @property
    def missing(self) -> int:
        return max((self.size or 0) - self.there, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    wish: Wish
    pieces: tuple[Piece, ...]
    needed: int  # bytes of disk that are not taken yet
    free: int
    becomes_current: bool

    def demand_space(self, path: Path) -> None:
        """Raises TemporaryError with both numbers."""
        if self.needed > self.free:
            there = sum(piece.there for piece in self.pieces)
            less = f" ({self.needed + there:,} less {there:,} that are there)" if there else ""
            raise TemporaryError(
                f"{path}: {self.needed:,} bytes are needed{less}, {self.free:,} are free: make "
                f"room for {self.needed - self.free:,} more, or name another disk with --dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    record: Record
    path: Path
    texts: bool  # whether the release's are there
    current: bool
    before: str | None  # what was current
    undone: tuple[str, ...]  # what was asked for and could not be had


def plan(models: Models, wish: Wish, teller: Teller, patience: Patience) -> Plan:
    """Asks the sources for their sizes and changes nothing. Raises UsageError, ModelFileError for
    a source of another size than published."""
    if wish.model is None:
        models.directory(wish.name)
    elif wish.name in models.names():
        raise UsageError(
            f"{wish.name}: is installed already in {models.path}: `ds4d model use` makes it "
            "current, another --name installs beside it, and without SRC a drafter or texts are "
            "added to it"
        )
    elif os.path.lexists(models.path / wish.name):
        raise UsageError(
            f"{models.path / wish.name}: is there and was not installed; take another --name"
        )
    stage = models.stage(wish.name)
    if stage.is_symlink() or (stage.exists() and not stage.is_dir()):
        raise ConfigError(f"{stage}: is not a directory; move it away, ds4d makes its own")
    pieces = []
    if wish.model is not None:
        file = model_file(wish.model.source)
        pieces.append(_piece("model", wish.model, stage / file, teller, patience))
    if wish.drafter is not None:
        file = directory.DRAFTER
        pieces.append(_piece("drafter", wish.drafter, stage / file, teller, patience))
    linked = pieces[0].missing if wish.link else 0
    return Plan(
        wish=wish,
        pieces=tuple(pieces),
        needed=sum(piece.missing for piece in pieces) - linked,
        free=shutil.disk_usage(_existing(models.path)).free,
        becomes_current=wish.use or models.named(CURRENT) is None,
    )


def model_file(source: Source) -> str:
    """How the model file will be called: as at its source, where that is a good name."""
    file = source.file or ""
    good = directory.is_name(file) and file.lower().endswith(".gguf")
    return file if good and file != directory.DRAFTER else "model.gguf"


def carry_out(
    models: Models, planned: Plan, blocks: Blocks, teller: Teller, patience: Patience
) -> Outcome:
    """All of it, or an error after which the same call goes on where this one ended.

    Raises TemporaryError for a source, a disk or another installation that may do better later,
    ModelFileError for files that are not what they should be, UsageError for a source that refuses.
    """
    wish = planned.wish
    planned.demand_space(models.path)
    undone: list[str] = []
    with models.installing():
        texts = _texts(wish, blocks, teller, patience, undone)
        stage = models.stage(wish.name)
        make_directory(stage)
        items = {
            piece.what: _get(piece, stage / piece.file, wish.link, teller, patience)
            for piece in planned.pieces
        }
        record, files = _record(models, wish, stage, items, undone)
        with models.lock():
            put = _add if wish.model is None else _publish
            path = put(models, wish.name, record, files, texts)
            before = models.named(CURRENT)
            if wish.use or before is None:
                verify.demand(path, blocks)
                models.switch(wish.name)
            current = models.named(CURRENT) == wish.name
    return Outcome(
        record=record,
        path=path,
        texts=(path / TEXTS).exists(),
        current=current,
        before=before,
        undone=tuple(undone),
    )


# Steps


def _piece(
    what: What,
    wanted: Wanted,
    path: Path,
    teller: Teller,
    patience: Patience,
) -> Piece:
    total = patiently(wanted.source, teller, patience, lambda source: source.probe()).total
    expected = wanted.published.size
    if None not in (total, expected) and total != expected:
        raise ModelFileError(
            f"{wanted.source.where}: has {total:,} bytes, expected {expected:,} as in "
            f"{wanted.published.against}{wanted.published.remedy}"
        )
    size = expected or total
    there = kept(path)
    return Piece(what=what, wanted=wanted, file=path.name, size=size, there=there)


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _texts(
    wish: Wish, blocks: Blocks, teller: Teller, patience: Patience, undone: list[str]
) -> dict[str, str] | None:
    """The release's texts; None if nobody asked, or if some are missing."""
    if wish.encoder is None:
        return None
    read = partial(read_small, limit=encoder.FILE_LIMIT)
    source = patiently(wish.encoder, teller, patience, read)
    found = encoder.find(source, wish.encoder.where, blocks)
    missing = [block for block in blocks if block not in found]
    if not missing:
        return found
    undone.append(
        f"{wish.encoder.where}: does not hold the release's {', '.join(missing)}: none of its "
        "texts are taken"
    )
    return None


def _get(piece: Piece, path: Path, link: bool, teller: Teller, patience: Patience) -> Item:
    published = piece.wanted.published
    source = piece.wanted.source
    expected = Expected(
        what=piece.what, size=published.size, sha256=published.sha256, begins=b"GGUF"
    )
    if link and piece.what == "model":
        assert isinstance(source, FileSource)  # the command line has seen to it
        size, sha256 = _link(source.path, path, expected, teller)
    else:
        fetched = fetch(source, path, expected, teller, patience)
        size, sha256 = fetched.size, fetched.sha256
    checked: Checked = "nothing"
    if published.sha256 is not None:
        checked = "sha256"
    elif published.size is not None:
        checked = "size"
    return Item(
        file=piece.file,
        size=size,
        sha256=sha256,
        checked=checked,
        against=published.against,
        release=published.release,
        source=source.where,
        installed_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _link(original: Path, path: Path, expected: Expected, teller: Teller) -> tuple[int, str]:
    """A second name for the file, with its size and digest."""
    forget_state(path)
    path.unlink(missing_ok=True)
    try:
        os.link(original.resolve(), path)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        raise UsageError(
            f"{original}: cannot be linked into {path.parent} ({error.strerror}): without --link "
            "it is copied"
        ) from None
    size = path.stat().st_size
    with teller.bar("model, sha256", size) as bar:
        sha256 = sha256_of(path, bar.at).hexdigest()
    if expected.sha256 not in (None, sha256):
        raise ModelFileError(f"{original}: has sha256 {sha256}, expected {expected.sha256}")
    return size, sha256


def _record(
    models: Models, wish: Wish, stage: Path, items: dict[What, Item], undone: list[str]
) -> tuple[Record, set[str]]:
    """What will be known of the target after its files have been looked into, and which of the
    staged files belong to it."""
    if wish.model is None:
        at, files = models.directory(wish.name), set()
        record = directory.read_record(at)
    else:
        item = items["model"]
        at, files = stage, {item.file}
        record = Record(format=FORMAT, name=wish.name, **msgspec.structs.asdict(item))
    try:
        model = gguf.open_model(at / record.file)
    except ModelFileError as error:
        if wish.model is None:
            raise
        raise ModelFileError(
            f"{error}: not installed; `ds4d model remove {stage.name}` deletes what was fetched"
        ) from None
    sidecar = items.get("drafter")
    if sidecar is None:
        model.close()
        return record, files
    try:
        with model:
            identity = drafter.compare(stage / sidecar.file, model, record.release)
        _demand_release(sidecar, record)
    except ModelFileError as error:
        undone.append(f"{error}: this drafter is not installed")
        return record, files
    made = directory.Drafter(identity=identity, **msgspec.structs.asdict(sidecar))
    return msgspec.structs.replace(record, drafter=made), files | {sidecar.file}


def _demand_release(sidecar: Item, record: Record) -> None:
    """Raises ModelFileError if both are known and differ."""
    if None not in (sidecar.release, record.release) and sidecar.release != record.release:
        raise ModelFileError(
            f"{sidecar.source}: was made for release {sidecar.release}, the model is of "
            f"{record.release}"
        )


def _publish(
    models: Models, name: str, record: Record, files: set[str], texts: dict[str, str] | None
) -> Path:
    """Make the stage whole and give it its name, with nothing in it that is not recorded."""
    stage, path = models.stage(name), models.path / name
    own = files | {RECORD}
    if texts is not None:
        _write_texts(stage, texts)
        own |= {TEXTS}
    directory.write_record(stage, record)
    for other in list(stage.iterdir()):
        if other.name not in own and not is_state(other):
            other.unlink()  # of an attempt that wished for more
    stage.rename(path)  # raises if something that is no empty directory has appeared there
    sync_directory(models.path)
    # Only now: without its state an unfinished file is of no use.
    for state in filter(is_state, list(path.iterdir())):
        state.unlink()
    return path


def _add(
    models: Models, name: str, record: Record, files: set[str], texts: dict[str, str] | None
) -> Path:
    """Put what was fetched beside the files of an installed target."""
    stage, path = models.stage(name), models.directory(name)
    if texts is not None:
        _write_texts(path, texts)
    for file in files:
        (stage / file).replace(path / file)  # a daemon that has the old one open keeps it
    directory.write_record(path, record)
    shutil.rmtree(stage)
    return path


def _write_texts(target: Path, texts: dict[str, str]) -> None:
    with written_whole(target / TEXTS) as out:
        out.write(encoder.as_json(texts))
