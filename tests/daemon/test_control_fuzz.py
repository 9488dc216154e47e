"""Random lines, from random clients: the service answers, or closes the connection, and lives."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from anyio import to_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4d.control.methods import TABLE
from tests.daemon.control_house import NOBODY, FakeAsks, control_house

if TYPE_CHECKING:
    from pathlib import Path

NAMES = sorted({name for row in TABLE.values() for name in row.params.__struct_fields__})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.sampled_from(["debug", "decode", "log"])
PARAMS = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=4)
METHODS = st.sampled_from(sorted(TABLE)) | st.text(max_size=12)
CALLS = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0") | SCALARS, "method": METHODS},
    optional={"id": SCALARS, "params": PARAMS | VALUES, "more": SCALARS},
)


def damaged(call: object, at: int, byte: int) -> bytes:
    """The call as JSON with one byte changed."""
    line = bytearray(json.dumps(call).encode())
    line[at % len(line)] = byte
    return bytes(line)


LINES = st.one_of(
    st.binary(max_size=60),
    CALLS.map(lambda call: json.dumps(call).encode()),
    st.builds(damaged, CALLS, st.integers(0, 200), st.integers(0, 255)),
    st.lists(CALLS, max_size=2).map(lambda calls: json.dumps(calls).encode()),
)


def exchange(path: Path, lines: list[bytes], *, half: bytes) -> None:
    """Send all at once, then ask for a sign of life on this connection and, that failing, on a
    new one; leave in the middle of a line."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, sock.makefile("rb") as replies:
        sock.settimeout(10)
        sock.connect(str(path))
        sock.sendall(b"".join(line + b"\n" for line in lines))
        sock.sendall(b'\n{"jsonrpc":"2.0","id":"alive?","method":"ping"}\n')
        for line in replies:
            found = json.loads(line)
            assert found["jsonrpc"] == "2.0"
            if found.get("id") == "alive?":
                assert "result" in found
                break
        else:
            raise AssertionError("the connection was closed")
        sock.sendall(half)


async def test_no_line_ends_the_service_or_a_connection(tmp_path: Path, caplog) -> None:
    asks = FakeAsks()
    asks.reloads.set()
    asks.drained.set()

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.sampled_from(["control", "monitor"]),
        st.lists(LINES, max_size=12),
        st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")),
    )
    def fuzz(name: str, lines: list[bytes], half: bytes) -> None:
        exchange(tmp_path / "run" / f"{name}.sock", lines, half=half)

    async with control_house(tmp_path, asks, service_uids=NOBODY, of_one_user=32) as house:
        await to_thread.run_sync(fuzz)
        async with house.client() as client:
            await client.call("ping")
    assert "control.error" not in caplog.text
