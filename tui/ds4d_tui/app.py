"""ds4top: watch a ds4d, and act on it. The command line, and the app that puts the panes together.

To add a pane, write its widget in a file of its own (`pane.Pane`: a NAME, a PLACE and `show`) and
name it in `PANES`: it gets a place on the screen, a number key, every view and, if it is `Lines`, a
place in --once. What it shows must be in `feed.View`; a new topic of the socket is subscribed to in
`client` and folded in by `feed`.

The app holds no truth: it shows whole snapshots, and acts by calls whose answers it tells.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.widgets import Footer
from textual.worker import WorkerFailed

from ds4d import wire
from ds4d_tui import dialogs, once
from ds4d_tui.client import FAILED, OK, USAGE, CallError, Client, places
from ds4d_tui.colours import DAY, NIGHT, THEMES
from ds4d_tui.columns import AT_WORK
from ds4d_tui.draw import MUTED, plural, text
from ds4d_tui.feed import View
from ds4d_tui.log import Log
from ds4d_tui.memory import MemoryPane
from ds4d_tui.overview import Overview
from ds4d_tui.pane import Lines
from ds4d_tui.sessions import Sessions
from ds4d_tui.tape import END, Replay, Tape, TapeError
from ds4d_tui.title import Alerts, Title

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult
    from textual.notifications import SeverityLevel

    from ds4d.wire import Session
    from ds4d_tui.client import R, Source
    from ds4d_tui.messages import OpNews, Stop, Told
    from ds4d_tui.pane import Pane

PANES: tuple[type[Pane], ...] = (Overview, MemoryPane, Sessions, Log)
ACTIONS = {
    "drain": ("d", "Refuse new requests; what runs or waits is finished"),
    "undrain": ("u", "Accept new requests again"),
    "reload": ("r", "Read the configuration again; shows the changes first"),
    "cancel": ("c", "Cancel the request under the cursor"),
    "close": ("x", "Close the session under the cursor"),
}
TICK_S = 0.5  # how often the age of the picture is looked at
HZ_MIN, HZ_MAX = 0.2, 10.0
INTERRUPTED = 130  # what a shell expects after Ctrl-C


class Ds4Top(App[None]):
    """See the module."""

    TITLE = "ds4top"
    CSS_PATH = "ds4top.tcss"
    AUTO_FOCUS = "Table"
    NOTIFICATION_TIMEOUT = 4  # seconds: they lie over the log
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012 (App has no ClassVar)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (34, "-tall")]  # noqa: RUF012

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "keys", key_display="?"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("less_than_sign,comma", "sort(-1)", "Sort by the column to the left", show=False),
        Binding("greater_than_sign,full_stop", "sort(1)", "sort", key_display="<>"),
        Binding("i", "invert", "Invert the order", show=False),
        Binding("space", "pause", "pause", key_display="␣"),
        *(
            binding
            for name, (key, told) in ACTIONS.items()
            for binding in (
                Binding(key, name, name, tooltip=told),
                Binding(key, f"explain('{name}')", show=False),  # while the other is not enabled
            )
        ),
        Binding("f", "follow", "Log: hold, or follow again", show=False),
        Binding("v", "level", "Log: leave out the lowest level", show=False),
        Binding("y", "copy", "Copy the label of the request", show=False),
        Binding("t", "theme", "Next theme", show=False),
        *(
            Binding(str(i), f"pane('{pane.NAME}')", f"Show or hide {pane.NAME}", show=False)
            for i, pane in enumerate(PANES, 1)
        ),
        Binding("q", "quit", "quit"),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
    ]

    def __init__(self, source: Source, *, theme: str = THEMES[0]) -> None:
        super().__init__()
        self.last_words = ""  # why it ended, if by itself
        self.fault: BaseException | None = None  # of ours, that ended it
        self._source = source
        self._view = View()
        self._now = 0.0  # of the view; stands still while it is paused
        self._paused = False
        self._title = Title()
        self._alerts = Alerts()
        self._panes = {pane.NAME: pane() for pane in PANES}
        self.register_theme(NIGHT)
        self.register_theme(DAY)
        self.theme = theme

    def compose(self) -> ComposeResult:
        yield self._title
        yield self._alerts
        for place in ("top", "body"):
            with Container(id=place):
                for pane in self._panes.values():
                    if pane.PLACE == place:
                        pane.entitle()
                        yield pane
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        ended = 128 + signal.SIGTERM
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, None, ended)
        self.run_worker(self._source.run(self.post_message), group="source")
        self.set_interval(TICK_S, self._tick)
        self._show()

    def _fatal_error(self) -> None:
        """Textual would print pages of traceback over the shell; `main` says it in a sentence."""
        fault = self._exception
        self.fault = fault.error if isinstance(fault, WorkerFailed) else fault
        self._close_messages_no_wait()

    # What comes in

    def on_frame(self) -> None:
        if not self._paused and self._title.is_attached:
            self._show()

    def on_op_news(self, event: OpNews) -> None:
        progress = event.progress
        if not progress.ended:
            return  # the picture shows how far it is
        if progress.error is not None:
            self._say(progress.error.message, title=progress.kind, severity="error")
        else:
            result = progress.result if isinstance(progress.result, dict) else {}
            self._say(str(result.get("text") or progress.text), title=progress.kind)

    def on_told(self, event: Told) -> None:
        self._say(event.text, severity=event.severity)

    def _say(
        self,
        told: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
    ) -> None:
        """A notification. Brackets in what the daemon says are brackets."""
        self.notify(told, title=title, severity=severity, timeout=timeout, markup=False)

    def on_stop(self, event: Stop) -> None:
        self.last_words = event.text
        self.exit(return_code=FAILED)

    def _show(self) -> None:
        """Show the newest view."""
        before = (self._why_not(), _drains(self._view))
        self._view = self._source.feed.view()
        self._now = self._source.clock()
        for pane in self._panes.values():
            if pane.display:
                pane.show(self._view, self._now)
        self._show_link()
        if before != (self._why_not(), _drains(self._view)):
            self.refresh_bindings()

    def _show_link(self) -> None:
        self._title.source, self._title.paused = self._source.label(), self._paused
        self._title.show(self._view, self._now)
        self._alerts.show(self._view, self._now)
        self._title.screen.set_class(self._view.is_stale(self._now), "-stale")

    def _tick(self) -> None:
        """Time passes for what is shown even if nothing comes."""
        if not self._paused and self._title.is_attached:
            self._now = self._source.clock()
            self._show_link()

    def _sessions(self) -> Sessions:
        return self._title.screen.query_one(Sessions)

    def _log_pane(self) -> Log:
        return self._title.screen.query_one(Log)

    # Keys that change the picture

    def action_keys(self) -> None:
        self.push_screen(dialogs.keys(_help()))

    def action_filter(self) -> None:
        self._sessions().ask_filter()

    def action_sort(self, step: int) -> None:
        self._sessions().sort_beside(step)

    def action_invert(self) -> None:
        self._sessions().invert()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._source.hold(self._paused)
        if self._paused:
            self._show_link()
        else:
            self._show()

    def action_follow(self) -> None:
        self._log_pane().hold_or_follow()

    def action_level(self) -> None:
        self._log_pane().next_level()

    def action_theme(self) -> None:
        at = THEMES.index(self.theme) if self.theme in THEMES else -1
        self.theme = THEMES[(at + 1) % len(THEMES)]
        self._say(self.theme, title="theme", timeout=2)

    def action_pane(self, name: str) -> None:
        pane = self._panes[name]
        pane.display = not pane.display
        if pane.display:
            pane.show(self._view, self._now)
        body = self.query_one("#body")
        body.set_class(sum(pane.display for pane in body.children) == 1, "-alone")

    def action_copy(self) -> None:
        if target := self._sessions().target:
            self.copy_to_clipboard(target.request)
            self._say(target.request, title="copied", timeout=2)

    # Keys that act on the daemon

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """None dims it in the footer; its key then explains."""
        if action == "drain" and _drains(self._view):
            return False
        if action == "undrain" and not _drains(self._view):
            return False
        if action in ACTIONS and self._why_not():
            return None
        return True

    def _why_not(self) -> str:
        link = self._view.link
        if link.read_only:
            return link.read_only
        return "" if link.state == "live" else "there is no connection to the daemon now"

    def action_explain(self, action: str) -> None:
        if why := self._why_not():
            told = f"cannot {action}: {why}"
        elif action == "drain":
            told = "it drains already; u takes that back"
        else:
            told = "it does not drain: there is nothing to take back"
        self._say(told, severity="warning")

    @work(group="action", exclusive=True)
    async def action_drain(self) -> None:
        status = self._view.status
        n_running = status.lanes.n_busy if status and status.lanes else 0
        n_queued = status.queue.n if status and status.queue else 0
        asked = (
            f"{plural(n_running, 'request')} running and {n_queued} waiting are finished, within\n"
            "runtime.drain_s. New ones are refused with Retry-After until\n"
            "u takes the drain back. The daemon itself goes on."
        )
        if not await self._sure("drain the daemon?", asked, "drain"):
            return
        if await self._ask(wire.StartDrain(), "drain") is not None:
            self._say("new requests are refused from now on", title="drain")

    @work(group="action", exclusive=True)
    async def action_undrain(self) -> None:
        asked = "The daemon accepts new requests again."
        if await self._sure("take the drain back?", asked, "undrain"):
            await self._do(wire.Undrain(), "undrain", "new requests are accepted again")

    @work(group="action", exclusive=True)
    async def action_reload(self) -> None:
        """What would change comes first. What needs a restart stays as it is, and that is said."""
        plan = await self._ask(wire.DoReload(dry_run=True), "reload")
        if plan is None:
            return
        if not plan.applied and not plan.restart_required:
            self._say("nothing would change: the files say what is in force", title="reload")
        elif not plan.applied:
            await self._note("reload: needs a restart", _changes(plan))
        elif await self._sure("reload the configuration?", _changes(plan), "reload"):
            call = wire.DoReload(allow_partial=bool(plan.restart_required))
            done = await self._ask(call, "reload")
            if done is not None:
                keys = ", ".join(change.key for change in done.applied) or "nothing"
                self._say(f"changed: {keys}", title="reload")

    @work(group="action", exclusive=True)
    async def action_cancel(self) -> None:
        target = self._sessions().target
        if target is None or target.phase == "idle":
            self._say("no request works under the cursor", severity="warning")
            return
        asked = f"{target.request}\nis {_doing(target)}; its client gets an error."
        if await self._sure("cancel this request?", asked, "cancel"):
            await self._do(wire.CancelRequest(request=target.request), "cancel", "cancelled")

    @work(group="action", exclusive=True)
    async def action_close(self) -> None:
        target = self._sessions().target
        if target is None or target.id is None:
            told = "is under the cursor" if target is None else "is there yet: c cancels what waits"
            self._say(f"no session {told}", severity="warning")
            return
        at_work = target.phase in AT_WORK
        asked = f"This frees {plural(target.n_pages, 'page')} ({target.n_tokens:,} tokens)."
        if at_work:
            asked += f"\n{target.request}\nis {_doing(target)} and will fail."
        if await self._sure(f"close session {target.id}?", asked, "close"):
            call = wire.CloseSession(id=target.id, force=at_work)
            await self._do(call, "close", f"session {target.id} is closed")

    async def _sure(self, title: str, asked: Content | str, verb: str) -> bool:
        self.clear_notifications()  # they would lie over it
        return await self.push_screen_wait(dialogs.Confirm(title, asked, verb))

    async def _note(self, title: str, told: Content) -> None:
        self.clear_notifications()
        await self.push_screen_wait(dialogs.Note(title, told))

    async def _do(self, params: wire.Params[wire.Done], title: str, done: str) -> None:
        answer = await self._ask(params, title)
        if answer is not None:
            self._say(answer.text or done, title=title)

    async def _ask(self, params: wire.Params[R], title: str) -> R | None:
        """The answer; None when there is none, which has been told."""
        try:
            return await self._source.call(params)
        except CallError as error:
            if error.code == wire.CONFIG_INVALID:
                await self._note(f"{title}: not done", _problems(error))
            else:
                self._say(str(error), title=f"{title}: not done", severity="error", timeout=10)
            return None


def _drains(view: View) -> bool:
    return view.status is not None and view.status.state in ("draining", "drained")


def _doing(session: Session) -> str:
    match session.phase:
        case "queued":
            return "waiting"
        case "prefill":
            return "reading its prompt"
        case "paused":
            return "paused"
        case _:
            return "answering"


def _changes(plan: wire.Reloaded) -> Content:
    """What a reload would do, one setting a line."""
    lines = []
    for change in plan.applied:
        when = "" if change.when == "now" else f" ({change.when})"
        lines.append(
            text(change.key, "bold") + text(f"  {change.old} → ", MUTED) + f"{change.new}{when}"
        )
    if plan.restart_required:
        lines.append(text("needs a restart, and stays as it is:", "$warning"))
        lines += [
            text(change.key, "bold") + text(f"  {change.old} → {change.new}", MUTED)
            for change in plan.restart_required
        ]
    return Content("\n").join(lines)


def _problems(error: CallError) -> Content:
    """A line for each place in the files that the daemon has named, else its sentence."""
    places = error.data if isinstance(error.data, list) else []
    lines = [
        text(f"{place.get('where', '')}  ", MUTED)
        + text(f"{place.get('key', '')}  ".lstrip(), "bold")
        + str(place["message"])
        for place in places
        if isinstance(place, dict) and "message" in place
    ]
    return Content("\n").join(lines or [Content(str(error))])


def _help() -> list[tuple[str, str]]:
    """Keys and what they do; without that, a heading."""
    return [
        ("sessions", ""),
        ("↑ ↓ PgUp PgDn", "move the cursor (also j k g G)"),
        ("< >  i", "sort by the next column; the other way round"),
        ("click a name", "sort by that column"),
        ("/", "filter; Enter keeps it, Esc clears it"),
        ("y", "copy the label of the request"),
        ("daemon", ""),
        *((key, told[0].lower() + told[1:]) for key, told in ACTIONS.values()),
        ("log", ""),
        ("Tab, ↑ ↓ ← →", "go there; scroll, which holds it"),
        ("f  v", "hold or follow; leave out the lowest level"),
        ("picture", ""),
        ("space", "pause: it stands still, data goes on"),
        (f"1 – {len(PANES)}", "show or hide " + ", ".join(pane.NAME for pane in PANES)),
        ("t  ctrl+p", "next theme; all themes and commands"),
        ("q  ctrl+z", "quit; suspend. The daemon goes on"),
    ]


class _Parser(argparse.ArgumentParser):
    """Complains in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}; `{self.prog} --help` lists what there is\n")


