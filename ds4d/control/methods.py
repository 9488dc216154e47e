"""What a client may call: one table, from the parameters' class to the role and the function.

A new method is its class in `wire` and a row here. A function gets a `Call` and the decoded
parameters; it returns the result, at once or as a coroutine, or raises what `failure` knows.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ds4d import wire
from ds4d.control import bench
from ds4d.control.params import check, nearest, shown
from ds4d.control.peers import who_may
from ds4d.control.updates import HZ_MAX, HZ_MIN, SUBSCRIPTIONS_MAX, view
from ds4d.errors import Declined
from ds4d.sched.snapshot import SESSIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import anyio

    from ds4d.control.asks import Asks
    from ds4d.control.connection import Connection
    from ds4d.control.limits import Limits
    from ds4d.control.listen import Door
    from ds4d.control.operations import Operations
    from ds4d.control.peers import Peer
    from ds4d.control.sparing import Sparing
    from ds4d.control.updates import Masks, Updates
    from ds4d.sched.snapshot import Lanes

P = TypeVar("P", bound=wire.Params[Any])

FEATURES: Final[tuple[str, ...]] = ()  # optional parts that this daemon has, for the hello
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What all methods work on."""

    asks: Asks
    operations: Operations
    updates: Updates
    masks: Masks
    doors: Sequence[Door]
    limits: Limits
    refusals: Sparing  # of connections and calls, to the log
    metrics_turn: anyio.Lock  # one text at a time: each takes a worker thread


@dataclass(frozen=True, slots=True)
class Call:
    desk: Desk
    connection: Connection  # of the caller

    @property
    def asks(self) -> Asks:
        return self.desk.asks

    @property
    def peer(self) -> Peer:
        return self.connection.peer


@dataclass(frozen=True, slots=True)
class Method:
    params: type[wire.Params[Any]]
    role: wire.Role  # and those above it
    function: Callable[[Call, Any], Any]
    mutates: bool = False  # what it does is logged, and goes on when the caller leaves
    waits: bool = False  # it returns a coroutine


def find(name: str) -> Method:
    """Raises Declined (NO_METHOD)."""
    method = TABLE.get(name)
    if method is None:
        others = nearest(name, TABLE) or f"there are {', '.join(TABLE)}"
        raise Declined(f"no method {shown(name)}; {others}", wire.NO_METHOD)
    return method


def check_role(what: str, role: wire.Role, peer: Peer, doors: Sequence[Door]) -> None:
    """Raises Declined (DENIED) that says which socket or group would do."""
    if not peer.may(role):
        raise Declined(
            f"{what} needs the role {role}, this connection has {peer.role}: "
            f"{who_may(role, peer, doors)}",
            wire.DENIED,
        )


# The daemon


def _ping(call: Call, p: wire.Ping) -> wire.Pong:
    return wire.Pong(at=time.time(), uptime_s=call.asks.uptime_s())


def _status(call: Call, p: wire.GetStatus) -> wire.Status:
    return call.asks.status()


async def _metrics(call: Call, p: wire.GetMetrics) -> wire.MetricsText:
    async with call.desk.metrics_turn:
        return wire.MetricsText(text=(await call.asks.exposition()).decode())


def _drain(call: Call, p: wire.StartDrain) -> wire.Op:
    if p.deadline_s is not None:
        check(wire.StartDrain, "deadline_s", p.deadline_s, 0, DAY_S)
    if (state := call.asks.state()) in ("starting", "loading", "failed", "stopping"):
        raise Declined(f"the daemon is {state}: nothing to drain", wire.WRONG_STATE)

    async def body(report: Callable[[str, float | None], None]) -> wire.Done:
        text = await call.asks.drain(p.deadline_s, stop=p.stop, report=report)
        return wire.Done(text=text)

    return call.desk.operations.start(p.METHOD, body, call.connection)


def _undrain(call: Call, p: wire.Undrain) -> wire.Done:
    call.asks.undrain()
    return wire.Done(text="the daemon takes work again")


def _shutdown(call: Call, p: wire.Shutdown) -> wire.Done:
    if p.mode == "graceful" and call.asks.state() == "stopping":  # twice would cut what runs
        return wire.Done(text="the daemon goes down already, when what runs has ended")
    call.asks.shutdown(fast=p.mode == "fast")  # our answer is sent before the connection ends
    how = "at once" if p.mode == "fast" else "when what runs has ended"
    return wire.Done(text=f"the daemon goes down {how}")


# Sessions and lanes


def _sessions(call: Call, p: wire.GetSessions) -> wire.Sessions:
    check(wire.GetSessions, "limit", p.limit, 1, SESSIONS_MAX)
    found = view(call.asks, call.desk.masks, call.peer.role)
    wanted = [one for one in found.sessions if p.phase in (None, one.phase)]
    return wire.Sessions(sessions=wanted[: p.limit], n_sessions=found.n_sessions)


def _close_session(call: Call, p: wire.CloseSession) -> wire.Done:
    call.asks.close_session(p.id, force=p.force)
    return wire.Done(text=f"session {p.id} is closed")


def _cancel_request(call: Call, p: wire.CancelRequest) -> wire.Done:
    request = _whole_id(call.asks, p.request)
    call.asks.cancel(request)
    return wire.Done(text=f"request {shown(request)} is cancelled")


def _whole_id(asks: Asks, beginning: str) -> str:
    """Of the only request at work whose id begins so. Raises Declined if there are several."""
    if len(beginning) < wire.REQUEST_MIN:  # else it is not meant as one
        return beginning
    ids = {one.request for one in asks.sessions().sessions if one.phase != "idle"}
    found = [id for id in ids if id.startswith(beginning)]
    if beginning in ids or not found:
        return beginning
    if len(found) > 1:
        raise Declined(
            f"{len(found)} requests begin with {shown(beginning)}: give more of the one you mean",
            wire.BAD_PARAMS,
        )
    return found[0]


