"""POST /v1/chat/completions through a real socket, with scripted tokens (spec/api.md 6)."""

from __future__ import annotations

import json
import threading
import weakref
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from ds4d.api import body as bodies
from ds4d.api import chat
from ds4d.api.models import Defaults
from ds4d.errors import DeviceError, Refused
from tests.daemon.script_runner import (
    INFO,
    MARKS,
    TOKENIZER,
    block_text,
    call_text,
    ids_of,
    one_by_one,
    open_door,
    read_sse,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "tags": {"type": "array"},
                "metric": {"type": "boolean"},
            },
            "required": ["city"],
        },
    },
}
SAYS_ON = {"thinking": {"type": "enabled"}}
ROME = call_text("get_weather", city="Rome", days=3, tags=["a", {"b": None}], metric=True)
ROME_ARGUMENTS = '{"city": "Rome", "days": 3, "tags": ["a", {"b": null}], "metric": true}'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def last_id(door, **fields) -> int:
    """The last id of the prompt: 4 opens thinking, 5 closes it."""
    answered = await door.chat(**fields)
    assert answered.status == 200, answered.body
    return int(door.runner.claims[-1].ids[-1])


# T3


async def test_thinking_is_on_unless_the_client_an_alias_or_the_file_says_off():
    info = replace(INFO, defaults=Defaults())
    async with open_door(info=info) as door:
        assert await last_id(door) == MARKS.think
        assert await last_id(door, model="deepseek-chat") == MARKS.end_think
        assert await last_id(door, model="deepseek-reasoner") == MARKS.think
        off = {"thinking": {"type": "disabled"}, "reasoning_effort": "high"}
        assert await last_id(door, **off) == MARKS.end_think
        template = {"chat_template_kwargs": {"enable_thinking": False}}
        assert await last_id(door, **template) == MARKS.end_think
        assert await last_id(door, reasoning_effort="none") == MARKS.end_think
        assert await last_id(door, reasoning={"enabled": False}) == MARKS.end_think
        assert await last_id(door, think=False, enable_thinking=True) == MARKS.think
        assert await last_id(door, model="deepseek-chat", **SAYS_ON) == MARKS.think
    async with open_door() as door:  # ds4-tiny recommends off
        assert await last_id(door) == MARKS.end_think
        assert await last_id(door, reasoning_effort="low") == MARKS.think
        assert await last_id(door, think="high") == MARKS.think
        assert await last_id(door, model="deepseek-reasoner") == MARKS.think


async def test_the_effort_text_follows_the_level_and_unknown_levels_are_refused():
    async with open_door() as door:
        lengths = {}
        for effort in ("minimal", "low", "medium", "high", "xhigh", "max", "ultra"):
            await door.chat(reasoning_effort=effort)
            lengths[effort] = len(door.runner.claims[-1].ids)
        assert lengths["minimal"] == lengths["low"] == 6
        assert lengths["medium"] == lengths["high"] == lengths["xhigh"] > 6
        assert lengths["max"] == lengths["ultra"] > lengths["high"]
        refused = await door.chat(reasoning={"effort": "turbo"})
        assert (refused.status, refused.error["param"]) == (400, "reasoning.effort")
        assert refused.error["message"].startswith("reasoning.effort: expected one of none, minim")


# T11, T12, T13


