"""What takes longer than a call: begun, followed, waited for, cancelled, remembered for a while.

An operation is a task of the service, not of the connection that began it: that may go, unless the
operation is only for those who hear of it. Everybody who began it or waits for it hears how far it
is. Knows neither sockets nor what is done.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from ds4d import wire
from ds4d.control.failure import failure
from ds4d.control.params import shown
from ds4d.errors import Declined
from ds4d.events import emit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

    from ds4d.control.asks import Report

log = logging.getLogger(__name__)

RUNNING_MAX: Final = 16
ENDED_KEPT: Final = 32  # so that who waits for one too late still learns how it went


class Listener(Protocol):
    """A connection, as an operation sees it."""

    def progress(self, progress: wire.OpProgress) -> None:
        """Must neither wait nor raise."""
        ...


class Operation:
    def __init__(self, id: str, kind: str, starter: Listener, *, unheard_ends: bool) -> None:
        self.id = id
        self.kind = kind
        self.unheard_ends = unheard_ends
        self.listeners: set[Listener] = {starter}
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.now = wire.OpProgress(op=id, kind=kind, text="begun")

    def report(self, text: str, fraction: float | None = None) -> None:
        """How far it is; the last report, with the result or the error, is made by `end`."""
        self._tell(wire.OpProgress(op=self.id, kind=self.kind, text=text, fraction=fraction))

    def end(self, result: object, error: wire.Error | None) -> None:
        self._tell(
            wire.OpProgress(
                op=self.id,
                kind=self.kind,
                text="done" if error is None else error.message,
                fraction=1.0 if error is None else self.now.fraction,
                ended=True,
                result=result,
                error=error,
            )
        )
        self.listeners.clear()
        self.ended.set()

    def _tell(self, now: wire.OpProgress) -> None:
        self.now = now
        for listener in self.listeners:
            listener.progress(now)


class Operations:
    def __init__(self, tasks: TaskGroup) -> None:
        """`tasks` is where operations run; when it is cancelled they end with an error."""
        self._tasks = tasks
        self._n = 0
        self._running: dict[str, Operation] = {}
        self._ended: OrderedDict[str, Operation] = OrderedDict()

    def start(
        self,
        kind: str,
        body: Callable[[Report], Awaitable[object]],
        starter: Listener,
        *,
        unheard_ends: bool = False,
    ) -> wire.Op:
        """Begin `body`, whose result is the operation's. With `unheard_ends` it is cancelled when
        the last of those who hear of it has gone. Raises Declined when too many run."""
        if len(self._running) >= RUNNING_MAX:
            raise Declined(
                f"{RUNNING_MAX} operations run already; wait for one, or cancel one: "
                f"{', '.join(self._running)}",
                wire.BUSY,
            )
        self._n += 1
        operation = Operation(f"{kind}-{self._n}", kind, starter, unheard_ends=unheard_ends)
        self._running[operation.id] = operation
        self._tasks.start_soon(self._run, operation, body)
        return wire.Op(op=operation.id, kind=kind)

    def runs(self, kind: str) -> str | None:
        """The id of an operation of that kind which has not ended."""
        return next((o.id for o in self._running.values() if o.kind == kind), None)

    async def wait(self, id: str, listener: Listener) -> wire.OpProgress:
        """Returns when it has ended, at once if it has already. Raises Declined (NOT_FOUND)."""
        operation = self._find(id)
        if not operation.ended.is_set():
            operation.listeners.add(listener)
            listener.progress(operation.now)
            await operation.ended.wait()
        return operation.now

    def cancel(self, id: str) -> None:
        """Raises Declined: NOT_FOUND, or WRONG_STATE when it has ended."""
        operation = self._find(id)
        if operation.ended.is_set():
            raise Declined(f"operation {id} has ended already", wire.WRONG_STATE)
        operation.scope.cancel()

    def forget(self, listener: Listener) -> None:
        """It has gone; nothing is told to it any more."""
        for operation in self._running.values():
            operation.listeners.discard(listener)
            if operation.unheard_ends and not operation.listeners:
                operation.scope.cancel()

    def _find(self, id: str) -> Operation:
        operation = self._running.get(id) or self._ended.get(id)
        if operation is None:
            running = f"now there are {', '.join(self._running)}" if self._running else "none runs"
            raise Declined(
                f"no operation {shown(id)}: {running}, and the last {ENDED_KEPT} that have ended "
                "are known",
                wire.NOT_FOUND,
            )
        return operation

    async def _run(self, operation: Operation, body: Callable[[Report], Awaitable[object]]) -> None:
        result: object = None
        error: wire.Error | None = None
        try:
            with operation.scope:
                result = await body(operation.report)
            if operation.scope.cancelled_caught:
                error = wire.Error(code=wire.CANCELLED, message=f"{operation.kind} was cancelled")
        except anyio.get_cancelled_exc_class():
            error = wire.Error(code=wire.CANCELLED, message="the daemon is going down")
            raise
        except Exception as raised:
            error = failure(raised, operation.kind)
        finally:
            del self._running[operation.id]
            self._ended[operation.id] = operation
            if len(self._ended) > ENDED_KEPT:
                self._ended.popitem(last=False)
            operation.end(result, error)
            emit(
                log,
                "control.operation",
                op=operation.id,
                error=None if error is None else error.code,
                reason=None if error is None else error.message,
            )