def parser() -> argparse.ArgumentParser:
    """The command line; its manual page is made from it too."""
    made = _Parser(
        prog="ds4top",
        allow_abbrev=False,  # an abbreviation may mean something else once an option is added
        description="Watch a running ds4d and act on it: sessions, lanes, memory, log. Press ? "
        "for the keys. It looks for the user's daemon first, then for the system's; where only "
        "the monitor socket lets it in, it shows and changes nothing.",
    )
    made.add_argument("--version", action="version", version=f"ds4top {version('ds4d')}")
    made.add_argument("--socket", type=Path, metavar="PATH", help="the control or monitor socket")
    made.add_argument(
        "--hz",
        type=_number(HZ_MIN, HZ_MAX),
        default=2.0,
        metavar="N",
        help=f"pictures a second, {HZ_MIN:g} to {HZ_MAX:g} (default: %(default)g)",
    )
    made.add_argument(
        "--theme",
        default=THEMES[0],
        choices=THEMES,
        metavar="NAME",
        help=f"one of {', '.join(THEMES)} (default: %(default)s)",
    )
    made.add_argument(
        "--once",
        action="store_true",
        help="print one picture as plain text and exit: 0, or 3 when no daemon runs, 4 when it "
        "lets nobody in, 1 for anything else",
    )
    tapes = made.add_argument_group("recordings")
    tapes.add_argument("--record", type=Path, metavar="FILE", help="write all that comes to FILE")
    tapes.add_argument("--replay", type=Path, metavar="FILE", help="show FILE instead of a daemon")
    tapes.add_argument(
        "--speed",
        type=_number(0.01, 1000),
        default=1.0,
        metavar="N",
        help="of a replay, 1 is as it was (default: %(default)g)",
    )
    tapes.add_argument(
        "--at",
        type=_moment,
        default=0.0,
        metavar="SECONDS",
        help="where a replay begins, or `end` for its last picture (default: %(default)g)",
    )
    return made