async def test_a_stream_is_role_reasoning_content_finish_usage_done():
    async with open_door() as door:
        door.play(*one_by_one("Why?</think>Yes."))
        read = await door.stream(stream_options={"include_usage": True}, **SAYS_ON)
        assert read.kinds == [
            "role", *["reasoning_content"] * 4, *["content"] * 4, "finish", "usage",
        ]  # fmt: skip
        assert (read.reasoning, read.content, read.finish) == ("Why?", "Yes.", "stop")
        assert all(chunk["usage"] is None for chunk in read.chunks[:-1])
        usage = read.usage
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 9)
        assert usage["total_tokens"] == 15
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_the_role_chunk_waits_for_the_first_token():
    async with open_door(keepalive_s=0.05) as door:
        gate = anyio.Event()
        door.play(gate, "a")
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        url = door.url + "/v1/chat/completions"
        async with door.client.post(url, json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert (response.status, first) == (200, b": keepalive\n\n")
            gate.set()
            read = read_sse(first + await response.read())
        assert read.kinds == ["role", "content", "finish"]


async def test_usage_comes_in_its_own_chunk_only_if_it_was_asked_for():
    async with open_door() as door:
        for options in ({"include_usage": False}, {}, None):
            read = await door.stream(stream_options=options)
            assert "usage" not in read.kinds
            assert not any("usage" in chunk for chunk in read.chunks)
        asked = {"include_usage": True, "continuous_usage_stats": True}
        door.play(*one_by_one("abc"))
        read = await door.stream(stream_options=asked)
        counts = [chunk["usage"]["completion_tokens"] for chunk in read.chunks]
        assert counts == [1, 1, 2, 3, 3, 3]
        ignored = await door.chat(stream_options={"include_usage": True})
        assert ignored.status == 200


async def test_tokens_of_one_step_are_separate_events_in_one_write():
    async with open_door() as door:
        gates = anyio.Event(), anyio.Event()
        door.play(gates[0], "abcd", gates[1], "e")
        async with await anyio.connect_tcp(door.host, door.port) as wire:
            body = b'{"messages":[{"role":"user","content":"x"}],"stream":true}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            await wire.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert b"\r\n\r\n" in await wire.receive()
            gates[0].set()
            size, _, data = (await wire.receive(65_536)).partition(b"\r\n")
            assert int(size, 16) == len(data.removesuffix(b"\r\n"))  # one chunk: one write
            assert data.count(b'"delta":{"content":') == 4
            gates[1].set()


async def test_step_granularity_joins_the_tokens_of_a_step():
    async with open_door(stream_granularity="step") as door:
        gate = anyio.Event()
        door.play("ab", gate, "cd")
        with anyio.fail_after(5):
            door.tasks.start_soon(_set_after, door, gate, 2)
            read = await door.stream()
        assert read.kinds == ["role", "content", "content", "finish"]
        assert read.content == "abcd"


async def _set_after(door, gate: anyio.Event, n_emitted: int) -> None:
    while door.runner.n_emitted < n_emitted:
        await anyio.sleep(0.005)
    await anyio.sleep(0.05)
    gate.set()


# T14, T15


async def test_comments_come_by_the_wall_clock_while_the_engine_is_silent():
    async with open_door(keepalive_s=0.05) as door:
        text = block_text(call_text("get_weather", city="Rome"))
        at = text.index("ome")
        door.play(0.3, text[:at], 0.3, text[at:])
        read = await door.stream(tools=[WEATHER])
        assert read.n_comments >= 6
        assert read.calls[0]["arguments"] == '{"city": "Rome"}'


async def test_a_fault_after_headers_is_a_data_event_and_keeps_what_was_sent():
    async with open_door() as door:
        door.play("abc", DeviceError("secret detail"))
        read = await door.stream()
        assert read.content == "abc"
        assert read.finish is None
        assert read.error["type"] == "server_error"
        assert "secret" not in read.error["message"]
        door.play("abc", DeviceError("secret detail"))
        whole = await door.chat()
        assert (whole.status, whole.error["code"]) == (500, "internal_error")
        door.play("abc", Refused("going down", status=503, code="draining", retry_after_s=7))
        drained = await door.chat()
        assert (drained.status, drained.headers["retry-after"]) == (503, "7")


# T16


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [[30.0], ["a", 30.0]], ids=["before a token", "while decoding"])
async def test_a_client_that_leaves_frees_its_lane_and_the_next_one_is_served(stream, steps):
    async with open_door() as door:
        door.play(*steps)
        with anyio.move_on_after(0.15):
            body = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
            url = door.url + "/v1/chat/completions"
            async with door.client.post(url, json=body) as response:
                await response.read()
        with anyio.fail_after(2):
            while door.runner.busy():
                await anyio.sleep(0.005)
        assert [ticket for ticket, _ in door.runner.left] == [1]
        door.play("fine")
        assert (await door.chat()).message["content"] == "fine"
        assert len(door.runner.left) == 1  # a normal end is no abort


