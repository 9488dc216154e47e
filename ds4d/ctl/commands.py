"""Every command of `ds4ctl`, in one table.

A new command is one entry of `COMMANDS`: its words, what it is for, its arguments, the call that it
makes (a class of `ds4d.wire`), and the function of `show` that turns the answer into text. The
parser, the help, the man page, the shell completion, the JSON form and the exit codes follow from
that; nothing else lists commands.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ds4d import wire
from ds4d.ctl import client, show
from ds4d.ctl.words import plain
from ds4d.program import DIGITS, count
from ds4d.sched.snapshot import SESSIONS_MAX, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    Argument = tuple[tuple[str, ...], dict[str, Any]]


SECONDS_MAX = 1e8  # three years; what an operating system takes as a timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    words: str  # `log level`: the last but one makes a group
    help: str  # one line
    about: str = ""  # more, for its own --help and the man page
    arguments: tuple[Argument, ...] = ()
    call: Callable[[argparse.Namespace], wire.Params[Any]]
    show: Callable[[Any], str]  # the call's result; of an operation, what it has ended with
    reads: bool = False  # the monitor socket will do
    exit_code: Callable[[Any], int] | None = None  # of a result; None: 0
    ends_with: Any = wire.Done  # what an operation's result is
    goes_on: str = ""  # said at Ctrl-C, which then leaves the operation alone; "": cancels it


def arg(*names: str, **options: Any) -> Argument:
    """What `add_argument` will be given."""
    return names, options


def seconds(text: str) -> float:
    """A time of zero or more, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds, such as 30")
    return value


