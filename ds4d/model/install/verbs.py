"""The command line of `ds4d model install|verify|list|use|rollback|remove`.

Arguments in, lines on stdout, notes and progress on stderr, an exit code out: 0 when all that was
asked for has been done, 1 when something is wrong or missing, else as in `errors`. What is a
setting comes as an argument of `run`: where models lie, the release's texts, what a daemon serves.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ds4d.errors import ConfigError, ModelFileError, TemporaryError, UsageError
from ds4d.model.install import directory, installing, manifest, sources, verify
from ds4d.model.install.directory import CURRENT, PREVIOUS, UNFINISHED, Models
from ds4d.model.install.fetch import Patience, patiently
from ds4d.model.install.files import is_full, size_of
from ds4d.model.install.installing import Published, Wanted, Wish
from ds4d.model.install.sources import source_of
from ds4d.model.install.telling import Teller, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ds4d.model.install.directory import Record
    from ds4d.model.install.encoder import Blocks
    from ds4d.model.install.installing import Outcome, Plan
    from ds4d.model.install.manifest import Kind, Manifest
    from ds4d.model.install.sources import Source

MANIFEST_LIMIT = 1 << 20  # bytes

_INSTALL = (
    "Gets a model file, checks it, and makes of it a directory that can be served. SRC is a path "
    "or an http(s) URL of a GGUF file. A file from elsewhere needs something to be compared with: "
    "a manifest (one is shipped), --sha256, --size, or the word --unverified. What was cut short "
    "is kept, and the same command goes on from there. The new model becomes current if none is, "
    "or with --use. Without SRC, a drafter or the release's texts are added to a model that is "
    "installed. Exit code 0: all of it was done; 1: the model is installed, but a drafter or texts "
    "that were asked for could not be."
)
_VERIFY = (
    "Reads all files of an installed model and compares them with what was recorded when it was "
    "installed, one line for each finding. Exit code 0: nothing is wrong; 1: something is."
)
_USE = (
    "Makes an installed model current, after a look at its files; the one that was current becomes "
    "previous. A running daemon goes on with what it has until it is restarted."
)
_ROLLBACK = "Makes the previous model current again, and the current one previous."
_LIST = "Lists installed models with their release, how they were checked, and what is unfinished."
_REMOVE = "Deletes an installed model that is not current, or what is there of an unfinished one."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """What every verb needs."""

    arguments: argparse.Namespace
    models: Models
    private: bool  # they lie in the daemon's state directory
    blocks: Blocks
    configured: Path | None
    teller: Teller
    patience: Patience


def add(verbs: Any) -> None:
    """Add the verbs to the subparsers of `ds4d model`, whose destination is `model_verb`."""
    install = verbs.add_parser("install", help="get, check and add a model", description=_INSTALL)
    install.add_argument("source", nargs="?", metavar="SRC", help="path or URL of a GGUF file")
    install.add_argument(
        "--name", metavar="NAME", help="how it is called here (default: after release or file)"
    )
    install.add_argument(
        "--manifest",
        metavar="FILE|URL",
        help="TOML with sizes and digests of known files (default: the shipped one)",
    )
    install.add_argument("--release", metavar="NAME", help="which release it is, such as 0731")
    install.add_argument(
        "--size", type=_bytes, metavar="BYTES", help="the size that the model file must have"
    )
    install.add_argument(
        "--sha256", type=_digest, metavar="HEX", help="the digest that the model file must have"
    )
    install.add_argument(
        "--unverified",
        action="store_true",
        help="take files as they come, with nothing to compare them with",
    )
    install.add_argument(
        "--drafter", metavar="SRC", help="path or URL of a DSpark sidecar for this model"
    )
    install.add_argument(
        "--drafter-sha256", type=_digest, metavar="HEX", help="the digest that it must have"
    )
    install.add_argument(
        "--encoder",
        metavar="SRC",
        help="path or URL of the release's encoder, a Python file that is read and never run; the "
        "release's prompt texts are taken from it",
    )
    install.add_argument(
        "--link", action="store_true", help="make a hard link to a local SRC instead of a copy"
    )
    install.add_argument("--use", action="store_true", help="make it current")
    install.add_argument(
        "--dry-run", action="store_true", help="say what would be done and change nothing"
    )

    check = verbs.add_parser("verify", help="read and compare a model's files", description=_VERIFY)
    check.add_argument(
        "name", nargs="?", metavar="NAME", help="an installed model (default: the current one)"
    )

    show = verbs.add_parser("list", help="what is installed", description=_LIST)
    show.add_argument("--json", action="store_true", help="print JSON, for programs")

    use = verbs.add_parser("use", help="make an installed model current", description=_USE)
    use.add_argument("name", metavar="NAME", help="an installed model")

    back = verbs.add_parser("rollback", help="go back to the previous model", description=_ROLLBACK)

    remove = verbs.add_parser("remove", help="delete a model", description=_REMOVE)
    remove.add_argument(
        "name", metavar="NAME", help="an installed model; NAME.part: what is there of one"
    )
    for verb in (install, check, show, use, back, remove):
        verb.add_argument(
            "--dir",
            type=Path,
            metavar="DIR",
            help="where models lie (default: where model.path has its `current`, else models in "
            "the state directory)",
        )


def run(
    arguments: argparse.Namespace,
    *,
    models: Path,
    blocks: Blocks,
    configured: Path | None,
    patience: Patience | None = None,
) -> int:
    """Carry out one verb; the exit code.

    `models` is the directory unless --dir or `configured` name one; `blocks` are the release's
    texts by name, as (bytes, sha256); `configured` is the `model.path` in force, also for the
    advice that follows a switch. Raises Ds4Error, and KeyboardInterrupt with a note on what is
    kept.
    """
    path = _absolute(arguments.dir or _served(configured) or models)
    here = _Here(
        arguments=arguments,
        models=Models(path),
        private=path == _absolute(models),
        blocks=blocks,
        configured=configured,
        teller=Teller(sys.stderr),
        patience=patience or Patience(),
    )
    verbs: dict[str, Callable[[_Here], int]] = {
        "install": _install,
        "verify": _verify,
        "list": _list,
        "use": _use,
        "rollback": _rollback,
        "remove": _remove,
    }
    try:
        return verbs[arguments.model_verb](here)
    except BrokenPipeError:
        raise  # `ds4d model list | head`
    except OSError as error:
        kind = TemporaryError if is_full(error) else ConfigError
        what = error.filename or here.models.path
        raise kind(f"{what}: {error.strerror or error}") from None


# Verbs


def _install(here: _Here) -> int:
    a = here.arguments
    if a.drafter_sha256 and not a.drafter:
        raise UsageError("--drafter-sha256 says something about --drafter, which is missing")
    known = _manifest(here)
    wish = _new(here, known) if a.source is not None else _addition(here, known)
    planned = installing.plan(here.models, wish, here.teller, here.patience)
    if a.dry_run:
        _say(*_planned(here, planned))
        planned.demand_space(here.models.path)
        return 0
    if here.private:
        # The daemon keeps other things there, which are for its user alone.
        here.models.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        outcome = installing.carry_out(
            here.models, planned, here.blocks, here.teller, here.patience
        )
    except KeyboardInterrupt:
        if here.models.stage(wish.name).exists():
            here.teller.note(
                f"stopped: what was fetched is kept in {here.models.stage(wish.name)}; the same "
                "command goes on from it"
            )
        raise
    _say(*_done(here, outcome))
    for sentence in outcome.undone:
        here.teller.note(f"ds4d: {sentence}")
    return 1 if outcome.undone else 0


def _verify(here: _Here) -> int:
    name = here.arguments.name or _named(here, CURRENT, "name one")
    path = here.models.directory(name)
    wrong = False
    for finding in verify.findings(path, here.blocks, here.teller):
        wrong |= finding.level == "wrong"
        _say(f"{finding.level:<6}{finding.text}")
    _say(f"{name}: " + ("is not as it was installed" if wrong else "is as it was installed"))
    return 1 if wrong else 0


def _list(here: _Here) -> int:
    rows = [*_installed(here), *_unfinished(here)]
    if here.arguments.json:
        _say(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    if not rows:
        _say(f"no model is installed in {here.models.path}: `ds4d model install SRC` gets one")
        return 0
    columns = ("STATE", "NAME", "RELEASE", "SIZE", "CHECKED", "DRAFTER", "TEXTS", "INSTALLED")
    table = [columns, *(_columns(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        _say("  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip())
    for row in rows:
        if row.problem:
            here.teller.note(f"ds4d: {row.problem}")
    return 0


def _use(here: _Here) -> int:
    name = here.arguments.name
    return _switch(here, lambda: name)


def _rollback(here: _Here) -> int:
    remedy = "there is nothing to go back to; `ds4d model list` shows what can be used"
    return _switch(here, lambda: _named(here, PREVIOUS, remedy))


def _remove(here: _Here) -> int:
    name, models = here.arguments.name, here.models
    if name not in models.unfinished():
        models.directory(name)  # says what there is
    with models.installing(), models.lock():
        if models.named(CURRENT) == name:
            raise UsageError(f"{name}: is current: `ds4d model use` another one, then remove it")
        lost = "; no model is previous now" if models.named(PREVIOUS) == name else ""
        models.remove(name)
    _say(f"{models.path / name} is deleted{lost}")
    return 0


# What is asked for


def _manifest(here: _Here) -> tuple[Manifest, bool]:
    """The manifest, and whether the operator has named it."""
    named = here.arguments.manifest
    if named is None:
        return manifest.shipped(), False
    source = source_of(named)
    data = patiently(
        source, here.teller, here.patience, lambda s: sources.read_small(s, MANIFEST_LIMIT)
    )
    try:
        return manifest.read(data.decode(), source.where), True
    except UnicodeDecodeError:
        raise ConfigError(f"{source.where}: not a manifest of model files: not UTF-8") from None


def _new(here: _Here, known: tuple[Manifest, bool]) -> Wish:
    a = here.arguments
    source = source_of(a.source)
    if a.link and source.remote:
        raise UsageError("--link takes a file of this machine, not a URL")
    published, entry = _published(here, "model", source, known)
    name = a.name or (entry.name if entry else None) or _stem(source)
    _demand_name(name)
    return Wish(
        name=name,
        model=Wanted(source, published),
        drafter=_drafter(here, known),
        encoder=source_of(a.encoder) if a.encoder else None,
        link=a.link,
        use=a.use,
    )


def _addition(here: _Here, known: tuple[Manifest, bool]) -> Wish:
    a = here.arguments
    if not a.drafter and not a.encoder:
        raise UsageError(
            "nothing to install: name a path or URL, or a --drafter or --encoder to add; `ds4d "
            "model install --help` tells more"
        )
    for option in ("size", "sha256", "release", "link"):
        if getattr(a, option):
            raise UsageError(f"--{option} says something about SRC, which is missing")
    return Wish(
        name=a.name or _named(here, CURRENT, "say which with --name"),
        drafter=_drafter(here, known),
        encoder=source_of(a.encoder) if a.encoder else None,
        use=a.use,
    )


def _drafter(here: _Here, known: tuple[Manifest, bool]) -> Wanted | None:
    if not here.arguments.drafter:
        return None
    source = source_of(here.arguments.drafter)
    return Wanted(source, _published(here, "drafter", source, known)[0])


def _published(
    here: _Here, kind: Kind, source: Source, known: tuple[Manifest, bool]
) -> tuple[Published, manifest.Entry | None]:
    """What the file is compared with: the command line's word, else a manifest's; nothing only
    for a file of this machine, or where the operator says so."""
    a = here.arguments
    of_model = kind == "model"
    n_bytes, digest = (a.size, a.sha256) if of_model else (None, a.drafter_sha256)
    release = a.release if of_model else None
    entries, named = known
    if n_bytes or digest:
        if named and of_model:
            raise UsageError("--manifest and --size or --sha256 say the same thing: give one")
        said = Published(size=n_bytes, sha256=digest, release=release, against="the command line")
        return said, None
    # --unverified does without the shipped manifest, but not without one that is named.
    entry = entries.find(kind, source.file, release) if named or not a.unverified else None
    if entry is not None:
        found = Published(
            size=entry.size,
            sha256=entry.sha256,
            release=entry.release,
            against=entries.where,
            remedy="" if named else "; --unverified takes another build of it",
        )
        return found, entry
    nothing = Published(release=release)
    if a.unverified:
        return nothing, None
    if named and of_model:
        has = ", ".join(f"{e.file} of {e.release}" for e in entries.entries(kind)) or "none"
        raise UsageError(f"{entries.where}: has no entry for {source.file} (entries: {has})")
    if source.remote:
        option = "--sha256" if of_model else "--drafter-sha256"
        raise UsageError(
            f"{source.where}: nothing is known to compare it with: give {option} or --manifest, "
            "or take whatever comes with --unverified"
        )
    return nothing, None


def _stem(source: Source) -> str:
    file = installing.model_file(source)
    if file == "model.gguf":
        raise UsageError(f"{source.where}: does not say how to call it: give it a --name")
    return file[: -len(".gguf")]


def _demand_name(name: str) -> None:
    if not directory.is_name(name):
        raise UsageError(
            f"{name}: not a name, expected up to 100 letters, digits and . _ + -, but not "
            f"{CURRENT}, {PREVIOUS} or one that ends in {UNFINISHED}"
        )


def _named(here: _Here, which: directory.Which, remedy: str) -> str:
    name = here.models.named(which)
    if name is None:
        raise UsageError(f"no model is {which} in {here.models.path}: {remedy}")
    return name


def _bytes(text: str) -> int:
    if not re.fullmatch(r"[0-9][0-9_,]{0,24}", text) or not int(re.sub("[_,]", "", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes")
    return int(re.sub("[_,]", "", text))


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a SHA-256 of 64 hex digits")
    return text.lower()


# What is done


def _switch(here: _Here, which: Callable[[], str]) -> int:
    models = here.models
    if not models.path.is_dir():
        raise UsageError(f"{models.path}: no model is installed: `ds4d model install SRC` gets one")
    with models.lock():
        name = which()
        before = models.named(CURRENT)
        path = models.directory(name)
        verify.demand(path, here.blocks)
        models.switch(name)
    if before == name:
        _say(f"{name} is current already")
    else:
        _say(f"{name} is current now" + (f", {before} is previous" if before else ""))
    _say(*_next(here))
    return 0


def _next(here: _Here) -> Iterator[str]:
    """What the operator does next, so that a daemon serves what is current."""
    current = here.models.path / CURRENT
    if here.configured is None or _absolute(here.configured) != current:
        serves = f"{here.configured}" if here.configured else "the embedded model"
        yield f"next: ds4d serves {serves}; for this one put into ds4d.toml, section [model]:"
        yield f'          path = "{current}"'
        yield "      then: systemctl restart ds4d"
    else:
        yield "next: systemctl restart ds4d"


def _served(configured: Path | None) -> Path | None:
    """The models' directory of which the daemon serves what is current."""
    return configured.parent if configured is not None and configured.name == CURRENT else None


