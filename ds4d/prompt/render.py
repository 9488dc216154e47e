"""Messages to the text and the ids of a prompt (spec/api.md 1.3 to 1.8).

A prompt is a list of pieces: markers, our own (trusted) text and client text. Only a marker piece
becomes a marker id; all text between two markers is encoded in one run by the plain tokenizer, so a
file that holds `<｜User｜>` stays a file, and a prompt without such text gets the very ids that one
pass of the release's tokenizer would give. Knows no HTTP, no sessions and no caches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ds4d.errors import RequestError
from ds4d.prompt.arguments import (
    CLOSE_VALUE,
    Parameter,
    as_parameters,
    dumps,
    valid_key,
    valid_name,
)
from ds4d.prompt.tokenizer import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    MARKER_TEXTS,
    THINK,
    USER,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from ds4d.prompt.ask import Ask, Call, Message, Tool
    from ds4d.prompt.constants import Constants
    from ds4d.prompt.tokenizer import Tokenizer

Kind = Literal["marker", "trusted", "client"]

_MARKER = re.compile("|".join(map(re.escape, MARKER_TEXTS)))


@dataclass(frozen=True, slots=True)
class Piece:
    kind: Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """`n_reasoning_missing`: turns whose reasoning belongs here but was not sent."""

    pieces: tuple[Piece, ...]
    thinking: bool  # the model starts inside <think>
    n_tools: int
    n_reasoning_missing: int = 0

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    ids: npt.NDArray[np.int32]  # [n], read-only
    starts: tuple[int, ...]  # offsets of the <｜User｜> and <｜Assistant｜> that open turns
    thinking: bool
    n_tools: int
    n_reasoning_missing: int = 0


def render(ask: Ask, constants: Constants) -> Rendered:
    """Lay out `ask` as pieces.

    Raises:
        RequestError: the name of a tool, a call or a parameter that can't be written into a tag; a
            prefix message that holds tool calls.
    """
    _check_names(ask)
    turns = _Turns()
    for message in ask.messages:
        turns.add(message)
    return _Writer(ask, constants).write(turns)


def tokenize(rendered: Rendered, tokenizer: Tokenizer) -> Prompt:
    """The ids of `rendered`: markers by id, the text between two markers in one plain run."""
    id_of = tokenizer.markers.by_text
    parts: list[npt.NDArray[np.int32]] = []
    starts: list[int] = []
    run: list[str] = []
    n = 0

    def flush() -> int:
        if not run:
            return 0
        parts.append(tokenizer.encode("".join(run)))
        run.clear()
        return len(parts[-1])

    for piece in rendered.pieces:
        if piece.kind != "marker":
            run.append(piece.text)
            continue
        n += flush()
        if piece.text in (USER, ASSISTANT):
            starts.append(n)
        parts.append(np.array([id_of[piece.text]], dtype=np.int32))
        n += 1
    flush()
    ids = np.concatenate(parts)
    ids.flags.writeable = False
    return Prompt(
        ids=ids,
        starts=tuple(starts),
        thinking=rendered.thinking,
        n_tools=rendered.n_tools,
        n_reasoning_missing=rendered.n_reasoning_missing,
    )


def trusted(text: str) -> Iterator[Piece]:
    """Pieces of our own text: the markers in it are meant."""
    start = 0
    for found in _MARKER.finditer(text):
        if found.start() > start:
            yield Piece("trusted", text[start : found.start()])
        yield Piece("marker", found.group())
        start = found.end()
    if start < len(text):
        yield Piece("trusted", text[start:])


# --- from messages to turns -----------------------------------------------------------------------


@dataclass(slots=True)
class _Result:
    call_id: str
    text: str


@dataclass(slots=True)
class _UserTurn:
    blocks: list[str | _Result] = field(default_factory=list)


@dataclass(slots=True)
class _Reminder:
    text: str


@dataclass(slots=True)
class _AssistantTurn:
    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    prefix: bool = False

    @property
    def content(self) -> str:
        return "\n\n".join(self.contents)

    @property
    def reasoning(self) -> str:
        return "\n\n".join(self.reasonings)


class _Turns:
    """Who speaks when: neighbours of one side merged, tool results in the order of their calls."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.turns: list[_UserTurn | _Reminder | _AssistantTurn] = []

    def add(self, message: Message) -> None:
        match message.role:
            case "system":
                text = "\n".join(message.blocks)
                if any(not isinstance(turn, _Reminder) for turn in self.turns):
                    # Moving it to the head would change the head and lose the cached prefix.
                    self._user().blocks.append(f"<system-reminder>\n{text}\n</system-reminder>")
                elif text:
                    self.system.append(text)
            case "latest_reminder":
                self.turns.append(_Reminder("\n\n".join(message.blocks)))
            case "user":
                self._user().blocks.append("\n\n".join(message.blocks))
            case "tool":
                text = "\n\n".join(message.blocks)
                self._user().blocks.append(_Result(message.call_id or "", text))
            case "assistant":
                turn = self._assistant()
                turn.contents += ["\n\n".join(message.blocks)] if any(message.blocks) else []
                turn.reasonings += [message.reasoning] if message.reasoning else []
                turn.calls += message.calls
                turn.prefix = message.prefix

    def close(self) -> None:
        """End in a user turn, which the answer opens behind, or in a turn to be gone on with."""
        last = self.turns[-1] if self.turns else None
        if not (isinstance(last, _AssistantTurn) and last.prefix):
            self._end_in_user_turn()
        known: dict[str, int] = {}
        for turn in self.turns:
            if isinstance(turn, _AssistantTurn):
                known = {call.id: n for n, call in enumerate(turn.calls)}
            elif isinstance(turn, _UserTurn):
                _sort_results(turn, known)

    def _user(self) -> _UserTurn:
        turn = self.turns[-1] if self.turns else None
        if not isinstance(turn, _UserTurn):
            turn = _UserTurn()
            self.turns.append(turn)
        return turn

    def _assistant(self) -> _AssistantTurn:
        turn = self.turns[-1] if self.turns else None
        if not isinstance(turn, _AssistantTurn):
            self._end_in_user_turn()
            turn = _AssistantTurn()
            self.turns.append(turn)
        return turn

    def _end_in_user_turn(self) -> None:
        """An answer needs a question: an empty one if the client sent none."""
        for turn in reversed(self.turns):
            if isinstance(turn, _UserTurn):
                return
            if isinstance(turn, _AssistantTurn):
                break
        self.turns.append(_UserTurn([""]))


