"""What a client asks for, whatever protocol carried it: the record between `api` and `prompt`.

Text lives left of here, token ids right of it. Nothing here is HTTP, and nothing is validated: the
adapters in `api/` have done that and name the client's own field when they refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
Effort = Literal["low", "high", "max"]
ToolChoice = Literal["auto", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call in the history. `arguments` is the JSON text that the client sent."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. `blocks` are the text parts in order; an empty tuple is empty content."""

    role: Role
    blocks: tuple[str, ...] = ()
    reasoning: str | None = None  # assistant: None = the client sent none
    calls: tuple[Call, ...] = ()  # assistant
    call_id: str | None = None  # tool: which call it answers
    prefix: bool = False  # assistant, last: go on with this body instead of opening a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call: the client's function object, keys in client order."""

    function: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.function["name"]
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    thinking: bool = False
    effort: Effort = "low"