async def test_clients_that_leave_do_not_add_to_the_threads_that_parse(monkeypatch):
    """Their handlers end at once, but no thread can be stopped half-way."""
    gate, at_work, parse = threading.Event(), [], bodies.parse

    def slowly(raw):
        at_work.append(raw)
        gate.wait(10)
        return parse(raw)

    monkeypatch.setattr(bodies, "parse", slowly)
    async with open_door() as door:
        for _ in range(chat.PARSERS + 3):
            with anyio.move_on_after(0.1):
                await door.chat()
        n_at_work = len(at_work)
        gate.set()
        assert n_at_work == chat.PARSERS
        assert (await door.chat()).status == 200


async def test_a_body_is_let_go_of_before_its_answer_is_written(monkeypatch):
    class Raw(bytearray):
        """A bytearray that can be watched."""

    body, seen = bodies.Intake.body, []

    @asynccontextmanager
    async def watched(intake, request, **limits):
        async with body(intake, request, **limits) as taken:
            raw = Raw(taken)
            seen.append(weakref.ref(raw))
            yield raw
            del raw

    monkeypatch.setattr(bodies.Intake, "body", watched)
    async with open_door() as door, anyio.create_task_group() as clients:
        gate = anyio.Event()
        door.play(gate)
        clients.start_soon(door.chat)
        with anyio.fail_after(5):
            while not door.runner.claims or seen[0]() is not None:
                await anyio.sleep(0.005)
        gate.set()


async def test_a_reader_that_takes_nothing_holds_up_its_own_lane_only_and_is_dropped():
    async with open_door(info=replace(INFO, n_ctx=1 << 20), send_stall_s=1.0) as door:
        door.play(*["x" * 64] * 2000)  # 25 MB of events: more than any socket buffers
        body = b'{"messages":[{"role":"user","content":"x"}],"stream":true,"max_tokens":128000}'
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        async with await anyio.connect_tcp(door.host, door.port) as wire:
            await wire.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            while not door.runner.claims:
                await anyio.sleep(0.005)
            door.play("quick")
            assert (await door.chat()).message["content"] == "quick"
            with anyio.fail_after(20):
                while door.runner.busy():
                    await anyio.sleep(0.02)
        assert [ticket for ticket, _ in door.runner.left] == [1]
        assert door.runner.n_emitted < 100_000


# T17


async def test_characters_split_over_tokens_arrive_whole_in_every_channel():
    async with open_door() as door:
        text = "考え🙂</think>答え👩‍👩‍👧é" + block_text(call_text("get_weather", city="東京🗼"))
        for n in (1, 2, 3, 5):
            door.play(*one_by_one(text, n))
            read = await door.stream(tools=[WEATHER], **SAYS_ON)
            assert (read.reasoning, read.content) == ("考え🙂", "答え👩‍👩‍👧é")
            assert json.loads(read.calls[0]["arguments"]) == {"city": "東京🗼"}
        door.play(ids_of("é")[:1])
        assert (await door.chat()).message["content"] == "\ufffd"


# T18


async def test_stop_strings_cut_content_across_tokens_but_not_reasoning_or_arguments():
    async with open_door() as door:
        door.play(*one_by_one("The END?</think>Go on. END of it", 1))
        read = await door.stream(stop=["END"], **SAYS_ON)
        assert (read.reasoning, read.content) == ("The END?", "Go on. ")
        assert (read.finish, read.stop_reason) == ("stop", "END")
        door.play("x" + block_text(call_text("get_weather", city="END")))
        whole = await door.chat(stop="END", tools=[WEATHER])
        assert whole.finish == "tool_calls"
        door.play("almost E")
        whole = await door.chat(stop=["END", ""])
        assert whole.message["content"] == "almost E"
        assert whole.json["choices"][0]["stop_reason"] is None
        door.play("a END b")
        whole = await door.chat(stop=["END"], include_stop_str_in_output=True)
        assert whole.message["content"] == "a END"


async def test_a_stop_token_id_ends_the_answer_and_is_named():
    async with open_door() as door:
        (bang,) = ids_of("!")
        door.play("Go! on")
        whole = await door.chat(stop_token_ids=[bang])
        assert whole.message["content"] == "Go"
        assert whole.json["choices"][0]["stop_reason"] == bang
        door.play("Go! on")
        kept = await door.chat(stop_token_ids=[bang], include_stop_str_in_output=True)
        assert kept.message["content"] == "Go!"
        door.play(block_text(call_text("get_weather", city="Go! on")))
        half = await door.chat(stop_token_ids=[bang], tools=[WEATHER])
        assert half.finish == "stop"
        assert "tool_calls" not in half.message


