"""The fields of POST /v1/chat/completions: a JSON object to a `Wish` (spec/api.md 2.2).

Owns which fields are carried out, ignored or refused, their types and ranges, and their defaults.
Every refusal names the client's own field. Does not know token ids but as numbers, nor HTTP.
`null` is the same as absent everywhere; unknown fields are ignored.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ds4d.api.body import kind
from ds4d.api.errors import unsupported
from ds4d.api.models import ModelInfo, thinking_of
from ds4d.errors import RequestError
from ds4d.prompt.ask import Ask, Call, Effort, Message, Role, Tool, ToolChoice
from ds4d.prompt.constants import effort_level
from ds4d.sched.ticket import Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4d.config import Api

MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_BIASED = 1024

# Accepted because clients send them, without effect on the answer of this server.
IGNORED = frozenset(
    """prediction verbosity store metadata user safety_identifier service_tier prompt_cache_key
    prompt_cache_retention web_search_options cache_control skip_special_tokens
    spaces_between_special_tokens add_generation_prompt""".split()
)

# Refused, but for the values that change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "audio": (),
    "modalities": (["text"],),
    "truncate_prompt_tokens": (),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": (),
    "json_schema": (),
    "thinking_budget": (),
    "thinking_token_budget": (),
}

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "latest_reminder": "latest_reminder",
}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class _Thinking(Struct):
    type: str | None = None
    budget_tokens: Any = None


class _Reasoning(Struct):
    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Any = None


class _Output(Struct):
    effort: str | None = None
    format: Any = None


class _Template(Struct):
    thinking: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    drop_thinking: bool | None = None


class _StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Function(Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(Struct):
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class _Message(Struct):
    role: str
    content: str | list[str | dict[str, Any]] | dict[str, Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    reasoning_details: list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: _Function | None = None
    name: str | None = None
    prefix: bool | None = None


class _Tool(Struct):
    type: str | None = None
    function: dict[str, Any] | None = None


class _Body(Struct):
    messages: list[_Message] | None = None
    model: str | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    # Logits are divided by it in float32: below the bound they could leave its range.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    thinking: _Thinking | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    chat_template_kwargs: _Template | None = None
    reasoning_effort: str | None = None
    reasoning: _Reasoning | None = None
    include_reasoning: bool | None = None
    output_config: _Output | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    continue_final_message: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None


KNOWN = frozenset(_Body.__struct_fields__) | IGNORED | REFUSED.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How the client wants its answer drawn, cut and written; `ask` is what it asks.

    `max_tokens` is not yet clamped to the context; `sampling` is complete but for the ids that the
    prompt format itself bans or exempts.
    """

    model: str  # as the client wrote it; echoed
    ask: Ask
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    keep_stop: bool  # the stop string stays in the text
    stream: bool
    include_usage: bool
    continuous_usage: bool
    show_reasoning: bool
    return_token_ids: bool
    legacy: bool  # `functions`: answered as one `function_call`
    one_call: bool
    cache: bool
    priority: int


def read(fields: dict[str, Any], model: ModelInfo, config: Api, *, loopback: bool) -> Wish:
    """Raises RequestError (400) that names the field."""
    present = {name: value for name, value in fields.items() if value is not None}
    _refuse(present)
    try:
        body = msgspec.convert(present, _Body)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    if not body.messages:
        raise RequestError("messages: expected a list of at least one message", param="messages")
    name = body.model or model.name
    legacy = body.functions is not None and not body.tools
    tools = tuple(_legacy_tools(body) if legacy else _tools(body))
    thinking, effort = _thinking(body, name, model)
    keep = body.continue_final_message is True
    stream = body.stream is True
    options = body.stream_options if stream and body.stream_options else _StreamOptions()
    return Wish(
        model=name,
        ask=Ask(
            messages=tuple(_messages(body.messages, keep)),
            tools=tools,
            tool_choice=_choice(body, legacy),
            thinking=thinking,
            effort=effort,
        ),
        sampling=_sampling(body, model),
        max_tokens=_max_tokens(body, config),
        min_tokens=body.min_tokens or 0,
        ignore_eos=_ignore_eos(body, config, loopback),
        stop=_stop(body.stop),
        stop_token_ids=_stop_ids(body.stop_token_ids, model),
        keep_stop=body.include_stop_str_in_output is True,
        stream=stream,
        include_usage=options.include_usage is True,
        continuous_usage=options.continuous_usage_stats is True,
        show_reasoning=not (
            body.include_reasoning is False or (body.reasoning and body.reasoning.exclude)
        ),
        return_token_ids=True in (body.return_token_ids, body.return_tokens_as_token_ids),
        legacy=legacy,
        one_call=legacy or body.parallel_tool_calls is False,
        cache=body.cache_prompt is not False,
        priority=body.priority or 0,
    )


