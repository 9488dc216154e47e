"""The HTTP door: sockets, routes, what all responses have in common (spec/api.md 2.0, 2.8, 2.9).

Owns which path is what, the order of checks (Host, preflight, route, key), request ids, and that
no error leaves in any form but JSON. Does not know what a chat is. The door opens before there is
a model: until `serve_model` was called, what needs one is answered 503 `model_loading`. A reload
is prepared where it may fail and applied where it can't; requests under way keep their settings.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import secrets
import socket
from time import perf_counter
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from ds4d import __version__, metrics
from ds4d.api import errors, models
from ds4d.api.chat import Chat, Terms
from ds4d.api.guard import Guard
from ds4d.config import host_and_port, is_loopback
from ds4d.errors import ConfigError, Refused, RequestError, TemporaryError
from ds4d.events import emit, tell
from ds4d.sched.runner import RETRY_LOADING_S, still_loading

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp.web_request import BaseRequest
    from anyio.abc import TaskStatus

    from ds4d.api.chat import Served
    from ds4d.config import Api
    from ds4d.sched.runner import Runner

    Methods = dict[str, Callable[["Exchange"], Awaitable[web.StreamResponse]]]

log = logging.getLogger("ds4d.api")

MAX_HEADER_BYTES = 64 << 10  # of one line; aiohttp's 8 KiB is less than some clients' metadata
CLOSE_S = 2.0  # for connections that are still busy when the door closes

_OPEN = frozenset(("", "health", "ready", "version", "metrics"))  # need no key
_NOT_BUILT: dict[str, tuple[str, ...]] = {
    "completions": ("POST",),
    "responses": ("POST",),
    "messages": ("POST",),
    "messages/count_tokens": ("POST",),
    "tokenize": ("POST",),
    "detokenize": ("POST",),
    "apply-template": ("POST",),
    "props": ("GET",),
}
_HERE = "it answers POST /v1/chat/completions and GET /v1/models"
_FOREIGN = re.compile(r"(embeddings|rerank|moderations|audio/.+|images/.+)")
_REQUEST_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_TRY = """
{name} is ready at {url}/v1; Ctrl-C stops it. From another terminal:

    curl {url}/v1/chat/completions{key} \\
         -d '{{"messages": [{{"role": "user", "content": "Hello! Who are you?"}}]}}'
