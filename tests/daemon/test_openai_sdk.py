"""The openai Python SDK against the door, with scripted tokens and with a whole runner."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import openai
import pytest

from ds4d.api.chat import Served
from ds4d.api.server import Server
from ds4d.config import Api
from ds4d.errors import DeviceError
from ds4d.prompt import render
from ds4d.prompt.ask import Ask, Message
from ds4d.sched.runner import Runner
from tests.daemon.script_runner import (
    CONSTANTS,
    INFO,
    TOKENIZER,
    block_text,
    call_text,
    one_by_one,
    open_door,
)
from tests.fakes import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["a"],
            },
        },
    }
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


async def test_the_sdk_streams_a_chat_with_reasoning_and_usage():
    async with open_door(keepalive_s=0.05) as door, client_of(door.url) as client:
        door.play(0.12, *one_by_one("Why not?</think>Hello, wörld 🙂."))
        stream = await client.chat.completions.create(
            model="ds4-tiny",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
            reasoning_effort="low",
        )
        content = reasoning = ""
        finishes, usage = [], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                finishes += [choice.finish_reason] if choice.finish_reason else []
        assert (content, reasoning, finishes) == ("Hello, wörld 🙂.", "Why not?", ["stop"])
        assert usage.completion_tokens_details.reasoning_tokens == 9
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_the_sdk_makes_a_tool_call_round_trip(stream):
    async with open_door() as door, client_of(door.url) as client:
        door.play(*one_by_one("Adding." + block_text(call_text("add", a=7, note='say "hi"\n')), 3))
        first = {"model": "ds4-tiny", "messages": HI, "tools": TOOLS}
        if stream:
            async with client.chat.completions.stream(**first) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**first)).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 7, "note": 'say "hi"\n'}
        door.play("It is 7.")
        answer = await client.chat.completions.create(
            model="ds4-tiny",
            messages=[
                *HI,
                message.model_dump(exclude_none=True, exclude={"parsed"}),
                {"role": "tool", "tool_call_id": call.id, "content": "7"},
            ],
            tools=TOOLS,
        )
        assert answer.choices[0].message.content == "It is 7."
        prompt = b"".join(TOKENIZER.token_bytes(i) for i in door.runner.claims[-1].ids.tolist())
        assert call_text("add", a=7, note='say "hi"\n').encode().rstrip() in prompt
        assert b"<tool_result>7</tool_result>" in prompt


async def test_the_sdk_raises_what_the_door_reports():
    async with open_door() as door, client_of(door.url) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=HI, n=3)
        assert (caught.value.param, caught.value.code) == ("n", "unsupported_value")
        door.play("abc", DeviceError("gone"))
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="failed to answer"):
            async for _ in stream:
                pass


async def test_a_stream_that_the_sdk_closes_stops_the_work():
    async with open_door() as door, client_of(door.url) as client:
        door.play(*["x", 0.01] * 2000)
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        n = 0
        async for chunk in stream:
            n += bool(chunk.choices[0].delta.content)
            if n == 3:
                break
        await stream.close()
        with anyio.fail_after(3):
            while door.runner.busy():
                await anyio.sleep(0.01)
        assert [ticket for ticket, _ in door.runner.left] == [1]
        assert door.runner.n_emitted < 100


# A whole runner: scheduler, engine thread, lanes


@asynccontextmanager
async def whole_daemon(**options) -> AsyncIterator[tuple[str, FakeEngine, Runner]]:
    engine = FakeEngine(n_vocab=TOKENIZER.n_vocab, eos_every=0, **options)
    runner = Runner(lambda report: (engine, engine.capacity))
    server = Server(Api(listen=("127.0.0.1:0",), keepalive_s=0.1), runner)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.run)
        await tasks.start(runner.run)
        info = replace(INFO, n_ctx=runner.n_ctx)
        server.serve_model(Served(info=info, tokenizer=TOKENIZER, constants=CONSTANTS))
        ((host, port),) = server.addresses
        yield f"http://{host}:{port}", engine, runner
        tasks.cancel_scope.cancel()


async def ask(client: openai.AsyncOpenAI, text: str, **fields):
    return await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": text}], max_tokens=24, **fields
    )


async def test_eight_clients_at_once_get_what_each_gets_alone():
    async with whole_daemon(lanes=3) as (url, engine, _), client_of(url) as client:
        texts = [f"question {n}" * (n + 1) for n in range(8)]
        alone = [(await ask(client, text)).choices[0].message.content for text in texts]
        together: dict[str, str] = {}

        async def one(text: str) -> None:
            together[text] = (await ask(client, text)).choices[0].message.content

        async with anyio.create_task_group() as tg:
            for text in texts:
                tg.start_soon(one, text)
        assert [together[text] for text in texts] == alone
        assert len(set(alone)) == 8
        assert max(len(cohort) for cohort in engine.cohorts) == 3


async def test_a_seeded_sample_is_repeated_and_a_follow_up_turn_reuses_the_prefix():
    async with whole_daemon() as (url, _, _), client_of(url) as client:
        fields = {"temperature": 1, "seed": 11}
        first, again = [await ask(client, "x" * 700, **fields) for _ in range(2)]
        other = await ask(client, "x" * 700, temperature=1, seed=12)
        text = first.choices[0].message.content
        assert again.choices[0].message.content == text
        assert other.choices[0].message.content != text
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        assert again.usage.prompt_tokens_details.cached_tokens > 600
        follow = [
            {"role": "user", "content": "x" * 700},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "more"},
        ]
        more = await client.chat.completions.create(model="m", messages=follow, max_tokens=2)
        assert more.usage.prompt_tokens_details.cached_tokens > 600


async def test_an_engine_that_wants_to_end_at_once_has_to_say_something_first():
    async with whole_daemon() as (url, engine, _), client_of(url) as client:
        asked = Ask(messages=(Message(role="user", blocks=("Hi",)),))
        prompt = render.tokenize(render.render(asked, CONSTANTS), TOKENIZER).ids
        engine.say(prompt, [TOKENIZER.markers.eos])
        answer = await client.chat.completions.create(model="m", messages=HI, max_tokens=3)
        assert answer.usage.completion_tokens > 0
        assert answer.usage.prompt_tokens == len(prompt)


async def test_a_client_that_leaves_in_prefill_or_decode_gives_its_lane_back():
    options = {"lanes": 1, "delay_token_s": 2e-3, "delay_step_s": 5e-3}
    async with whole_daemon(**options) as (url, engine, runner), client_of(url) as client:
        for text in ("x" * 2000, "short"):
            with anyio.move_on_after(0.3):
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": text}], max_tokens=4000
                )
            with anyio.fail_after(5):
                while any(runner.n_open()):
                    await anyio.sleep(0.005)
        assert engine.n_prefilled < 2000
        assert (await ask(client, "next")).choices[0].finish_reason == "length"
