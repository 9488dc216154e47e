"""Who may talk to us: the Host check, keys and CORS (spec/api.md 2.0). Headers in, verdict out."""

from __future__ import annotations

import hmac
import re
import stat
from typing import TYPE_CHECKING

from ds4d.config import is_loopback
from ds4d.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ds4d.config import Api


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """The keys of `api.api_keys_file`, one a line; empty lines and `#` comments do not count."""
    if path is None:
        return ()
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path}: keys that others can read are no secret; chmod 600 {path}")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: the key file cannot be read: {error.strerror}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith(b"#"))
    if not keys:
        raise ConfigError(f"{path}: holds no key; expected one a line")
    return keys


class Guard:
    """`loopback`: only local clients can reach us, so a foreign Host is a web page's trick."""

    def __init__(self, config: Api, *, loopback: bool) -> None:
        self._keys = read_keys(config.api_keys_file)
        self._hosts = {host.lower() for host in config.allowed_hosts} if loopback else None
        self._origins = frozenset(config.cors_origins)

    def check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("Host")
        if self._hosts is None or host is None:  # no browser leaves it out
            return
        name = re.sub(r":\d*$", "", host.strip()).lower()
        if name not in self._hosts and not is_loopback(name.removeprefix("[").removesuffix("]")):
            raise RequestError(
                f"The Host {host[:100]!r} is not allowed here; api.allowed_hosts can admit it.",
                status=403,
            )

    def check_key(self, headers: Mapping[str, str]) -> None:
        if not self._keys:
            return
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = bearer or headers.get("x-api-key") or headers.get("api-key") or ""
        data = given.encode("utf-8", "surrogateescape")
        # Every key is compared (a list, not a generator): time tells nothing about them.
        if True not in [hmac.compare_digest(data, key) for key in self._keys]:
            what = "is not a key of this server" if given else "is missing"
            raise RequestError(f"The API key {what}.", status=401)

    def cors(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Headers for any response to a page of an admitted origin."""
        origin = headers.get("Origin")
        if origin is None or not (origin in self._origins or "*" in self._origins):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "x-request-id, retry-after",
            "Vary": "Origin",
        }

    def preflight(self, headers: Mapping[str, str]) -> dict[str, str]:
        allowed = self.cors(headers)
        if allowed:
            allowed["Access-Control-Allow-Methods"] = "GET, POST, OPTIONS"
            allowed["Access-Control-Max-Age"] = "600"
            # "*" would not cover Authorization.
            if wanted := headers.get("Access-Control-Request-Headers"):
                allowed["Access-Control-Allow-Headers"] = wanted
            if headers.get("Access-Control-Request-Private-Network") == "true":
                allowed["Access-Control-Allow-Private-Network"] = "true"
        return allowed
