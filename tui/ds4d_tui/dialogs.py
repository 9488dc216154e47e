"""What lies over the dashboard: a question before anything is changed, and the list of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from ds4d_tui.colours import PHASES
from ds4d_tui.draw import MUTED, Share, bar, text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from textual.app import ComposeResult


class Confirm(ModalScreen[bool]):
    """Asks before something is done. What is safe has the focus: Enter alone changes nothing."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
        Binding("left", "app.focus_previous", show=False),
        Binding("right", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, body: Content | str, verb: str) -> None:
        super().__init__()
        self._title = title
        self._body = body
        self._verb = verb

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = self._title
            with VerticalScroll():
                yield Static(self._body, markup=False)
            with Horizontal():
                yield Button(f"{self._verb} (y)", id="yes", variant="warning", compact=True)
                yield Button("no (n)", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Note(ModalScreen[None]):
    """Tells something that is too long for a notification."""

    AUTO_FOCUS = "VerticalScroll"  # for the keys that scroll
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q,question_mark", "close", "Close"),
    ]

    def __init__(self, title: str, body: Content | str) -> None:
        super().__init__()
        self._title = title
        self._body = body

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as dialog:
            dialog.border_title = self._title
            dialog.border_subtitle = "esc closes"
            with VerticalScroll():
                yield Static(self._body, markup=False)

    def action_close(self) -> None:
        self.dismiss()


def keys(bindings: Iterable[tuple[str, str]]) -> Note:
    """`bindings`: (keys, what they do); a description that is empty makes a heading of the keys."""
    lines = [
        text(f" {name:<14}", "bold $accent") + told if told else text(name, f"bold {MUTED}")
        for name, told in bindings
    ]
    states = Content(" ").join(text(f"■ {phase} ", style) for phase, style in PHASES.items())
    prefill = bar([Share(0.3, "$primary 45%"), Share(0.3, "$primary")], 14)
    legend = [
        Content(""),
        text("colours", f"bold {MUTED}"),
        Content(" ") + states,
        Content(" ") + prefill + "  of a prompt: reused, computed, to do",
    ]
    return Note("keys", Content("\n").join([*lines, *legend]))