# T19, T20, T21


@pytest.mark.parametrize("n", [1, 3, 7])
async def test_fragments_of_a_call_join_to_the_arguments_of_the_whole_answer(n):
    async with open_door() as door:
        text = "Looking." + block_text(ROME)
        door.play(*one_by_one(text, n))
        read = await door.stream(tools=[WEATHER])
        door.play(text)
        whole = await door.chat(tools=[WEATHER])
        (call,) = whole.message["tool_calls"]
        assert (whole.finish, read.finish) == ("tool_calls", "tool_calls")
        assert whole.message["content"] == read.content == "Looking."
        assert call["function"] == {"name": "get_weather", "arguments": ROME_ARGUMENTS}
        assert read.calls[0]["arguments"] == ROME_ARGUMENTS
        assert call["id"].startswith("call_")
        assert len(call["id"]) == len("call_") + 32
        assert call["id"] != read.calls[0]["id"]


async def test_three_calls_have_three_indices_and_ids():
    async with open_door() as door:
        names = ("a", "b", "c")
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        door.play(*one_by_one(block_text(*(call_text(name) for name in names))))
        read = await door.stream(tools=tools)
        assert [call["name"] for call in read.calls] == list(names)
        assert len({call["id"] for call in read.calls}) == 3
        assert all(call["arguments"] == "{}" for call in read.calls)
        door.play(block_text(*(call_text(name) for name in names)))
        whole = await door.chat(tools=tools)
        assert whole.message["content"] is None
        assert len(whole.message["tool_calls"]) == 3


async def test_one_call_is_returned_where_one_was_wanted():
    async with open_door() as door:
        for stream in (True, False):
            door.play(*one_by_one(block_text(ROME, ROME)))
            fields = {"tools": [WEATHER], "parallel_tool_calls": False}
            if stream:
                read = await door.stream(**fields)
                assert (len(read.calls), read.finish) == (1, "tool_calls")
            else:
                whole = await door.chat(**fields)
                assert len(whole.message["tool_calls"]) == 1
        assert len(door.runner.left) == 2  # the second call was not waited for


async def test_text_before_a_call_loses_its_line_feeds_and_a_lone_bracket_is_flushed():
    async with open_door() as door:
        door.play(*one_by_one("First.\n\n\n" + block_text(ROME)))
        assert (await door.stream(tools=[WEATHER])).content == "First."
        door.play(*one_by_one("1 + 1 = 2 <"))
        assert (await door.stream(tools=[WEATHER])).content == "1 + 1 = 2 <"


async def test_a_call_cut_by_the_limit_is_not_returned():
    async with open_door() as door:
        text = block_text(ROME, ROME)
        n = len(ids_of(text)) - 40
        door.play(text)
        whole = await door.chat(tools=[WEATHER], max_tokens=n)
        assert whole.finish == "length"
        assert len(whole.message["tool_calls"]) == 1
        assert whole.json["usage"]["completion_tokens"] == n


async def test_legacy_functions_are_answered_in_the_legacy_shape():
    async with open_door() as door:
        functions = [WEATHER["function"]]
        door.play(block_text(ROME, ROME))
        whole = await door.chat(functions=functions, function_call="auto")
        call = {"name": "get_weather", "arguments": ROME_ARGUMENTS}
        assert (whole.message["function_call"], whole.finish) == (call, "function_call")
        assert "tool_calls" not in whole.message
        door.play(*one_by_one(block_text(ROME)))
        read = await door.stream(functions=functions)
        assert (read.calls, read.finish) == ([call], "function_call")
        history = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "get_weather", "content": "rain"},
        ]
        assert (await door.post({"messages": history, "functions": functions})).status == 200
        prompt = b"".join(TOKENIZER.token_bytes(i) for i in door.runner.claims[-1].ids.tolist())
        assert b"<tool_result>rain</tool_result>" in prompt


# T26, T33


async def test_tool_choice_none_forbids_calls_and_leaves_the_prompt_as_it_is():
    async with open_door() as door:
        (a,) = ids_of("a")
        door.play("x", [(MARKS.dsml, a)], "y")
        prose = await door.chat(tools=[WEATHER], tool_choice="none")
        assert prose.message["content"] == "xay"
        await door.chat(tools=[WEATHER], tool_choice="auto")
        none, auto = door.runner.claims
        assert none.ids.tolist() == auto.ids.tolist()
        assert not auto.sampling.bias


