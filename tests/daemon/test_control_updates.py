"""Subscriptions: what they send, what they cost, and what becomes of slow readers."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from ds4d import events, metrics, wire
from ds4d.control.limits import Limits
from ds4d.control.updates import QUEUE_BYTES, Masks, Updates
from ds4d.events import emit
from tests.daemon.control_house import NOBODY, FakeAsks, control_house, until

if TYPE_CHECKING:
    from tests.daemon.control_house import Client

log = logging.getLogger("ds4d.test")


@pytest.fixture
def kept_lines() -> None:
    """The log as the daemon has it: its lines can be read back."""
    events.configure("debug", io.StringIO())


def dropped(role: str) -> float:
    return metrics.REGISTRY.get_sample_value("ds4d_control_dropped_total", {"role": role}) or 0.0


async def lines_until(client: Client, text: str) -> list[dict[str, Any]]:
    """Lines of the log, up to the update that has `text`; what other tests logged comes too."""
    lines: list[dict[str, Any]] = []
    while not any(text in line["text"] for line in lines):
        lines += (await client.note("update"))["log"]
    return lines


async def test_an_update_is_a_whole_snapshot_and_the_first_comes_at_once(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        sub = (await client.call("subscribe", topics=["status", "sessions"], hz=0.2))["sub"]
        update = await client.note("update")
        assert (update["sub"], update["seq"]) == (sub, 1)
        typed = msgspec.convert(update, wire.Update)
        assert typed.status is not None
        assert typed.status.lanes is not None
        assert typed.sessions is not None
        assert len(typed.sessions) == typed.n_sessions == 20
        assert typed.log is None
        assert typed.dropped == 0


async def test_updates_go_on_at_their_rate_with_numbers_without_a_gap(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.call("subscribe", topics=["status"], hz=20)
        updates = [await client.note("update") for _ in range(6)]
        assert [one["seq"] for one in updates] == [1, 2, 3, 4, 5, 6]
        assert "sessions" not in updates[0]


async def test_sessions_beyond_what_a_snapshot_holds_are_counted(tmp_path) -> None:
    async with control_house(tmp_path, FakeAsks(n_sessions=5000)) as house:
        async with house.client() as client:
            await client.call("subscribe", topics=["sessions"])
            update = await client.note("update")
            assert len(update["sessions"]) == 200
            assert update["n_sessions"] == 5000


async def test_a_snapshot_is_made_once_for_all_who_want_it_at_that_moment(tmp_path) -> None:
    async with control_house(tmp_path) as house, anyio.create_task_group() as tasks:
        seen: list[list[float]] = []

        async def watch() -> None:
            async with house.client() as client:
                await client.call("subscribe", topics=["status", "sessions"], hz=20)
                seen.append([(await client.note("update"))["at"] for _ in range(12)])

        for _ in range(6):
            tasks.start_soon(watch)
        await until(lambda: len(seen) == 6)
        assert len({at for one in seen for at in one}) < 6 * 12 / 2
        assert house.asks.n_status < 6 * 12 / 2


async def test_nothing_is_asked_while_nobody_has_subscribed(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await anyio.sleep(0.1)
        assert house.asks.n_status == 0
        sub = (await client.call("subscribe", topics=["status"], hz=20))["sub"]
        await client.note("update")
        assert "ended" in (await client.call("unsubscribe", sub=sub))["text"]
        n = house.asks.n_status
        await anyio.sleep(0.15)
        assert house.asks.n_status == n
        error = await client.error("unsubscribe", sub=sub)
        assert error.code == wire.NOT_FOUND
        assert "it has none" in error.message


async def test_a_fast_subscription_does_not_wait_for_a_slow_one(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as slow, house.client() as fast:
            await slow.call("subscribe", topics=["status"], hz=0.2)
            await slow.note("update")
            await fast.call("subscribe", topics=["status"], hz=20)
            for seq in range(1, 5):
                assert (await fast.note("update"))["seq"] == seq
            assert house.asks.n_status < 20


async def test_nobody_ends_the_subscription_of_another(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as one, house.client() as two:
            sub = (await one.call("subscribe", topics=["status"], hz=20))["sub"]
            assert (await two.error("unsubscribe", sub=sub)).code == wire.NOT_FOUND
            await one.note("update")


async def test_one_connection_may_have_several_subscriptions_but_not_many(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        subs = [
            (await client.call("subscribe", topics=["status"], hz=0.2))["sub"] for _ in range(4)
        ]
        assert {(await client.note("update"))["sub"] for _ in range(4)} == set(subs)
        assert (await client.error("subscribe", topics=["status"])).code == wire.BUSY


async def test_monitors_get_snapshots_without_ids(tmp_path) -> None:
    async with control_house(tmp_path, service_uids=NOBODY) as house:
        async with house.client() as admin, house.client("monitor") as monitor:
            for client in (admin, monitor):
                await client.call("subscribe", topics=["sessions"], hz=20)
            plain = (await admin.note("update"))["sessions"][0]
            hidden = (await monitor.note("update"))["sessions"][0]
            asked = (await monitor.call("sessions"))["sessions"][0]
            assert plain["request"] == "chatcmpl-000000000000000000000000"
            assert hidden == asked
            assert hidden["request"] not in ("", plain["request"])


async def test_log_lines_come_once_each_and_in_order(tmp_path, kept_lines) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        emit(log, "test.before", n=1)
        await client.call("subscribe", topics=["log"], hz=20)
        lines = await lines_until(client, "test.before")
        for n in range(30):
            emit(log, "test.line", n=n, level=logging.WARNING)
        lines += await lines_until(client, "n=29")
        numbers = [line["seq"] for line in lines]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert lines[-1]["level"] == "warning"
        assert lines[-1]["text"].startswith("test.line n=29")


async def test_a_log_of_which_there_is_no_news_sends_nothing(tmp_path, kept_lines) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        emit(log, "test.once")
        await client.call("subscribe", topics=["log"], hz=20)
        await lines_until(client, "test.once")
        await anyio.sleep(0.2)
        emit(log, "test.again")
        update = await client.note("update")
        assert [line["text"].split()[0] for line in update["log"]] == ["test.again"]


async def test_many_long_log_lines_come_in_several_updates(tmp_path, kept_lines) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        for n in range(120):
            log.info("test.long %d %s", n, "x" * 1900)
        log.info("test.huge %s", "y" * 200_000)
        await client.call("subscribe", topics=["log", "status"], hz=20)
        updates = []
        while not any("test.huge" in line["text"] for one in updates for line in one["log"]):
            updates.append(await client.note("update"))
        assert len(updates) > 3
        last = next(x for x in updates[-1]["log"] if "test.huge" in x["text"])
        assert last["text"].endswith("…")
        numbers = [line["seq"] for one in updates for line in one["log"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


async def test_a_log_line_that_is_no_unicode_is_sent_escaped(tmp_path, kept_lines) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        logging.getLogger("ds4d").propagate = False  # pytest could not report such a line
        del logging.getLogger("ds4d").handlers[1:]  # pytest's own cannot write such a text down
        log.info("test.bytes %s", "\udcff")
        await client.call("subscribe", topics=["log"], hz=20)
        lines = await lines_until(client, "test.bytes")
        assert lines[-1]["text"] == "test.bytes \\udcff"


async def test_an_update_that_does_not_fit_a_line_is_an_error_and_not_cut(tmp_path) -> None:
    asks = FakeAsks(n_sessions=200, label="x" * 6000)
    async with control_house(tmp_path, asks) as house, house.client() as client:
        await client.call("subscribe", topics=["sessions"])
        error = (await client.reply(None))["error"]
        assert "subscribe to fewer topics" in error["message"]
        assert await client.ends()


async def test_subscriptions_of_one_slow_connection_take_turns(tmp_path) -> None:
    asks = FakeAsks(n_sessions=200)
    async with control_house(tmp_path, asks) as house, house.client() as client:
        subs = [
            (await client.call("subscribe", topics=["sessions"], hz=20))["sub"] for _ in range(2)
        ]
        await anyio.sleep(0.5)  # by now the socket is full
        seen = [(await client.note("update"))["sub"] for _ in range(16)]
        # The first few went out before it was, some of them before the second subscription.
        assert seen[4:] in (subs * 6, subs[::-1] * 6)


async def test_a_slow_reader_loses_the_oldest_and_is_told_how_many(tmp_path) -> None:
    before = dropped("service")
    asks = FakeAsks(n_sessions=200)  # 60 kB an update: the socket is soon full
    async with control_house(tmp_path, asks) as house:
        async with house.client() as slow, house.client() as other:
            await slow.call("subscribe", topics=["status", "sessions"], hz=20)
            await other.call("subscribe", topics=["status"], hz=20)
            with anyio.fail_after(20):
                while dropped("service") < before + 5:
                    await other.note("update")
            updates = [await slow.note("update") for _ in range(30)]
            assert [one["seq"] for one in updates] == list(range(1, 31))
            lost = sum(one["dropped"] for one in updates)
            assert 5 <= lost <= dropped("service") - before
            # It is told where the gap is: the times show it.
            gap = next(i for i, one in enumerate(updates) if one["dropped"])
            seconds = updates[gap]["at"] - updates[gap - 1]["at"]
            assert seconds > 0.9 * updates[gap]["dropped"] / 20


async def test_what_waits_for_a_slow_reader_is_bounded_in_bytes_too(tmp_path) -> None:
    """64 whole snapshots of many sessions, for each of many readers, would be the daemon's end."""

    class Slow:
        role = "service"

        def news(self) -> None:
            pass

    asks = FakeAsks(n_sessions=200)
    updates = Updates(asks, Masks(), Limits())
    subscription = updates.add(Slow(), frozenset({"status", "sessions"}), 20.0)
    for now in range(30):
        updates._push(float(now) / 20)
    n_bytes = 0
    while subscription.waits:
        n_bytes += len(subscription.take())
    assert 0.8 * QUEUE_BYTES < n_bytes < 1.1 * QUEUE_BYTES


