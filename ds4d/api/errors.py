"""Errors as the two protocols write them: status, headers and JSON body (spec/api.md 2.0).

Owns the words `type` and `code`. SDKs retry 408, 409, 429 and all of 5xx unless
`x-should-retry: false` forbids it, so a client's mistake is never answered with one of those.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ds4d.errors import Ds4Error, Refused, RequestError
from ds4d.events import emit

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error, ready to be written. `headers` are those that this error alone needs."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    extra: dict[str, int | str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


def problem(error: BaseException) -> Problem:
    """What a client is told about `error`. Of errors that are nobody's plan it learns no detail."""
    match error:
        case RequestError():
            status = error.status
            headers = {"x-should-retry": "false"} if status < 500 else {}
            if status == 401:
                headers["WWW-Authenticate"] = "Bearer"
            if status == 405 and "allow" in error.extra:
                headers["Allow"] = str(error.extra["allow"])
            return Problem(
                status,
                _TYPES.get(status, "invalid_request_error"),
                str(error),
                error.param,
                error.code or _CODES.get(status),
                {k: v for k, v in error.extra.items() if k != "allow"},
                headers,
            )
        case Refused():
            kind = _TYPES.get(error.status, "server_error")
            headers = {"retry-after": str(max(1, error.retry_after_s))}
            return Problem(error.status, kind, str(error), code=error.code, headers=headers)
        case _:
            text = "The server failed to answer this request; its log says why."
            return Problem(500, "server_error", text, code="internal_error")


def log_failure(log: logging.Logger, request: str, error: BaseException) -> None:
    """One line; what was not planned also leaves its traceback, at debug level."""
    if isinstance(error, Ds4Error):
        emit(log, "request.failed", req=request, reason=str(error))
    else:
        emit(log, "request.error", level=logging.ERROR, req=request, reason=repr(error))
        log.debug("request.error traceback", exc_info=error)


def openai_body(p: Problem) -> bytes:
    error: dict[str, Any] = {"message": p.message, "type": p.type, "param": p.param, "code": p.code}
    return msgspec.json.encode({"error": error | p.extra})


def anthropic_body(p: Problem, request_id: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(p.status, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": p.message}
    return msgspec.json.encode(
        {"type": "error", "error": error | p.extra, "request_id": request_id}
    )


def unsupported(message: str, param: str) -> RequestError:
    """A known field, or a value of one, that this server does not carry out."""
    return RequestError(message, param=param, code="unsupported_value")


def too_long(
    n_prompt: int, n_ctx: int, max_tokens: int, param: str, *, at_least: bool = False
) -> RequestError:
    """The words are those that agents look for when they decide to compact."""
    room = n_ctx - n_prompt
    more = f", which leaves {room} for an answer of {max_tokens}" if room > 0 else ""
    return RequestError(
        f"This model's maximum context length is {n_ctx} tokens. However, your prompt has "
        f"{'at least ' if at_least else ''}{n_prompt} tokens{more}. Please shorten the {param}.",
        param=param,
        code="context_length_exceeded",
        extra={"n_prompt_tokens": n_prompt, "n_ctx": n_ctx},
    )
