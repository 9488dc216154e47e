"""The control socket: the protocol, roles, limits and operations, over real sockets."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest

from ds4d import wire
from ds4d.config import Control
from ds4d.control.methods import TABLE
from ds4d.errors import ConfigError, Declined, Ds4Error, Refused, RequestError
from tests.daemon.control_house import NOBODY, FakeAsks, control_house, settings, until

# The protocol


async def test_the_first_line_says_who_answers_and_what_the_caller_may_do(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.raw() as client:
        hello = await client.note("hello")
        assert hello["protocol"] == {"major": wire.MAJOR, "minor": wire.MINOR}
        assert (hello["server"], hello["pid"], hello["boot"]) == (
            "ds4d",
            os.getpid(),
            "0123456789ab",
        )
        assert (hello["state"], hello["role"]) == ("ready", "service")


@pytest.mark.parametrize(
    ("method", "params", "called"),
    [
        ("session.close", {"id": 3, "force": True}, ("close_session", 3, True)),
        ("request.cancel", {"request": "chatcmpl-1"}, ("cancel", "chatcmpl-1")),
        ("undrain", {}, ("undrain",)),
        ("drain", {"deadline_s": 5, "stop": True}, ("drain", 5.0, True)),
        ("config.show", {"defaults": True}, ("config_text", True)),
        ("config.check", {"file": "/etc/x.toml"}, ("check_config", "/etc/x.toml")),
        ("lanes.set", {"max": 2}, ("set_lanes", 2)),
        ("log.level", {"level": "debug", "ttl_s": 60}, ("set_log_level", "ds4d", "debug", 60.0)),
        ("shutdown", {"mode": "fast"}, ("shutdown", True)),
    ],
)
async def test_a_method_asks_the_daemon_for_what_the_client_has_asked(
    tmp_path, method, params, called
) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.call(method, **params)
        await until(lambda: called in house.asks.calls)


async def test_every_class_of_parameters_has_a_row_in_the_table() -> None:
    assert {kind.METHOD for kind in wire.Params.__subclasses__()} == TABLE.keys()


async def test_results_are_the_records_of_the_wire(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        house.asks.reloads.set()
        for method, params in (
            ("ping", {}),
            ("status", {}),
            ("sessions", {}),
            ("metrics", {}),
            ("reload", {"dry_run": True}),
            ("config.show", {}),
            ("config.check", {}),
            ("lanes.set", {"max": 1}),
            ("log.level", {"level": "info"}),
            ("subscribe", {"topics": ["log"]}),
            ("undrain", {}),
        ):
            result = await client.call(method, **params)
            msgspec.convert(result, TABLE[method].params.RESULT)


async def test_a_line_that_is_no_json_is_answered_and_the_next_one_too(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        for line in (b"{\n", b"\n", b"nonsense\n", b'{"a": "\xff"}\n', b"[" * 5000 + b"\n"):
            await client.send(line)
            error = (await client.reply(None))["error"]
            assert error["code"] in (wire.PARSE, wire.INVALID)
        deep = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":' + b"[" * 50_000 + b"\n"
        await client.send(deep)
        assert (await client.reply(None))["error"]["code"] == wire.PARSE
        assert (await client.call("ping"))["uptime_s"] == 12.5


@pytest.mark.parametrize(
    ("line", "id", "text"),
    [
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', None, "batches"),
        (b'"ping"', None, "object"),
        (b'{"id":7,"method":"ping"}', 7, "jsonrpc"),
        (b'{"jsonrpc":"1.0","id":"x","method":"ping"}', "x", "jsonrpc"),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', None, "id"),
        (b'{"jsonrpc":"2.0","id":%d,"method":"ping"}' % (1 << 70), None, "64 bits"),
        (b'{"jsonrpc":"2.0","id":"%s","method":"ping"}' % (b"x" * 300), None, "256"),
    ],
)
async def test_a_line_that_is_no_call_is_refused_and_says_what_a_call_is(
    tmp_path, line, id, text
) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.send(line + b"\n")
        error = (await client.reply(id))["error"]
        assert error["code"] == wire.INVALID
        assert text in error["message"]
        await client.call("ping")


async def test_a_call_without_an_id_is_carried_out_and_not_answered(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.send({"jsonrpc": "2.0", "method": "undrain"})
        await client.send({"jsonrpc": "2.0", "method": "nonsense"})
        await client.call("ping")
        assert house.asks.calls == [("undrain",)]


async def test_an_unknown_method_is_told_the_nearest_ones(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        error = await client.error("sesion.close", id=1)
        assert error.code == wire.NO_METHOD
        assert "did you mean session.close" in error.message
        error = await client.error("xyzzy" * 100)
        assert "there are ping, status" in error.message
        assert len(error.message) < 500


@pytest.mark.parametrize(
    ("method", "params", "text"),
    [
        ("sessions", {"limt": 3}, "sessions: no parameter 'limt'; did you mean limit?"),
        ("ping", {"zzz": 3}, "ping: no parameter 'zzz'; it has none"),
        ("sessions", {"limit": "3"}, "sessions: limit: expected a whole number, got '3'"),
        ("sessions", {"limit": 0}, "sessions: limit: expected 1 to 200, got 0"),
        ("sessions", {"phase": "x"}, "decode, idle, paused, prefill, queued or null, got 'x'"),
        ("session.close", {}, "session.close: id: expected a whole number, but it is missing"),
        ("session.close", {"id": 1, "force": 1}, "force: expected true or false, got 1"),
        ("drain", {"deadline_s": -1}, "drain: deadline_s: expected 0 to 86400, got -1"),
        ("drain", {"deadline_s": "x"}, "deadline_s: expected a number or null, got 'x'"),
        ("subscribe", {"topics": ["x"]}, "topics: expected a list, each one of log, sessions"),
        ("subscribe", {"topics": []}, "topics: expected at least one"),
        ("subscribe", {"topics": ["log"], "hz": 21}, "hz: expected 0.2 to 20, got 21"),
        ("log.level", {"level": "info", "ttl_s": 0}, "ttl_s: expected 1 to 604800, got 0"),
        ("reload", {"file": "a.toml"}, "file: expected an absolute path"),
        ("config.check", {"file": "/a\0b"}, "file: expected an absolute path"),
    ],
)
async def test_a_wrong_parameter_is_named_with_what_was_expected(
    tmp_path, method, params, text
) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        error = await client.error(method, **params)
        assert error.code == wire.BAD_PARAMS
        assert text in error.message
        assert house.asks.calls == []


async def test_parameters_by_position_are_refused(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.send({"jsonrpc": "2.0", "id": 1, "method": "session.close", "params": [1]})
        error = (await client.reply(1))["error"]
        assert error["code"] == wire.BAD_PARAMS
        assert "by name" in error["message"]


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (Declined("busy", wire.BUSY), wire.BUSY),
        (ConfigError("bad"), wire.CONFIG_INVALID),
        (ConfigError("/\udcff.toml: bad", [("/\udcff", "a", "bad")]), wire.CONFIG_INVALID),
        (Refused("later", status=503, code="draining", retry_after_s=1), wire.BUSY),
        (RequestError("bad"), wire.BAD_PARAMS),
        (Ds4Error("broken"), wire.INTERNAL),
        (FileNotFoundError(2, "No such file", "/x"), wire.IO),
        (TimeoutError(), wire.DEADLINE),
        (ZeroDivisionError("oops"), wire.INTERNAL),
        (ExceptionGroup("tasks", [Declined("inner", wire.NOT_FOUND)]), wire.NOT_FOUND),
    ],
)
async def test_whatever_a_call_raises_is_an_error_and_the_connection_goes_on(
    tmp_path, raised, code
) -> None:
    async with control_house(tmp_path, FakeAsks(errors={"undrain": raised})) as house:
        async with house.client() as client:
            error = await client.error("undrain")
            assert error.code == code
            assert error.message
            await client.call("ping")


async def test_the_problems_of_a_configuration_come_one_by_one(tmp_path) -> None:
    wrong = ConfigError("two lines", [("ds4d.toml:3", "lanes.max", "too large")])
    async with control_house(tmp_path, FakeAsks(errors={"reload": wrong})) as house:
        async with house.client() as client:
            error = await client.error("reload")
            assert error.code == wire.CONFIG_INVALID
            (problem,) = error.data
            assert problem == {"where": "ds4d.toml:3", "key": "lanes.max", "message": "too large"}


async def test_a_result_that_does_not_fit_a_line_is_an_error_and_not_cut(tmp_path) -> None:
    async with control_house(tmp_path, FakeAsks(toml="x" * wire.LINE_MAX)) as house:
        async with house.client() as client:
            error = await client.error("config.show")
            assert error.code == wire.INTERNAL
            assert str(wire.LINE_MAX) in error.message
            house.asks.toml = "x" * (wire.LINE_MAX - 500)
            assert len((await client.call("config.show"))["toml"]) == wire.LINE_MAX - 500


async def test_a_result_that_cannot_be_encoded_is_an_error(tmp_path) -> None:
    async with control_house(tmp_path, FakeAsks(toml="\udcff")) as house, house.client() as client:
        assert (await client.error("config.show")).code == wire.INTERNAL
        await client.call("ping")


async def test_a_line_without_end_is_refused_and_ends_the_connection(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as client:
            await client.send(b"x" * wire.LINE_MAX)
            error = (await client.reply(None))["error"]
            assert str(wire.LINE_MAX) in error["message"]
            assert await client.ends()
        async with house.client() as other:
            await other.call("ping")


async def test_a_line_may_be_as_long_as_is_said(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        call = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        line = json.dumps(call).encode()
        await client.send(line + b" " * (wire.LINE_MAX - len(line) - 1) + b"\n")
        assert "result" in await client.reply(1)


async def test_half_a_line_is_not_waited_for_for_ever(tmp_path) -> None:
    async with control_house(tmp_path, half_line_s=0.1) as house, house.client() as client:
        await anyio.sleep(0.2)  # a silent connection is fine
        await client.call("ping")
        await client.send(b'{"jsonrpc":')
        error = (await client.reply(None))["error"]
        assert "not ended within 0.1 s" in error["message"]
        assert await client.ends()


async def test_a_line_whose_rest_comes_in_time_is_one_line(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        for part in (b'{"jsonrpc":"2.0","id"', b':1,"method":', b'"ping"}', b"\n"):
            await client.send(part)
            await anyio.sleep(0.01)
        assert "result" in await client.reply(1)


async def test_a_last_line_without_its_end_does_not_act(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.send(b'{"jsonrpc":"2.0","id":1,"method":"undrain"}')
        await client.stream.send_eof()
        assert "LF" in (await client.reply(None))["error"]["message"]
        assert await client.ends()
        assert house.asks.calls == []


async def test_who_has_said_all_is_still_answered(tmp_path) -> None:
    """`echo '{…}' | socat - UNIX-CONNECT:control.sock`."""
    async with control_house(tmp_path) as house, house.client() as client:
        op = (await client.call("drain"))["op"]
        waiting = await client.ask("op.wait", op=op)
        await client.stream.send_eof()
        await anyio.sleep(0.05)
        house.asks.drained.set()
        assert (await client.result(waiting))["ended"]
        assert await client.ends()


async def test_two_clients_do_not_hear_each_other(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as one, house.client() as two:
            a, b = await one.ask("ping"), await two.ask("status")
            assert "state" in await two.result(b)
            assert "at" in await one.result(a)


async def test_many_calls_at_once_are_answered_in_order(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        lines = [
            json.dumps({"jsonrpc": "2.0", "id": i, "method": "ping"}).encode() for i in range(3000)
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.send, b"\n".join(lines) + b"\n")
            for i in range(3000):
                await client.reply(i)


async def test_a_client_that_never_reads_is_not_read_from_and_then_let_go(tmp_path) -> None:
    async with control_house(tmp_path, stall_s=0.3) as house:
        async with house.client() as client, house.client() as other:
            line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "status"}).encode() + b"\n"
            with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(10):
                while True:
                    await client.send(line * 100)
            n = house.asks.n_status
            assert n < 5000
            await other.call("ping")
            assert house.asks.n_status == n


async def test_calls_under_way_are_bounded(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        op = (await client.call("drain"))["op"]
        for _ in range(8):
            await client.ask("op.wait", op=op)
        assert (await client.error("op.wait", op=op)).code == wire.BUSY
        await client.call("ping")


async def test_texts_of_metrics_are_made_one_at_a_time(tmp_path) -> None:
    """Each takes a worker thread, of which there are few for all."""

    class Asks(FakeAsks):
        n, most = 0, 0

        async def exposition(self) -> bytes:
            self.n += 1
            self.most = max(self.n, self.most)
            await anyio.sleep(0.001)
            self.n -= 1
            return b""

    asks = Asks()
    async with control_house(tmp_path, asks) as house:
        async with house.client() as one, house.client() as two:
            ids = [(client, await client.ask("metrics")) for client in (one, two) * 8]
            for client, id in ids:
                assert await client.result(id) == {"text": ""}
    assert asks.most == 1


# Roles


async def test_a_monitor_may_look_and_not_touch(tmp_path) -> None:
    async with control_house(tmp_path, service_uids=NOBODY) as house:
        async with house.client("monitor") as client:
            allowed = {"ping", "status", "sessions", "metrics", "subscribe", "unsubscribe"}
            for method in TABLE.keys() - allowed:
                error = await client.error(method)
                assert error.code == wire.DENIED
                assert f"{method} needs the role admin" in error.message
                assert f"use {house.paths.runtime / 'control.sock'}" in error.message
            for method in ("ping", "status", "metrics"):
                await client.call(method)
            assert house.asks.calls == []


async def test_a_monitor_sees_no_ids_but_always_the_same_instead(tmp_path) -> None:
    async with control_house(tmp_path, service_uids=NOBODY) as house:
        async with house.client() as admin, house.client("monitor") as monitor:
            plain = (await admin.call("sessions"))["sessions"]
            hidden = (await monitor.call("sessions"))["sessions"]
            again = (await monitor.call("sessions"))["sessions"]
            assert hidden == again
            for a, b in zip(plain, hidden, strict=True):
                assert a["request"] != b["request"]
                assert (a["id"] is None) == (b["id"] is None)
                assert a["id"] is None or a["id"] != b["id"]
                assert a | {"id": 0, "request": ""} == b | {"id": 0, "request": ""}
            assert len({one["request"] for one in hidden}) == len(hidden)


async def test_only_the_service_user_reloads_another_file(tmp_path) -> None:
    async with control_house(tmp_path, service_uids=NOBODY) as house, house.client() as client:
        house.asks.reloads.set()
        await client.call("reload")
        error = await client.error("reload", file="/etc/other.toml")
        assert error.code == wire.DENIED
        assert "role service" in error.message
    async with control_house(tmp_path) as house, house.client("monitor") as client:
        house.asks.reloads.set()
        await client.call("reload", file="/etc/other.toml")
        assert ("reload", False, False, "/etc/other.toml") in house.asks.calls


async def test_only_the_service_user_has_another_file_checked(tmp_path) -> None:
    """What is wrong in it is told with a piece of it, and the file may be one of secrets."""
    async with control_house(tmp_path, service_uids=NOBODY) as house, house.client() as client:
        await client.call("config.check")
        error = await client.error("config.check", file="/etc/shadow")
        assert error.code == wire.DENIED
        assert "config.check with a file needs the role service" in error.message
        assert house.asks.calls == [("check_config", None)]
    async with control_house(tmp_path) as house, house.client("monitor") as client:
        await client.call("config.check", file="/etc/other.toml")


async def test_what_the_log_says_is_not_for_monitors(tmp_path) -> None:
    async with control_house(tmp_path, service_uids=NOBODY) as house:
        async with house.client("monitor") as client:
            error = await client.error("subscribe", topics=["status", "log"])
            assert error.code == wire.DENIED
            assert "the topic log needs the role admin" in error.message


async def test_a_socket_for_a_group_names_it_to_those_outside(tmp_path) -> None:
    config = replace(settings(tmp_path), control=Control(socket_mode="0660"))
    async with control_house(tmp_path, service_uids=NOBODY, config=config) as house:
        async with house.client("monitor") as client:
            error = await client.error("undrain")
            # Our own group owns the file here, and so we are members.
            assert "which you may open as a member of group" in error.message


async def test_calls_that_change_something_are_logged_whatever_comes_of_them(
    tmp_path, caplog
) -> None:
    caplog.set_level(logging.INFO, "ds4d.control")
    asks = FakeAsks(errors={"cancel": Declined("no such request", wire.NOT_FOUND)})
    async with control_house(tmp_path, asks, service_uids=NOBODY) as house:
        async with house.client() as client, house.client("monitor") as monitor:
            await client.call("session.close", id=7, force=True)
            await client.error("request.cancel", request="a b")
            await client.error("lanes.set")
            op = (await client.call("drain"))["op"]
            await monitor.error("shutdown")
            for quiet in ("ping", "status", "config.show"):
                await client.call(quiet)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("control.call")]
    who = f"uid={os.getuid()} pid={os.getpid()}"
    assert lines[0] == (
        f'control.call {who} role=admin method=session.close arguments="id=7 force=True"'
    )
    assert 'arguments="request=a b" error=3 reason="no such request"' in lines[1]
    assert "method=lanes.set error=-32602" in lines[2]
    assert lines[3].endswith(f"method=drain op={op}")
    assert "role=monitor method=shutdown error=4" in lines[4]
    assert len(lines) == 5


# Limits


async def test_one_user_has_a_bounded_number_of_connections(tmp_path) -> None:
    async with control_house(tmp_path) as house, anyio.create_task_group() as tasks:
        hold = anyio.Event()

        async def connected(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with house.client():
                task_status.started()
                await hold.wait()

        for _ in range(8):
            await tasks.start(connected)
        async with house.raw("monitor") as ninth:
            error = (await ninth.reply(None))["error"]
            assert error["code"] == wire.BUSY
            assert f"user {os.getuid()} has 8 connections" in error["message"]
            assert await ninth.ends()
        hold.set()
        await anyio.sleep(0.05)
        async with house.client() as client:
            await client.call("ping")


async def test_monitors_leave_room_for_those_who_may_act(tmp_path) -> None:
    async with control_house(tmp_path, service_uids=NOBODY, connections=3, monitors=2) as house:
        async with house.client("monitor"), house.client("monitor"):
            async with house.raw("monitor") as third:
                assert "2 may be" in (await third.reply(None))["error"]["message"]
            async with house.client() as admin:
                await admin.call("ping")
                async with house.raw() as fourth:
                    assert "3 may be" in (await fourth.reply(None))["error"]["message"]


async def test_whoever_is_refused_again_and_again_does_not_fill_the_log(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "ds4d.control")
    limits = {"monitors": 1, "refusals_logged": 3, "refusals_each_s": 3600.0}
    async with control_house(tmp_path, service_uids=NOBODY, **limits) as house:
        async with house.client("monitor") as monitor:
            for _ in range(10):
                async with house.raw("monitor") as refused:
                    await refused.reply(None)
                await monitor.error("shutdown")
    lines = [r.getMessage().split()[0] for r in caplog.records]
    refusals = [line for line in lines if line in ("control.refused", "control.call")]
    assert refusals == ["control.refused", "control.call", "control.refused"]


async def test_a_later_refusal_tells_how_many_were_left_out(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "ds4d.control")
    limits = {"refusals_logged": 1, "refusals_each_s": 0.05}
    async with control_house(tmp_path, service_uids=NOBODY, **limits) as house:
        async with house.client("monitor") as monitor:
            with anyio.fail_after(20):
                while " left_out=" not in caplog.text:
                    await monitor.error("shutdown")
    assert "method=shutdown error=4 " in caplog.records[-1].getMessage()


# Operations


async def test_an_operation_tells_its_starter_and_those_who_wait(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as starter, house.client() as other:
            op = await starter.call("drain")
            assert op == {"op": "drain-1", "kind": "drain"}
            assert (await starter.note("op.progress"))["text"] == "2 running"
            waiting = await other.ask("op.wait", op="drain-1")
            assert (await other.note("op.progress"))["text"] == "2 running"
            house.asks.drained.set()
            ended = await starter.note("op.progress")
            assert ended["ended"]
            assert ended["result"] == {"text": "drained: none was cut"}
            assert await other.result(waiting) == ended
            assert await other.note("op.progress") == ended


async def test_waiting_blocks_no_other_call(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        op = (await client.call("drain"))["op"]
        waiting = await client.ask("op.wait", op=op)
        await client.call("ping")
        await client.call("status")
        house.asks.drained.set()
        assert (await client.result(waiting))["ended"]


async def test_who_asks_too_late_still_learns_how_it_went(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        house.asks.drained.set()
        first = (await client.call("drain"))["op"]
        ended = await client.call("op.wait", op=first)
        assert await client.call("op.wait", op=first) == ended
        assert (await client.error("op.cancel", op=first)).code == wire.WRONG_STATE
        for _ in range(32):
            await client.call("op.wait", op=(await client.call("drain"))["op"])
        error = await client.error("op.wait", op=first)
        assert error.code == wire.NOT_FOUND
        assert "the last 32" in error.message


async def test_an_operation_goes_on_when_its_starter_leaves(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as starter:
            op = (await starter.call("drain"))["op"]
        async with house.client() as other:
            waiting = await other.ask("op.wait", op=op)
            await anyio.sleep(0.02)
            house.asks.drained.set()
            assert (await other.result(waiting))["error"] is None


async def test_cancelling_a_drain_takes_it_back(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        op = (await client.call("drain"))["op"]
        waiting = await client.ask("op.wait", op=op)
        await client.send({"jsonrpc": "2.0", "method": "op.cancel", "params": {"op": op}})
        ended = await client.result(waiting)
        assert ended["error"]["code"] == wire.CANCELLED
        assert ("drain taken back",) in house.asks.calls


async def test_an_operation_that_fails_says_why(tmp_path) -> None:
    failing = FakeAsks(errors={"drain": Declined("nothing to drain", wire.WRONG_STATE)})
    async with control_house(tmp_path, failing) as house, house.client() as client:
        ended = await client.call("op.wait", op=(await client.call("drain"))["op"])
        assert ended["error"]["code"] == wire.WRONG_STATE
        assert ended["text"] == "nothing to drain"


async def test_a_result_that_cannot_be_sent_ends_only_those_who_wait_for_it(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as starter, house.client() as other:
            house.asks.how = "\udcff"
            await starter.call("drain")
            house.asks.drained.set()
            assert (await starter.reply(None))["error"]["code"] == wire.INTERNAL
            assert await starter.ends()
            await other.call("ping")


async def test_operations_are_bounded(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        for _ in range(16):
            await client.call("drain")
        error = await client.error("drain")
        assert error.code == wire.BUSY
        assert "drain-16" in error.message


async def test_a_reload_goes_on_when_its_caller_leaves(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as client:
            await client.ask("reload")
            await until(lambda: house.asks.calls)
        await anyio.sleep(0.02)
        house.asks.reloads.set()
        await until(lambda: ("reloaded",) in house.asks.calls)


# The end


async def test_a_second_shutdown_does_not_cut_what_the_first_lets_end(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.call("shutdown")
        house.asks.state_ = "stopping"
        assert "already" in (await client.call("shutdown"))["text"]
        await client.call("shutdown", mode="fast")
        assert house.asks.calls == [("shutdown", False), ("shutdown", True)]


@pytest.mark.parametrize("state", ["loading", "failed", "stopping"])
async def test_a_drain_that_cannot_be_is_refused_before_it_begins(tmp_path, state) -> None:
    """Who does not wait for its end would not hear of it."""
    async with control_house(tmp_path, FakeAsks(state_=state)) as house, house.client() as client:
        error = await client.error("drain")
        assert (error.code, error.message) == (
            wire.WRONG_STATE,
            f"the daemon is {state}: nothing to drain",
        )


async def test_a_request_is_cancelled_by_the_beginning_of_its_id(tmp_path) -> None:
    asks = FakeAsks(n_sessions=4, label="request number {}")  # the last one is of an idle session
    async with control_house(tmp_path, asks) as house, house.client() as client:
        error = await client.error("request.cancel", request="request numb")
        assert error.code == wire.BAD_PARAMS
        assert error.message.startswith("3 requests begin with 'request numb': ")
        asks.n_sessions = 1
        said = await client.call("request.cancel", request="request numb")
        assert said["text"] == "request 'request number 0' is cancelled"
        for typed in ("request n", "request number 0", "request number 00"):
            await client.call("request.cancel", request=typed)
    names = [name for _, name in asks.calls]
    assert names == ["request number 0", "request n", "request number 0", "request number 00"]


async def test_a_shutdown_is_answered_before_the_daemon_goes(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        house.asks.on_shutdown = house.scope.cancel
        assert "goes down" in (await client.call("shutdown"))["text"]
        assert await client.ends()


async def test_the_end_of_a_drain_that_stops_the_daemon_is_told_to_all(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as starter, house.client() as other:
            house.asks.on_shutdown = house.scope.cancel
            op = (await starter.call("drain", stop=True))["op"]
            waiting = await other.ask("op.wait", op=op)
            await other.note("op.progress")
            house.asks.drained.set()
            notes = [await starter.note("op.progress")]
            while not notes[-1]["ended"]:
                notes.append(await starter.note("op.progress"))
            assert notes[-1]["result"] == {"text": "drained: none was cut"}
            assert await other.result(waiting) == notes[-1]
            assert await starter.ends()


async def test_operations_that_the_end_interrupts_say_so(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        op = (await client.call("drain"))["op"]
        await client.ask("op.wait", op=op)
        assert not (await client.note("op.progress"))["ended"]
        house.scope.cancel()
        found: dict[str, Any] = {}
        while not found.get("ended"):
            found = await client.note("op.progress")
        assert found["error"]["code"] == wire.CANCELLED
        assert "going down" in found["text"]


async def test_a_client_that_never_reads_does_not_delay_the_end(tmp_path) -> None:
    async with control_house(tmp_path, flush_s=0.1) as house, house.client() as client:
        line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "status"}).encode() + b"\n"
        with anyio.move_on_after(0.3):
            while True:
                await client.send(line * 100)
        house.scope.cancel()
        with anyio.fail_after(5):
            while (house.paths.runtime / "control.sock").exists():
                await anyio.sleep(0.01)
