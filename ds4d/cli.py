"""The command line of `ds4d`: verbs that need no daemon. Arguments in, an exit code out.

Whatever goes wrong is told in one sentence on stderr, never as a traceback: that of a fault of ours
goes to a file. Does not know any algorithm; the modules behind a verb are imported when it is used.
"""

from __future__ import annotations

import argparse
import logging
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ds4d import __version__, config, events
from ds4d.errors import ConfigError, Ds4Error, UsageError, cause
from ds4d.files import written_whole
from ds4d.notify import Notifier
from ds4d.program import Parser, keep_crash, run, say

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("ds4d.cli")

BROKEN = 70  # a fault of ours: like a lost device, a restart may cure it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code of the process."""
    return run(lambda: _run(sys.argv[1:] if argv is None else list(argv)), _tell)


def _run(argv: list[str]) -> int:
    arguments = parser(argv[0] if argv else "").parse_args(argv)
    match arguments.verb:
        case "serve":
            return _serve(arguments)
        case "config":
            return _init(arguments) if arguments.config_verb == "init" else _check(arguments)
        case "bench":
            from ds4d import bench

            return bench.run(arguments)
        case _ if arguments.model_verb == "inspect":
            return _inspect(arguments)
        case _:
            return _install(arguments)


def parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The whole command line; man page and shell completion are made from it. With `verb` the
    arguments of others may be missing, whose modules are slow to import."""
    top = Parser(prog="ds4d", description="Serves DeepSeek-V4-Flash from one GPU to agents.")
    top.add_argument("--version", action="version", version=f"ds4d {__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")

    serve = verbs.add_parser(
        "serve",
        help="run the daemon (with no model: the embedded ds4-tiny)",
        description="Runs the daemon in the foreground until a signal ends it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"settings, for ds4d.toml or --set:\n{textwrap.indent(config.listing(), '  ')}",
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="a ds4d.toml")
    serve.add_argument("--model", type=Path, metavar="FILE", help="a GGUF file")
    serve.add_argument(
        "--listen", action="append", metavar="HOST:PORT", help="where to answer; may be given again"
    )
    serve.add_argument("--profile", metavar="NAME", help="a preset of settings")
    serve.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting, such as lanes.max=2; may be given again",
    )

    model = verbs.add_parser("model", help="model files", description="Looks after model files.")
    model_verbs = model.add_subparsers(
        dest="model_verb", required=True, metavar="VERB", title="verbs"
    )
    inspect = model_verbs.add_parser(
        "inspect",
        help="geometry, quants, bytes, memory needed",
        description="Says what a GGUF file holds and what it would need to be served.",
    )
    inspect.add_argument("file", type=Path, metavar="FILE", help="a GGUF file")
    inspect.add_argument("--json", action="store_true", help="print JSON, for programs")
    if verb in (None, "model"):
        from ds4d.model.install import verbs as install

        install.add(model_verbs)

    settings = verbs.add_parser(
        "config", help="settings", description="Writes and checks ds4d.toml."
    )
    config_verbs = settings.add_subparsers(
        dest="config_verb", required=True, metavar="VERB", title="verbs"
    )
    init = config_verbs.add_parser(
        "init",
        help="write a commented ds4d.toml",
        description="Writes a ds4d.toml in which every setting is explained and commented out.",
    )
    init.add_argument(
        "--file",
        metavar="FILE",
        help="where to write (default: ds4d.toml in the configuration directory); - is stdout",
    )
    init.add_argument(
        "--profile",
        choices=sorted(config.PRESETS),
        default=config.KEYS["profile"].default,
        metavar="NAME",
        help="whose values to show: %(choices)s (default: %(default)s)",
    )
    init.add_argument("--force", action="store_true", help="replace the file that is there")
    check = config_verbs.add_parser(
        "check",
        help="check the settings without starting anything",
        description="Reads the file, its drop-ins and the environment as `ds4d serve` would.",
    )
    check.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="a ds4d.toml (default: that of the configuration directory, if it is there)",
    )

    measure = verbs.add_parser(
        "bench", help="measure the engine alone", description="Measures the engine alone."
    )
    if verb in (None, "bench"):
        from ds4d import bench

        bench.add_arguments(measure)
    return top


def _serve(arguments: argparse.Namespace) -> int:
    sets = list(arguments.set)
    if arguments.profile is not None:
        sets.append(f"profile={arguments.profile}")
    if arguments.model is not None:
        sets.append(f"model.path={arguments.model}")
    if arguments.listen:
        sets.append(f"api.listen={','.join(arguments.listen)}")
    try:
        loaded = config.read(file=arguments.config, sets=sets)
    except ConfigError as error:
        Notifier(config.directories().notify).send(f"STATUS=failed: {error}")
        raise
    events.configure(loaded.config.log.level, journal=loaded.config.paths.journal)
    from ds4d.daemon import main as serve  # late: a bad setting need not wait for its imports

    return serve(loaded)


def _inspect(arguments: argparse.Namespace) -> int:
    from ds4d.model import inspect

    say(inspect.main(arguments.file, arguments.json).rstrip("\n"))
    return 0


def _install(arguments: argparse.Namespace) -> int:
    """The verbs that change which models there are."""
    from ds4d.model.install import verbs
    from ds4d.prompt.constants import RELEASE_BLOCKS

    configured = None
    try:
        configured = config.load(file=_settings_file()).model.path
    except ConfigError:
        if arguments.dir is None:  # they say where models lie
            raise
        sys.stderr.write("ds4d: the settings have problems, see `ds4d config check`\n")
    return verbs.run(
        arguments,
        models=config.administered().state / "models",
        blocks=RELEASE_BLOCKS,
        configured=configured,
    )


def _init(arguments: argparse.Namespace) -> int:
    text = config.template(arguments.profile)
    if arguments.file == "-":
        say(text.rstrip("\n"))
        return 0
    if arguments.file is not None:
        file = Path(arguments.file)
    else:
        file = config.administered().config / config.FILE_NAME
    try:
        if arguments.file is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(file, replace=arguments.force) as out:
            out.write(text.encode())
    except FileExistsError:
        raise UsageError(f"{file} is there already; --force replaces it") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    say(f"{file} written; `ds4d config check` reads it after your changes")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    loaded = config.read(file=arguments.file or _settings_file())
    files = ", ".join(map(str, loaded.files)) or "the built-in values: there is no file"
    say(f"no problems in {files}")
    return 0


def _settings_file() -> Path | None:
    """That of the daemon which the person at this shell looks after, unless there is none: one
    that cannot be seen or is a link to nowhere is for the reader to complain of."""
    file = config.administered().config / config.FILE_NAME
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass
    return file


def _tell(error: BaseException) -> int:
    """One sentence for a person; a list of problems has a line each."""
    reason, paths = cause(error), config.directories()
    # The journal takes the priority of each line from its head.
    head = "<3>ds4d" if paths.journal else "ds4d"
    if isinstance(reason, Ds4Error):
        log.debug("cli.error", exc_info=error)
        sys.stderr.write("".join(f"{head}: {line}\n" for line in str(reason).splitlines()))
        return reason.exit_code
    if paths.journal:
        log.error("cli.error", exc_info=error)
    where = keep_crash(error, paths.state)
    sys.stderr.write(f"{head}: unexpected {type(reason).__name__}: {reason}; {where}\n")
    return BROKEN
