"""Request bodies: bytes from a client to a JSON object, whatever the bytes are.

Owns size, encoding, nesting and the repair of lone surrogates. Does not know any field. `Intake`
works on the loop, `parse` in a worker thread: a body of 64 MiB takes it about a second.
"""

from __future__ import annotations

import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from ds4d.errors import Refused, RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp.web_request import BaseRequest

MAX_NESTING = 200  # containers inside containers; real requests need about 20
BODIES_AT_ONCE = 4  # of the largest size allowed; ordinary ones are far smaller

# Any escape of a JSON string; first a good pair, then half of one.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


class Intake:
    """Bodies on their way from the socket to a prompt: together bounded, and none may stall.

    One for all, whatever the limits become: what is under way counts against the new ones.
    """

    def __init__(self) -> None:
        self._taken = 0  # bytes, of all of them

    @asynccontextmanager
    async def body(
        self, request: BaseRequest, *, max_bytes: int, stall_s: float
    ) -> AsyncIterator[bytearray]:
        """One body, decompressed (gzip, deflate). Its bytes count until the context ends.

        Raises RequestError for one that is too large, broken or stops arriving, Refused when
        others fill the room.
        """
        if (request.content_length or 0) > max_bytes:
            raise _too_large(max_bytes)
        body, taken = bytearray(), 0
        try:
            while chunk := await _chunk(request, stall_s):
                body += chunk
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if self._taken + len(chunk) > BODIES_AT_ONCE * max_bytes:
                    raise _no_room()
                self._taken += len(chunk)
                taken += len(chunk)
            yield body
        finally:
            self._taken -= taken


async def _chunk(request: BaseRequest, stall_s: float) -> bytes:
    try:
        with anyio.fail_after(stall_s):
            return await request.content.readany()
    except TimeoutError:
        raise RequestError(
            f"The request body stopped arriving: nothing for {stall_s:.0f} s."
        ) from None
    except (HttpProcessingError, ClientError, web.RequestPayloadError) as error:
        raise RequestError("The request body does not decode as its headers promise.") from error


def parse(raw: bytes | bytearray) -> dict[str, Any]:
    """A JSON object. Integers stay integers, keys keep their order, the last duplicate wins."""
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"The body is not UTF-8: bad byte at {error.start}.") from None
    if _HALF.search(text):
        text = _ESCAPE.sub(lambda m: "\\ufffd" if m["half"] else m[0], text)
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"The body is not valid JSON: {error.msg} at character {error.pos}."
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise RequestError(f"The body holds a number that is too long: {error}.") from None
    if not isinstance(value, dict):
        raise RequestError(f"The body must be a JSON object, not {kind(value)}.")
    _check_nesting(value)
    return value


def kind(value: object) -> str:
    """The JSON word for a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def _check_nesting(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [
            v
            for container in level
            for v in (container.values() if isinstance(container, dict) else container)
            if isinstance(v, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> RequestError:
    return RequestError(f"The body nests deeper than {MAX_NESTING} levels.")


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"The body is larger than {max_bytes >> 20} MiB.", status=413)


def _no_room() -> Refused:
    return Refused(
        "Other request bodies fill the memory that is set aside for them; try again in a moment.",
        status=429,
        code="bodies_full",
        retry_after_s=1,
    )


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"The body holds {name}, which is not JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise RequestError(f"The number {text[:40]} is too large.")
    return value
