"""What the source of the data (`client`, `tape`) tells the app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from textual.message import Message

if TYPE_CHECKING:
    from ds4d import wire


class Frame(Message):
    """There is a newer picture: the feed has it. A burst of them costs one repaint."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Frame)


class OpNews(Message):
    """An operation that was begun here has come further."""

    def __init__(self, progress: wire.OpProgress) -> None:
        super().__init__()
        self.progress = progress


class Told(Message):
    """A sentence for the person at the screen."""

    def __init__(self, text: str, severity: Literal["information", "warning", "error"]) -> None:
        super().__init__()
        self.text = text
        self.severity = severity


class Stop(Message):
    """It makes no sense to go on, and why."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
