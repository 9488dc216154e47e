"""What an operator asks of a running daemon, through the control socket: drain, reload, sessions.

The whole daemon with a fake engine; the socket's own manners are in `test_control`.
"""

from __future__ import annotations

import os
import signal
import stat
import tomllib
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from ds4d import config, wire
from ds4d.api.server import Server
from ds4d.config import KEYS
from ds4d.notify import Notifier
from ds4d.sched import host
from ds4d.sched.runner import Runner
from ds4d.service import Service
from tests.daemon.house import Refusal, Waking, daemon_with, engine, free_port, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# Drain


async def test_a_drain_cuts_none_of_eight_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        answers: list[list[Any]] = []

        async def ask() -> None:
            answers.append(await house.stream(max_tokens=60))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
            while (await operator.ask("sessions"))["n_sessions"] < 8:  # all have come: some wait
                await anyio.sleep(0.002)
            op = await operator.ask("drain", deadline_s=30)
            status, headers, body = await house.chat()
            assert (status, body["error"]["code"]) == (503, "draining")
            assert int(headers["Retry-After"]) >= 1
            seen = await operator.ask("status")
            assert seen["state"] == "draining"
            assert seen["drain"]["n_running"] + seen["drain"]["n_queued"] >= 1
            assert "undrain" in seen["reasons"][0]["remedy"]
            end = await operator.ask("op.wait", op=op["op"])
        assert end["ended"] and end["error"] is None
        assert "none was cut" in end["result"]["text"]
        assert len(answers) == 8
        for events in answers:
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert (await operator.ask("status"))["state"] == "drained"
        assert (await house.chat())[0] == 503
        await operator.ask("undrain")
        assert (await house.chat())[0] == 200


async def test_a_drain_that_is_taken_back_lets_everything_go_on(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await house.chat(max_tokens=100))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: bool(waking.engine.cohorts))
            op = await operator.ask("drain", deadline_s=30)
            await operator.ask("undrain")
            end = await operator.ask("op.wait", op=op["op"])
            assert end["error"]["code"] == wire.WRONG_STATE
            assert "taken back" in end["error"]["message"]
            assert (await house.chat())[0] == 200
        assert answers == [200]