def _wrong(message: str) -> RequestError:
    """msgspec's "Expected `int`, got `str` - at `$.messages[3].role`" in our words."""
    what, _, path = message.partition(" - at `$")
    param = path.strip("`.").replace("[...]", "") or "body"
    what = what.replace("`", "").replace(" | null", "").replace("Expected", "expected", 1)
    return RequestError(f"{param}: {what}", param=param)


def _refuse(present: dict[str, Any]) -> None:
    for name, neutral in REFUSED.items():
        if name in present:
            value = present[name]
            if isinstance(value, dict):
                value = {k: v for k, v in value.items() if v is not None}
            if not any(type(value) is type(v) and value == v for v in neutral):
                only = " or ".join(json.dumps(v) for v in neutral)
                hint = (
                    f"{name}: only {only} is supported" if neutral else f"{name} is not supported"
                )
                raise unsupported(f"{hint} by this server.", name)


# Messages


def _messages(given: list[_Message], keep: bool) -> Iterator[Message]:
    known_calls: set[str] = set()
    for i, m in enumerate(given):
        at = f"messages[{i}]"
        role = _ROLES.get(m.role)
        if role is None:
            raise RequestError(
                f"{at}.role: expected one of {', '.join(_ROLES)}, got {m.role[:40]!r}",
                param=f"{at}.role",
            )
        last = i == len(given) - 1
        if m.prefix and not (last and role == "assistant"):
            raise RequestError(
                f"{at}.prefix: only the last message can be continued, and only an assistant's",
                param=f"{at}.prefix",
            )
        if keep and last and role != "assistant":
            raise RequestError(
                "continue_final_message: the last message is not an assistant's",
                param="continue_final_message",
            )
        calls = tuple(_calls(m, at, i)) if role == "assistant" else ()
        known_calls.update(call.id for call in calls)
        call_id = m.tool_call_id
        if m.role == "function":  # names no call; the legacy shape has one at a time
            call_id = next(
                (f"legacy_{j}" for j in reversed(range(i)) if given[j].function_call), None
            )
        elif role == "tool" and call_id and call_id not in known_calls:
            raise RequestError(
                f"{at}.tool_call_id: no earlier message holds a call {call_id[:80]!r}; "
                "send the whole history",
                param=f"{at}.tool_call_id",
                code="unknown_call_id",
            )
        yield Message(
            role=role,
            blocks=tuple(_blocks(m.content, at, role)),
            reasoning=_past_reasoning(m) if role == "assistant" else None,
            calls=calls,
            call_id=call_id if role == "tool" else None,
            prefix=last and role == "assistant" and (keep or m.prefix is True),
        )


def _blocks(content: Any, at: str, role: Role) -> Iterator[str]:
    if content is None:
        return
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        if role != "tool":
            raise RequestError(
                f"{at}.content: expected a string or an array of parts, got an object",
                param=f"{at}.content",
            )
        yield json.dumps(content, ensure_ascii=False)
    else:
        for j, part in enumerate(content):
            yield part if isinstance(part, str) else _part(part, f"{at}.content[{j}]")