"""


def tail_of(path: str) -> str:
    """A path without what clients add, double or leave out: `/v1`, `/beta`, slashes at the end."""
    return re.sub(r"^(/(v1|beta)(?=/|$))+", "", re.sub(r"/{2,}", "/", path)).strip("/")


class Exchange:
    """One request on its way through the door."""

    def __init__(self, request: BaseRequest) -> None:
        self.request = request
        self.tail = tail_of(request.path)
        self.anthropic = self.tail.startswith("messages")
        asked = request.headers.get("x-request-id", "")
        known = _REQUEST_ID.fullmatch(asked) is not None
        self.id = asked if known else f"req_{secrets.token_hex(16)}"
        self.cors: dict[str, str] = {}
        self._began = perf_counter()

    def headers(self) -> dict[str, str]:
        """Those of every response, as of now."""
        common = {
            "Server": f"ds4d/{__version__}",
            "x-request-id": self.id,
            "openai-processing-ms": str(round(1e3 * (perf_counter() - self._began))),
        }
        if self.anthropic:
            common["request-id"] = self.id
        return common | self.cors

    def json(self, status: int, value: Any, **headers: str) -> web.Response:
        return self._response(status, msgspec.json.encode(value), headers)

    def error(self, error: BaseException) -> web.Response:
        p = errors.problem(error)
        body = errors.anthropic_body(p, self.id) if self.anthropic else errors.openai_body(p)
        return self._response(p.status, body, p.headers)

    def empty(self, headers: dict[str, str]) -> web.Response:
        return web.Response(status=204, headers=self.headers() | headers)

    def _response(self, status: int, body: bytes, headers: dict[str, str]) -> web.Response:
        return web.Response(
            status=status,
            body=body,
            content_type="application/json",
            charset="utf-8",
            headers=self.headers() | headers,
        )


class Server:
    """Listens on `config.listen`, or on the sockets `passed` by the service manager. `addresses`
    are (host, port) pairs once `run` has started.

    Metrics are served here as long as only this machine can reach us, else on `metrics_listen`.
    """

    def __init__(
        self,
        config: Api,
        runner: Runner,
        *,
        passed: Sequence[int] = (),
        metrics_listen: str = "",
        exposition: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._config = config
        self._runner = runner
        self._exposition = exposition
        self._metrics_listen = metrics_listen
        self._sockets = [_passed(number) for number in passed]
        hosts = [host_and_port(where)[0] for where in config.listen]
        if self._sockets:
            hosts = [one.getsockname()[0] for one in self._sockets]
        self._hosts = hosts
        self._loopback = all(map(is_loopback, hosts))
        try:
            self._guard = self._guard_for(config)
        except ConfigError:
            for one in self._sockets:
                one.close()
            raise
        self._served: Served | None = None
        self._chat = Chat(runner, loopback=self._loopback)
        self._metrics_url = ""
        self._routes: dict[str, Methods] = {
            "": {"GET": self._root},
            "health": {"GET": self._health},
            "ready": {"GET": self._ready},
            "version": {"GET": self._version},
            "metrics": {"GET": self._metrics},
            "models": {"GET": self._models},
            "chat/completions": {"POST": self._completions},
        }

    @property
    def urls(self) -> list[str]:
        return [f"{_url(*address)}/v1" for address in self.addresses]

    def serve_model(self, served: Served) -> None:
        """From now on there is a model to talk to. The doors must be open."""
        self._adopt(self._config, self._guard, served)
        url = _url(*self.addresses[0])
        emit(log, "api.serving", model=served.info.name, url=f"{url}/v1")
        key = " -H 'Authorization: Bearer KEY'" if self._config.api_keys_file else ""
        tell(_TRY.format(name=served.info.name, url=url, key=key))

    def prepare(self, config: Api, served: Served) -> Callable[[], None]:
        """Ready everything for other settings, in any thread; what is returned applies them, on
        the loop. Raises ConfigError, for example for a key file that cannot be read."""
        guard = self._guard_for(config)
        return lambda: self._adopt(config, guard, served)

    def _guard_for(self, config: Api) -> Guard:
        """Raises ConfigError, also where a door that systemd has opened would need keys: the
        settings cannot know where that is."""
        if not (self._loopback or config.api_keys_file or config.insecure_no_auth):
            raise ConfigError(
                f"the socket from systemd ({', '.join(self._hosts)}) is reachable from other "
                "machines without a key; expected api.api_keys_file or api.insecure_no_auth = true"
            )
        return Guard(config, loopback=self._loopback)

    def _adopt(self, config: Api, guard: Guard, served: Served) -> None:
        self._config, self._guard, self._served = config, guard, served

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Open the doors, then serve until cancelled.

        Raises:
            TemporaryError: a port is taken.  ConfigError: an address that is not ours to listen on.
        """
        door, side = self._door(self._handle), self._door(self._handle_metrics)
        await door.setup()
        await side.setup()
        try:
            for one in self._sockets:
                await web.SockSite(door, one).start()
            if not self._sockets:
                for where in self._config.listen:
                    await _listen(door, where, "api.listen")
            self.addresses = [tuple(address[:2]) for address in door.addresses]
            for host, port in self.addresses:
                emit(log, "api.open", host=host, port=port)
            if self._exposition is not None and not self._loopback:
                await _listen(side, self._metrics_listen, "metrics.listen")
                self._metrics_url = f"{_url(*side.addresses[0][:2])}/metrics"
                emit(log, "metrics.open", url=self._metrics_url)
            task_status.started()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await door.cleanup()
                await side.cleanup()
            self._chat.close()

    def _door(
        self, handle: Callable[[BaseRequest], Awaitable[web.StreamResponse]]
    ) -> web.ServerRunner:
        return web.ServerRunner(
            _Door(
                handle,
                handler_cancellation=True,  # a client that leaves stops its own work
                access_log=None,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
            ),
            shutdown_timeout=CLOSE_S,
        )

    # One request

    async def _handle(self, request: BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request)
        try:
            return await self._route(exchange)
        except ConnectionError:
            raise  # nobody is left to be told
        except (RequestError, Refused) as error:
            response = exchange.error(error)
            metrics.REJECTED.labels(code=str(response.status)).inc()
            emit(
                log,
                "request.rejected",
                req=exchange.id,
                status=response.status,
                code=error.code,
                reason=str(error),
            )
        except Exception as error:
            errors.log_failure(log, exchange.id, error)
            response = exchange.error(error)
        if not request.content.is_eof():  # too large, or broken: the connection is of no more use
            response.force_close()
        return response

    async def _route(self, exchange: Exchange) -> web.StreamResponse:
        request, tail = exchange.request, exchange.tail
        exchange.cors = self._guard.cors(request.headers)
        self._guard.check_host(request.headers)
        if request.method == "OPTIONS":
            return exchange.empty(self._guard.preflight(request.headers))
        if tail not in _OPEN:
            self._guard.check_key(request.headers)
        if tail.startswith("models/"):
            methods: Methods = {"GET": self._model}
        elif _FOREIGN.fullmatch(tail):
            raise RequestError(
                f"ds4d has no {request.path[:100]}: it serves one language model; {_HERE}.",
                code="unsupported_endpoint",
            )
        elif tail in _NOT_BUILT or tail.startswith("responses/"):
            allowed = _NOT_BUILT.get(tail, ("GET", "POST", "DELETE"))
            _check_method(request.method, allowed)
            raise RequestError(
                f"{request.path[:100]} is not supported by this version of ds4d; {_HERE}.",
                status=404,
                code="unsupported_endpoint",
            )
        elif tail in self._routes:
            methods = self._routes[tail]
        else:
            raise RequestError(f"There is no {request.path[:100]}: {_HERE}.", status=404)
        _check_method(request.method, tuple(methods))
        return await methods["GET" if request.method == "HEAD" else request.method](exchange)

    async def _completions(self, exchange: Exchange) -> web.StreamResponse:
        terms = Terms(self._config, self._model_or_refuse())
        await _welcome_body(exchange.request)
        return await self._chat.answer(exchange, terms)

    async def _models(self, exchange: Exchange) -> web.Response:
        info, anthropic = self._model_or_refuse().info, _speaks_anthropic(exchange.request)
        return exchange.json(200, models.listing(info, self._config, anthropic=anthropic))

    async def _model(self, exchange: Exchange) -> web.Response:
        info, anthropic = self._model_or_refuse().info, _speaks_anthropic(exchange.request)
        name = exchange.tail.removeprefix("models/")
        return exchange.json(200, models.one(name, info, self._config, anthropic=anthropic))

    def _model_or_refuse(self) -> Served:
        if self._served is None:
            raise still_loading(self._runner.loading)
        return self._served

    async def _root(self, exchange: Exchange) -> web.Response:
        return exchange.json(200, {"name": "ds4d", "version": __version__})

    async def _version(self, exchange: Exchange) -> web.Response:
        return exchange.json(200, {"version": __version__, "name": "ds4d"})

    async def _health(self, exchange: Exchange) -> web.Response:
        """Alive and not failed; a daemon that loads or drains is both."""
        match self._runner.state:
            case "failed":
                error = {"message": "The engine has failed.", "type": "server_error"}
                return exchange.json(503, {"status": "error", "error": error})
            case "loading":
                return exchange.json(200, {"status": "loading model"})
            case "ready" | "draining" | "drained":
                return exchange.json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> web.Response:
        """Whether a request would be admitted now."""
        if self._served is not None and self._runner.would_admit():
            return exchange.json(200, {"status": "ready"})
        body: dict[str, Any] = {
            "status": "busy" if self._runner.state == "ready" else self._runner.state
        }
        if loading := self._runner.loading:
            what, fraction = loading
            body |= {"what": what, "percent": math.floor(100 * fraction)}
        return exchange.json(503, body, **{"retry-after": str(RETRY_LOADING_S)})

    async def _metrics(self, exchange: Exchange) -> web.Response:
        if self._exposition is None:
            raise RequestError("There are no metrics here.", status=404)
        if not self._loopback:
            raise RequestError(
                f"Metrics are served to this machine alone: {self._metrics_url}.", status=404
            )
        return await self._exposed(exchange)

    async def _handle_metrics(self, request: BaseRequest) -> web.StreamResponse:
        """The door of `metrics.listen`: it leads nowhere else."""
        exchange = Exchange(request)
        try:
            if exchange.tail != "metrics":
                raise RequestError("There is only /metrics here.", status=404)
            _check_method(request.method, ("GET",))
            return await self._exposed(exchange)
        except RequestError as error:
            return exchange.error(error)

    async def _exposed(self, exchange: Exchange) -> web.Response:
        assert self._exposition is not None
        headers = exchange.headers() | {"Content-Type": metrics.CONTENT_TYPE}
        return web.Response(body=await self._exposition(), headers=headers)