def _absolute(path: Path) -> Path:
    """Without following links: `current` is the point of it."""
    return path.expanduser().absolute()


def _planned(here: _Here, planned: Plan) -> Iterator[str]:
    path = here.models.path / planned.wish.name
    yield f"{'adds to' if planned.wish.model is None else 'makes'} {path}"
    for piece in planned.pieces:
        known = "unknown size" if piece.size is None else f"{piece.size:,} bytes"
        yield f"  {piece.what:<9}{piece.file}: {known} from {piece.wanted.source.where}"
        if piece.there:
            yield f"           of which {piece.there:,} are there already"
        yield f"           compared with: {_compared(piece.wanted.published)}"
    if planned.wish.encoder is not None:
        yield f"  texts    from {planned.wish.encoder.where}"
    least = "at least " if any(piece.size is None for piece in planned.pieces) else ""
    yield f"  disk     {least}{planned.needed:,} bytes are needed, {planned.free:,} are free"
    yield f"  current  {'it becomes current' if planned.becomes_current else 'no change'}"


def _compared(published: Published) -> str:
    if published.against is None:
        return "nothing, its digest is only recorded"
    what = [f"{published.size:,} bytes"] if published.size else []
    what.append(f"sha256 {published.sha256}" if published.sha256 else "no digest is published")
    return f"{published.against}: {', '.join(what)}"


