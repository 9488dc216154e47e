"""What the model writes, token by token, to reasoning, content and tool calls (spec/api.md 1.10).

THINK → `</think>` → CONTENT → `<｜DSML｜tool_calls>` → block → END. The markers are token ids: the
same characters spelled out in ordinary tokens are text, so quoting a file can't call a tool.
Arguments become JSON while they arrive. Everything here is pure; the caller stops generation
when it sees `End`. Knows no HTTP, no sampling and no token limits.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ds4d.prompt.arguments import (
    CLOSE_VALUE,
    ESCAPED_CLOSE_VALUE,
    as_json,
    dumps,
    parameter_kinds,
    valid_key,
    valid_name,
)
from ds4d.prompt.detokenizer import Detokenizer
from ds4d.prompt.tokenizer import DSML

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ds4d.prompt.arguments import Kinds
    from ds4d.prompt.ask import Tool, ToolChoice
    from ds4d.prompt.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str  # never empty


@dataclass(frozen=True, slots=True)
class Content:
    text: str  # never empty


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON object; all pieces of a call that ended, joined, are the object"""

    index: int
    fragment: str  # never empty


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole. A call without this event must not be run."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Comes once, last. `tool_parse_failed`: a block was dropped from the point where it could not
    be read, or was not allowed; it is never shown as content. `n_duplicates`: parameters given
    again within their call, the last of which counts (JSON readers take the last as well)."""

    finish: Literal["stop", "length", "tool_calls"]
    tool_parse_failed: bool = False
    n_duplicates: int = 0


Event = Reasoning | Content | CallStart | CallArguments | CallEnd | End


class Phase(enum.Enum):
    THINK = "think"
    CONTENT = "content"
    BLOCK = "block"
    END = "end"


# The marker's id within text: a lone surrogate, which no decoded bytes can contain.
_MARK = "\ud800"
_OPENER = f"<{_MARK}tool_calls>\n"

# Spellings seen from models that were not held to the grammar. A block is read in the spelling it
# was opened with; the full `｜DSML｜` in ordinary tokens is not among them: that is a quotation.
_LOOSE = (DSML[1:], DSML[:-1], "|DSML|", "")


_MARKED = re.compile(f"<{_MARK}")
_ANY_OPENER = re.compile(
    f"<(?:{_MARK}|(?P<loose>{'|'.join(map(re.escape, _LOOSE))})tool_calls>\\s*<(?P=loose)invoke\\s)"
)


class Reader:
    """Reads one assistant turn. The events of a turn don't depend on how its text fell into
    tokens, once neighbouring pieces are joined.

    thinking: the prompt ended in <think>. Calls are read when `tools` has one and `tool_choice` is
    not none; else a block ends the turn unread.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice = "auto",
    ) -> None:
        self.phase = Phase.THINK if thinking else Phase.CONTENT
        self.n_reasoning_tokens = 0  # `</think>` included
        self._markers = tokenizer.markers
        self._text = Detokenizer(tokenizer.token_bytes)
        self._tools = {tool.name: tool.function.get("parameters") for tool in tools}
        self._may_call = bool(tools) and tool_choice != "none"
        self._spellings = (_MARK, *_LOOSE) if self._may_call else (_MARK,)
        self._held = ""  # not yet shown: blanks, and what may be the start of a block
        self._is_fresh = True  # nothing of this reasoning was shown yet
        self._block: _Block | None = None
        self._events: list[Event] = []

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.END

    def push(self, token: int) -> list[Event]:
        """Events that `token` completes. A token that ends the turn ends it here too."""
        if self.is_over:
            return []
        marks = self._markers
        if token in marks.stops:
            return self.finish()
        if self.phase is Phase.THINK:
            self.n_reasoning_tokens += 1
        if token == marks.dsml:
            self._read(self._text.flush() + _MARK)
        elif token in (marks.think, marks.end_think) and self.phase is not Phase.BLOCK:
            self._read(self._text.flush())
            if token == marks.end_think and self.phase is Phase.THINK:
                self._show(len(self._held))
                self.phase = Phase.CONTENT
        else:
            self._read(self._text.push(token))
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The last events. `cut`: the token limit came before the model's own end; then nothing is
        closed on its behalf, so that half a file never looks whole."""
        if self.is_over:
            return []
        self._read(self._text.flush())
        if self._block is not None and not self.is_over:
            self._events += self._block.finish(cut=cut)
            self._end("length" if cut else None)
        elif not self.is_over:
            self._show(len(self._held))
            self._end("length" if cut else "stop")
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self, text: str) -> None:
        match self.phase:
            case Phase.THINK:
                self._held += text
                self._think()
            case Phase.CONTENT:
                self._held += text
                self._content()
            case Phase.BLOCK:
                self._read_block(text)
            case Phase.END:
                pass

    def _think(self) -> None:
        """A block may open without `</think>`, but only as the very opener on a line of its own."""
        held = self._held
        if not self._may_call:
            self._show(len(held))
            return
        for opener in re.finditer(re.escape(_OPENER), held):
            if self._begins_line(opener.start()):
                self._open(_MARK, opener.start())
                return
        last = held.rfind("<")
        is_start = last >= 0 and _OPENER.startswith(held[last:]) and self._begins_line(last)
        self._show(_rstrip(held, last if is_start else len(held)))

    def _begins_line(self, at: int) -> bool:
        return self._held[at - 1] == "\n" if at else self._is_fresh

    def _content(self) -> None:
        held = self._held
        found = (_ANY_OPENER if self._may_call else _MARKED).search(held)
        if found:
            self._open(found["loose"] if found.lastgroup else _MARK, found.start())
            return
        last = held.rfind("<")
        before = held.rfind("<", 0, max(last, 0))
        for at in (before, last):
            if at >= 0 and any(_may_open(held[at:], spelling) for spelling in self._spellings):
                self._show(_rstrip(held, at))
                return
        self._show(_rstrip(held, len(held)))

    def _open(self, spelling: str, at: int) -> None:
        """A block begins at `at` of the held text. Blanks before it belong to it."""
        text = self._held[at:]
        self._show(_rstrip(self._held, at))
        self._held = ""
        self.phase = Phase.BLOCK
        self._block = _Block(spelling, self._tools)
        if self._may_call:
            self._read_block(text)
        else:
            self._end(None)

    def _read_block(self, text: str) -> None:
        if self._block is not None:
            self._events += self._block.read(text)
            if self._block.is_over:
                self._end(None)

    def _end(self, finish: Literal["stop", "length"] | None) -> None:
        self.phase = Phase.END
        block = self._block
        if block is None:
            self._events.append(End(finish=finish or "stop"))
            return
        self._events.append(
            End(
                finish=finish or ("tool_calls" if block.n_calls else "stop"),
                tool_parse_failed=finish is None and (block.failed or not block.n_calls),
                n_duplicates=block.n_duplicates,
            )
        )

    def _show(self, n_chars: int) -> None:
        shown = self._held[:n_chars].replace(_MARK, DSML)
        self._held = self._held[n_chars:]
        if not shown:
            return
        if self.phase is Phase.THINK:
            self._is_fresh = False
            self._events.append(Reasoning(shown))
        else:
            self._events.append(Content(shown))


def _rstrip(text: str, end: int) -> int:
    """Where `text[:end]` ends without its trailing blanks."""
    return len(text[:end].rstrip())


def _may_open(text: str, spelling: str) -> bool:
    """Whether `text` is the beginning of an opener. In a loose spelling the first invoke is part of
    it: `<tool_calls>` alone may well be somebody's XML."""
    opener = f"<{spelling}tool_calls>"
    if spelling == _MARK:
        return text == "<"
    if len(text) < len(opener):
        return opener.startswith(text)
    invoke = text.removeprefix(opener).lstrip()
    return text.startswith(opener) and f"<{spelling}invoke".startswith(invoke)


