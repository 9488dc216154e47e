"""Forms of texts: addresses, host names, origins, modes of sockets. Knows no key."""

from __future__ import annotations

import re
from typing import Final

from ds4d.config.values import Like


def host_and_port(listen: str) -> tuple[str, int]:
    """`"127.0.0.1:30007"` or `"[::1]:30007"` taken apart. Raises ValueError."""
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", listen, re.ASCII)
    if parts is None or int(parts[3]) > 65_535:
        raise ValueError(listen)
    return parts[1] or parts[2], int(parts[3])


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def _is_address(text: str) -> bool:
    try:
        host_and_port(text)
    except ValueError:
        return False
    return True


def _is_host(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", text) is not None


def _is_origin(text: str) -> bool:
    return re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", text) is not None


def _is_mode(text: str, *, never: int) -> bool:
    """Octal digits that let the owner read and write, and nobody do what is in `never`."""
    if re.fullmatch("0?[0-7]{3}", text, re.ASCII) is None:
        return False
    mode = int(text, 8)
    return mode & 0o600 == 0o600 and not mode & never


ADDRESS: Final = Like("host:port", _is_address, problem="not an address")
HOST: Final = Like("a host name without a port", _is_host, problem="not a host name")
ORIGIN: Final = Like("* or scheme://host[:port], no path", _is_origin, problem="not an origin")

# Whoever may write to a socket may connect to it.
CONTROL_MODE: Final = Like(
    'octal digits, read and write for the owner and perhaps the group, such as "0660"',
    lambda text: _is_mode(text, never=0o117),
    problem="not allowed",
)
MONITOR_MODE: Final = Like(
    'octal digits, read and write for the owner and perhaps others, such as "0666"',
    lambda text: _is_mode(text, never=0o111),
    problem="not allowed",
)