async def test_the_deadline_of_a_drain_ends_what_still_runs(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        statuses: list[int] = []

        async def ask() -> None:
            statuses.append((await house.chat(max_tokens=8000))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: bool(waking.engine.cohorts))
            end = await operator.carry_out("drain", deadline_s=0.05)
        assert end["error"]["code"] == wire.DEADLINE
        assert "was ended" in end["error"]["message"]
        assert statuses == [503]


async def test_drain_and_stop_ends_the_daemon(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        await operator.ask("drain", stop=True)
        await house.ends()
    assert waking.engine.closed


@pytest.mark.parametrize("mode", ["graceful", "fast"])
async def test_shutdown_over_the_socket_is_what_a_signal_is(tmp_path: Path, mode: str) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        await operator.ask("shutdown", mode=mode)
        await house.ends()
    assert waking.engine.closed


async def test_the_control_socket_answers_while_the_engine_wakes(tmp_path: Path) -> None:
    waking = Waking(engine())
    waking.gate.clear()
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        while (status := await operator.ask("status"))["loading"]["what"] != "kernels":
            await anyio.sleep(0.002)
        assert status["state"] == "loading"
        assert status["loading"] == {"what": "kernels", "fraction": 0.4} | {
            "since_s": status["loading"]["since_s"]
        }
        for method in ("drain", "reload"):
            with pytest.raises(Refusal, match="the daemon is loading") as refusal:
                await operator.ask(method)
            assert refusal.value.code == wire.WRONG_STATE
        waking.gate.set()
        await house.until_ready()
        assert (await operator.ask("status"))["state"] in ("ready", "degraded")


async def test_sockets_of_a_user_are_for_that_user_alone(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        for name in ("control", "monitor"):
            mode = stat.S_IMODE((house.runtime / f"{name}.sock").stat().st_mode)
            assert mode == 0o600
    assert not list(house.runtime.glob("*.sock"))


# Reload


LIVE: list[tuple[str, str, Any]] = []  # filled by `takes_effect`


def takes_effect(text: str) -> Callable[[Any], Any]:
    """A test of one live key: `text` is what the file says after the reload."""

    def note(check: Any) -> Any:
        LIVE.append((check.__name__, text, check))
        return check

    return note


@takes_effect("[api]\naliases = ['other']\nlist_aliases = true")
async def aliases(house: Any, _: Any) -> None:
    listed = [m["id"] for m in (await house.get("/v1/models"))[1]["data"]]
    assert "other" in listed


@takes_effect("[model]\nname = 'renamed'")
async def name(house: Any, _: Any) -> None:
    assert (await house.get("/v1/models"))[1]["data"][0]["id"] == "renamed"


@takes_effect("[api]\nstrict_model = true")
async def strict_model(house: Any, _: Any) -> None:
    assert (await house.chat(model="nobody"))[0] == 404


@takes_effect("[api]\ndefault_max_tokens = 7")
async def default_max_tokens(house: Any, waking: Any) -> None:
    waking.engine.delay_step_s = 0.0
    events = await house.stream(stream_options={"include_usage": True})
    assert events[-1]["usage"]["completion_tokens"] == 7


@takes_effect("[api]\nmin_headroom = 1")
async def min_headroom(house: Any, _: Any) -> None:
    """A prompt that leaves about 300 tokens, where 512 are asked for."""
    text = [{"role": "user", "content": "x" * 7880}]
    assert (await house.chat(messages=text, max_tokens=600))[0] == 200


@takes_effect("[api]\nmax_body_mib = 1")
async def max_body_mib(house: Any, _: Any) -> None:
    body = BytesIO(b'{"messages": "' + b"x" * (1 << 20))
    async with house.client.post(house.url + "/v1/chat/completions", data=body) as response:
        assert response.status == 413


@takes_effect("[api]\ncors_origins = ['https://page.example']")
async def cors_origins(house: Any, _: Any) -> None:
    headers = {"Origin": "https://page.example"}
    async with house.client.get(house.url + "/v1/models", headers=headers) as response:
        assert response.headers.get("Access-Control-Allow-Origin") == "https://page.example"


@takes_effect("[api]\nallowed_hosts = ['box.example']")
async def allowed_hosts(house: Any, _: Any) -> None:
    headers = {"Host": "box.example"}
    async with house.client.get(house.url + "/v1/models", headers=headers) as response:
        assert response.status == 200


@takes_effect("[api]\ncodex_catalog = true")
async def codex_catalog(house: Any, _: Any) -> None:
    assert (await house.get("/v1/models"))[1].get("models") == []


@takes_effect("[api]\nallow_ignore_eos = false")
async def allow_ignore_eos(house: Any, _: Any) -> None:
    assert (await house.chat(ignore_eos=True))[0] == 400


@takes_effect("[api]\nkeepalive_s = 0.05")
async def keepalive_s(house: Any, waking: Any) -> None:
    waking.engine.delay_step_s = 0.3
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2}
    url = house.url + "/v1/chat/completions"
    async with house.client.post(url, json=body) as response:
        assert b": keepalive" in await response.read()


@takes_effect("[lanes]\nmax = 1")
async def lanes_max(house: Any, waking: Any) -> None:
    waking.engine.cohorts.clear()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(house.chat)
    assert {len(cohort) for cohort in waking.engine.cohorts} == {1}


@takes_effect("[prefill]\nchunk = 128")
async def prefill_chunk(house: Any, waking: Any) -> None:
    waking.engine.calls.clear()
    fresh = f"{waking.engine.n_prefilled}{'y' * 700}"  # nothing that is known already
    await house.chat(messages=[{"role": "user", "content": fresh}], max_tokens=1)
    assert waking.engine.calls.count("prefill") >= 6


@takes_effect("[sched]\nqueue_total = 1")
async def queue_total(house: Any, waking: Any) -> None:
    waking.engine.delay_step_s = 0.01
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await house.chat())[0])

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(ask)
    assert 429 in statuses


async def n_thinking_prompt(house: Any, **more: Any) -> int:
    status, _, body = await house.chat(thinking={"type": "enabled"}, max_tokens=1, **more)
    assert status == 200, body
    return int(body["usage"]["prompt_tokens"])


