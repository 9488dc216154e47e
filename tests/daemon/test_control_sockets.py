"""Where the sockets are, who may open them, and what a dead daemon or systemd has left there."""

from __future__ import annotations

import grp
import os
import socket
import stat
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from ds4d import wire
from ds4d.config import Control
from ds4d.control.listen import Door, close_doors, open_doors
from ds4d.control.peers import Peer, who_may
from ds4d.errors import ConfigError, TemporaryError
from tests.daemon.control_house import NOBODY, control_house, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "passed.sock"))
        sock.listen(8)
        yield sock


def test_a_missing_directory_is_made_for_us_alone_and_the_files_go_in_the_end(tmp_path) -> None:
    doors = open_doors(settings(tmp_path))
    try:
        assert mode(tmp_path / "run") == 0o700
        assert [door.name for door in doors] == ["control", "monitor"]
        for door in doors:
            assert mode(tmp_path / "run" / f"{door.name}.sock") == 0o600
            assert not door.sock.get_inheritable()
    finally:
        close_doors(doors)
    assert list((tmp_path / "run").iterdir()) == []


def test_modes_are_those_of_the_settings_whatever_the_umask(tmp_path) -> None:
    before = os.umask(0o077)
    try:
        config = replace(
            settings(tmp_path), control=Control(socket_mode="0660", monitor_mode="0666")
        )
        doors = open_doors(config)
    finally:
        os.umask(before)
    assert mode(tmp_path / "run" / "control.sock") == 0o660
    assert mode(tmp_path / "run" / "monitor.sock") == 0o666
    assert doors[0].gid == (tmp_path / "run" / "control.sock").stat().st_gid
    close_doors(doors)