async def test_a_reader_that_has_stopped_is_let_go_and_disturbs_nobody(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "ds4d.control")
    asks = FakeAsks(n_sessions=200)
    async with control_house(tmp_path, asks, full_s=0.3) as house:
        async with house.client() as stopped, house.client() as other:
            await stopped.call("subscribe", topics=["status", "sessions"], hz=20)
            await other.call("subscribe", topics=["status"], hz=20)
            seq = 0
            with anyio.fail_after(20):
                while "its queue of updates was full" not in caplog.text:
                    seq += 1
                    assert (await other.note("update"))["seq"] == seq
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                while True:
                    await stopped.read()
            assert (await other.note("update"))["seq"] == seq + 1


async def test_a_subscriber_that_dies_disturbs_nobody(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as other:
        await other.call("subscribe", topics=["status"], hz=20)
        for _ in range(5):
            async with house.client() as dying:
                await dying.call("subscribe", topics=["status", "sessions"], hz=20)
                await dying.note("update")
        for seq in range(1, 6):
            assert (await other.note("update"))["seq"] == seq


async def test_a_snapshot_that_cannot_be_made_ends_only_those_who_want_it(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        async with house.client() as broken, house.client() as other:
            await other.call("subscribe", topics=["sessions"], hz=20)
            await broken.call("subscribe", topics=["status"], hz=20)
            await broken.note("update")
            house.asks.errors["status"] = ZeroDivisionError("oops")
            found = await broken.read()
            while "error" not in found:
                found = await broken.read()
            assert found["error"]["code"] == wire.INTERNAL
            assert await broken.ends()
            await other.note("update")
            await other.note("update")


async def test_who_listens_need_not_say_anything_more(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.call("subscribe", topics=["status"], hz=20)
        await client.stream.send_eof()
        for _ in range(4):
            await client.note("update")
