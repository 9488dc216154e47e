"""Who is at the other end of a connection, and what that one may do (spec/serving.md 4.1).

The kernel says who connected; the file's mode has said already who may. Knows no method.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ds4d.control.listen import Door, Name
    from ds4d.wire import Role

RANK: Final[dict[Role, int]] = {"monitor": 0, "admin": 1, "service": 2}

_SO_PEERGROUPS = 59  # asm-generic/socket.h; the socket module does not name it
_BUFFER = 1024  # bytes, the most that `getsockopt` takes: 256 groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    pid: int
    uid: int
    groups: frozenset[int]  # as they were when it connected
    role: Role

    def may(self, role: Role) -> bool:
        return RANK[self.role] >= RANK[role]


def peer_of(sock: socket.socket, door: Name, service_uids: frozenset[int]) -> Peer:
    """`sock` is a connection that `door` has accepted."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    role: Role = "admin" if door == "control" else "monitor"
    if uid in service_uids:
        role = "service"
    return Peer(pid=pid, uid=uid, groups=frozenset({gid, *_groups(sock)}), role=role)


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """The supplementary ones; none when the kernel does not say, or there are too many."""
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _BUFFER)
    except OSError:
        return ()
    return struct.unpack(f"{len(found) // 4}I", found)


def who_may(role: Role, peer: Peer, doors: Sequence[Door]) -> str:
    """What `peer`, who lacks `role`, can do about it: half a sentence."""
    control = next(door for door in doors if door.name == "control")
    users = f"root and user {control.user}" if control.user not in ("", "root") else "root"
    if role == "service":
        return f"only {users} may do that"
    if control.gid is not None and control.gid in peer.groups:
        return f"use {control.path}, which you may open as a member of group {control.group}"
    if control.group is not None:
        return f"use {control.path}, which {users} and members of group {control.group} may open"
    return f"use {control.path}, which {users} may open"