def _set_lanes(call: Call, p: wire.SetLanes) -> Lanes:
    call.asks.set_lanes(p.max)
    lanes = call.asks.status().lanes
    if lanes is None:
        raise Declined("there are no lanes: the model is not there", wire.WRONG_STATE)
    return lanes


def _bench(call: Call, p: wire.Bench) -> wire.Op:
    running = call.desk.operations.runs(bench.KIND)
    if running is not None:
        raise Declined(
            f"operation {running} measures already: it ends with the ds4ctl that began it",
            wire.BUSY,
        )
    bench.check_sizes(call.asks, p)
    return call.desk.operations.start(
        bench.KIND, partial(bench.load, call.asks, p), call.connection, unheard_ends=True
    )


# Configuration and log


async def _reload(call: Call, p: wire.DoReload) -> wire.Reloaded:
    if p.file is not None:
        _check_file(call, wire.DoReload, p.file)
    return await call.asks.reload(dry_run=p.dry_run, allow_partial=p.allow_partial, file=p.file)


def _show_config(call: Call, p: wire.ShowConfig) -> wire.ConfigText:
    return call.asks.config_text(defaults=p.defaults)


async def _check_config(call: Call, p: wire.CheckConfig) -> wire.Checked:
    if p.file is not None:
        _check_file(call, wire.CheckConfig, p.file)
    return await call.asks.check_config(p.file)


def _check_file(call: Call, kind: type[wire.Params[Any]], path: str) -> None:
    """A message about what is wrong in a file repeats a part of it: so only who may read
    everything that the daemon may read names one."""
    check_role(f"{kind.METHOD} with a file", "service", call.peer, call.desk.doors)
    if not PurePosixPath(path).is_absolute() or "\0" in path:
        raise Declined(
            f"{kind.METHOD}: file: expected an absolute path, since the daemon runs in another "
            f"directory than you, got {shown(path)}",
            wire.BAD_PARAMS,
        )


def _log_level(call: Call, p: wire.SetLogLevel) -> wire.LogLevel:
    if p.ttl_s is not None:
        check(wire.SetLogLevel, "ttl_s", p.ttl_s, 1, 7 * DAY_S)
    previous = call.asks.set_log_level(p.logger, p.level, p.ttl_s)
    return wire.LogLevel(logger=p.logger, previous=previous, level=p.level)


# Subscriptions and operations


def _subscribe(call: Call, p: wire.Subscribe) -> wire.Subscribed:
    if not p.topics:
        raise Declined("subscribe: topics: expected at least one", wire.BAD_PARAMS)
    check(wire.Subscribe, "hz", p.hz, HZ_MIN, HZ_MAX)
    if "log" in p.topics:
        check_role("the topic log", "admin", call.peer, call.desk.doors)
    if len(call.desk.updates.of(call.connection)) >= SUBSCRIPTIONS_MAX:
        raise Declined(
            f"this connection has {SUBSCRIPTIONS_MAX} subscriptions already; "
            "unsubscribe from one, or ask for several topics in one",
            wire.BUSY,
        )
    added = call.desk.updates.add(call.connection, frozenset(p.topics), p.hz)
    return wire.Subscribed(sub=added.id)


def _unsubscribe(call: Call, p: wire.Unsubscribe) -> wire.Done:
    call.desk.updates.remove(p.sub, call.connection)
    return wire.Done(text=f"subscription {p.sub} has ended")


async def _wait(call: Call, p: wire.WaitOp) -> wire.OpProgress:
    return await call.desk.operations.wait(p.op, call.connection)


def _cancel(call: Call, p: wire.CancelOp) -> wire.Done:
    call.desk.operations.cancel(p.op)
    return wire.Done(text=f"operation {p.op} is being cancelled")


def _row(
    params: type[P],
    role: wire.Role,
    function: Callable[[Call, P], object | Awaitable[object]],
    *,
    mutates: bool = False,
) -> Method:
    return Method(params, role, function, mutates, inspect.iscoroutinefunction(function))


_ROWS: Final = (
    _row(wire.Ping, "monitor", _ping),
    _row(wire.GetStatus, "monitor", _status),
    _row(wire.GetSessions, "monitor", _sessions),
    _row(wire.GetMetrics, "monitor", _metrics),
    _row(wire.Subscribe, "monitor", _subscribe),
    _row(wire.Unsubscribe, "monitor", _unsubscribe),
    _row(wire.CloseSession, "admin", _close_session, mutates=True),
    _row(wire.CancelRequest, "admin", _cancel_request, mutates=True),
    _row(wire.StartDrain, "admin", _drain, mutates=True),
    _row(wire.Undrain, "admin", _undrain, mutates=True),
    _row(wire.DoReload, "admin", _reload, mutates=True),
    _row(wire.ShowConfig, "admin", _show_config),
    _row(wire.CheckConfig, "admin", _check_config),
    _row(wire.SetLanes, "admin", _set_lanes, mutates=True),
    _row(wire.Bench, "admin", _bench, mutates=True),
    _row(wire.SetLogLevel, "admin", _log_level, mutates=True),
    _row(wire.WaitOp, "admin", _wait),
    _row(wire.CancelOp, "admin", _cancel, mutates=True),
    _row(wire.Shutdown, "admin", _shutdown, mutates=True),
)
TABLE: Final = {row.params.METHOD: row for row in _ROWS}