def _sort_results(turn: _UserTurn, order: dict[str, int]) -> None:
    """Results of known calls change places among themselves; everything else stays where it is."""
    known = [
        (i, block)
        for i, block in enumerate(turn.blocks)
        if isinstance(block, _Result) and block.call_id in order
    ]
    results = sorted((block for _, block in known), key=lambda result: order[result.call_id])
    for (place, _), result in zip(known, results, strict=True):
        turn.blocks[place] = result


# --- from turns to pieces -------------------------------------------------------------------------


class _Writer:
    def __init__(self, ask: Ask, constants: Constants) -> None:
        self._ask = ask
        self._constants = constants
        self._pieces: list[Piece] = []
        self._n_missing = 0

    def write(self, turns: _Turns) -> Rendered:
        turns.close()
        self._head(turns.system)
        is_user = [isinstance(turn, _UserTurn) for turn in turns.turns]
        last_user = len(is_user) - 1 - is_user[::-1].index(True)
        called = any(isinstance(turn, _AssistantTurn) and turn.calls for turn in turns.turns)
        keeps_all = bool(self._ask.tools) or called
        for i, turn in enumerate(turns.turns):
            match turn:
                case _UserTurn():
                    self._marker(USER)
                    self._blocks(turn.blocks)
                case _Reminder():
                    self._marker(LATEST_REMINDER)
                    self._client(turn.text)
                case _AssistantTurn():
                    is_open = turn.prefix and i == len(turns.turns) - 1
                    keeps = self._ask.thinking and (keeps_all or i > last_user)
                    self._assistant(turn, keeps=keeps, is_open=is_open)
        thinking = False
        if not isinstance(turns.turns[-1], _AssistantTurn):
            thinking = self._ask.thinking
            self._marker(ASSISTANT)
            self._marker(THINK if thinking else END_THINK)
        return Rendered(
            pieces=tuple(self._pieces),
            thinking=thinking,
            n_tools=len(self._ask.tools),
            n_reasoning_missing=self._n_missing,
        )

    def _head(self, system: list[str]) -> None:
        self._marker(BOS)
        if self._ask.thinking:
            self._trusted(self._constants.effort_text(self._ask.effort))
        self._client("\n\n".join(system))
        if self._ask.tools:
            self._trusted("\n\n" + self._constants.tools_head)
            self._client("\n".join(dumps(_function(tool)) for tool in self._ask.tools))
            self._trusted(self._constants.tools_tail)

    def _blocks(self, blocks: list[str | _Result]) -> None:
        for i, block in enumerate(blocks):
            self._trusted("\n\n" if i else "")
            if isinstance(block, _Result):
                self._trusted("<tool_result>")
                self._client(block.text.replace("</tool_result>", "&lt;/tool_result>"))
                self._trusted("</tool_result>")
            else:
                self._client(block)

    def _assistant(self, turn: _AssistantTurn, *, keeps: bool, is_open: bool) -> None:
        self._marker(ASSISTANT)
        if keeps and turn.reasoning:
            self._marker(THINK)
            self._client(turn.reasoning)
        elif keeps and not is_open:
            self._n_missing += 1  # and no empty pair: the model never saw one
        self._marker(END_THINK)
        self._client(turn.content)
        if turn.calls:
            self._calls(turn.calls)
        if not is_open:
            self._marker(EOS)

    def _calls(self, calls: Iterable[Call]) -> None:
        self._trusted(f"\n\n<{DSML}tool_calls>\n")
        for i, call in enumerate(calls):
            self._trusted("\n" if i else "")
            self._trusted(f'<{DSML}invoke name="')
            self._client(call.name)
            self._trusted('">\n')
            for j, parameter in enumerate(as_parameters(call.arguments)):
                self._trusted("\n" if j else "")
                self._parameter(parameter)
            self._trusted(f"\n</{DSML}invoke>")
        self._trusted(f"\n</{DSML}tool_calls>")

    def _parameter(self, parameter: Parameter) -> None:
        self._trusted(f'<{DSML}parameter name="')
        self._client(parameter.key)
        self._trusted(f'" string="{"true" if parameter.is_string else "false"}">')
        self._client(parameter.text)
        self._trusted(CLOSE_VALUE)

    def _marker(self, text: str) -> None:
        self._pieces.append(Piece("marker", text))

    def _trusted(self, text: str) -> None:
        self._pieces.extend(trusted(text))

    def _client(self, text: str) -> None:
        if text:
            self._pieces.append(Piece("client", text))


