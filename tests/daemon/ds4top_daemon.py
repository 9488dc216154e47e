"""A daemon for ds4top to watch: a real Unix socket, scripted answers, and a load that is a function
of time, so that its pictures are always the same.

    python -m tests.daemon.ds4top_daemon SOCKET     plays that load until it is stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ds4d import wire
from ds4d.sched.snapshot import Lanes, Pages, Queue, Rates, Session, Totals

if TYPE_CHECKING:
    from collections.abc import Callable

MIB, GIB = 1 << 20, 1 << 30
START = 1_764_500_400.0  # 11:00:00 UTC
PARTS = {
    "weights": 4200 * MIB,
    "pages": 1740 * MIB,
    "lanes": 640 * MIB,
    "arena": 310 * MIB,
    "frontiers": 96 * MIB,
}
MODEL = wire.Model(
    name="ds4-tiny",
    file="ds4-tiny.gguf",
    embedded=True,
    bytes=16_026_336,
    context=8192,
    row_fingerprint="a3f1",
    system_fingerprint="fp_a3f1",
    prompt_texts="ds4-tiny",
    prompt_profile="0731",
)


def memory(**changes: Any) -> wire.Memory:
    fields: dict[str, Any] = {
        "budget": 8 * GIB,
        "parts": PARTS,
        "available": 5320 * MIB,
        "cgroup_headroom": None,
        "simulated": None,
        "reserve": 1536 * MIB,
        "uncommitted": 2100 * MIB,
        "free_to_promise": 3220 * MIB,
        "resident": 5100 * MIB,
        "swap": 0,
        "psi_some": 0.0,
    }
    return wire.Memory(**fields | changes)


def status(**changes: Any) -> wire.Status:
    fields: dict[str, Any] = {
        "state": "ready",
        "version": "0.1.0",
        "pid": 4711,
        "boot": "0f3a",
        "uptime_s": 273_840.0,
        "profile": "balanced",
        "config_files": ["/etc/ds4d/ds4d.toml"],
        "config_hash": "5d41402abc4b",
        "urls": ["http://127.0.0.1:30007"],
        "model": MODEL,
        "lanes": Lanes(n=4, n_max=4, n_busy=0),
        "queue": Queue(n=0, n_max=32, n_lane=0, n_memory=0, oldest_s=0.0, wait_s=0.0),
        "pages": Pages(
            n=1024, n_free=1024, n_promised=0, tokens=256, frontiers=52, frontiers_free=52
        ),
        "rates": Rates(prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0),
        "totals": Totals(),
        "memory": memory(),
    }
    return wire.Status(**fields | changes)


def hello(**changes: Any) -> wire.Hello:
    fields: dict[str, Any] = {
        "protocol": wire.Protocol(major=wire.MAJOR, minor=wire.MINOR),
        "version": "0.1.0",
        "pid": 4711,
        "boot": "0f3a",
        "state": "ready",
        "role": "admin",
        "features": [],
    }
    return wire.Hello(**fields | changes)


def log_line(seq: int, level: str = "info", text: str = "request.done req=r1 ms=5") -> wire.LogLine:
    return wire.LogLine(seq=seq, at=START + seq, level=level, text=text)  # type: ignore[arg-type]


# A load, as a function of time in seconds


def _label(n: int) -> str:
    return f"req_{(n * 0x9E3779B97F4A7C15F39CC0605CEDC835) % (1 << 128):032x}"


def working(t: float) -> list[Session]:
    """Three lanes answer, one reads a long prompt; each begins anew when it has ended."""
    answered, read = t % 80, t % 45
    sessions = [
        Session(
            id=n,
            request=_label(n),
            phase="decode",
            lane=lane,
            n_tokens=1800 * n + int(rate * answered),
            n_pages=(1800 * n) // 256 + 1,
            n_prompt=1800 * n - 300,
            n_cached=(1800 * n - 300) * (n % 3) // 3,
            n_generated=300 + int(rate * answered),
            n_answer_max=4096,
            age_s=12.0 * n + t,
            tokens_per_s=rate + 4 * math.sin(t / 3 + n),
        )
        for lane, (n, rate) in enumerate([(4, 44.0), (7, 51.0), (12, 38.0)])
    ]
    done = 8192 + int(1150 * read)
    reading = Session(
        id=17,
        request=_label(17),
        phase="prefill",
        lane=3,
        n_tokens=done,
        n_pages=done // 256,
        n_prompt=60_416,
        n_cached=8192,
        n_answer_max=32_768,
        age_s=3.0 + read,
        remaining_s=(60_416 - done) / 1150,
        tokens_per_s=1150 + 80 * math.sin(t / 2),
    )
    return [*sessions, reading]


def waiting(t: float) -> list[Session]:
    return [
        Session(
            id=None if i else 9,
            request=_label(30 + i),
            phase="queued",
            waits_for="memory" if i == 1 else "lane",
            n_prompt=2400 * (i + 1),
            n_answer_max=8192,
            age_s=20.0 - 6 * i + t,
            remaining_s=8.0 + 14 * i,
        )
        for i in range(3)
    ]


def resting(t: float, n: int) -> list[Session]:
    return [
        Session(
            id=40 + i,
            request=_label(40 + i),
            phase="idle",
            n_tokens=900 + 731 * i,
            n_pages=(900 + 731 * i) // 256 + 1,
            n_prompt=700 + 600 * i,
            n_cached=500 * i,
            n_generated=200 + 31 * i,
            n_answer_max=4096,
            age_s=90.0 + 210 * i + t,
            idle_s=40.0 + 190 * i + t,
        )
        for i in range(n)
    ]


def busy(t: float, n_sessions: int = 20) -> wire.Update:
    """The picture at second `t`: 4 lanes at work, 3 turns wait, the rest are idle."""
    sessions = [*working(t), *waiting(t), *resting(t, n_sessions - 7)]
    decode = sum(s.tokens_per_s or 0 for s in sessions if s.phase == "decode")
    prefill = 1150 * max(math.sin(t / 9), 0.0) ** 0.5 + 60 * math.sin(t / 2) ** 2
    used = sum(s.n_pages for s in sessions)
    return wire.Update(
        sub=1,
        seq=int(t * 2),
        at=START + t,
        status=status(
            uptime_s=273_840.0 + t,
            lanes=Lanes(n=4, n_max=4, n_busy=4),
            queue=Queue(n=3, n_max=32, n_lane=2, n_memory=1, oldest_s=20.0 + t, wait_s=36.0),
            pages=Pages(
                n=1024,
                n_free=1024 - used,
                n_promised=sum(s.n_pages for s in working(t)) + 90,
                tokens=256,
                frontiers=52,
                frontiers_free=33,
            ),
            rates=Rates(prefill_tokens_per_s=prefill, decode_tokens_per_s=decode),
            totals=Totals(
                requests=1240 + int(t), prompt=8_400_000, cached=7_224_000, generated=912_000
            ),
            heartbeat_age_s=0.1,
            loop_lag_s=0.002,
        ),
        sessions=sessions,
        n_sessions=len(sessions),
        log=_log_at(t),
    )


def _log_at(t: float) -> list[wire.LogLine]:
    if t % 3:
        return []
    n = int(t / 3)
    told: list[tuple[str, str]] = [
        ("info", f"request.done req={_label(n)} prompt=4210 cached=3900 out=311 first_ms=212"),
        ("info", f"request.received api=chat req={_label(n + 3)} prompt=2400 max_tokens=8192"),
        ("warning", "client.gone how=eof phase=decode released_ms=14"),
        ("info", "admission.decision action=wait need_mib=310 free_mib=210 reason=memory"),
        ("debug", "prefill.chunk lane=3 from=8192 to=8448 ms=222"),
        ("error", 'reload.result ok=no error="ds4d.toml:12: lanes.max is 99"'),
    ]
    level, text = told[n % len(told)]
    return [wire.LogLine(seq=n, at=START + t, level=level, text=text)]  # type: ignore[arg-type]


def quiet(t: float) -> wire.Update:
    """Nobody is there."""
    return wire.Update(
        sub=1, seq=int(t * 2), at=START + t, status=status(uptime_s=90.0 + t), sessions=[]
    )


# The socket


def notification(params: wire.Hello | wire.Update | wire.OpProgress) -> bytes:
    raw = msgspec.Raw(msgspec.json.encode(params))
    return msgspec.json.encode(wire.Reply(method=params.METHOD, params=raw)) + b"\n"


def answer(id: int, result: object) -> bytes:
    raw = msgspec.Raw(msgspec.json.encode(result))
    return msgspec.json.encode(wire.Reply(id=id, result=raw)) + b"\n"


def refusal(id: int | None, code: int, message: str, data: object = None) -> bytes:
    error = wire.Error(code=code, message=message, data=data)
    return msgspec.json.encode(wire.Reply(id=id, error=error)) + b"\n"


class Daemon:
    """Greets, subscribes everybody, sends what `tell` is given, notes the calls. `answers`: what a
    method gets, a result, a (code, message) or (code, message, data), or None for silence."""

    def __init__(self, path: Path, greeting: bytes | None = None) -> None:
        self.path = path
        self.greeting = notification(hello()) if greeting is None else greeting
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.subscriptions: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.last: bytes = b""  # update, which a newcomer is sent
        self.n_connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Daemon:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.path.unlink(missing_ok=True)
        self.hang_up()
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()

    def tell(self, *told: wire.Update | wire.OpProgress | bytes) -> None:
        for item in told:
            raw = item if isinstance(item, bytes) else notification(item)
            if isinstance(item, wire.Update):
                self.last = raw
            for writer in self._writers:
                writer.write(raw)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        self._writers.add(writer)
        writer.write(self.greeting)
        with contextlib.suppress(ConnectionError):
            while raw := await reader.readline():
                self._take(msgspec.json.decode(raw, type=wire.Request), writer)
        self._writers.discard(writer)
        writer.close()

    def _take(self, request: wire.Request, writer: asyncio.StreamWriter) -> None:
        assert isinstance(request.id, int)
        params = msgspec.json.decode(request.params)
        if request.method == "subscribe":
            self.subscriptions.append(params)
            given = self.answers.get("subscribe", wire.Subscribed(sub=len(self.subscriptions)))
            if isinstance(given, dict):  # by topic
                given = given.get(params["topics"][0], wire.Subscribed(sub=1))
        else:
            self.calls.append((request.method, params))
            given = self.answers.get(request.method, wire.Done(text=""))
        if isinstance(given, tuple):
            writer.write(refusal(request.id, *given))
        elif given is not None:
            writer.write(answer(request.id, given))
        if request.method == "subscribe" and self.last:
            writer.write(self.last)


async def _play(path: Path, picture: Callable[[float], wire.Update], hz: float) -> None:
    async with Daemon(path) as daemon:
        for n in itertools.count():
            daemon.tell(picture(n / hz))
            await asyncio.sleep(1 / hz)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_play(Path(sys.argv[1]), busy, 2.0))