def _number(least: float, most: float) -> Callable[[str], float]:
    def number(given: str) -> float:
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g}, got {given!r}")
        return value

    return number


def _moment(given: str) -> float:
    if given == "end":
        return END
    try:
        return _number(0, 1e9)(given)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected seconds or `end`, got {given!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run ds4top; returns its exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as fault:
        told = traceback.format_exception_only(fault)[-1].strip()
        return _fail(f"a fault in ds4top ended it: {told}; {_keep(fault)}")


def _run(argv: Sequence[str] | None) -> int:
    asked = parser()
    arguments = asked.parse_args(argv)
    if arguments.replay and (arguments.record or arguments.socket):
        asked.error("--replay needs no daemon: leave out --record and --socket")
    if not arguments.replay and (arguments.at or arguments.speed != 1):
        asked.error("--at and --speed are for --replay")
    if arguments.once and arguments.record:
        asked.error("--once shows one picture: there is nothing to --record")
    if not arguments.once and not (sys.stdin.isatty() and sys.stderr.isatty()):
        asked.error("it needs a terminal (stdin, stderr): --once prints a picture as plain text")
    if not arguments.once and not once.draws_lines(sys.stderr.encoding):
        asked.error(
            f"the terminal's encoding is {sys.stderr.encoding}, which has no lines to draw with: "
            "take a UTF-8 locale, or --once, which can do without"
        )
    tape = None
    try:
        if arguments.record:
            tape = Tape(arguments.record, arguments.hz)
        source = _source(arguments, tape)
        if arguments.once:
            return once.main(source, [pane for pane in PANES if issubclass(pane, Lines)])
        return _watch(source, arguments.theme)
    except TapeError as error:
        return _fail(str(error))
    finally:
        if tape is not None:
            tape.close()


def _source(arguments: argparse.Namespace, tape: Tape | None) -> Client | Replay:
    if arguments.replay:
        return Replay(arguments.replay, speed=arguments.speed, start_s=arguments.at)
    return Client(places(arguments.socket, os.environ), arguments.hz, tape)


def _watch(source: Source, theme: str) -> int:
    app = Ds4Top(source, theme=theme)
    app.run()
    if app.fault is not None:
        raise app.fault
    return _fail(app.last_words) if app.last_words else app.return_code or OK


def _keep(fault: BaseException) -> str:
    """Write the traceback to a file, for whoever mends it; returns where it is."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ds4top-crash-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write("".join(traceback.format_exception(fault)))
    except OSError as error:
        return f"its traceback could not be kept: {error.strerror}"
    return f"its traceback is in {file.name}"


def _fail(why: str) -> int:
    sys.stderr.write(f"ds4top: {why}\n")
    return FAILED
