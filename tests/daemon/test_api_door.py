"""The HTTP door: routes, checks, errors and states, through a socket (spec/api.md 2.0, 6)."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import zlib
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
import anyio
import pytest

from ds4d import events
from ds4d.api import body as bodies
from ds4d.api import models
from ds4d.api.chat import Served
from ds4d.api.server import Server, tail_of
from ds4d.config import Api
from ds4d.errors import ConfigError, Refused, TemporaryError
from tests.daemon.script_runner import CONSTANTS, INFO, TOKENIZER, block_text, call_text, open_door

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def raw(door, data: bytes) -> bytes:
    """All that the server says to `data` until it closes or is silent."""
    got = b""
    async with await anyio.connect_tcp(door.host, door.port) as wire:
        await wire.send(data)
        with anyio.move_on_after(1):
            while True:
                try:
                    got += await wire.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    break
                if b"\r\n\r\n" in got and b"}" in got:
                    break
    return got


# T41: bodies


async def test_a_body_is_json_whatever_its_headers_say_and_however_large():
    async with open_door() as door:
        text = json.dumps({**CHAT, "metadata": {"x": "y" * 5_000_000}}).encode()
        assert (await door.post(text)).status == 200
        for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense"):
            answered = await door.post(CHAT, headers={"Content-Type": kind})
            assert answered.status == 200
        for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            headers = {"Content-Encoding": encoding}
            packed = pack(json.dumps(CHAT).encode())
            assert (await door.post(packed, headers=headers)).status == 200
            assert (await door.post(b"not packed", headers=headers)).status == 400


async def test_a_body_beyond_the_limit_is_413_in_json_plain_or_packed():
    async with open_door(max_body_mib=1) as door:
        big = json.dumps({**CHAT, "user": "y" * 1_200_000}).encode()
        for data, headers in ((big, {}), (gzip.compress(big), {"Content-Encoding": "gzip"})):
            refused = await door.post(data, headers=headers)
            assert (refused.status, refused.error["code"]) == (413, "request_too_large")
        assert not door.runner.claims


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "an array"),
        (b'"x"', "a string"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": [-Infinity]}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"1" * 5000 + b"}", "too long"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nests deeper"),
        (b'{"a": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nests deeper"),
        (b"[" * 1_000_000, "nests deeper"),
    ],
)
async def test_a_body_that_is_no_json_object_is_400_and_says_why(body, says):
    async with open_door() as door:
        refused = await door.post(body)
        assert refused.status == 400
        assert refused.error["type"] == "invalid_request_error"
        assert says in refused.error["message"]


async def test_lone_surrogates_become_replacement_characters():
    async with open_door() as door:
        body = rb'{"messages":[{"role":"user","content":"a\ud83db\\ud83d\ud83d\ude42\udc00"}]}'
        assert (await door.post(body)).status == 200
        ids = door.runner.claims[-1].ids.tolist()
        text = bytes(i - 8 for i in ids if i >= 8).decode()
        assert text == "a\ufffdb\\ud83d🙂\ufffd"


async def test_a_byte_order_mark_and_unknown_fields_do_no_harm():
    async with open_door() as door:
        body = b"\xef\xbb\xbf" + json.dumps({**CHAT, "brand_new": {"x": [1]}}).encode()
        assert (await door.post(body)).status == 200


# T42: keys, hosts, origins


async def test_any_key_will_do_when_none_is_set():
    async with open_door() as door:
        headers = {"Authorization": "Bearer EMPTY"}
        assert (await door.post(CHAT, headers=headers)).status == 200


async def test_a_key_is_asked_for_when_there_are_some(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    keys.chmod(0o600)
    async with open_door(api_keys_file=keys) as door:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "first"}):
            refused = await door.post(CHAT, headers=headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
            assert refused.headers["WWW-Authenticate"] == "Bearer"
        for headers in (
            {"Authorization": "Bearer first-key"},
            {"authorization": "bearer second-key"},
            {"x-api-key": "second-key"},
            {"api-key": "first-key"},
        ):
            assert (await door.post(CHAT, headers=headers)).status == 200
        for path in ("/health", "/ready", "/version", "/"):
            assert (await door.get(path)).status == 200
        assert (await door.get("/v1/models")).status == 401
        anthropic = await door.post(CHAT, path="/v1/messages")
        assert anthropic.status == 401
        assert anthropic.json["error"]["type"] == "authentication_error"


def test_a_key_file_that_others_can_read_or_that_is_empty_is_refused(tmp_path):
    keys = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        Server(Api(api_keys_file=keys), None)
    keys.write_text("k\n")
    keys.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Server(Api(api_keys_file=keys), None)
    keys.write_text("# nothing\n")
    keys.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no key"):
        Server(Api(api_keys_file=keys), None)


async def test_a_foreign_host_is_403_on_loopback_unless_it_is_admitted():
    async with open_door(allowed_hosts=("box.lan",)) as door:
        for host, status in (
            ("evil.test", 403),
            ("evil.test:30007", 403),
            ("localhost.evil.test", 403),
            ("localhost", 200),
            ("LOCALHOST:1", 200),
            ("127.0.0.1:9", 200),
            ("[::1]:9", 200),
            ("127.0.0.5:9", 200),
            ("127.0.0.5.evil.test", 403),
            ("box.lan:80", 200),
        ):
            assert (await door.post(CHAT, headers={"Host": host})).status == status, host
            assert (await door.get("/health", headers={"Host": host})).status == status, host


async def test_cors_is_off_by_default_and_covers_errors_and_streams_when_on():
    page = {"Origin": "https://app.test"}
    async with open_door() as door:
        assert "Access-Control-Allow-Origin" not in (await door.post(CHAT, headers=page)).headers
    async with open_door(cors_origins=("https://app.test",)) as door:
        asks = {
            "Access-Control-Request-Headers": "authorization,x-foo",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = await door.get("/v1/chat/completions", "OPTIONS", headers=page | asks)
        assert preflight.status == 204
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,x-foo"
        assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"
        for body in (CHAT, {**CHAT, "stream": True}, {}):
            answered = await door.post(body, headers=page)
            assert answered.headers["Access-Control-Allow-Origin"] == "https://app.test"
            assert answered.headers["Vary"] == "Origin"
            assert "x-request-id" in answered.headers["Access-Control-Expose-Headers"]
        other = await door.post(CHAT, headers={"Origin": "https://evil.test"})
        assert "Access-Control-Allow-Origin" not in other.headers


# T44: routes


async def test_paths_are_found_in_every_spelling_that_clients_use():
    async with open_door() as door:
        for path in (
            "/v1/chat/completions",
            "/chat/completions",
            "/v1/v1/chat/completions",
            "/beta/chat/completions",
            "/v1/chat/completions/",
            "//v1//chat/completions",
            "/v1/chat/completions?beta=true",
        ):
            assert (await door.post(CHAT, path=path)).status == 200, path
        assert (await door.get("/models")).json == (await door.get("/v1/models/")).json


async def test_foreign_and_unknown_routes_and_wrong_methods_say_what_they_are():
    async with open_door() as door:
        for path in ("/v1/embeddings", "/v1/audio/speech", "/rerank", "/v1/images/generations"):
            refused = await door.post({}, path=path)
            assert (refused.status, refused.error["code"]) == (400, "unsupported_endpoint"), path
        unknown = await door.get("/v1/foo")
        assert (unknown.status, unknown.error["code"]) == (404, "not_found")
        assert "answers POST /v1/chat/completions" in unknown.error["message"]
        for path in ("/v1/completions", "/v1/responses", "/tokenize", "/apply-template"):
            refused = await door.post({}, path=path)
            assert (refused.status, refused.error["code"]) == (404, "unsupported_endpoint"), path
        for path in ("/props", "/v1/responses/resp_1"):
            assert (await door.get(path)).error["code"] == "unsupported_endpoint"
        messages = await door.post(CHAT, path="/v1/messages?beta=true")
        assert messages.status == 404
        assert messages.json["type"] == "error"
        assert messages.json["error"]["type"] == "not_found_error"
        assert messages.json["request_id"] == messages.headers["request-id"]
        wrong = await door.get("/v1/chat/completions")
        assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
        assert wrong.error["code"] == "method_not_allowed"
        assert (await door.post({}, path="/v1/models")).headers["Allow"] == "GET, HEAD"
        head = await door.get("/", "HEAD")
        assert (head.status, head.body) == (200, b"")


def test_a_path_is_reduced_to_its_tail():
    assert tail_of("/v1/v1/models/a/b/") == "models/a/b"
    assert tail_of("/v1x/models") == "v1x/models"
    assert tail_of("/v1") == tail_of("/") == ""


async def test_every_response_carries_the_common_headers():
    async with open_door() as door:
        for answered in (await door.post(CHAT), await door.post({}), await door.get("/nope")):
            assert answered.headers["x-request-id"].startswith("req_")
            assert answered.headers["Server"].startswith("ds4d/")
            assert int(answered.headers["openai-processing-ms"]) >= 0
        named = await door.post({**CHAT, "stream": True}, headers={"x-request-id": "mine.1"})
        assert named.headers["x-request-id"] == "mine.1"
        assert door.runner.claims[-1].label == "mine.1"
        evil = await door.get("/health", headers={"x-request-id": "a b"})
        assert evil.headers["x-request-id"].startswith("req_")


# Models


def test_defaults_are_the_files_advice_then_the_releases():
    d = models.defaults(Api(), "0731")
    assert (d.thinking, d.temperature, d.top_p, d.min_p, d.effort) == (True, 1.0, 0.95, 0.0, "low")
    assert models.defaults(Api(), "preview", two_bit_experts=True).min_p == 0.05
    assert models.defaults(Api(), "preview").top_p == 1.0
    assert models.defaults(Api(default_min_p=0.2), "0731", two_bit_experts=True).min_p == 0.2
    tiny = models.defaults(Api(default_effort="high"), "0731", temperature=0.0, thinking=False)
    assert (tiny.temperature, tiny.thinking, tiny.effort) == (0.0, False, "high")


async def test_the_list_holds_one_model_with_its_context_under_every_name():
    async with open_door(aliases=("mini",)) as door:
        body = (await door.get("/v1/models")).json
        (entry,) = body["data"]
        assert (body["object"], entry["id"], entry["object"]) == ("list", "ds4-tiny", "model")
        for name in ("max_model_len", "context_length", "context_window", "max_input_tokens"):
            assert entry[name] == 8192
        assert "models" not in body
        for name in ("ds4-tiny", "mini", "deepseek-ai/DeepSeek-V4-Flash-0731"):
            assert (await door.get(f"/v1/models/{name}")).json["id"] == name
        assert (await door.get("/v1/models/gpt-5")).error["code"] == "model_not_found"
        headers = {"anthropic-version": "2023-06-01"}
        anthropic = (await door.get("/v1/models", headers=headers)).json
        assert anthropic["data"][0]["type"] == "model"
        assert (anthropic["first_id"], anthropic["has_more"]) == ("ds4-tiny", False)
    async with open_door(aliases=("mini",), list_aliases=True, codex_catalog=True) as door:
        body = (await door.get("/v1/models")).json
        assert [entry["id"] for entry in body["data"]] == ["ds4-tiny", "mini"]
        assert body["models"] == []


async def test_the_model_name_is_echoed_and_checked_only_where_the_operator_is_strict():
    async with open_door() as door:
        assert (await door.chat(model="gpt-5")).json["model"] == "gpt-5"
        assert (await door.chat()).json["model"] == "ds4-tiny"
    async with open_door(strict_model=True) as door:
        refused = await door.chat(model="gpt-5")
        assert (refused.status, refused.error["param"]) == (404, "model")
        assert refused.error["code"] == "model_not_found"
        assert (await door.chat(model="deepseek-chat")).status == 200


# States


async def test_a_door_without_a_model_says_how_far_loading_is():
    async with open_door(loaded=False) as door:
        door.runner.state, door.runner.loading = "loading", ("compiling kernels", 0.4)
        for answered in (await door.post(CHAT), await door.get("/v1/models")):
            assert answered.status == 503
            assert answered.error["code"] == "model_loading"
            assert "compiling kernels, 40 %" in answered.error["message"]
            assert answered.headers["retry-after"] == "5"
            assert "x-should-retry" not in answered.headers
        health = await door.get("/health")
        assert (health.status, health.json) == (200, {"status": "loading model"})
        loading = {"status": "loading", "what": "compiling kernels", "percent": 40}
        assert (await door.get("/ready")).json == loading
        assert (await door.get("/version")).json["name"] == "ds4d"


@pytest.mark.parametrize("watched", [True, False])
async def test_a_person_at_a_terminal_is_told_what_to_type_once_it_is_ready(watched):
    out = io.StringIO()
    out.isatty = lambda: watched
    events.configure(stream=out)
    async with open_door() as door:
        url = door.url
    assert f"api.serving model=ds4-tiny url={url}/v1" in out.getvalue()
    assert (f"curl {url}/v1/chat/completions" in out.getvalue()) == watched


async def test_a_full_queue_and_a_drain_tell_the_client_to_wait():
    async with open_door() as door:
        door.runner.refusal = Refused("8 wait", status=429, code="queue_full", retry_after_s=3)
        full = await door.post(CHAT)
        assert (full.status, full.headers["retry-after"]) == (429, "3")
        assert (full.error["type"], full.error["code"]) == ("rate_limit_error", "queue_full")
        assert (await door.get("/ready")).json == {"status": "busy"}
        door.runner.state = "draining"
        door.runner.refusal = Refused("bye", status=503, code="draining", retry_after_s=10)
        drained = await door.post({**CHAT, "stream": True})
        assert (drained.status, drained.error["code"]) == (503, "draining")
        assert (await door.get("/health")).status == 200
        assert (await door.get("/ready")).status == 503
        door.runner.state = "failed"
        assert (await door.get("/health")).json["status"] == "error"


async def test_a_path_of_any_bytes_is_answered():
    async with open_door() as door:
        for path in (
            b"/%ff%fe",
            b"/v1/models/%ED%A0%80",
            b"/\xff\xfe",
            b"/%00",
            b"//evil.test/x",
            b"*",
        ):
            got = await raw(door, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head, _, body = got.partition(b"\r\n\r\n")
            assert head[9:12] in (b"400", b"404"), got
            json.loads(body)


async def test_a_body_announced_as_too_large_is_refused_before_it_is_sent():
    async with open_door() as door:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        got = await raw(door, head + b"Content-Length: 73400320\r\n\r\n{")
        assert got.startswith(b"HTTP/1.1 413 ")
        assert b"request_too_large" in got


async def test_a_body_that_unpacks_without_end_is_refused_at_the_limit():
    async with open_door(max_body_mib=8) as door:
        bomb = gzip.compress(b"[" * (64 << 20))
        refused = await door.post(bomb, headers={"Content-Encoding": "gzip"})
        assert refused.status == 413
        for encoding in ("br", "zstd", "nonsense"):
            answered = await door.post(CHAT, headers={"Content-Encoding": encoding})
            assert answered.status in (200, 400)


async def test_a_fault_of_ours_is_500_in_json_without_its_details(caplog):
    async with open_door() as door:
        door.runner.refusal = ValueError("secret detail")
        with caplog.at_level("INFO", "ds4d"):
            failed = await door.post({**CHAT, "stream": True})
        assert (failed.status, failed.error["code"]) == (500, "internal_error")
        assert b"secret" not in failed.body
        assert "secret detail" in caplog.text  # the operator's, in one line
        assert "Traceback" not in caplog.text


# What is no request at all


async def test_bytes_that_are_not_http_are_answered_in_json():
    async with open_door() as door:
        for data in (
            b"\x16\x03\x01 hello\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: banana\r\n\r\n{}",
        ):
            got = await raw(door, data)
            head, _, body = got.partition(b"\r\n\r\n")
            assert head[:13] in (b"HTTP/1.0 400 ", b"HTTP/1.1 400 "), got[:200]
            assert b"text/" not in head
            assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_client_that_asks_first_is_told_to_go_on():
    async with open_door() as door:
        body = json.dumps(CHAT).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        async with await anyio.connect_tcp(door.host, door.port) as wire:
            await wire.send(head)
            with anyio.fail_after(5):
                assert await wire.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
                await wire.send(body)
                assert (await wire.receive()).startswith(b"HTTP/1.1 200 OK")


# Sockets


async def test_a_taken_port_is_one_sentence_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(Api(listen=(f"127.0.0.1:{port}",)), None)
        with pytest.raises(TemporaryError, match=rf"{port} is in use.*--listen"):
            await server.run()


async def test_an_address_of_another_machine_is_a_matter_of_configuration():
    for where in ("192.0.2.1:0", "no-such-host.invalid:0"):
        with pytest.raises(ConfigError, match=r"api\.listen"):
            await Server(Api(listen=(where,), insecure_no_auth=True), None).run()


# Fields (2.2)

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"thinking_budget": 100}, "thinking_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 9}}, "reasoning.max_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
         "tools[0].function.strict"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"chat_template_kwargs": {"drop_thinking": False}}, "chat_template_kwargs.drop_thinking"),
    ],
)  # fmt: skip
async def test_a_known_field_that_is_not_built_is_refused_by_name(fields, param):
    async with open_door() as door:
        refused = await door.post(CHAT | fields)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert refused.error["code"] == "unsupported_value"
        assert not door.runner.claims


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "tool_call_id": "c9", "content": "x"}]},
         "messages[0].tool_call_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repeat_penalty": 1e-320}, "repeat_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "é" * 129}, "stop"),
        ({"stop_token_ids": [264]}, "stop_token_ids"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"thinking": {"type": "sideways"}}, "thinking.type"),
        ({"reasoning_effort": "turbo"}, "reasoning_effort"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"priority": 2**40}, "priority"),
        ({"model": 5}, "model"),
    ],
)  # fmt: skip
async def test_a_field_of_the_wrong_type_or_range_is_400_by_name(fields, param):
    async with open_door() as door:
        refused = await door.post(CHAT | fields)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body
        assert refused.error["type"] == "invalid_request_error"
        assert param.split("[")[0].split(".")[0] in refused.error["message"]


async def test_a_tool_that_is_not_strict_is_rendered_with_every_key_it_came_with():
    function = {"strict": False, "name": "f", "returns": {"type": "string"}, "parameters": None}
    async with open_door() as door:
        await door.chat(tools=[{"type": "function", "function": function}])
        ids = door.runner.claims[-1].ids.tolist()
        text = b"".join(TOKENIZER.token_bytes(i) for i in ids).decode()
    assert '\n{"name": "f", "strict": false, "returns": {"type": "string"}}\n' in text


async def test_null_and_values_that_change_nothing_are_as_good_as_absent():
    nothing = dict.fromkeys(
        """tools tool_choice stop seed temperature max_tokens response_format logprobs n thinking
        functions stream_options logit_bias reasoning_effort guided_json audio model""".split()
    )
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "tool_choice": "auto",
        "response_format": {"type": "text", "json_schema": None},
        "parallel_tool_calls": True, "best_of": 1, "use_beam_search": False, "tools": [],
        "length_penalty": 1.0, "modalities": ["text"], "max_tokens": -1,
        "chat_template_kwargs": {"drop_thinking": True, "other": 5}, "stop": "", "store": True,
        "metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "verbosity": "low",
        "prompt_cache_key": "k", "prediction": {}, "skip_special_tokens": False,
    }  # fmt: skip
    async with open_door() as door:
        for fields in ({}, nothing, neutral):
            assert (await door.post(CHAT | fields)).status == 200
        plain, *others = door.runner.claims
        for claim in others:
            assert claim.ids.tolist() == plain.ids.tolist()
            assert claim.max_tokens == plain.max_tokens
            assert replace(claim.sampling, seed=0) == replace(plain.sampling, seed=0)


async def test_a_failed_block_is_flagged_and_never_shown():
    async with open_door() as door:
        door.play("Text" + block_text(call_text("f", a="x"))[:30] + "garbage > here")
        whole = await door.chat(tools=[TOOL])
        assert whole.message["content"] == "Text"
        assert whole.json["usage"]["tool_parse_failed"] is True
        assert whole.finish == "stop"


async def test_an_info_without_a_large_context_renders_max_effort_as_high():
    async with open_door(info=replace(INFO, max_effort_ctx=393_216)) as door:
        for effort in ("high", "max"):
            await door.chat(reasoning_effort=effort)
        high, top = door.runner.claims
        assert high.ids.tolist() == top.ids.tolist()


async def test_a_body_that_stops_arriving_is_given_up():
    async with open_door(send_stall_s=0.2) as door:
        half = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b'Content-Length: 100\r\n\r\n{"messages": ['
        )
        answer = await raw(door, half)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"stopped arriving" in answer


async def test_bodies_together_are_bounded_and_make_room_again():
    class Slow:
        """A request of which 1 MiB has come and more is to come."""

        content_length = None

        def __init__(self) -> None:
            self.content = self
            self.more = anyio.Event()
            self.chunks = [bytes(1 << 20)]

        async def readany(self) -> bytes:
            if self.chunks:
                return self.chunks.pop()
            await self.more.wait()
            return b""

    intake = bodies.Intake()
    waiting = [Slow() for _ in range(bodies.BODIES_AT_ONCE)]

    async def take(request: Slow) -> None:
        async with intake.body(request, max_bytes=1 << 20, stall_s=60):
            pass

    async with anyio.create_task_group() as tasks:
        for request in waiting:
            tasks.start_soon(take, request)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(Refused, match="Other request bodies"):
            await take(Slow())
        for request in waiting:
            request.more.set()
    last = Slow()
    last.more.set()
    await take(last)


async def test_a_reload_forgets_neither_the_bodies_under_way_nor_the_fields_it_has_named(caplog):
    """Else every reload under load would make room for as many more."""
    limit, held_back = 1 << 20, 10
    start = b'{"brand_new": 1, "messages": [{"role": "user", "content": "'
    body = start + b"x" * (limit - len(start) - held_back)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    caplog.set_level("INFO", "ds4d")
    async with open_door(max_body_mib=1) as door, AsyncExitStack() as wires:
        for _ in range(bodies.BODIES_AT_ONCE):
            wire = await anyio.connect_tcp(door.host, door.port)
            await wires.enter_async_context(wire)
            await wire.send(head % limit + body)

        async def is_full() -> bool:
            return (await door.chat("y" * 1000, brand_new=1)).status == 429

        with anyio.fail_after(10):
            while not await is_full():
                await anyio.sleep(0.005)
        served = Served(info=INFO, tokenizer=TOKENIZER, constants=CONSTANTS)
        config = Api(listen=("127.0.0.1:0",), max_body_mib=1, aliases=("other",))
        door.server.prepare(config, served)()
        assert await is_full()
        wider = replace(config, max_body_mib=2)
        door.server.prepare(wider, served)()
        assert not await is_full()
        door.server.prepare(config, served)()
    named = [r for r in caplog.records if "request.unknown_field" in r.getMessage()]
    assert len(named) == 1


# Doors that systemd has opened


def listening(host: str) -> socket.socket:
    one = socket.socket()
    one.bind((host, 0))
    one.listen()
    return one


async def test_a_socket_that_was_passed_is_the_door_and_the_setting_is_not():
    taken = listening("127.0.0.1")
    port = taken.getsockname()[1]
    server = Server(Api(listen=("127.0.0.1:1",)), None, passed=(taken.detach(),))
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.run)
        assert server.addresses == [("127.0.0.1", port)]
        async with aiohttp.ClientSession() as client:
            async with client.get(f"http://127.0.0.1:{port}/version") as response:
                assert response.status == 200
        tasks.cancel_scope.cancel()


async def test_a_passed_door_that_others_can_reach_needs_keys_at_start_and_at_every_reload(
    tmp_path,
):
    """What `api.listen` says is no help: that is not where the door is."""
    with pytest.raises(ConfigError, match=r"socket from systemd \(0\.0\.0\.0\) is reachable"):
        Server(Api(), None, passed=(listening("0.0.0.0").detach(),))
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    taken = listening("0.0.0.0")
    server = Server(Api(api_keys_file=keys), None, passed=(taken.detach(),))
    served = Served(info=INFO, tokenizer=TOKENIZER, constants=CONSTANTS)
    with pytest.raises(ConfigError, match="reachable from other machines without a key"):
        server.prepare(Api(), served)
    server.prepare(Api(insecure_no_auth=True), served)
    for one in server._sockets:
        one.close()


async def test_a_passed_socket_that_is_no_door_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "other.sock"))
        one.listen()
        with pytest.raises(ConfigError, match="no listening TCP socket"):
            Server(Api(), None, passed=(os.dup(one.fileno()),))
