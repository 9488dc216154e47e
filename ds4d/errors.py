"""The exception tree. A class exists because someone catches it by name; `exit_code` is what the
process ends with when one reaches `cli.main` (design.md, "Starting and stopping").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ds4Error(Exception):
    """Anything that ds4d raises on purpose. `str(error)` is one sentence for a person."""

    exit_code = 1


class UsageError(Ds4Error):
    """A command line that cannot be carried out as written."""

    exit_code = 64


class ConfigError(Ds4Error):
    """The operator acts: a setting, a file or a port is not as it must be. `problems` are the
    single ones, if they were found in settings: (where, key, message)."""

    exit_code = 78

    def __init__(self, message: str, problems: Sequence[tuple[str, str, str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ModelFileError(ConfigError):
    """A model file that is not what it claims to be; names file, key or tensor."""


class MemoryRefusedError(Ds4Error):
    """What was asked for at start does not fit into memory; restarting would not help."""

    exit_code = 71


class TemporaryError(Ds4Error):
    """A start that may succeed later: another process holds the port or the directory."""

    exit_code = 75


class RequestError(Ds4Error):
    """The client acts. `status` is 400, 401, 403, 404, 405 or 413; `param` and `code` as in
    spec/api.md 2.0; `extra` are further keys of the error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        extra: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.extra = extra or {}


class Refused(Ds4Error):
    """The client waits: 429 or 503, with `retry_after_s` seconds."""

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Declined(Ds4Error):
    """The operator is told why not: what was asked of the running daemon cannot be done now.
    `code` is one of `ds4d.wire`."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class CheckpointError(Ds4Error):
    """We act: the stored state is dropped and its tokens are prefilled again."""


class OutOfMemory(Ds4Error):
    """The engine was asked for more lanes, pages or frontiers than were promised to it."""


class DeviceError(Ds4Error):
    """systemd acts: the device or the engine thread is gone."""

    exit_code = 70


class LaneError(Ds4Error):
    """One lane failed alone (a non-finite logit); its state is dropped, the others go on."""


def cause(error: BaseException) -> BaseException:
    """The reason among what a task group has collected: ours first."""
    while isinstance(error, BaseExceptionGroup):
        ours = error.subgroup(Ds4Error)
        error = (ours or error).exceptions[0]
    return error
