"""Manifests: which size and digest have been published for which release.

A TOML file with a table for each file that is known:

    [[model]]                          # or [[drafter]]
    release = "0731"
    name = "deepseek-v4-flash-0731"    # how it is called once installed
    file = "*0731*.gguf"               # the file's name; * and ? as in a shell
    size = 86_720_111_488              # bytes
    sha256 = "…"                       # 64 hex digits; left out where none has been published

`size` or `sha256` must be there. Unknown keys are refused: a misspelt `sha256` would otherwise pass
for a digest that nobody has published. Does not know where a manifest comes from.
"""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from importlib import resources
from typing import Annotated, Literal

import msgspec

from ds4d import __version__
from ds4d.errors import ConfigError, UsageError

Kind = Literal["model", "drafter"]
Bytes = Annotated[int, msgspec.Meta(ge=1)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]  # `$` would let a line feed pass
NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}"
Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME}\Z")]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has been published about one file."""

    release: Annotated[str, msgspec.Meta(min_length=1)]
    file: Annotated[str, msgspec.Meta(min_length=1)]
    name: Name | None = None
    size: Bytes | None = None
    sha256: Digest | None = None

    def __post_init__(self) -> None:
        if self.size is None and self.sha256 is None:
            raise ValueError("an entry needs a size or a sha256")

    def is_of(self, file: str) -> bool:
        return fnmatchcase(file.lower(), self.file.lower())


class _Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: tuple[Entry, ...] = ()
    drafter: tuple[Entry, ...] = ()


class Manifest:
    """`where` names it to a person."""

    def __init__(self, where: str, tables: _Tables) -> None:
        self.where = where
        self._tables = tables

    def find(self, kind: Kind, file: str | None, release: str | None) -> Entry | None:
        """The entry for a file of that name; with `release`, among those of the release, which
        may then be called as it likes if it is the only one. Raises UsageError for several."""
        entries = self.entries(kind)
        if release is not None:
            entries = tuple(e for e in entries if e.release == release)
            if len(entries) == 1:
                return entries[0]
        fitting = [e for e in entries if file is not None and e.is_of(file)]
        if len(fitting) > 1:
            raise UsageError(
                f"{self.where} has {len(fitting)} entries for {file} (releases "
                f"{', '.join(e.release for e in fitting)}): name one with --release"
            )
        return fitting[0] if fitting else None

    def entries(self, kind: Kind) -> tuple[Entry, ...]:
        return self._tables.model if kind == "model" else self._tables.drafter


def read(text: str, where: str) -> Manifest:
    """Raises ConfigError, one sentence with the line or the entry."""
    try:
        return Manifest(where, msgspec.convert(tomllib.loads(text), _Tables))
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{where}: not a manifest of model files: {error}") from None


def shipped() -> Manifest:
    """The one in this package."""
    text = resources.files("ds4d").joinpath("data", "manifest.toml").read_text("utf-8")
    return read(text, f"the manifest shipped with ds4d {__version__}")