def _part(part: dict[str, Any], at: str) -> str:
    key = _TEXT_PARTS.get(str(part.get("type")))
    if key is None:
        raise unsupported(
            f"{at}: a content part of type {str(part.get('type'))[:40]!r} is not supported; "
            "this model reads text.",
            f"{at}.type",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{at}.{key}: expected a string, got {kind(text)}", param=f"{at}.{key}")
    return text


def _past_reasoning(m: _Message) -> str | None:
    """Clients that have none often send an empty text; that means the same."""
    details = [d["text"] for d in m.reasoning_details or () if isinstance(d.get("text"), str)]
    return m.reasoning_content or m.reasoning or m.thinking or "".join(details) or None


def _calls(m: _Message, at: str, i: int) -> Iterator[Call]:
    for j, call in enumerate(m.tool_calls or ()):
        where = f"{at}.tool_calls[{j}]"
        if call.function is None:
            raise unsupported(f"{where}: only calls of functions are supported.", f"{where}.type")
        yield _call(call.function, call.id or f"call_{i}_{j}")
    if m.function_call is not None:
        yield _call(m.function_call, f"legacy_{i}")


def _call(function: _Function, call_id: str) -> Call:
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return Call(id=call_id, name=function.name, arguments=arguments or "{}")


# Tools


def _tools(body: _Body) -> Iterator[Tool]:
    for i, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "function"):
            raise unsupported(
                f"tools[{i}].type: {tool.type[:40]!r} is not supported; tools are functions here.",
                f"tools[{i}].type",
            )
        if tool.function is None:
            raise RequestError(
                f"tools[{i}].function: expected an object with a name", param=f"tools[{i}].function"
            )
        yield _tool(tool.function, f"tools[{i}].function")


def _legacy_tools(body: _Body) -> Iterator[Tool]:
    for i, function in enumerate(body.functions or ()):
        yield _tool(function, f"functions[{i}]")


def _tool(function: dict[str, Any], at: str) -> Tool:
    name = function.get("name")
    if not isinstance(name, str):
        raise RequestError(f"{at}.name: expected a string, got {kind(name)}", param=f"{at}.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(
            f"{at}.description: expected a string, got {kind(description)}",
            param=f"{at}.description",
        )
    if function.get("strict"):
        raise unsupported(
            f"{at}.strict: true promises arguments that follow the schema, which this version of "
            "ds4d cannot enforce yet; leave it out, and check the arguments of a call.",
            f"{at}.strict",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{at}.parameters: expected a JSON schema (an object), got {kind(parameters)}",
            param=f"{at}.parameters",
        )
    return Tool(function={k: v for k, v in function.items() if v is not None})


def _choice(body: _Body, legacy: bool) -> ToolChoice:
    param = "function_call" if legacy else "tool_choice"
    match body.function_call if legacy else body.tool_choice:
        case None | "auto":
            return "auto"
        case "none":
            return "none"
        case "required" | "any" | dict():
            raise unsupported(f"{param}: only auto and none are supported by this server.", param)
        case other:
            raise RequestError(
                f"{param}: expected auto or none, got {str(other)[:40]!r}", param=param
            )


# Thinking


def _thinking(body: _Body, name: str, model: ModelInfo) -> tuple[bool, Effort]:
    """On or off, and how much. A plain word for it goes before an effort, both before the alias."""
    template = body.chat_template_kwargs or _Template()
    reasoning = body.reasoning or _Reasoning()
    output = body.output_config or _Output()
    said = [
        _thinking_type(body.thinking),
        body.enable_thinking,
        body.think if isinstance(body.think, bool) else None,
        template.thinking,
        template.enable_thinking,
        reasoning.enabled,
    ]
    if reasoning.max_tokens is not None:
        raise unsupported("reasoning.max_tokens is not supported.", "reasoning.max_tokens")
    if output.format is not None:
        raise unsupported("output_config.format is not supported.", "output_config.format")
    if template.drop_thinking is False:
        param = "chat_template_kwargs.drop_thinking"
        raise unsupported(f"{param}: only true is supported by this server.", param)
    words = {
        "reasoning_effort": body.reasoning_effort,
        "reasoning.effort": reasoning.effort,
        "output_config.effort": output.effort,
        "chat_template_kwargs.reasoning_effort": template.reasoning_effort,
        "think": body.think if isinstance(body.think, str) else None,
    }
    param, word = next(((p, w) for p, w in words.items() if w is not None), ("", None))
    effort = model.defaults.effort
    if word is not None:
        level = _level(word, param)
        said.append(False if level is None else None)
        effort = level or effort
    if True in said:
        thinking = True
    elif False in said:
        thinking = False
    elif word is not None:
        thinking = True
    else:
        alias = thinking_of(name)
        thinking = model.defaults.thinking if alias is None else alias
    if effort == "max" and model.n_ctx < model.max_effort_ctx:
        effort = "high"
    return thinking, effort


