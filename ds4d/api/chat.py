"""POST /v1/chat/completions: bytes to a claim, a ticket's events to chunks or to one answer.

Owns the OpenAI shape of both (spec/api.md 2.2, 2.3). What the fields mean is `chat_fields`, what
the tokens mean is `answer`; does not know the engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ds4d.api import body, chat_fields, errors, models, sse
from ds4d.api.answer import Answer, join
from ds4d.events import emit
from ds4d.prompt import render
from ds4d.prompt.toolcalls import CallArguments, CallStart, Content, Reader, Reasoning
from ds4d.sched.ticket import Claim, Done, Failed, Started, Stats, Token

if TYPE_CHECKING:
    from aiohttp import web

    from ds4d.api.answer import Delta
    from ds4d.api.chat_fields import Wish
    from ds4d.api.models import ModelInfo
    from ds4d.api.server import Exchange
    from ds4d.config import Api
    from ds4d.prompt.constants import Constants
    from ds4d.prompt.render import Prompt, Rendered
    from ds4d.prompt.tokenizer import Markers, Tokenizer
    from ds4d.sched.runner import Runner
    from ds4d.sched.ticket import Event, Ticket

log = logging.getLogger("ds4d.api")

PARSERS = 2  # bodies that are parsed and tokenised at once; more would starve the engine's threads
MAX_NAMED = 200  # unknown fields that the log names, each once
NEVER = -1e30  # a bias that no logit survives, and no penalty makes infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model that is served, as far as text goes."""

    info: ModelInfo
    tokenizer: Tokenizer
    constants: Constants


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a request from its beginning to its end, whatever is reloaded meanwhile."""

    config: Api
    served: Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    wish: Wish
    prompt: Prompt
    claim: Claim
    clamped: bool  # max_tokens had to shrink to what the context leaves


class Chat:
    """The endpoint. What all requests share is bounded here, over every reload."""

    def __init__(self, runner: Runner, *, loopback: bool) -> None:
        self._runner = runner
        self._loopback = loopback
        self._intake = body.Intake()
        # Threads of our own, not a limiter: aiohttp cancels through anyio's shields, and a limiter
        # would count a thread as free that is still at work for a client that has gone.
        self._parsers = ThreadPoolExecutor(PARSERS, "ds4d-parse")
        self._unknown: set[str] = set()

    def close(self) -> None:
        """No request comes any more."""
        self._parsers.shutdown(wait=False)

    async def answer(self, exchange: Exchange, terms: Terms) -> web.StreamResponse:
        prepared = await self._read(exchange, terms)
        emit(
            log,
            "request.validated",
            level=logging.DEBUG,
            req=exchange.id,
            api="chat",
            stream=prepared.wish.stream,
            prompt_tokens=len(prepared.claim.ids),
            max_tokens=prepared.claim.max_tokens,
        )
        ticket = self._runner.submit(prepared.claim)
        try:
            reply = _Reply(terms.served, prepared)
            if prepared.wish.stream:
                return await self._stream(exchange, ticket, reply, terms.config)
            return await self._whole(exchange, ticket, reply)
        except asyncio.CancelledError:
            emit(log, "client.gone", req=exchange.id, how="closed")
            raise
        finally:
            ticket.leave()  # also when this handler is cancelled: the client has gone

    async def _read(self, exchange: Exchange, terms: Terms) -> Prepared:
        """The bytes of the body live no longer than this: an answer may take minutes."""
        limit, stall_s = terms.config.max_body_mib << 20, terms.config.send_stall_s
        async with self._intake.body(exchange.request, max_bytes=limit, stall_s=stall_s) as raw:
            prepare = partial(self._prepare, raw, exchange.id, terms)
            return await asyncio.get_running_loop().run_in_executor(self._parsers, prepare)

    # In a worker thread

    def _prepare(self, raw: bytearray, label: str, terms: Terms) -> Prepared:
        served, config = terms.served, terms.config
        fields = body.parse(raw)
        self._name_unknown(fields)
        wish = chat_fields.read(fields, served.info, config, loopback=self._loopback)
        models.check_name(wish.model, served.info, config)
        rendered = render.render(wish.ask, served.constants)
        n_ctx, n_least = served.info.n_ctx, _least(rendered, served.tokenizer)
        if n_least >= n_ctx:
            raise errors.too_long(n_least, n_ctx, wish.max_tokens, "messages", at_least=True)
        prompt = render.tokenize(rendered, served.tokenizer)
        n_prompt = len(prompt.ids)
        room = n_ctx - n_prompt
        if room < 1 or room < min(wish.max_tokens, config.min_headroom):
            raise errors.too_long(n_prompt, n_ctx, wish.max_tokens, "messages")
        max_tokens = min(wish.max_tokens, room)
        claim = _claim(wish, prompt, max_tokens, label, served.tokenizer.markers)
        return Prepared(wish=wish, prompt=prompt, claim=claim, clamped=max_tokens < wish.max_tokens)

    def _name_unknown(self, fields: dict[str, Any]) -> None:
        for name in fields.keys() - chat_fields.KNOWN - self._unknown:
            if len(self._unknown) < MAX_NAMED:
                self._unknown.add(name)
                emit(log, "request.unknown_field", name=name[:80])

    # On the loop

    async def _whole(self, exchange: Exchange, ticket: Ticket, reply: _Reply) -> web.Response:
        deltas: list[Delta] = []
        while not reply.over():
            for event in await _step(ticket):
                if isinstance(event, Failed):
                    raise event.error
                deltas += reply.take(event)
                if reply.over():
                    break
        ticket.leave(reply.answer.n_tokens, outcome=reply.finish() or "left")
        reply.settle(ticket.stats)
        return exchange.json(200, reply.whole(deltas), **reply.headers())

    async def _stream(
        self, exchange: Exchange, ticket: Ticket, reply: _Reply, config: Api
    ) -> web.StreamResponse:
        stream = sse.Stream(
            exchange.request,
            exchange.headers() | reply.headers(),
            keepalive_s=config.keepalive_s,
            stall_s=config.send_stall_s,
        )
        by_step = config.stream_granularity == "step"
        await stream.open()
        async with anyio.create_task_group() as tg:
            tg.start_soon(stream.keep_alive)
            try:
                await _write(stream, ticket, reply, exchange.id, by_step=by_step)
            except sse.ReaderGone as gone:
                how, outcome = ("slow", "slow_client") if gone.stalled else ("reset", "left")
                emit(log, "client.gone", req=exchange.id, how=how, reason=str(gone))
                ticket.leave(outcome=outcome)
            finally:
                tg.cancel_scope.cancel()
        return stream.response


def _least(rendered: Rendered, tokenizer: Tokenizer) -> int:
    """Tokens that the prompt has at least: tells a hopeless one without tokenising it."""
    n_chars = sum(len(piece.text) for piece in rendered.pieces if piece.kind != "marker")
    n_markers = sum(piece.kind == "marker" for piece in rendered.pieces)
    return n_markers + -(-n_chars // tokenizer.longest)


def _claim(wish: Wish, prompt: Prompt, max_tokens: int, label: str, marks: Markers) -> Claim:
    bias = wish.sampling.bias
    if not wish.ask.tools or wish.ask.tool_choice == "none":
        # Forbidden by the sampler and not in the prompt, whose bytes stay those of `auto`.
        bias = (*((i, b) for i, b in bias if i != marks.dsml), (marks.dsml, NEVER))
    exempt = (marks.eos, marks.end_think, marks.dsml)
    return Claim(
        ids=prompt.ids,
        starts=prompt.starts,
        sampling=replace(wish.sampling, bias=bias, exempt=exempt),
        max_tokens=max_tokens,
        stop_ids=marks.stops | wish.stop_token_ids,
        min_tokens=max_tokens if wish.ignore_eos else min(wish.min_tokens, max_tokens),
        # A turn that thinks and then ends has said nothing; this covers thinking off as well.
        banned_after=(marks.end_think, tuple(sorted(marks.stops))),
        cache=wish.cache,
        priority=wish.priority,
        label=label,
    )


async def _write(
    stream: sse.Stream, ticket: Ticket, reply: _Reply, label: str, *, by_step: bool
) -> None:
    try:
        await _write_answer(stream, ticket, reply, by_step=by_step)
    except sse.ReaderGone:
        raise
    except Exception as error:  # the status is sent: only an event can still tell
        errors.log_failure(log, label, error)
        problem = errors.openai_body(errors.problem(error))
        await stream.send([b"data: %b\n\n" % problem, sse.DONE])


async def _write_answer(
    stream: sse.Stream, ticket: Ticket, reply: _Reply, *, by_step: bool
) -> None:
    while not reply.over():
        chunks: list[bytes] = []  # of one step: they leave in one write
        deltas: list[Delta] = []
        for event in await _step(ticket):
            if isinstance(event, Failed):
                await stream.send([*chunks, *reply.chunks(join(deltas))])
                raise event.error
            deltas += reply.take(event)
            if not by_step:
                chunks += reply.chunks(deltas)
                deltas = []
            if reply.over():
                break
        chunks += reply.chunks(join(deltas))
        await stream.send(chunks)
    ticket.leave(reply.answer.n_tokens, outcome=reply.finish() or "left")
    reply.settle(ticket.stats)
    await stream.send(reply.last_chunks())


async def _step(ticket: Ticket) -> list[Event]:
    """What lies ready, at least one event: the tokens of one engine step come together."""
    events = [await anext(ticket)]
    while ticket.ready:
        events.append(await anext(ticket))
    return events


class _Reply:
    """One reply in the making: the answer, its counts, and their OpenAI shape."""

    def __init__(self, served: Served, prepared: Prepared) -> None:
        wish, prompt = prepared.wish, prepared.prompt
        self.answer = Answer(
            Reader(
                served.tokenizer,
                thinking=prompt.thinking,
                tools=wish.ask.tools,
                tool_choice=wish.ask.tool_choice,
            ),
            stop=wish.stop,
            keep_stop=wish.keep_stop,
            stop_token_ids=wish.stop_token_ids,
            one_call=wish.one_call,
            show_reasoning=wish.show_reasoning,
        )
        self._prepared = prepared
        self._n_cached = 0
        self._stats: Stats | None = None
        self._role_due = True  # it goes out with the first token: benchmarks time prefill by it
        self._started = False  # a token has come
        self._ids: list[int] = []  # drawn, not yet attached to a chunk
        self._all_ids: list[int] = []
        self._frame: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": "chat.completion.chunk" if wish.stream else "chat.completion",
            "created": int(time.time()),
            "model": wish.model,
            "system_fingerprint": served.info.fingerprint,
        }

    def over(self) -> bool:
        return self.answer.finish is not None

    def headers(self) -> dict[str, str]:
        if self._prepared.clamped:
            return {"x-ds4d-max-tokens": str(self._prepared.claim.max_tokens)}
        return {}

    def take(self, event: Event) -> list[Delta]:
        match event:
            case Started():
                self._n_cached = event.n_cached
            case Token():
                self._started = True
                self._ids.append(event.id)
                self._all_ids.append(event.id)
                return self.answer.push(event.id)
            case Done():
                return self.answer.done(event)
        return []

    def settle(self, stats: Stats | None) -> None:
        """The ticket was left: these are its numbers."""
        self._stats = stats
        if stats is not None:
            self._n_cached = stats.n_cached

    # Stream

    def chunks(self, deltas: list[Delta]) -> list[bytes]:
        chunks = []
        if self._role_due and (self._started or self.over()):
            self._role_due = False
            extra = {}
            if self._prepared.wish.return_token_ids:
                extra["prompt_token_ids"] = self._prepared.prompt.ids.tolist()
            chunks.append(self._chunk({"role": "assistant", "content": ""}, extra=extra))
        chunks += [self._chunk(self._delta(delta), ids=self._take_ids()) for delta in deltas]
        return chunks

    def last_chunks(self) -> list[bytes]:
        extra: dict[str, Any] = {}
        if self._stats is not None:
            extra["timings"] = _timings(self._stats)
        last = self._chunk({}, ids=self._take_ids(), finish=self.finish(), extra=extra)
        events = [last]
        if self._prepared.wish.include_usage:
            events.append(sse.event(self._frame | {"choices": [], "usage": self._usage()}))
        return [*events, sse.DONE]

    def _take_ids(self) -> list[int]:
        ids, self._ids = self._ids, []
        return ids

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        ids: list[int] | None = None,
        finish: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        wish = self._prepared.wish
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish,
        }
        if finish is not None:
            choice["stop_reason"] = self.answer.stop_reason
        if wish.return_token_ids and ids is not None:
            choice["token_ids"] = ids
        chunk = self._frame | {"choices": [choice]} | (extra or {})
        if wish.include_usage:
            chunk["usage"] = self._usage() if wish.continuous_usage else None
        return sse.event(chunk)

    def _delta(self, delta: Delta) -> dict[str, Any]:
        match delta:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case CallStart(index, name):
                function = {"name": name, "arguments": ""}
                if self._prepared.wish.legacy:
                    return {"function_call": function}
                call_id = self.answer.call_ids[index]
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments(index, fragment):
                if self._prepared.wish.legacy:
                    return {"function_call": {"arguments": fragment}}
                return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}

    # Whole

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        wish, prompt = self._prepared.wish, self._prepared.prompt
        text = "".join(d.text for d in deltas if isinstance(d, Content))
        calls = self._calls(deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
        if prompt.thinking and wish.show_reasoning:
            message["reasoning_content"] = "".join(
                d.text for d in deltas if isinstance(d, Reasoning)
            )
        if calls and wish.legacy:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        message["refusal"] = None
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self.finish(),
            "stop_reason": self.answer.stop_reason,
        }
        whole = self._frame | {"choices": [choice], "usage": self._usage()}
        if wish.return_token_ids:
            choice["token_ids"] = self._all_ids
            whole["prompt_token_ids"] = prompt.ids.tolist()
        if self._stats is not None:
            whole["timings"] = _timings(self._stats)
        return whole

    def _calls(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        """Those that are complete: half a call must not be run."""
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            match delta:
                case CallStart(index, name):
                    function = {"name": name, "arguments": ""}
                    calls.append(
                        {
                            "id": self.answer.call_ids[index],
                            "type": "function",
                            "function": function,
                        }
                    )
                case CallArguments(index, fragment):
                    calls[index]["function"]["arguments"] += fragment
        return calls[: self.answer.n_calls]

    # Both

    def finish(self) -> str | None:
        finish = self.answer.finish
        return "function_call" if finish == "tool_calls" and self._prepared.wish.legacy else finish

    def _usage(self) -> dict[str, Any]:
        n_prompt, n_out = len(self._prepared.prompt.ids), self.answer.n_tokens
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_out,
            "total_tokens": n_prompt + n_out,
            "prompt_tokens_details": {"cached_tokens": self._n_cached},
            "completion_tokens_details": {"reasoning_tokens": self.answer.n_reasoning_tokens},
            "prompt_cache_hit_tokens": self._n_cached,
            "prompt_cache_miss_tokens": n_prompt - self._n_cached,
        }
        return usage | ({"tool_parse_failed": True} if self.answer.tool_parse_failed else {})


def _timings(stats: Stats) -> dict[str, float | int]:
    return {
        "wait_ms": round(stats.wait_ms, 1),
        "prompt_ms": round(stats.prefill_ms, 1),
        "predicted_ms": round(stats.decode_ms, 1),
        "predicted_n": stats.n_generated,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    }