@takes_effect("[api]\ndefault_effort = 'high'")
async def default_effort(house: Any, _: Any) -> None:
    """Effort high has a text of its own in the prompt."""
    low = await n_thinking_prompt(house, reasoning_effort="low")
    assert await n_thinking_prompt(house) > low


@takes_effect("[api]\nprompt_profile = 'preview'")
async def prompt_profile(house: Any, _: Any) -> None:
    """The preview checkpoint knows no text for effort high."""
    low = await n_thinking_prompt(house, reasoning_effort="low")
    assert await n_thinking_prompt(house, reasoning_effort="high") == low


@takes_effect("[api]\ndefault_min_p = 0.25")
async def default_min_p(house: Any, waking: Any) -> None:
    seen: list[float] = []
    verify = waking.engine.verify
    waking.engine.verify = lambda works: (
        seen.extend(w.sampling.min_p for w in works) or verify(works)
    )
    await house.chat(temperature=1.0, max_tokens=2)
    waking.engine.verify = verify
    assert set(seen) == {0.25}


@takes_effect("[log]\nlevel = 'debug'")
async def log_level(house: Any, _: Any) -> None:
    async with house.operator() as operator:
        found = await operator.ask("log.level", level="debug")
        assert found["previous"] == "debug"


@takes_effect("[runtime]\ndrain_s = 0.05")
async def drain_s(house: Any, waking: Any) -> None:
    waking.engine.delay_step_s = 0.01
    statuses: list[int] = []

    async def ask() -> None:
        statuses.append((await house.chat(max_tokens=8000))[0])

    async with anyio.create_task_group() as tasks, house.operator() as operator:
        tasks.start_soon(ask)
        waking.engine.cohorts.clear()
        await until(lambda: bool(waking.engine.cohorts))
        end = await operator.carry_out("drain")
        assert "0.05 s" in end["error"]["message"]
    assert statuses == [503]


# Keys whose effect takes minutes, or needs a host in trouble: the part that obeys them is asked.
RULES = {
    "api.request_max_s": ("request_max_s", 11),
    "api.queue_deadline_s": ("queue_deadline_s", 12),
    "api.send_stall_s": ("send_stall_s", 13),
    "sched.decode_stall_target_ms": ("stall_target_s", 0.5),
    "sched.prefill_share": ("prefill_share", 0.25),
}
ELSEWHERE = {
    *RULES,
    "api.api_keys_file",  # test_keys_are_read_anew_by_a_reload
    "api.stream_granularity",  # read by the same Chat as its neighbours: test_api_chat
    "runtime.stop_drain_s",
    "runtime.engine_stall_s",
    "memory.psi_some_max",
}


def test_every_live_key_is_shown_to_be_live() -> None:
    shown = {key for _, text, _ in LIVE for key in keys_in(text)}
    assert shown | ELSEWHERE == {name for name, key in KEYS.items() if key.when != "restart"}


def keys_in(text: str) -> set[str]:
    return {
        f"{section}.{key}" for section, keys in tomllib.loads(text).items() for key in keys.keys()
    }