def _done(here: _Here, outcome: Outcome) -> Iterator[str]:
    record = outcome.record
    yield f"{record.name} is installed in {outcome.path}"
    yield f"  model    {record.file}, {record.size:,} bytes, release {record.release or 'unknown'}"
    yield f"  checked  {_checked(record)}"
    yield f"  drafter  {_about_drafter(record)}"
    yield "  texts    " + ("the release's" if outcome.texts else f"none: {verify.WITHOUT_TEXTS}")
    if outcome.current:
        before = outcome.before
        changed = f" (before: {before})" if before not in (None, record.name) else ""
        yield f"  current  yes{changed}"
        yield from _next(here)
    else:
        yield f"  current  no, {outcome.before} is: `ds4d model use {record.name}` changes that"
    closed = _closed(outcome.path / record.file)
    if closed is not None:
        yield (
            f"note: {closed} is closed to all users but root: a service with a user of its own "
            "cannot read this model"
        )


def _checked(item: directory.Item) -> str:
    if item.checked == "sha256":
        return f"{verify.checked(item)}: {item.sha256}"
    return f"{verify.checked(item)}; the sha256 computed here is {item.sha256}, and is recorded"


def _about_drafter(record: Record) -> str:
    if record.drafter is None:
        return "none"
    if record.drafter.identity == "unknown":
        return f"{record.drafter.file}: {verify.UNKNOWN_DRAFTER}"
    return f"{record.drafter.file}, made for this model"