def _thinking_type(thinking: _Thinking | None) -> bool | None:
    if thinking is None:
        return None
    if thinking.budget_tokens is not None:
        raise unsupported("thinking.budget_tokens is not supported.", "thinking.budget_tokens")
    match thinking.type:
        case None:
            return None
        case "enabled" | "adaptive":
            return True
        case "disabled":
            return False
        case other:
            raise RequestError(
                f"thinking.type: expected enabled, disabled or adaptive, got {other[:40]!r}",
                param="thinking.type",
            )


def _level(word: str, param: str) -> Effort | None:
    try:
        return effort_level(word)
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from None


# Sampling and limits


def _sampling(body: _Body, model: ModelInfo) -> Sampling:
    d = model.defaults
    seed = body.seed
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise RequestError("seed: expected an integer from -2^63 to 2^64 - 1", param="seed")
    repetition = body.repetition_penalty
    if repetition is None:
        repetition = body.repeat_penalty
    top_k = d.top_k if body.top_k is None else body.top_k
    return Sampling(
        bias=tuple(_bias(body.logit_bias or {}, model.n_vocab)),
        repetition=1.0 if repetition is None else repetition,
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        temperature=d.temperature if body.temperature is None else body.temperature,
        min_p=d.min_p if body.min_p is None else body.min_p,
        top_k=min(max(top_k, 0), model.n_vocab),
        top_p=d.top_p if body.top_p is None else body.top_p,
        seed=secrets.randbits(64) if seed is None else seed % (1 << 64),
        seeded=seed is not None,
    )


def _bias(given: dict[str, float], n_vocab: int) -> Iterator[tuple[int, float]]:
    if len(given) > MAX_BIASED:
        raise RequestError(
            f"logit_bias: expected at most {MAX_BIASED} tokens, got {len(given)}",
            param="logit_bias",
        )
    seen: set[int] = set()
    for text, value in given.items():
        token = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else n_vocab
        if token >= n_vocab or token in seen:
            raise RequestError(
                f"logit_bias: {text[:40]!r} is not a token id below {n_vocab}, given once",
                param="logit_bias",
            )
        seen.add(token)
        yield token, value


def _max_tokens(body: _Body, config: Api) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value is not None and value != -1:
            if value < 1:
                raise RequestError(f"{name}: expected an integer >= 1, got {value}", param=name)
            return value
    return config.default_max_tokens


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop: expected at most {MAX_STOPS} strings, got {len(stops)}", param="stop"
        )
    if any(len(s.encode()) > MAX_STOP_BYTES for s in stops):
        raise RequestError(f"stop: expected at most {MAX_STOP_BYTES} bytes each", param="stop")
    return stops


def _stop_ids(ids: list[int] | None, model: ModelInfo) -> frozenset[int]:
    if ids and not all(0 <= i < model.n_vocab for i in ids):
        raise RequestError(
            f"stop_token_ids: expected token ids below {model.n_vocab}", param="stop_token_ids"
        )
    return frozenset(ids or ())


def _ignore_eos(body: _Body, config: Api, loopback: bool) -> bool:
    allowed = loopback if config.allow_ignore_eos is None else config.allow_ignore_eos
    if body.ignore_eos and not allowed:
        raise unsupported("ignore_eos: only false is supported by this server.", "ignore_eos")
    return body.ignore_eos is True