async def test_what_shows_only_in_trouble_reaches_the_part_that_obeys_it(tmp_path: Path) -> None:
    file = tmp_path / "ds4d.toml"
    file.touch()
    environ = {"HOME": str(tmp_path)}
    loaded = await anyio.to_thread.run_sync(lambda: config.read(file=file, environ=environ))
    waking = Waking(engine())
    waking.settings = loaded.config
    runner = Runner(waking.build)
    server = Server(loaded.config.api, runner)
    service = Service(
        loaded,
        runner,
        server,
        waking,
        Notifier(None),
        stop=lambda fast: None,
        connections=dict,
        memory=lambda simulated: replace(host.sample(), psi_some=20.0, swap=0),
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(runner.run)
        tasks.start_soon(service.run)
        service.ready()
        await until(lambda: [r.code for r in service.status().reasons] == ["memory_pressure"])
        rules = {key: value for key, (_, value) in RULES.items()}
        rules["sched.decode_stall_target_ms"] = 500
        more = {"runtime.stop_drain_s": 3, "runtime.engine_stall_s": 7, "memory.psi_some_max": 30}
        file.write_text("\n".join(f"{k} = {v}" for k, v in (rules | more).items()))
        await service.reload(dry_run=False, allow_partial=False, file=None)
        for name, value in RULES.values():
            assert getattr(runner.rules, name) == value
        assert (service.stop_drain_s, runner.engine_stall_s) == (3, 7)
        assert service.status().reasons == []
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("text", "check"), [pytest.param(t, c, id=n) for n, t, c in LIVE])
async def test_a_live_key_takes_effect_without_a_restart(
    tmp_path: Path, text: str, check: Any
) -> None:
    """Each check fails before the reload, so that it cannot pass for another reason."""
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        before = await operator.ask("status")
        if check is not drain_s:  # it would wait for the default of 120 s
            with pytest.raises(AssertionError):
                await check(house, waking)
        waking.engine.delay_step_s = 0.002
        house.configure(text)
        dry = await operator.ask("reload", dry_run=True)
        result = await operator.ask("reload")
        assert result["applied"] == dry["applied"] != []
        assert result["restart_required"] == []
        await check(house, waking)
        after = await operator.ask("status")
        assert after["boot"] == before["boot"]
        assert after["config_hash"] != before["config_hash"]
        assert after["reload"]["ok"]


