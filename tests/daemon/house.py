"""The daemon put together, in this process: a fake engine, real sockets, real signals."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio

from ds4d import config, daemon, wire
from ds4d.api.chat import Served
from ds4d.api.models import ModelInfo, defaults
from ds4d.waking import Woken
from tests.daemon.script_runner import CONSTANTS, TOKENIZER
from tests.fakes import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

CONTEXT = 8192


def engine(**more: Any) -> FakeEngine:
    return FakeEngine(n_vocab=TOKENIZER.n_vocab, **{"eos_every": 0, "delay_step_s": 0.002} | more)


class Waking:
    """A fake engine behind a gate, and the byte tokenizer. `on_text_side` is called when a reload
    reads prompt texts, in its thread."""

    def __init__(
        self,
        engine: FakeEngine,
        *,
        error: Exception | None = None,
        reasons: Sequence[wire.Reason] = (),
    ) -> None:
        self.engine = engine
        self.gate = threading.Event()
        self.gate.set()
        self.settings: config.Config | None = None  # of the start
        self.next_lane_bytes: int | None = None
        self.on_text_side: Callable[[], None] = lambda: None
        self._error = error
        self._reasons = tuple(reasons)
        self._woken: Woken | None = None

    @property
    def woken(self) -> Woken:
        assert self._woken is not None
        return self._woken

    def text_side(self, settings: config.Config) -> Served:
        self.on_text_side()
        return self._served(settings)

    def _served(self, settings: config.Config) -> Served:
        info = ModelInfo(
            name=settings.model.name or "fake",
            root="ds4d/fake",
            n_ctx=CONTEXT,
            n_vocab=TOKENIZER.n_vocab,
            defaults=defaults(settings.api, "0731", temperature=0.0, thinking=False),
        )
        wanted = settings.api.prompt_profile
        texts = CONSTANTS if wanted == "auto" else replace(CONSTANTS, profile=wanted)
        return Served(info=info, tokenizer=TOKENIZER, constants=texts)

    def build(self, report: Callable[[str, float], None]) -> Any:
        report("kernels", 0.4)
        self.gate.wait(20)
        if self._error is not None:
            raise self._error
        assert self.settings is not None
        self._woken = Woken(
            served=self._served(self.settings),
            text_side=self.text_side,
            model_as=_model_as,
            reasons=self._reasons,
            budget_bytes=1 << 30,
            next_lane_bytes=self.next_lane_bytes,
            base_bytes=1 << 20,
        )
        return self.engine, self.engine.capacity


def _model_as(served: Served) -> wire.Model:
    return wire.Model(
        name=served.info.name,
        file="/models/fake.gguf",
        embedded=False,
        bytes=1 << 20,
        context=CONTEXT,
        row_fingerprint="fake",
        system_fingerprint=served.info.fingerprint,
        prompt_texts=served.constants.name,
        prompt_profile=served.constants.profile,
    )


class House:
    def __init__(
        self, url: str, client: aiohttp.ClientSession, ended: anyio.Event, directory: Path
    ) -> None:
        self.url = url
        self.client = client
        self.ended = ended
        self.file = directory / "ds4d.toml"
        self.runtime = directory / "run" / "ds4d"

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.json()

    async def chat(self, **more: Any) -> tuple[int, dict[str, str], Any]:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40} | more
        url = self.url + "/v1/chat/completions"
        async with self.client.post(url, json=body) as response:
            return response.status, dict(response.headers), await response.json()

    async def stream(self, **more: Any) -> list[Any]:
        """The events of one streamed answer, without the last `[DONE]`."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True} | more
        async with self.client.post(self.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            return [
                json.loads(line.removeprefix(b"data: "))
                async for line in response.content
                if line.startswith(b"data: {")
            ]

    async def until_ready(self) -> None:
        with anyio.fail_after(10):
            while (await self.get("/ready"))[0] != 200:
                await anyio.sleep(0.005)

    async def until_loading(self) -> None:
        """Until the fake engine, in its thread, has said how far it is."""
        with anyio.fail_after(10):
            while "40 %" not in (await self.chat())[2]["error"]["message"]:
                await anyio.sleep(0.005)

    async def ends(self) -> None:
        with anyio.fail_after(10):
            await self.ended.wait()

    def configure(self, text: str) -> None:
        self.file.write_text(text, "utf-8")

    @asynccontextmanager
    async def operator(self, name: str = "control") -> AsyncIterator[Operator]:
        async with await anyio.connect_unix(str(self.runtime / f"{name}.sock")) as stream:
            operator = Operator(stream)
            await operator.hello()
            yield operator


class Operator:
    """A client of the control socket that says one thing at a time."""

    def __init__(self, stream: anyio.abc.SocketStream) -> None:
        self._stream = stream
        self._rest = b""
        self._n = 0
        self.notifications: list[Any] = []

    async def hello(self) -> Any:
        line = await self.line()
        assert line["method"] == "hello"
        return line["params"]

    async def line(self) -> Any:
        while b"\n" not in self._rest:
            self._rest += await self._stream.receive()
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    async def ask(self, method: str, **params: Any) -> Any:
        """The result. Raises Refusal with the error's code and message."""
        self._n += 1
        call = {"jsonrpc": "2.0", "id": self._n, "method": method, "params": params}
        await self._stream.send(json.dumps(call).encode() + b"\n")
        while True:
            line = await self.line()
            if line.get("id") != self._n:
                self.notifications.append(line)
                continue
            if "error" in line:
                raise Refusal(line["error"])
            return line["result"]

    async def carry_out(self, method: str, **params: Any) -> Any:
        """A long operation, to its end."""
        op = await self.ask(method, **params)
        return await self.ask("op.wait", op=op["op"])


class Refusal(Exception):
    def __init__(self, error: Any) -> None:
        super().__init__(error["message"])
        self.code = error["code"]
        self.data = error.get("data")


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.002)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@asynccontextmanager
async def daemon_with(
    waking: Waking,
    directory: Path,
    *sets: str,
    text: str = "",
    host: str = "127.0.0.1",
    **variables: str,
) -> AsyncIterator[House]:
    """A daemon that reads `directory`/ds4d.toml, which holds `text`, below `sets`. `variables` are
    of its environment."""
    port = free_port()
    file = directory / "ds4d.toml"
    file.write_text(text, "utf-8")
    environ = {"HOME": str(directory), "XDG_RUNTIME_DIR": str(directory / "run")} | variables
    loaded = await anyio.to_thread.run_sync(
        lambda: config.read(file=file, sets=[f"api.listen={host}:{port}", *sets], environ=environ)
    )
    waking.settings = loaded.config
    ended = anyio.Event()

    async def run() -> None:
        try:
            await daemon.serve(loaded, waking)
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks, aiohttp.ClientSession() as client:
        tasks.start_soon(run)
        house = House(f"http://127.0.0.1:{port}", client, ended, directory)
        with anyio.fail_after(10):
            while not ended.is_set():
                try:
                    await house.get("/version")
                    break
                except aiohttp.ClientConnectionError:
                    await anyio.sleep(0.005)
        yield house
        tasks.cancel_scope.cancel()
