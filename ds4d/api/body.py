"""Request bodies: bytes from a client to a JSON object, whatever the bytes are.

Owns size, encoding, nesting and the repair of lone surrogates. Does not know any field. `read`
runs on the loop, `parse` in a worker thread: a body of 64 MiB takes it about a second.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from ds4d.errors import RequestError

if TYPE_CHECKING:
    from aiohttp.web_request import BaseRequest

MAX_NESTING = 200  # containers inside containers; real requests need about 20

# Any escape of a JSON string; first a good pair, then half of one.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


async def read(request: BaseRequest, max_bytes: int) -> bytearray:
    """The body, decompressed (gzip, deflate), at most `max_bytes` long."""
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except (HttpProcessingError, ClientError, web.RequestPayloadError) as error:
        raise RequestError("The request body does not decode as its headers promise.") from error
    return body


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


def _no_constant(name: str) -> NoReturn:
    raise RequestError(f"The body holds {name}, which is not JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise RequestError(f"The number {text[:40]} is too large.")
    return value