async def test_a_bad_file_changes_nothing_and_says_where(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        before = await operator.ask("status")
        house.configure("[api]\naliases = ['new']\n[lanes]\nmax = 99\nmux = 1\n")
        with pytest.raises(Refusal) as refusal:
            await operator.ask("reload")
        assert refusal.value.code == wire.CONFIG_INVALID
        assert [p["where"] for p in refusal.value.data] == ["ds4d.toml:4", "ds4d.toml:5"]
        after = await operator.ask("status")
        assert after["config_hash"] == before["config_hash"]
        assert not after["reload"]["ok"]
        assert len((await house.get("/v1/models"))[1]["data"]) == 1
        problems = (await operator.ask("config.check"))["problems"]
        assert [p["key"] for p in problems] == ["lanes.max", "lanes.mux"]


async def test_a_key_file_that_cannot_be_read_leaves_all_as_it_was(tmp_path: Path) -> None:
    """It is found after the values were checked: nothing may have been applied by then."""
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        house.configure("[api]\napi_keys_file = '/nowhere/keys'\nstrict_model = true")
        with pytest.raises(Refusal) as refusal:
            await operator.ask("reload")
        assert "/nowhere/keys" in str(refusal.value)
        assert (await house.chat(model="nobody"))[0] == 200


async def test_keys_are_read_anew_by_a_reload(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    keys.chmod(0o600)
    waking = Waking(engine())
    text = f"[api]\napi_keys_file = '{keys}'\n"
    async with (
        daemon_with(waking, tmp_path, text=text) as house,
        house.operator() as operator,
    ):
        await house.until_ready()

        async def status_with(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with house.client.get(house.url + "/v1/models", headers=headers) as response:
                return int(response.status)

        assert [await status_with(key) for key in ("one", "two")] == [200, 401]
        keys.write_text("two\n")
        await operator.ask("reload")
        assert [await status_with(key) for key in ("one", "two")] == [401, 200]


async def test_what_needs_a_restart_is_named_and_nothing_else_is_applied(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        house.configure("[api]\nstrict_model = true\n[lanes]\nmax = 9\n[memory]\nreserve_mib = 1\n")
        with pytest.raises(Refusal) as refusal:
            await operator.ask("reload")
        assert "lanes.max (4 to 9)" in str(refusal.value)
        assert "memory.reserve_mib (512 to 1)" in str(refusal.value)
        assert (await house.chat(model="nobody"))[0] == 200
        done = await operator.ask("reload", allow_partial=True)
        assert [c["key"] for c in done["applied"]] == ["api.strict_model"]
        waits = [c["key"] for c in done["restart_required"]]
        assert sorted(waits) == ["lanes.max", "memory.reserve_mib"]
        assert (await house.chat(model="nobody"))[0] == 404
        assert "lanes" in (await operator.ask("config.show"))["toml"]


async def test_a_hangup_signal_reloads_without_breaking_a_stream(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        streams: list[list[Any]] = []

        async def ask() -> None:
            streams.append(await house.stream(max_tokens=60))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await until(lambda: bool(waking.engine.cohorts))
            for text in ("[api]\nstrict_model = true", "[api]\nstrict_model = 1"):
                house.configure(text)
                before = (await operator.ask("status"))["reload"]
                os.kill(os.getpid(), signal.SIGHUP)
                with anyio.fail_after(5):
                    while (await operator.ask("status"))["reload"] == before:
                        await anyio.sleep(0.002)
        assert [s[-1]["choices"][0]["finish_reason"] for s in streams] == ["length"] * 3
        status = await operator.ask("status")
        assert not status["reload"]["ok"]
        assert "strict_model" in status["reload"]["text"]
        assert (await house.chat(model="nobody"))[0] == 404  # the good one holds


# What an operator has set by a command, and the settings beside it


async def test_lanes_that_were_set_stay_until_a_reload_changes_their_key(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()

        async def shown() -> tuple[int, str]:
            toml = (await operator.ask("config.show"))["toml"]
            (line,) = (line for line in toml.splitlines() if line.startswith("max = "))
            value, _, source = line.partition("#")
            assert int(value.removeprefix("max = ")) == tomllib.loads(toml)["lanes"]["max"]
            return tomllib.loads(toml)["lanes"]["max"], source.strip()

        async def status() -> tuple[int, str]:
            found = await operator.ask("status")
            return found["lanes"]["n_max"], found["config_hash"]

        assert await shown() == (4, "preset cpu-tiny")
        before = await status()
        assert (await operator.ask("lanes.set", max=2))["n_max"] == 2
        assert await shown() == (2, "ds4ctl lanes set")
        house.configure("[api]\nstrict_model = true")
        await operator.ask("reload")
        n_max, digest = await status()
        assert n_max == 2
        assert digest == (await operator.ask("config.show"))["hash"] != before[1]
        house.configure("[lanes]\nmax = 3")
        await operator.ask("reload")
        assert (await status())[0] == 3
        assert await shown() == (3, "ds4d.toml:2")
        await operator.ask("lanes.set", max=1)
        await operator.ask("lanes.set", max=3)  # as the file has it: nothing is put over it
        assert await shown() == (3, "ds4d.toml:2")


async def test_more_lanes_than_memory_gave_are_wanted_then_not_then_again(tmp_path: Path) -> None:
    """What the start asked for is no reason for a restart, and no reason is left when it goes."""
    waking = Waking(engine(lanes=2))
    waking.next_lane_bytes = 3 << 30
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()

        async def reload(n_lanes: int) -> tuple[str, str, int]:
            house.configure(f"[lanes]\nmax = {n_lanes}")
            await operator.ask("reload")
            status = await operator.ask("status")
            reasons = [r for r in status["reasons"] if r["code"] == "fewer_lanes"]
            text = reasons[0]["text"] if reasons else ""
            return status["state"], text, status["lanes"]["n_max"]

        text = "{} of {} lanes: one more needs 3072 MiB in all and 1024 may be used"
        assert await reload(4) == ("degraded", text.format(2, 4), 2)
        assert await reload(3) == ("degraded", text.format(2, 3), 2)
        assert (await reload(2))[1:] == ("", 2)
        assert (await reload(1))[1:] == ("", 1)
        assert await reload(4) == ("degraded", text.format(2, 4), 2)
        with pytest.raises(Refusal, match=r"lanes\.max \(4 to 5\) needs a restart"):
            await reload(5)


async def test_a_level_for_a_while_ends_by_itself_or_by_a_reload_that_changes_it(
    tmp_path: Path,
) -> None:
    waking = Waking(engine())
    async with (
        daemon_with(waking, tmp_path, text="[log]\nlevel = 'info'") as house,
        house.operator() as operator,
    ):
        await house.until_ready()
        await operator.ask("log.level", level="info")  # what a test's log has is its own affair

        async def level() -> str:
            toml = (await operator.ask("config.show"))["toml"]
            return str(tomllib.loads(toml)["log"]["level"])

        async def previous(**more: Any) -> str:
            return str((await operator.ask("log.level", **more))["previous"])

        assert await previous(level="debug", ttl_s=1) == "info"
        assert await level() == "debug"
        house.configure("[log]\nlevel = 'info'\n[api]\nstrict_model = true")
        await operator.ask("reload")  # another key: the level stays
        assert await level() == "debug"
        with anyio.fail_after(5):
            while await level() != "info":
                await anyio.sleep(0.01)
        assert await previous(level="debug", ttl_s=600) == "info"
        house.configure("[log]\nlevel = 'warning'")
        await operator.ask("reload")
        assert await level() == "warning"
        assert await previous(level="debug", ttl_s=1) == "warning"
        assert await previous(level="error") == "debug"  # for good: nothing comes back
        await anyio.sleep(1.1)
        assert await previous(level="warning") == "error"


async def test_a_new_name_is_the_name_everywhere(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        house.configure("[model]\nname = 'renamed'\n[api]\nprompt_profile = 'preview'")
        await operator.ask("reload")
        model = (await operator.ask("status"))["model"]
        assert (model["name"], model["prompt_profile"]) == ("renamed", "preview")
        assert 'ds4d_state{model="renamed"' in (await operator.ask("metrics"))["text"]
        assert (await house.chat())[2]["system_fingerprint"] == model["system_fingerprint"]


# Sessions, requests, lanes


async def test_a_request_is_cancelled_by_its_id(tmp_path: Path) -> None:
    waking = Waking(engine(delay_step_s=0.005))
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        events: list[Any] = []

        async def ask() -> None:
            events.extend(await house.stream())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(waking.engine.cohorts) > 3)
            (session,) = (await operator.ask("sessions"))["sessions"]
            assert session["phase"] == "decode"
            await operator.ask("request.cancel", request=session["request"])
        assert events[-1]["error"]["code"] == "cancelled"
        with pytest.raises(Refusal) as refusal:
            await operator.ask("request.cancel", request="req_nobody")
        assert refusal.value.code == wire.NOT_FOUND


async def test_an_idle_session_is_closed_and_its_prompt_computed_anew(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        body = {"messages": [{"role": "user", "content": "z" * 400}]}

        async def cached() -> int:
            usage = (await house.chat(**body))[2]["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await cached() == 0
        assert await cached() > 0
        for session in (await operator.ask("sessions", phase="idle"))["sessions"]:
            await operator.ask("session.close", id=session["id"])
        assert await cached() == 0


async def test_a_shortcoming_of_the_start_makes_the_daemon_degraded_and_says_why(
    tmp_path: Path,
) -> None:
    reason = wire.Reason(code="kernel_cache", text="no cache", remedy="make one")
    waking = Waking(engine(), reasons=[reason])
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        status = await operator.ask("status")
        assert status["state"] == "degraded"
        assert {"code": "kernel_cache", "text": "no cache", "remedy": "make one"} in status[
            "reasons"
        ]
        assert (await house.chat())[0] == 200  # it serves all the same


async def test_metrics_are_on_the_api_port_while_only_this_machine_can_ask(tmp_path: Path) -> None:
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path) as house, house.operator() as operator:
        await house.until_ready()
        await house.chat()
        async with house.client.get(house.url + "/metrics") as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = await response.text()
        assert 'ds4d_requests_total{api="chat",model="fake",outcome="length"}' in text
        assert 'ds4d_state{model="fake",state="' in text
        assert 'ds4d_control_connections{model="fake",role="service"} 1.0' in text
        assert "ds4d_requests_total" in (await operator.ask("metrics"))["text"]


async def test_metrics_have_a_door_of_their_own_when_others_can_reach_the_api(
    tmp_path: Path,
) -> None:
    side = f"http://127.0.0.1:{(port := free_port())}"
    sets = ("api.insecure_no_auth=true", f"metrics.listen=127.0.0.1:{port}")
    waking = Waking(engine())
    async with daemon_with(waking, tmp_path, *sets, host="0.0.0.0") as house:
        await house.until_ready()
        status, body = await house.get("/metrics")
        assert status == 404
        assert f"{side}/metrics" in body["error"]["message"]
        async with house.client.get(f"{side}/metrics") as response:
            assert "ds4d_build_info" in await response.text()
        async with house.client.get(f"{side}/v1/models") as response:
            assert response.status == 404