def _url(host: str, port: int) -> str:
    """Where a client of this machine finds us."""
    if host in ("0.0.0.0", "::"):  # every address, and so this one
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _speaks_anthropic(request: BaseRequest) -> bool:
    return "anthropic-version" in request.headers


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method in allowed or (method == "HEAD" and "GET" in allowed):
        return
    allow = ", ".join((*allowed, "HEAD") if "GET" in allowed else allowed)
    raise RequestError(f"Expected {allow} here, not {method}.", status=405, extra={"allow": allow})


async def _welcome_body(request: BaseRequest) -> None:
    """Tell a client that asks first (`Expect: 100-continue`) to send its body."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # no part of the response


def _passed(number: int) -> socket.socket:
    """A listening socket that the service manager has opened. Raises ConfigError."""
    one = socket.socket(fileno=number)
    inet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
    if not inet or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        one.close()
        raise ConfigError(
            f"the socket named api from systemd (descriptor {number}) is no listening TCP socket; "
            "expected ListenStream=HOST:PORT"
        )
    one.setblocking(False)
    return one


async def _listen(door: web.ServerRunner, where: str, key: str) -> None:
    host, port = host_and_port(where)
    try:
        await web.TCPSite(door, host, port).start()
    except socket.gaierror:
        raise ConfigError(f"{key}: no such host {host!r}; expected one of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "--listen " if key == "api.listen" else f"--set {key}="
            raise TemporaryError(
                f"{where} is in use, perhaps by another ds4d: stop that one, or listen elsewhere "
                f"({remedy}{host}:{port + 1 if 0 < port < 65_535 else 0})"
            ) from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"{key}: cannot listen on {where}: {reason}; expected an address of this machine "
            "and a port that this user may open (1024 and up)"
        ) from None


class _Door(web.Server):
    """aiohttp's low-level server, whose own errors are JSON too."""

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """Answers what never becomes a request: bytes that are not HTTP, headers beyond the limits."""

    __slots__ = ()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun; there is no way to say more")
        first_line = (message or "").strip().partition("\n")[0][:200]
        reason = f"This is not a valid HTTP request: {first_line}" if status < 500 else ""
        error = RequestError(reason, status=400) if status < 500 else exc or RuntimeError()
        emit(log, "http.error", level=logging.DEBUG, status=status, reason=repr(exc))
        response = Exchange(request).error(error)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        emit(log, "http.error", reason=repr(kw.get("exc_info") or args))
