"""The one OS thread that owns the engine: a mailbox and a hop per call.

A long-lived thread and not a pool, since a device context belongs to a thread. The event loop hands
over a function and sleeps until its result is back; it never blocks on the engine.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from ds4d.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_LOOKS = 4  # at the heartbeat at least, within the time that it may stand still
_LOOK_S = 1.0  # between two of them at most


class _Letter:
    """One call on its way there and back."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = anyio.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class EngineThread:
    """Runs calls one after another, in the order in which they were made."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._mail: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._ended = anyio.Event()
        self._given_up = False
        self.still_s: float | None = None  # since its heartbeat moved; None: no call to watch
        # A daemon thread: a device call that never returns must not keep the process alive.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(
        self,
        function: Callable[..., T],
        *args: object,
        heartbeat: Callable[[], int] | None = None,
        stall_s: Callable[[], float] = lambda: math.inf,
        abandon: bool = False,
    ) -> T:
        """`function(*args)` there; its result or exception here.

        A call that has begun is waited for even when the caller is cancelled, since the engine is
        at rest only then: what may take long looks at a `Cancel` flag of its own. With `abandon`
        the thread is given up instead. Raises `DeviceError` when `heartbeat` has not moved for
        `stall_s` as it is by then; the thread is given up then too.
        """
        letter = _Letter(lambda: function(*args))
        self._mail.put(letter)
        with anyio.CancelScope(shield=not abandon):
            try:
                if heartbeat is None:
                    await letter.done.wait()
                else:
                    await self._wait(letter, heartbeat, stall_s)
            except anyio.get_cancelled_exc_class():
                self._given_up = True
                raise
        if letter.error is not None:
            raise letter.error
        value: T = letter.value
        return value

    async def _wait(
        self, letter: _Letter, heartbeat: Callable[[], int], stall_s: Callable[[], float]
    ) -> None:
        last, still_s = heartbeat(), 0.0
        try:
            while not letter.done.is_set():
                self.still_s = still_s
                look_s = min(stall_s() / _LOOKS, _LOOK_S)
                with anyio.move_on_after(look_s):
                    await letter.done.wait()
                    return
                now = heartbeat()
                # Looks are added up, not the clock read: it also ran while we were stopped.
                still_s = still_s + look_s if now == last else 0.0
                last = now
                if still_s >= stall_s():
                    self._given_up = True
                    raise DeviceError(f"the engine has not moved for {still_s:.0f} s")
        finally:
            self.still_s = None

    async def close(self) -> None:
        """End the thread after the calls made so far. One that was given up is left behind."""
        self._mail.put(None)
        if not self._given_up:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    def _work(self) -> None:
        while (letter := self._mail.get()) is not None:
            try:
                letter.value = letter.call()
            except BaseException as error:  # carried to the caller, whatever it is
                letter.error = error
            self._back(letter.done.set)
            del letter  # results may be large; don't hold the last one while asleep
        self._back(self._ended.set)

    def _back(self, callback: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more
