"""The settings that hold: those that were read, and what an operator has put over them since.

A reload compares what was read then and now; what an operator has set with a command stays until a
reload changes that key. Knows none of the parts that obey.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ds4d import config, wire
from ds4d.sched.scheduler import Rules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ds4d.config import Config, Loaded


class Settings:
    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.started = loaded.config  # with which the engine was built
        self._over: dict[str, tuple[Any, str]] = {}  # by key: the value, and who has set it
        self._holds = loaded
        self.hash = config.digest(loaded.config)  # of what holds

    @property
    def config(self) -> Config:
        """As it was read last; what an operator has put over it is told by `text` and `hash`."""
        return self.loaded.config

    def adopt(self, loaded: Loaded) -> frozenset[str]:
        """`loaded` takes the place of what was read. Returns the keys that it changes; whatever an
        operator had put over those ends."""
        changed = frozenset(c.key for c in config.diff(self.config, loaded.config))
        self.loaded = loaded
        self._over = {key: over for key, over in self._over.items() if key not in changed}
        self._refresh()
        return changed

    def overrule(self, key: str, value: Any, by: str) -> None:
        """An operator has set `key` by a command; to what was read takes that back."""
        if value == attrgetter(key)(self.config):
            self._over.pop(key, None)
        else:
            self._over[key] = value, by
        self._refresh()

    def text(self, *, defaults: bool) -> wire.ConfigText:
        return wire.ConfigText(toml=config.show(self._holds, defaults=defaults), hash=self.hash)

    def _refresh(self) -> None:
        values = {key: value for key, (value, _) in self._over.items()}
        sources = {key: by for key, (_, by) in self._over.items()}
        self._holds = replace(
            self.loaded,
            config=_with(self.config, values),
            sources={**self.loaded.sources, **sources},
        )
        self.hash = config.digest(self._holds.config)


def _with(settings: Config, values: Mapping[str, Any]) -> Config:
    for key, value in values.items():
        section, _, leaf = key.partition(".")
        changed = replace(getattr(settings, section), **{leaf: value})
        settings = replace(settings, **{section: changed})
    return settings


def rules(settings: Config) -> Rules:
    """The scheduler's, out of the configuration."""
    return Rules(
        send_stall_s=settings.api.send_stall_s,
        queue_deadline_s=settings.api.queue_deadline_s,
        request_max_s=settings.api.request_max_s,
        queue_total=settings.sched.queue_total,
        stall_target_s=settings.sched.decode_stall_target_ms / 1e3,
        prefill_share=settings.sched.prefill_share,
    )