def patience(text: str) -> float:
    """A time of more than zero, in seconds."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError("in no time at all nothing can answer")
    return value


def number(text: str) -> int:
    """A whole number from 0 on."""
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def absolute(text: str) -> str:
    """A path that means the same to the daemon, which lives elsewhere."""
    try:
        return str(Path(text).absolute())
    except OSError:
        raise argparse.ArgumentTypeError(f"{text!r} lies in a directory that is gone") from None


COMMANDS = (
    Command(
        words="ping",
        help="ask whether the daemon answers",
        call=lambda a: wire.Ping(),
        show=show.pong,
        reads=True,
    ),
    Command(
        words="status",
        help="show what the daemon does, why, and what to do about it",
        about="Also while it loads, drains or has failed.",
        call=lambda a: wire.GetStatus(),
        show=show.status,
        reads=True,
    ),
    Command(
        words="sessions",
        help="list sessions and the requests that wait",
        about="SINCE is the age of the request at work, or for how long an idle session was not "
        "used; LEFT is predicted: until the prompt is computed, or a lane is free.",
        arguments=(
            arg("--phase", choices=get_args(Phase), metavar="PHASE", help="only %(choices)s"),
            arg(
                "--limit",
                type=count,
                default=SESSIONS_MAX,
                metavar="N",
                help="at most so many (%(default)s)",
            ),
        ),
        call=lambda a: wire.GetSessions(phase=a.phase, limit=a.limit),
        show=show.sessions,
        reads=True,
    ),
    Command(
        words="close",
        help="forget a session and give its memory back",
        about="The next request of its conversation computes its prompt anew.",
        arguments=(
            arg("id", type=number, metavar="ID", help="as `ds4ctl sessions` shows it"),
            arg("--force", action="store_true", help="also end the request that works on it"),
        ),
        call=lambda a: wire.CloseSession(id=a.id, force=a.force),
        show=show.done,
    ),
    Command(
        words="cancel",
        help="end one request; its client gets an error",
        arguments=(
            arg(
                "request",
                metavar="REQUEST",
                help="its id as `ds4ctl sessions` and the log have it, or the first "
                f"{wire.REQUEST_MIN} or more characters of it",
            ),
        ),
        call=lambda a: wire.CancelRequest(request=a.request),
        show=show.done,
    ),
    Command(
        words="drain",
        help="refuse new work and wait for what runs or is queued",
        about="New requests get 503 with Retry-After. What still runs at the deadline is ended. "
        "Ctrl-C stops only the waiting; `ds4ctl undrain` takes the drain back.",
        arguments=(
            arg(
                "--deadline",
                type=seconds,
                metavar="S",
                help="seconds to wait at most (default: the setting runtime.drain_s)",
            ),
            arg("--stop", action="store_true", help="shut the daemon down afterwards"),
            arg(
                "--no-wait",
                dest="wait",
                action="store_false",
                help="begin it and return at once",
            ),
        ),
        call=lambda a: wire.StartDrain(deadline_s=a.deadline, stop=a.stop),
        show=show.done,
        goes_on="the drain goes on; `ds4ctl undrain` takes it back, `ds4ctl status` shows it",
    ),
    Command(
        words="undrain",
        help="accept work again",
        call=lambda a: wire.Undrain(),
        show=show.done,
    ),
    Command(
        words="reload",
        help="read the configuration anew and apply it, all or nothing",
        about="No running request is disturbed. When a value is wrong, or one that has changed "
        "needs a restart, nothing changes and the exit code is 7.",
        arguments=(
            arg("--dry-run", action="store_true", help="only say what would change"),
            arg(
                "--allow-partial",
                action="store_true",
                help="apply what needs no restart and leave the rest as it was",
            ),
            arg(
                "--file",
                type=absolute,
                metavar="FILE",
                help="another ds4d.toml from now on (root and the daemon's own user only)",
            ),
        ),
        call=lambda a: wire.DoReload(dry_run=a.dry_run, allow_partial=a.allow_partial, file=a.file),
        show=show.reloaded,
    ),
    Command(
        words="config show",
        help="print the settings in effect, with the source of each",
        arguments=(arg("--defaults", action="store_true", help="the built-in ones instead"),),
        call=lambda a: wire.ShowConfig(defaults=a.defaults),
        show=lambda answer: plain(answer.toml).rstrip("\n"),
    ),
    Command(
        words="config check",
        help="check the daemon's configuration as it lies on disk now",
        about="Drop-ins and the environment are those that the daemon has. Exit code 7 if there "
        "are problems. `ds4d config check` needs no daemon.",
        arguments=(
            arg(
                "file",
                nargs="?",
                type=absolute,
                metavar="FILE",
                help="another ds4d.toml (root and the daemon's own user only)",
            ),
        ),
        call=lambda a: wire.CheckConfig(file=a.file),
        show=show.checked,
        exit_code=lambda answer: client.CONFIG_INVALID if answer.problems else client.OK,
    ),
    Command(
        words="lanes set",
        help="let at most N lanes be used, until lanes.max is reloaded or the daemon restarts",
        about="A lower number takes effect as requests end.",
        arguments=(arg("n", type=count, metavar="N", help="1 to those that the engine has"),),
        call=lambda a: wire.SetLanes(max=a.n),
        show=show.lanes,
    ),
    Command(
        words="bench",
        help="measure the live daemon under a load of its own",
        about="Each run sends random prompts, as many at a time as --concurrency says. It is "
        "cancelled when ds4ctl ends. `ds4d bench` measures the engine alone.",
        arguments=(
            arg(
                "--prompt-tokens",
                type=count,
                default=512,
                metavar="N",
                help="length of each prompt (%(default)s)",
            ),
            arg(
                "--answer-tokens",
                type=count,
                default=64,
                metavar="N",
                help="length of each answer (%(default)s)",
            ),
            arg(
                "--depth",
                type=number,
                default=0,
                metavar="N",
                help="tokens of context before the prompt, not measured (%(default)s)",
            ),
            arg(
                "--concurrency",
                type=count,
                default=1,
                metavar="N",
                help="requests at a time (%(default)s)",
            ),
            arg("--runs", type=count, default=3, metavar="N", help="how often (%(default)s)"),
            arg(
                "--no-exclusive",
                dest="exclusive",
                action="store_false",
                help="measure beside other work; without it a busy daemon refuses",
            ),
        ),
        call=lambda a: wire.Bench(
            prompt_tokens=a.prompt_tokens,
            answer_tokens=a.answer_tokens,
            depth=a.depth,
            concurrency=a.concurrency,
            runs=a.runs,
            exclusive=a.exclusive,
        ),
        show=show.bench,
        ends_with=list[wire.BenchRow],
    ),
    Command(
        words="log level",
        help="change how much the daemon logs, now",
        arguments=(
            arg(
                "level",
                choices=("debug", "info", "warning", "error"),
                metavar="LEVEL",
                help="the least that is logged: %(choices)s",
            ),
            arg(
                "--logger",
                default="ds4d",
                metavar="NAME",
                help="only this part, such as ds4d.sched (default: all)",
            ),
            arg(
                "--for",
                dest="ttl",
                type=seconds,
                metavar="S",
                help="seconds after which the previous level comes back (default: never)",
            ),
        ),
        call=lambda a: wire.SetLogLevel(level=a.level, logger=a.logger, ttl_s=a.ttl),
        show=show.log_level,
    ),
    Command(
        words="metrics",
        help="print what Prometheus would read",
        call=lambda a: wire.GetMetrics(),
        show=lambda answer: plain(answer.text).rstrip("\n"),
        reads=True,
    ),
    Command(
        words="shutdown",
        help="drain for runtime.stop_drain_s, then end the daemon",
        about="As SIGTERM does. `systemctl stop ds4d` is the same for the service.",
        arguments=(
            arg("--fast", action="store_true", help="end what runs at once, as two SIGTERMs do"),
        ),
        call=lambda a: wire.Shutdown(mode="fast" if a.fast else "graceful"),
        show=show.done,
    ),
)

GROUPS = {
    "config": "the daemon's settings",
    "lanes": "how many conversations are computed at a time",
    "log": "what the daemon logs",
}
