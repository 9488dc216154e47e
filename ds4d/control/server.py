"""The control socket and the monitor socket (spec/serving.md 4): who may connect, and how many.

Owns the listening sockets, the connections and the tasks behind them: operations and updates. Knows
the daemon by `asks` alone, and no method.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio
import msgspec
from anyio import TASK_STATUS_IGNORED, to_thread

from ds4d import wire
from ds4d.control.connection import Connection
from ds4d.control.limits import Limits
from ds4d.control.lines import Gone, Lines
from ds4d.control.listen import close_doors, open_doors
from ds4d.control.methods import Desk
from ds4d.control.operations import Operations
from ds4d.control.peers import peer_of
from ds4d.control.sparing import Sparing
from ds4d.control.updates import Masks, Updates
from ds4d.errors import Declined
from ds4d.events import emit

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from ds4d.config import Config
    from ds4d.control.asks import Asks
    from ds4d.control.listen import Door
    from ds4d.control.peers import Peer

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.5  # while the process has no file descriptor left
# What `accept` may say without the socket being of no more use.
_PASSING: Final = {errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Control:
    """`run` it in the root task group, before anything that takes time."""

    def __init__(
        self,
        config: Config,
        asks: Asks,
        *,
        service_uids: frozenset[int] | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`service_uids`: who has the role service on either socket; None: root and our own."""
        self._config = config
        self._asks = asks
        self._limits = limits or Limits()
        self._service_uids = frozenset({0, os.getuid()}) if service_uids is None else service_uids
        self._open: set[Connection] = set()
        self._end = anyio.Event()

    def connections(self) -> dict[wire.Role, int]:
        """How many there are, by role."""
        return Counter(connection.peer.role for connection in self._open)

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Open both sockets, report started, then serve until cancelled. Raises ConfigError, and
        TemporaryError when another daemon answers there."""
        doors = await to_thread.run_sync(open_doors, self._config)
        try:
            async with anyio.create_task_group() as outer:
                connections = await outer.start(self._keep_connections)
                try:
                    await self._serve(doors, connections, task_status)
                finally:
                    self._end.set()  # operations have ended; now all may be told
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(close_doors, doors)

    async def _serve(
        self, doors: list[Door], connections: TaskGroup, task_status: TaskStatus[None]
    ) -> None:
        masks = Masks()
        updates = Updates(self._asks, masks, self._limits)
        async with anyio.create_task_group() as tasks:
            desk = Desk(
                asks=self._asks,
                operations=Operations(tasks),
                updates=updates,
                masks=masks,
                doors=doors,
                limits=self._limits,
                refusals=Sparing(self._limits.refusals_logged, self._limits.refusals_each_s),
                metrics_turn=anyio.Lock(),
            )
            tasks.start_soon(updates.run)
            for door in doors:
                tasks.start_soon(self._accept, door, desk, connections)
                emit(log, "control.open", socket=door.name, path=door.path)
            task_status.started()

    async def _keep_connections(self, *, task_status: TaskStatus[TaskGroup]) -> None:
        """Connections outlive the cancellation of all else by the time it takes to say so."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as connections:
                task_status.started(connections)
                await self._end.wait()
                for connection in self._open:
                    connection.finish()

    async def _accept(self, door: Door, desk: Desk, connections: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(door.sock)
            try:
                sock, _ = door.sock.accept()
            except BlockingIOError:
                continue  # it has gone again
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
                emit(log, "control.accept", level=logging.WARNING, reason=error.strerror)
                await anyio.sleep(PAUSE_S)
                continue
            sock.setblocking(False)
            peer = peer_of(sock, door.name, self._service_uids)
            lines = Lines(sock, half_line_s=self._limits.half_line_s)
            try:
                self._check_room(peer)
            except Declined as error:
                _turn_away(lines, error, peer, desk)
                continue
            connection = Connection(lines, peer, desk)
            self._open.add(connection)
            connections.start_soon(self._run, connection)

    def _check_room(self, peer: Peer) -> None:
        """Raises Declined that says which of the limits is reached."""
        of_user = Counter(one.peer.uid for one in self._open)[peer.uid]
        if of_user >= self._limits.of_one_user:
            text = f"user {peer.uid} has {of_user} connections, which is all that one may have"
            raise Declined(f"{text}; close one", wire.BUSY)
        limit = self._limits.monitors if peer.role == "monitor" else self._limits.connections
        if len(self._open) >= limit:
            text = f"there are {len(self._open)} connections, and {limit} may be"
            raise Declined(f"{text}; try again when one has ended", wire.BUSY)

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._open.discard(connection)


def _turn_away(lines: Lines, error: Declined, peer: Peer, desk: Desk) -> None:
    if (left_out := desk.refusals.line()) is not None:
        emit(
            log,
            "control.refused",
            uid=peer.uid,
            pid=peer.pid,
            reason=str(error),
            left_out=left_out or None,
        )
    reply = wire.Reply(id=None, error=wire.Error(code=error.code, message=str(error)))
    with suppress(Gone):
        lines.send(memoryview(msgspec.json.encode(reply) + b"\n"))  # a fresh socket takes it all
    lines.close()
