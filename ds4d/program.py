"""What our command lines share: the parser, the way a program ends, what a fault leaves behind.

Owns no verb and no exit code but that of Ctrl-C. `ds4d` and `ds4ctl` use it; man pages and shell
completion are made from the parsers built with it.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import sys
import traceback
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from ds4d import __version__
from ds4d.errors import Ds4Error, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

INTERRUPTED = 130  # what a shell expects after Ctrl-C
DIGITS = 18  # of a number, so that it fits 64 bits
CRASHES_KEPT = 5  # files; a fault that comes back with every restart must not fill the disk


class UnwrittenError(Ds4Error):
    """What a program has to say could not be written to stdout."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError, one sentence, where argparse prints its usage and exits. Takes options by
    their full names only: an abbreviation may mean something else once an option is added."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """The verb that does not know an argument complains itself, not the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists what there is")


def count(text: str) -> int:
    """A whole number from 1 on, for `add_argument(type=...)`."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)


def say(text: str) -> None:
    """Print `text` on stdout, now. Raises BrokenPipeError and UnwrittenError."""
    with _writing():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def run(body: Callable[[], int], tell: Callable[[BaseException], int]) -> int:
    """The exit code of `body`, or of `tell` for the exception that it raised."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of files and models are in any script
    try:
        code = body()
        with _writing():
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `ds4d model inspect FILE | head`
        _drop_output()
        return 0
    except UnwrittenError as error:
        _drop_output()
        return tell(error)
    except Exception as error:
        return tell(error)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwrittenError(f"the output cannot be written: {error.strerror}") from None


def _drop_output() -> None:
    """What is still to be written to stdout goes nowhere, and is no error when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def keep_crash(error: BaseException, folder: Path) -> str:
    """Write the traceback of an unexpected `error` to a new file in `folder`, for whoever mends
    it; returns half a sentence that says where it is."""
    now = datetime.now(UTC)
    path = folder / f"crash-{now:%Y%m%dT%H%M%S.%f}-{os.getpid()}.txt"
    head = (
        f"ds4d {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{now.isoformat(timespec='seconds')}  {' '.join(sys.argv)}\n\n"
    )
    text = head + "".join(traceback.format_exception(error))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        for old in sorted(folder.glob("crash-*.txt"))[:-CRASHES_KEPT]:
            old.unlink(missing_ok=True)
    except OSError as failed:
        return f"its traceback could not be kept in {folder}: {failed.strerror}"
    return f"its traceback is in {path}"
