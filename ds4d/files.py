"""Files written whole: a reader sees the old one or the new one, also after a crash.

Knows nothing of what is in them.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NEW_MODE = 0o644  # a service with a user of its own reads what its operator has written


@contextmanager
def written_whole(path: Path, *, replace: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to, which gets the name `path` once it is whole and on disk.

    Of a link, the file that it names is replaced. Owner and mode stay those of the file that was
    there, where we may set them. Raises OSError: FileExistsError if there is one and it is not to
    be replaced.
    """
    if not replace and os.path.lexists(path):
        raise FileExistsError(path)
    path = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    beside = Path(name)
    try:
        with open(descriptor, "wb") as out:
            yield out
            out.flush()
            _take_over(path, descriptor)
            os.fsync(descriptor)
        if replace:
            beside.replace(path)
        else:
            os.link(beside, path)  # unlike a rename it fails if somebody was faster
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in it last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_over(path: Path, descriptor: int) -> None:
    try:
        old = path.stat()
    except FileNotFoundError:
        os.fchmod(descriptor, NEW_MODE)
        return
    with suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o7777)  # after the owner, which would clear some bits