def _function(tool: Tool) -> dict[str, Any]:
    """Name, description, parameters, then the rest: the same bytes whatever API carried it."""
    first = ("name", "description", "parameters")
    function = tool.function
    return {key: function[key] for key in first if key in function} | function


# --- names ----------------------------------------------------------------------------------------


def _check_names(ask: Ask) -> None:
    for i, tool in enumerate(ask.tools):
        where = f"tools[{i}].function"
        _check_tool(tool.name, f"{where}.name")
        parameters = tool.function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        for key in properties if isinstance(properties, dict) else ():
            _check_key(key, f"{where}.parameters.properties")
    for i, message in enumerate(ask.messages):
        if message.prefix and message.calls:
            where = f"messages[{i}].prefix"
            raise RequestError(
                f"{where}: a message that holds tool calls can't be continued; expected text only",
                param=where,
            )
        for j, call in enumerate(message.calls):
            where = f"messages[{i}].tool_calls[{j}].function"
            _check_tool(call.name, f"{where}.name")
            for parameter in as_parameters(call.arguments):
                _check_key(parameter.key, f"{where}.arguments")


def _check_tool(name: str, param: str) -> None:
    if not valid_name(name):
        raise RequestError(
            f"{param}: {name[:140]!r} can't be the name of a tool,"
            " expected 1 to 128 of the characters A-Z a-z 0-9 _ . : / -",
            param=param,
        )


def _check_key(key: str, param: str) -> None:
    if not valid_key(key):
        raise RequestError(
            f"{param}: {key[:140]!r} can't be the name of a parameter,"
            """ expected 1 to 128 printable characters, none of them " < or >""",
            param=param,
        )
