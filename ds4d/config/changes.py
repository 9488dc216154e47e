"""How one configuration differs from another, and what a reload may take over. Reads nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ds4d.config.sources import error_of
from ds4d.config.tree import KEYS, build, conflicts, value_at
from ds4d.config.values import RESTART, as_toml

if TYPE_CHECKING:
    from collections.abc import Collection

    from ds4d.config.sources import Loaded
    from ds4d.config.tree import Config
    from ds4d.config.values import When

_KEPT: Final = " at start"  # after the source of a value that waits for a restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A key with two values, as TOML; one that is not set is `unset`."""

    key: str
    old: str
    new: str
    when: When  # from when on the new value can hold


def diff(old: Config, new: Config) -> tuple[Changed, ...]:
    """The keys whose values differ, in the order of the sections."""
    return tuple(
        Changed(key=name, old=as_toml(before), new=as_toml(after), when=key.when)
        for name, key in KEYS.items()
        if (before := value_at(old, name)) != (after := value_at(new, name))
    )


def merge(old: Config, new: Config, keep: Collection[str] = ()) -> Config:
    """`new`, but as in `old` what needs a restart and the keys in `keep`.

    Raises ConfigError if the two do not go together: an API that stays on all interfaces, say, and
    whose keys were taken away.
    """
    values = {
        name: value_at(old if key.when == RESTART or name in keep else new, name)
        for name, key in KEYS.items()
    }
    merged = build(old.paths, values)
    where = "without a restart"
    if found := [(where, conflict.key, conflict.message) for conflict in conflicts(merged)]:
        raise error_of(found)
    return merged


def adopt(old: Loaded, new: Loaded, keep: Collection[str] = ()) -> Loaded:
    """What holds after a reload that leaves out what needs a restart and the keys in `keep`.
    Raises ConfigError as `merge` does."""
    config = merge(old.config, new.config, keep)
    kept = {changed.key for changed in diff(config, new.config)}
    sources = {
        name: old.sources[name].removesuffix(_KEPT) + _KEPT if name in kept else source
        for name, source in new.sources.items()
    }
    return replace(new, config=config, sources=sources)


def digest(config: Config) -> str:
    """12 hex digits that differ when any setting does; directories do not count."""
    text = "\n".join(f"{name} = {as_toml(value_at(config, name))}" for name in KEYS)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