@pytest.mark.parametrize("thinking", [True, False])
async def test_an_answer_does_not_end_right_behind_the_end_of_thinking(thinking):
    async with open_door() as door:
        (a,) = ids_of("a")
        door.play(*(["hm</think>"] if thinking else []), [(MARKS.eos, a)], "b")
        whole = await door.chat(enable_thinking=thinking)
        assert whole.message["content"] == "ab"
        assert whole.message.get("reasoning_content") == ("hm" if thinking else None)


# T34, T35


def spaced(n: int) -> str:
    """A message that renders to a prompt of `n` tokens with the byte tokenizer."""
    return "x" * (n - 4)  # BOS, user, assistant and the end of thinking


async def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_agents_look_for():
    async with open_door(info=replace(INFO, n_ctx=1000)) as door:
        for n in (1000, 1001, 50_000):
            refused = await door.chat(spaced(n), stream=True)
            assert refused.status == 400
            error = refused.error
            assert error["code"] == "context_length_exceeded"
            assert (error["n_prompt_tokens"], error["n_ctx"], error["param"]) == (
                n, 1000, "messages",
            )  # fmt: skip
            assert "This model's maximum context length is 1000 tokens" in error["message"]
            assert str(n) in error["message"]
        assert not door.runner.claims


async def test_a_hopeless_prompt_is_refused_before_it_is_tokenised():
    async with open_door() as door:
        refused = await door.chat("word " * 2_000_000)
        assert "has at least 10000004 tokens" in refused.error["message"]
        nearly = await door.chat("x" * 8188)
        assert "has at least 8192 tokens" in nearly.error["message"]
        assert "has 8191 tokens" in (await door.chat("x" * 8187)).error["message"]


async def test_max_tokens_is_clamped_unless_too_little_is_left():
    info = replace(INFO, n_ctx=1000)
    async with open_door(info=info) as door:
        refused = await door.chat(spaced(900), max_tokens=4096)
        assert refused.error["code"] == "context_length_exceeded"
        door.play("x" * 100)
        fits = await door.chat(spaced(900), max_tokens=100)
        assert fits.finish == "length"
        assert "x-ds4d-max-tokens" not in fits.headers
    async with open_door(info=info, min_headroom=50) as door:
        door.play("x" * 200)
        clamped = await door.chat(spaced(900), max_tokens=4096)
        assert (clamped.status, clamped.finish) == (200, "length")
        assert clamped.headers["x-ds4d-max-tokens"] == "100"
        assert clamped.json["usage"]["completion_tokens"] == 100


# T37 and what else becomes a claim


async def test_sampling_fields_reach_the_claim_and_defaults_are_the_files():
    info = replace(INFO, defaults=Defaults(temperature=0.0, top_p=0.95, min_p=0.05, top_k=40))
    async with open_door(info=info) as door:
        await door.chat()
        s = door.runner.claims[-1].sampling
        assert (s.temperature, s.top_p, s.min_p, s.top_k, s.seeded) == (0.0, 0.95, 0.05, 40, False)
        fields = {
            "temperature": 0.7, "top_p": 0.5, "top_k": -1, "min_p": 0, "seed": -1,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_penalty": 1.1,
            "logit_bias": {"7": -100, "9": 5}, "tools": [WEATHER], "priority": 3,
            "cache_prompt": False, "min_tokens": 5, "max_completion_tokens": 9, "max_tokens": 99,
        }  # fmt: skip
        assert (await door.chat(**fields)).status == 200
        claim = door.runner.claims[-1]
        s = claim.sampling
        assert (s.temperature, s.top_p, s.top_k, s.min_p) == (0.7, 0.5, 0, 0.0)
        assert (s.seed, s.seeded) == (2**64 - 1, True)
        assert (s.presence, s.frequency, s.repetition) == (0.5, -0.5, 1.1)
        assert s.bias == ((7, -100.0), (9, 5.0))
        assert set(s.exempt) == {MARKS.eos, MARKS.end_think, MARKS.dsml}
        assert (claim.priority, claim.cache, claim.min_tokens, claim.max_tokens) == (3, False, 5, 9)
        assert claim.stop_ids == MARKS.stops


