"""The command line of `ds4d`: verbs that need no daemon. Arguments in, an exit code out.

Whatever goes wrong is told in one sentence on stderr, never as a traceback (at log level debug the
log has that). Does not know any algorithm; the modules behind a verb are imported when it is used.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ds4d import __version__, config, events
from ds4d.errors import Ds4Error, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("ds4d.cli")

INTERRUPTED = 130  # what a shell expects after Ctrl-C
BROKEN = 70  # a fault of ours: like a lost device, a restart may cure it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code of the process."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `ds4d model inspect FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _tell(error)


def _run(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:  # has options of its own
        from ds4d.bench import main as bench

        return bench(argv[1:])
    arguments = _parser().parse_args(argv)
    match arguments.verb:
        case "serve":
            return _serve(arguments)
        case _:
            return _inspect(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    sets = list(arguments.set)
    if arguments.profile is not None:
        sets.append(f"profile={arguments.profile}")
    if arguments.model is not None:
        sets.append(f"model.path={arguments.model}")
    if arguments.listen:
        sets.append(f"api.listen={','.join(arguments.listen)}")
    settings = config.load(file=arguments.config, sets=sets)
    events.configure(settings.log.level)
    from ds4d.daemon import main as run  # late: a bad setting need not wait for its imports

    return run(settings)


def _inspect(arguments: argparse.Namespace) -> int:
    from ds4d.model import inspect

    sys.stdout.write(inspect.main(arguments.file, arguments.json).rstrip("\n") + "\n")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; `{self.prog} --help` lists what there is")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ds4d", description="Serves DeepSeek-V4-Flash from one GPU to agents.")
    parser.add_argument("--version", action="version", version=f"ds4d {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    serve = verbs.add_parser(
        "serve",
        help="run the daemon (with no model: the embedded ds4-tiny)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings, for ds4d.toml or --set:\n{textwrap.indent(config.listing(), '  ')}",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="a ds4d.toml")
    serve.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file")
    serve.add_argument("--listen", action="append", metavar="HOST:PORT", help="may be given again")
    serve.add_argument("--profile", metavar="NAME", help="a preset of settings")
    serve.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of the list below, such as lanes.max=2; may be given again",
    )

    model = verbs.add_parser("model", help="model files")
    model_verbs = model.add_subparsers(dest="model_verb", required=True, metavar="VERB")
    inspect = model_verbs.add_parser("inspect", help="geometry, quants, bytes, memory needed")
    inspect.add_argument("file", type=Path, metavar="FILE")
    inspect.add_argument("--json", action="store_true", help="for programs")

    verbs.add_parser("bench", help="measure the engine alone; see `ds4d bench --help`")
    return parser


def _tell(error: BaseException) -> int:
    """One sentence for a person; a list of problems has a line each."""
    cause = _first(error)
    log.debug("cli.error", exc_info=error)
    if isinstance(cause, Ds4Error):
        sys.stderr.write(f"ds4d: {cause}\n")
        return cause.exit_code
    sys.stderr.write(f"ds4d: unexpected {type(cause).__name__}: {cause}\n")
    return BROKEN


def _first(error: BaseException) -> BaseException:
    """The reason among what a task group has collected: ours first."""
    while isinstance(error, BaseExceptionGroup):
        ours = error.subgroup(Ds4Error)
        error = (ours or error).exceptions[0]
    return error
