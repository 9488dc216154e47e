"""`ds4ctl`: one command for a running daemon, its answer on stdout, an exit code.

Exit codes (spec/serving.md 4.3): 0 ok, 1 error, 2 usage, 3 not running, 4 denied, 5 deadline, 6 not
in this state, 7 configuration invalid; 130 after Ctrl-C. What goes wrong is a sentence on stderr,
after `--json` also `{"error": ...}` on stdout, with a code if the daemon said it. `commands` says
which commands there are; this only parses, calls and prints.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ds4d import __version__, config, wire
from ds4d.ctl import client, show
from ds4d.ctl.client import Answer, Client, Failure
from ds4d.ctl.commands import COMMANDS, GROUPS, Command, patience
from ds4d.ctl.words import plain
from ds4d.errors import Ds4Error, UsageError
from ds4d.program import Parser, keep_crash, run, say

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_S = 10.0  # for one answer; the daemon needs milliseconds
_BACK = "\r\033[K"  # to the start of the line, and clear it
_COLOUR = re.compile(r"\033\[[0-9;]*m")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code of the process."""
    return run(lambda: _run(parser().parse_args(argv)), _tell)


def parser() -> argparse.ArgumentParser:
    """The whole command line, made from the table of commands."""
    top = Parser(
        prog="ds4ctl",
        description="Asks a running ds4d what it does, and tells it what to do.",
        parents=[_common()],
    )
    top.add_argument("--version", action="version", version=f"ds4ctl {__version__}")
    top.set_defaults(json=False, socket=None, timeout=None, wait=True)
    verbs = {"": top.add_subparsers(required=True, metavar="COMMAND", title="commands")}
    for command in COMMANDS:
        group, _, word = command.words.rpartition(" ")
        if group not in verbs:
            about = GROUPS[group]
            inner = verbs[""].add_parser(group, help=about, description=_sentence(about))
            verbs[group] = inner.add_subparsers(required=True, metavar="COMMAND", title="commands")
        one = verbs[group].add_parser(
            word,
            help=command.help,
            description=f"{_sentence(command.help)} {command.about}".rstrip(),
            parents=[_common()],
        )
        for names, options in command.arguments:
            one.add_argument(*names, **options)
        one.set_defaults(command=command)
    return top


def _common() -> Parser:
    """Options that are taken before and after the command."""
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    common.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="the daemon's socket (default: the user's, then the system's)",
    )
    common.add_argument(
        "--timeout",
        type=patience,
        metavar="S",
        help=f"seconds to wait for an answer (default: {ANSWER_S:g}; for the end of an operation: "
        "as long as the daemon lets it take)",
    )
    return common


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _run(arguments: argparse.Namespace) -> int:
    command: Command = arguments.command
    params = command.call(arguments)
    if arguments.socket is None:
        paths = client.places(config.directories().runtime, reads=command.reads)
    else:
        paths = (arguments.socket,)
    try:
        with closing(client.connect(paths, arguments.timeout or ANSWER_S)) as daemon:
            return _ask(daemon, command, params, arguments)
    except Failure as failure:
        if arguments.json:
            error = failure.error or {"message": str(failure)}
            _print(msgspec.json.encode({"error": error}).decode())
        raise


def _ask(
    daemon: Client, command: Command, params: wire.Params[Any], arguments: argparse.Namespace
) -> int:
    answer, show_it = daemon.ask(params), command.show
    if params.RESULT is wire.Op and arguments.wait:
        answer = _wait(daemon, command, answer.read(), arguments)
    elif params.RESULT is wire.Op:
        show_it = show.begun
    if arguments.json:
        _print(answer.raw.decode("utf-8", "replace"))
    else:
        _print(show_it(answer.read()))
    return client.OK if command.exit_code is None else command.exit_code(answer.read())


def _wait(daemon: Client, command: Command, op: wire.Op, arguments: argparse.Namespace) -> Answer:
    """The end of an operation; on a terminal one line says meanwhile how far it is."""
    shows = sys.stderr.isatty() and not arguments.json
    left = command.goes_on or f"{op.kind} is cancelled"  # the daemon does so when we go

    def heard(progress: wire.OpProgress) -> None:
        if shows:
            share = "" if progress.fraction is None else f" {progress.fraction:.0%}"
            sys.stderr.write(f"{_BACK}{op.kind}:{share} {plain(progress.text)}"[: show.WIDTH])
            sys.stderr.flush()

    try:
        return daemon.wait(op, command.ends_with, heard, arguments.timeout)
    except TimeoutError:
        text = f"{op.kind} has not ended within {arguments.timeout:g} s (--timeout): {left}"
        raise Failure(text, client.DEADLINE) from None
    except KeyboardInterrupt:
        sys.stderr.write("\n" if shows else "")
        sys.stderr.write(f"ds4ctl: {left}\n")
        raise
    finally:
        if shows:
            sys.stderr.write(_BACK)


def _print(text: str) -> None:
    """Colours are for terminals only. What was foreign in `text` has lost its own before."""
    if text:
        say(text if sys.stdout.isatty() else _COLOUR.sub("", text))


def _tell(error: BaseException) -> int:
    if isinstance(error, Failure):
        return _say(_words(error), error.exit_code)
    if isinstance(error, UsageError):
        return _say(str(error), client.USAGE)
    if isinstance(error, Ds4Error):
        return _say(str(error), client.ERROR)
    where = keep_crash(error, config.directories().state)
    return _say(f"unexpected {type(error).__name__}: {error}; {where}", client.ERROR)


def _words(failure: Failure) -> str:
    """The problems of a configuration have a line each."""
    error = failure.error
    if error is None or error.code != wire.CONFIG_INVALID or not error.data:
        return str(failure)
    problems = client.converted(error.data, list[wire.Problem])
    return "\n".join(show.problem(problem) for problem in problems)


def _say(text: str, exit_code: int) -> int:
    sys.stderr.write(f"ds4ctl: {plain(text)}\n")
    return exit_code
