"""Small steps with files and directories that every user may read."""

from __future__ import annotations

import errno
import hashlib
from typing import TYPE_CHECKING

from ds4d.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIRECTORY_MODE = 0o755  # a service with a user of its own reads what lies there


def make_directory(path: Path) -> None:
    """With its parents; whatever the umask says, others may enter what is made here."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        directory.chmod(DIRECTORY_MODE)


def is_full(error: OSError) -> bool:
    """Whether it says that the disk, a quota or the size of a file is at its limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def size_of(path: Path) -> int:
    """Raises ModelFileError for what is missing or is no regular file."""
    try:
        n_bytes = path.stat().st_size
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    if not path.is_file():
        raise ModelFileError(f"{path}: is not a regular file")
    return n_bytes


def sha256_of(path: Path, at: Callable[[int], None]) -> hashlib._Hash:
    """The hash of all bytes of a file so far, to read or to go on with; `at` is told how many
    have been read. Raises ModelFileError."""
    hasher, done = hashlib.sha256(), 0
    block = memoryview(bytearray(4 << 20))
    try:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(block):
                hasher.update(block[:n])
                done += n
                at(done)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    return hasher