def test_what_a_dead_daemon_has_left_is_replaced(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "run" / "control.sock"))
        dead.listen()
    doors = open_doors(settings(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(doors[0].path)
    close_doors(doors)


@pytest.mark.parametrize("full", [False, True])
def test_a_living_daemon_is_left_alone_and_named(tmp_path, full) -> None:
    first = open_doors(settings(tmp_path))
    clients = []
    if full:
        first[0].sock.listen(0)
        for _ in range(2):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            clients.append(client)
            client.connect_ex(first[0].path)
    with pytest.raises(TemporaryError, match=r"another ds4d.*XDG_RUNTIME_DIR") as raised:
        open_doors(settings(tmp_path))
    assert first[0].path in str(raised.value)
    assert full or f"process {os.getpid()}" in str(raised.value)
    for client in clients:
        client.close()
    assert (tmp_path / "run" / "control.sock").exists()
    close_doors(first)


def test_the_first_socket_is_closed_when_the_second_cannot_be_had(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "monitor.sock").write_text("no socket")
    with pytest.raises(ConfigError, match=r"monitor\.sock: is in the way and no socket"):
        open_doors(settings(tmp_path))
    assert not (tmp_path / "run" / "control.sock").exists()
    assert (tmp_path / "run" / "monitor.sock").read_text() == "no socket"


def test_a_path_too_long_for_a_socket_says_what_to_shorten(tmp_path) -> None:
    config = settings(tmp_path, runtime=tmp_path / ("x" * 90))
    with pytest.raises(ConfigError, match=r"at most 107.*XDG_RUNTIME_DIR"):
        open_doors(config)


def test_a_directory_that_cannot_be_made_says_which_variable_names_it(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made.*XDG_RUNTIME_DIR"):
        open_doors(settings(tmp_path, runtime=tmp_path / "file" / "run"))


def test_under_systemd_the_directory_is_the_units_to_make(tmp_path) -> None:
    with pytest.raises(ConfigError, match="RuntimeDirectory="):
        open_doors(settings(tmp_path, under_systemd=True))
    assert not (tmp_path / "run").exists()


def test_a_file_that_another_daemon_has_made_since_is_not_removed(tmp_path) -> None:
    first = open_doors(settings(tmp_path))
    for door in first:
        os.unlink(door.path)
    second = open_doors(settings(tmp_path))
    close_doors(first)
    assert (tmp_path / "run" / "control.sock").exists()
    close_doors(second)


def test_a_passed_socket_is_used_and_its_file_stays(tmp_path, listening) -> None:
    config = settings(tmp_path, passed={"control": (os.dup(listening.fileno()),)})
    doors = open_doors(config)
    assert [(d.name, d.path, d.made is None) for d in doors] == [
        ("control", str(tmp_path / "passed.sock"), True),
        ("monitor", str(tmp_path / "run" / "monitor.sock"), False),
    ]
    close_doors(doors)
    assert (tmp_path / "passed.sock").exists()
    assert not (tmp_path / "run" / "monitor.sock").exists()


@pytest.mark.parametrize("what", ["tcp", "silent", "file", "closed"])
def test_a_passed_descriptor_that_will_not_do_is_refused(tmp_path, what) -> None:
    match what:
        case "tcp":
            with socket.create_server(("127.0.0.1", 0)) as sock:
                descriptor = os.dup(sock.fileno())
        case "silent":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                descriptor = os.dup(sock.fileno())
        case "file":
            descriptor = os.open(tmp_path, os.O_RDONLY)
        case "closed":
            descriptor = 999_999
    with pytest.raises(ConfigError, match="not a listening Unix stream socket"):
        open_doors(settings(tmp_path, passed={"monitor": (descriptor,)}))
    if what == "file":
        os.close(descriptor)


async def test_passed_sockets_serve_and_outlive_the_daemon(tmp_path, listening) -> None:
    """systemd holds them: who connects while nobody serves is answered by the next daemon."""
    for _ in range(2):
        config = settings(tmp_path, passed={"control": (os.dup(listening.fileno()),)})
        async with await anyio.connect_unix(tmp_path / "passed.sock") as early:
            async with control_house(tmp_path, config=config):
                assert b'"hello"' in await early.receive()


async def test_the_files_are_gone_when_the_service_has_ended(tmp_path) -> None:
    async with control_house(tmp_path) as house, house.client() as client:
        await client.call("ping")
    assert list((tmp_path / "run").iterdir()) == []


async def test_an_error_at_the_start_is_the_services_own(tmp_path) -> None:
    async with control_house(tmp_path):
        with pytest.raises(TemporaryError):
            try:
                async with control_house(tmp_path):
                    pass
            except ExceptionGroup as group:
                raise group.exceptions[0] from None


# Who may


def control_door(**more: Any) -> Door:
    fields = {"name": "control", "sock": None, "path": "/run/ds4d/control.sock", "user": "ds4d"}
    return Door(**fields | more)


@pytest.mark.parametrize(
    ("role", "door", "groups", "text"),
    [
        ("admin", {}, {5}, "use /run/ds4d/control.sock, which root and user ds4d may open"),
        ("admin", {"user": "root"}, {5}, "which root may open"),
        (
            "admin",
            {"group": "ds4d-admin", "gid": 7},
            {5},
            "which root and user ds4d and members of group ds4d-admin may open",
        ),
        (
            "admin",
            {"group": "ds4d-admin", "gid": 7},
            {5, 7},
            "which you may open as a member of group ds4d-admin",
        ),
        ("service", {"group": "ds4d-admin", "gid": 7}, {7}, "only root and user ds4d may do that"),
    ],
)
def test_who_lacks_a_role_is_told_which_socket_or_group_would_do(role, door, groups, text) -> None:
    peer = Peer(pid=1, uid=1000, groups=frozenset(groups), role="monitor")
    assert text in who_may(role, peer, [control_door(**door)])


async def test_the_kernel_says_who_connects(tmp_path) -> None:
    async with control_house(tmp_path) as house:
        for name in ("control", "monitor"):
            async with house.raw(name) as client:
                assert (await client.note("hello"))["role"] == "service"
    async with control_house(tmp_path, service_uids=NOBODY) as house:
        for name, role in (("control", "admin"), ("monitor", "monitor")):
            async with house.raw(name) as client:
                assert (await client.note("hello"))["role"] == role


async def test_a_group_that_one_is_not_in_is_told_by_its_name(tmp_path) -> None:
    foreign = next(g for g in grp.getgrall() if g.gr_gid not in {os.getgid(), *os.getgroups()})
    (tmp_path / "run").mkdir()
    try:
        os.chown(tmp_path / "run", -1, foreign.gr_gid)
    except PermissionError:
        pytest.skip("only root gives a directory to a group that it is not in")
    os.chmod(tmp_path / "run", 0o2700)  # what is made inside belongs to its group
    config = replace(settings(tmp_path), control=Control(socket_mode="0660"))
    async with control_house(tmp_path, service_uids=NOBODY, config=config) as house:
        async with house.client("monitor") as client:
            error = await client.error("lanes.set", max=1)
            assert error.code == wire.DENIED
            assert f"members of group {foreign.gr_name} may open" in error.message