_MAX_HEADER = 512  # characters of a tag with its attributes: two names of 128 and some blanks
_INVOKE = re.compile(r'\s+name="(?P<name>[^"]*)"\s*')
_PARAMETER = re.compile(r'\s+name="(?P<name>[^"]*)"(?:\s+string="(?P<string>true|false)")?\s*')
_ESCAPED = (ESCAPED_CLOSE_VALUE, ESCAPED_CLOSE_VALUE.replace(DSML, _MARK))


class _State(enum.Enum):
    OPENER = enum.auto()  # before `tool_calls>`
    CALLS = enum.auto()  # between calls
    CALL = enum.auto()  # between the parameters of a call
    VALUE = enum.auto()
    OVER = enum.auto()


class _Block:
    """A tool-call block as text in which the marker is one character. Blanks between tags are
    free; any other text there is an error, and an error ends the block."""

    def __init__(self, spelling: str, tools: dict[str, object]) -> None:
        self.n_calls = 0  # whole ones
        self.n_duplicates = 0
        self.failed = False
        self._tools = tools
        self._state = _State.OPENER
        self._text = ""  # unread
        self._events: list[Event] = []
        self._opener = f"<{spelling}tool_calls>"
        self._closer = f"</{spelling}tool_calls>"
        self._invoke = f"<{spelling}invoke"
        self._end_invoke = f"</{spelling}invoke>"
        self._parameter = f"<{spelling}parameter"
        self._end_value = f"</{spelling}parameter>"
        # of the call and the parameter being read
        self._name = ""
        self._keys: set[str] = set()
        self._kinds: Kinds | None = None
        self._is_string = False
        self._value: list[str] | None = None  # None: shown as it arrives

    @property
    def is_over(self) -> bool:
        return self._state is _State.OVER

    def read(self, text: str) -> list[Event]:
        self._text += text
        while self._step():
            pass
        return self._take()

    def finish(self, *, cut: bool) -> list[Event]:
        """The model stopped here. Unless it was cut off, missing closing tags are supplied once."""
        if cut:
            self._state = _State.OVER
            return self._take()
        if self._state is _State.VALUE:
            # `</` may be the value's own end; with the marker behind it, it is a tag.
            is_tag = len(self._text) > 2 and self._end_value.startswith(self._text)
            self._add_value("" if is_tag else self._text)
            self._text = ""
            self._close_value()
        if self._state is _State.CALL and self._end_invoke.startswith(self._text.strip()):
            self._text = ""
            self._close_call()
        if self._state is _State.CALLS and self._closer.startswith(self._text.strip()):
            self._state = _State.OVER
        if not self.is_over:
            self._fail()
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _step(self) -> bool:
        """Read one tag or one piece of a value. False: more text is needed, or the block is over"""
        match self._state:
            case _State.OPENER:
                return self._read_tag(self._opener, None)
            case _State.CALLS:
                return self._read_tag(self._closer, self._invoke)
            case _State.CALL:
                return self._read_tag(self._end_invoke, self._parameter)
            case _State.VALUE:
                return self._read_value()
            case _State.OVER:
                return False

    def _read_tag(self, whole: str, header: str | None) -> bool:
        """Either the tag `whole`, or one that begins with `header` and carries attributes."""
        text = self._text = self._text.lstrip()
        if text.startswith(whole):
            self._text = text[len(whole) :]
            if self._state is _State.CALL:
                self._close_call()
            else:
                self._state = _State.CALLS if self._state is _State.OPENER else _State.OVER
            return True
        if header is None or not text.startswith(header):
            is_start = whole.startswith(text) or (header is not None and header.startswith(text))
            return False if is_start else self._fail()
        end = text.find(">")  # no name holds one
        if end < 0:
            return False if len(text) <= _MAX_HEADER else self._fail()
        self._text = text[end + 1 :]
        attributes = text[len(header) : end]
        if self._state is _State.CALLS:
            return self._open_call(attributes)
        return self._open_value(attributes)

    def _open_call(self, attributes: str) -> bool:
        found = _INVOKE.fullmatch(attributes)
        if found is None or not valid_name(found["name"]):
            return self._fail()
        self._name = found["name"]
        self._keys = set()
        self._state = _State.CALL
        self._events.append(CallStart(self.n_calls, self._name))
        return True

    def _close_call(self) -> None:
        self._emit("}" if self._keys else "{}")
        self._events.append(CallEnd(self.n_calls))
        self.n_calls += 1
        self._state = _State.CALLS

    def _open_value(self, attributes: str) -> bool:
        found = _PARAMETER.fullmatch(attributes)
        if found is None or not valid_key(found["name"]):
            return self._fail()
        key = found["name"]
        self._kinds = parameter_kinds(self._tools.get(self._name), key)
        takes_string = self._kinds is not None and "string" in self._kinds
        # Without the flag: a string where the schema wants one, else JSON if it is JSON.
        self._is_string = found["string"] == "true" if found["string"] else takes_string
        self._emit(("{" if not self._keys else ", ") + dumps(key) + ": ")
        self.n_duplicates += key in self._keys
        self._keys.add(key)
        shown = self._is_string and (self._kinds is None or takes_string)
        self._value = None if shown else []
        if self._value is None:
            self._emit('"')
        self._state = _State.VALUE
        return True

    def _read_value(self) -> bool:
        text = self._text
        end = text.find(self._end_value)
        if end >= 0:
            self._add_value(text[:end])
            self._text = text[end + len(self._end_value) :]
            self._close_value()
            return True
        n_held = max(
            _tail(text, "<", (self._end_value,)),
            _tail(text, "&", _ESCAPED) if self._is_string else 0,
        )
        self._add_value(text[: len(text) - n_held])
        self._text = text[len(text) - n_held :]
        return False

    def _add_value(self, text: str) -> None:
        text = text.replace(_MARK, DSML)
        if self._is_string:
            text = text.replace(ESCAPED_CLOSE_VALUE, CLOSE_VALUE)
        if self._value is None:
            self._emit(dumps(text)[1:-1])
        else:
            self._value.append(text)

    def _close_value(self) -> None:
        if self._value is None:
            self._emit('"')
        else:
            text = "".join(self._value)
            self._emit(as_json(text, is_string=self._is_string, kinds=self._kinds))
        self._state = _State.CALL

    def _emit(self, fragment: str) -> None:
        """Fragments of one step are joined: `{"city": "` is one piece."""
        if not fragment:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments) and last.index == self.n_calls:
            fragment = last.fragment + fragment
            self._events.pop()
        self._events.append(CallArguments(self.n_calls, fragment))

    def _fail(self) -> bool:
        self.failed = True
        self._state = _State.OVER
        return False


def _tail(text: str, first: str, wanted: tuple[str, ...]) -> int:
    """Length of the end of `text` that one of `wanted`, which all begin with `first`, begins with.
    None of them has its first character twice, so only the last one in `text` can count."""
    at = text.rfind(first)
    if at < 0 or not any(whole.startswith(text[at:]) for whole in wanted):
        return 0
    return len(text) - at
