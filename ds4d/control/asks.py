"""What the control socket asks of the daemon. `service.Service` is the one that answers.

Every call is made on the event loop and must not block it. Raises `Declined` (with a code of
`wire`) for what cannot be done, `ConfigError` for settings that are wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ds4d import wire
    from ds4d.sched.runner import Runner

    Report = Callable[[str, float | None], None]
    """How far an operation is: a text for a person, and the share that is done if it is known."""


class Asks(Protocol):
    boot: str
    runner: Runner  # for a load on the live daemon

    def state(self) -> wire.State: ...

    def uptime_s(self) -> float: ...

    def status(self) -> wire.Status: ...

    def sessions(self) -> wire.Sessions: ...

    def n_vocab(self) -> int:
        """Token ids are below it; 0 while there is no model."""
        ...

    def close_session(self, id: int, *, force: bool) -> None: ...

    def cancel(self, request: str) -> None: ...

    async def drain(self, within_s: float | None, *, stop: bool, report: Report) -> str:
        """Returns when nothing runs any more, with a sentence on how it went; with `stop` it has
        called `shutdown` then, unless the drain was taken back. Cancelling the only
        one under way takes the drain back as `undrain` does."""
        ...

    def undrain(self) -> None: ...

    async def reload(
        self, *, dry_run: bool, allow_partial: bool, file: str | None
    ) -> wire.Reloaded: ...

    def config_text(self, *, defaults: bool) -> wire.ConfigText: ...

    async def check_config(self, file: str | None) -> wire.Checked: ...

    def set_lanes(self, n_max: int) -> None: ...

    def set_log_level(self, logger: str, level: str, ttl_s: float | None) -> str:
        """Returns the previous level."""
        ...

    async def exposition(self) -> bytes:
        """What Prometheus reads: text format 0.0.4."""
        ...

    def shutdown(self, *, fast: bool) -> None:
        """Begin to stop, and return before anything has been cancelled."""
        ...