def _closed(file: Path) -> Path | None:
    """What keeps other users from reading a file: itself or a directory above, if it is root's."""
    for path, needed in ((file, 0o004), *((parent, 0o001) for parent in file.parents)):
        status = path.stat()
        if status.st_uid == 0 and not status.st_mode & needed:
            return path
    return None


# What is there


class _Row(msgspec.Struct, kw_only=True):
    """A line of the list, and an object of its JSON."""

    name: str
    path: str
    state: Literal["current", "previous", "installed", "unfinished"]
    bytes: int | None = None  # on the disk; None: cannot be said
    texts: bool = False  # whether the release's are there
    problem: str | None = None
    record: directory.Record | None = None


def _installed(here: _Here) -> Iterator[_Row]:
    current, previous = here.models.named(CURRENT), here.models.named(PREVIOUS)
    for name in here.models.names():
        path = here.models.path / name
        row = _Row(
            name=name,
            path=str(path),
            state=CURRENT if name == current else PREVIOUS if name == previous else "installed",
            texts=(path / directory.TEXTS).exists(),
        )
        try:
            row.record = directory.read_record(path)
            row.bytes = size_of(path / row.record.file)
            directory.check_size(path / row.record.file, row.record)
        except ModelFileError as error:
            row.problem = str(error)
        yield row


def _unfinished(here: _Here) -> Iterator[_Row]:
    for name in here.models.unfinished():
        path, n_bytes = here.models.path / name, 0
        with suppress(FileNotFoundError):  # an installation may be finishing it at this moment
            n_bytes = sum(p.stat().st_size for p in path.iterdir() if not p.name.startswith("."))
        yield _Row(name=name, path=str(path), state="unfinished", bytes=n_bytes)


def _columns(row: _Row) -> tuple[str, ...]:
    begins = (row.state, row.name)
    n_bytes = "?" if row.bytes is None else size(row.bytes)
    record = row.record
    if record is None:
        return (*begins, "", n_bytes, "", "", "", "")
    return (
        *begins,
        record.release or "unknown",
        n_bytes,
        record.checked,
        record.drafter.identity if record.drafter else "none",
        "release" if row.texts else "none",
        record.installed_at,
    )


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
