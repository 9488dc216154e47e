"""ScriptEngine of spec/api.md 6: a runner that plays scripted tokens, and a door with a socket.

The tokenizer has one token a byte and the markers, so a script is text. `play` is what the "model"
writes: a str or a list of ids is one engine step; a float is a silence in seconds; an Event is
waited for; an error ends the ticket. An id may be a tuple: the model's preferences, best first, of
which the first that the claim allows is drawn. At the end the model wants EOS.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
from blockbuster import blockbuster_ctx

from ds4d.api.chat import Served
from ds4d.api.models import Defaults, ModelInfo
from ds4d.api.server import Server
from ds4d.config import Api
from ds4d.errors import Ds4Error
from ds4d.prompt import constants, tokenizer
from ds4d.sched.ticket import Done, Failed, Progress, Started, Stats, Ticket, Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import TaskGroup
    from multidict import CIMultiDictProxy

    from ds4d.sched.runner import Loading, State
    from ds4d.sched.ticket import Claim

MARKERS = (
    tokenizer.BOS,
    tokenizer.EOS,
    tokenizer.USER,
    tokenizer.ASSISTANT,
    tokenizer.THINK,
    tokenizer.END_THINK,
    tokenizer.DSML,
    tokenizer.LATEST_REMINDER,
)


def byte_tokenizer() -> tokenizer.Tokenizer:
    """The markers (BOS 0, EOS 1 as `tests/fakes.py` has it), then the 256 bytes."""
    char_of = {byte: chr(code) for code, byte in tokenizer._BYTE_OF_CHAR.items()}
    tokens = [*MARKERS, *(char_of[byte] for byte in range(256))]
    types = [tokenizer.USER_DEFINED] * len(MARKERS) + [1] * 256
    return tokenizer.Tokenizer(tokens, types, [])


TOKENIZER = byte_tokenizer()
MARKS = TOKENIZER.markers
CONSTANTS = constants.load()
FALLBACK = len(MARKERS) + ord("~")  # drawn when all that a script prefers is forbidden


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, trusted=True).tolist()


def one_by_one(text: str, n: int = 1) -> list[list[int]]:
    """`text` in steps of `n` tokens."""
    ids = ids_of(text)
    return [ids[i : i + n] for i in range(0, len(ids), n)]


def call_text(name: str, **parameters: object) -> str:
    """A tool call as the model writes it."""
    lines = []
    for key, value in parameters.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value)
        flag = "true" if is_string else "false"
        lines.append(
            f'<｜DSML｜parameter name="{key}" string="{flag}">{text}</｜DSML｜parameter>\n'
        )
    return f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n'


def block_text(*calls: str) -> str:
    return f"\n\n<｜DSML｜tool_calls>\n{''.join(calls)}</｜DSML｜tool_calls>"


class ScriptRunner:
    """What the API sees of a runner."""

    def __init__(self, tasks: TaskGroup, n_ctx: int) -> None:
        self.state: State = "ready"
        self.loading: Loading | None = None
        self.n_ctx = n_ctx
        self.refusal: Ds4Error | None = None
        self.scripts: deque[list[Any]] = deque()
        self.claims: list[Claim] = []
        self.left: list[tuple[int, int]] = []  # tickets left before their end: id, n_kept
        self.n_emitted = 0
        self.n_cached = 0
        self._n_playing = 0
        self._tasks = tasks

    def would_admit(self) -> bool:
        return self.state == "ready" and self.refusal is None

    def submit(self, claim: Claim) -> Ticket:
        if self.refusal is not None:
            raise self.refusal
        self.claims.append(claim)
        room = anyio.Event()
        ticket = Ticket(
            len(self.claims), claim, on_leave=self._leave, on_room=lambda _: room.set(), buffer=16
        )
        scope = anyio.CancelScope()
        ticket.scope = scope
        steps = self.scripts.popleft() if self.scripts else ["ok"]
        self._tasks.start_soon(self._play, ticket, steps, scope)
        return ticket

    def busy(self) -> bool:
        """Whether a claim is being worked on."""
        return self._n_playing > 0

    def _leave(self, ticket: Ticket, n_kept: int) -> None:
        if not ticket.ended:
            self.left.append((ticket.id, n_kept))
            ticket.stats = self._stats(ticket, n_kept)
            ticket.scope.cancel()

    def _stats(self, ticket: Ticket, n: int) -> Stats:
        return Stats(n_prompt=len(ticket.claim.ids), n_cached=self.n_cached, n_generated=n)

    async def _play(self, ticket: Ticket, steps: list[Any], scope: anyio.CancelScope) -> None:
        self._n_playing += 1
        try:
            with scope:
                await self._play_steps(ticket, steps)
        finally:
            self._n_playing -= 1

    async def _play_steps(self, ticket: Ticket, steps: list[Any]) -> None:
        claim, n = ticket.claim, 0
        last = int(claim.ids[-1])
        ticket.put(Started(len(claim.ids), self.n_cached, 0.0))
        ticket.put(Progress(len(claim.ids), len(claim.ids)))
        for step in chain(steps, repeat([MARKS.eos])):
            match step:
                case float():
                    await anyio.sleep(step)
                    continue
                case anyio.Event():
                    await step.wait()
                    continue
                case Ds4Error():
                    ticket.put(Failed(step, self._stats(ticket, n)))
                    return
            for wanted in ids_of(step) if isinstance(step, str) else step:
                token = self._draw(claim, wanted, last, n)
                if token in claim.stop_ids:
                    self._end(ticket, Done("stop", token, self._stats(ticket, n)))
                    return
                last, n = token, n + 1
                self.n_emitted += 1
                full = ticket.put(Token(token, n - 1))
                if n == claim.max_tokens:
                    self._end(ticket, Done("length", None, self._stats(ticket, n)))
                    return
                if full:
                    while len(ticket._unread) > 8:
                        await anyio.sleep(0.001)
            await anyio.sleep(0)

    def _end(self, ticket: Ticket, done: Done) -> None:
        ticket.put(done)
        ticket.stats = done.stats

    def _draw(self, claim: Claim, wanted: int | tuple[int, ...], last: int, n: int) -> int:
        banned = {i for i, bias in claim.sampling.bias if bias < -50}
        if n < claim.min_tokens:
            banned |= claim.stop_ids
        if claim.banned_after and last == claim.banned_after[0]:
            banned |= set(claim.banned_after[1])
        wishes = wanted if isinstance(wanted, tuple) else (wanted,)
        return next((i for i in wishes if i not in banned), FALLBACK)


@dataclass
class DoorUnderTest:
    server: Server
    runner: ScriptRunner
    client: aiohttp.ClientSession
    host: str
    port: int
    tasks: TaskGroup

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def play(self, *steps: Any) -> None:
        """What the next claim is answered with."""
        self.runner.scripts.append(list(steps))

    async def post(self, body: Any, path: str = "/v1/chat/completions", **kw: Any) -> Answered:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=BytesIO(data), **kw) as response:
            return Answered(response.status, response.headers, await response.read())

    async def get(self, path: str, method: str = "GET", **kw: Any) -> Answered:
        async with self.client.request(method, self.url + path, **kw) as response:
            return Answered(response.status, response.headers, await response.read())

    async def chat(self, content: str = "Hi", **fields: Any) -> Answered:
        return await self.post({"messages": [{"role": "user", "content": content}], **fields})

    async def stream(self, content: str = "Hi", **fields: Any) -> Streamed:
        answered = await self.chat(content, stream=True, **fields)
        assert answered.status == 200, answered.body
        assert answered.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        return read_sse(answered.body)


@dataclass
class Answered:
    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["Content-Type"] == "application/json; charset=utf-8"
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        error = self.json["error"]
        assert {"message", "type", "param", "code"} <= error.keys()
        assert error["message"]
        if 400 <= self.status < 500 and self.status != 429:
            assert self.headers["x-should-retry"] == "false"
        return error

    @property
    def message(self) -> Any:
        assert self.status == 200, self.body
        (choice,) = self.json["choices"]
        return choice["message"]

    @property
    def finish(self) -> str:
        return self.json["choices"][0]["finish_reason"]


@dataclass
class Streamed:
    """A stream put together again. `kinds` is the order of what came."""

    kinds: list[str] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    n_comments: int = 0
    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None
    done: bool = False


def read_sse(raw: bytes) -> Streamed:
    """A strict reader: whole events only, one line of JSON each, nothing after [DONE]."""
    assert raw.endswith(b"\n\n")
    read = Streamed()
    for block in raw.decode("utf-8").removesuffix("\n\n").split("\n\n"):
        assert "\n" not in block
        assert not read.done
        if block.startswith(":"):
            read.n_comments += 1
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        if data == "[DONE]":
            read.done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            read.error = chunk["error"]
            continue
        read.chunks.append(chunk)
        _read_chunk(read, chunk)
    assert read.done
    return read


def _read_chunk(read: Streamed, chunk: Any) -> None:
    assert chunk["object"] == "chat.completion.chunk"
    for name in ("id", "created", "model", "system_fingerprint"):
        assert chunk[name] == read.chunks[0][name]
    if not chunk["choices"]:
        read.kinds.append("usage")
        read.usage = chunk["usage"]
        return
    (choice,) = chunk["choices"]
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    delta = choice["delta"]
    if choice["finish_reason"] is not None:
        assert delta == {}
        assert read.finish is None
        read.finish, read.stop_reason = choice["finish_reason"], choice["stop_reason"]
        read.kinds.append("finish")
        return
    (kind,) = (k for k in delta if not (k == "content" and "role" in delta))
    read.kinds.append(kind)
    match kind:
        case "role":
            assert delta == {"role": "assistant", "content": ""}
        case "content":
            assert delta["content"]
            read.content += delta["content"]
        case "reasoning_content":
            assert delta["reasoning_content"]
            read.reasoning += delta["reasoning_content"]
        case "tool_calls":
            (call,) = delta["tool_calls"]
            _read_call(read.calls, call)
        case "function_call":
            call = delta["function_call"]
            if "name" in call:
                read.calls.append({"name": call["name"], "arguments": ""})
            read.calls[-1]["arguments"] += call["arguments"]


def _read_call(calls: list[dict[str, Any]], call: Any) -> None:
    if call["index"] == len(calls):
        assert call["type"] == "function"
        assert call["function"].keys() == {"name", "arguments"}
        calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
    else:
        assert call["index"] == len(calls) - 1
        assert call.keys() == {"index", "function"}
        assert call["function"].keys() == {"arguments"}
    calls[-1]["arguments"] += call["function"]["arguments"]


INFO = ModelInfo(
    name="ds4-tiny",
    root="ds4d/ds4-tiny",
    n_ctx=8192,
    n_vocab=TOKENIZER.n_vocab,
    defaults=Defaults(thinking=False, temperature=0.0),
)


@asynccontextmanager
async def open_door(
    config: Api | None = None, info: ModelInfo = INFO, *, loaded: bool = True, **changes: Any
) -> AsyncIterator[DoorUnderTest]:
    """A server on a free port with a scripted runner behind it; `changes` are fields of `Api`.
    A call of ours that blocks the loop fails the test."""
    config = replace(config or Api(listen=("127.0.0.1:0",)), **changes)
    async with anyio.create_task_group() as tasks:
        runner = ScriptRunner(tasks, info.n_ctx)
        server = Server(config, runner)  # reads the key file, once
        with blockbuster_ctx("ds4d"):
            await tasks.start(server.run)
            if loaded:
                server.serve_model(Served(info=info, tokenizer=TOKENIZER, constants=CONSTANTS))
            ((host, port),) = server.addresses
            async with aiohttp.ClientSession() as client:
                yield DoorUnderTest(server, runner, client, host, port, tasks)
        tasks.cancel_scope.cancel()