async def test_unseeded_claims_get_seeds_of_their_own_and_equal_seeds_stay_equal():
    async with open_door() as door:
        for seed in (None, None, 5, 5, 5 - 2**63):
            await door.chat(seed=seed)
        seeds = [claim.sampling.seed for claim in door.runner.claims]
        assert seeds[0] != seeds[1]
        assert seeds[2] == seeds[3] == 5
        assert seeds[4] == 5 + 2**63


async def test_ignore_eos_runs_to_the_limit_where_the_operator_allows_it():
    async with open_door() as door:
        door.play("ab", [MARKS.eos], "cd", [MARKS.eos] * 90)
        whole = await door.chat(ignore_eos=True, max_tokens=20)
        assert (whole.finish, whole.json["usage"]["completion_tokens"]) == ("length", 20)
    async with open_door(allow_ignore_eos=False) as door:
        refused = await door.chat(ignore_eos=True)
        assert refused.error["param"] == "ignore_eos"
        assert refused.error["code"] == "unsupported_value"
        assert (await door.chat(ignore_eos=False)).status == 200


async def test_token_ids_are_returned_with_every_chunk_if_asked_for():
    async with open_door() as door:
        text = "é🙂 ok"
        door.play(*one_by_one(text))
        read = await door.stream(return_token_ids=True)
        assert read.chunks[0]["prompt_token_ids"] == door.runner.claims[-1].ids.tolist()
        parts = [c["choices"][0].get("token_ids") for c in read.chunks]
        assert parts[0] is None
        assert all(part for part in parts[1:-1])
        assert [i for part in parts[1:] for i in part] == ids_of(text)
        door.play(text)
        whole = await door.chat(return_token_ids=True)
        assert whole.json["choices"][0]["token_ids"] == ids_of(text)
        assert whole.json["prompt_token_ids"] == door.runner.claims[-1].ids.tolist()


async def test_cached_tokens_are_reported_in_both_vocabularies():
    async with open_door() as door:
        door.runner.n_cached = 4
        usage = (await door.chat()).json["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
        assert usage["prompt_cache_hit_tokens"] == 4
        assert usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"] - 4
        assert (await door.stream(stream_options={"include_usage": True})).usage == usage


async def test_reasoning_can_be_left_out_and_is_still_counted():
    async with open_door() as door:
        for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
            door.play("hm</think>yes")
            whole = await door.chat(enable_thinking=True, **fields)
            assert "reasoning_content" not in whole.message
            assert whole.message["content"] == "yes"
            details = whole.json["usage"]["completion_tokens_details"]
            assert details == {"reasoning_tokens": 3}


async def test_the_last_assistant_message_can_be_gone_on_with():
    async with open_door() as door:
        turns = [
            {"role": "user", "content": "Count"},
            {"role": "assistant", "content": "one, t"},
        ]
        for fields in ({"continue_final_message": True}, {}):
            if not fields:
                turns[-1]["prefix"] = True
            door.play("wo")
            whole = await door.post({"messages": turns, **fields})
            assert whole.message["content"] == "wo"
            ids = door.runner.claims[-1].ids.tolist()
            assert ids[-6:] == ids_of("one, t")
        turns[-1] = {"role": "user", "content": "x", "prefix": True}
        assert (await door.post({"messages": turns})).error["param"] == "messages[1].prefix"


async def test_a_history_with_calls_and_reasoning_in_any_spelling_is_accepted():
    async with open_door() as door:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        for reasoning in (
            {"reasoning_content": "because"},
            {"reasoning": "because"},
            {"thinking": "because"},
            {"reasoning_details": [{"type": "x"}, {"text": "because"}]},
        ):
            history = [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": [{"type": "input_text", "text": "Go"}]},
                {"role": "assistant", "content": "", "tool_calls": [call], **reasoning},
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": {"ok": True}},
            ]
            body = {"messages": history, "tools": [WEATHER], **SAYS_ON}
            assert (await door.post(body)).status == 200
            ids = door.runner.claims[-1].ids.tolist()
            prompt = b"".join(TOKENIZER.token_bytes(i) for i in ids).decode()
            assert "<think>because</think>" in prompt
            assert '<tool_result>{"ok": true}</tool_result>' in prompt
            assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.")
