"""Directories, and what systemd says to a process that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds4d import config
from ds4d.errors import ConfigError

US = str(os.getpid())


def test_directories_are_systemds_else_the_users():
    user = config.directories({"HOME": "/h"})
    assert user.config == Path("/h/.config/ds4d")
    assert user.state == Path("/h/.local/state/ds4d")
    assert user.cache == Path("/h/.cache/ds4d")
    assert user.runtime == Path("/h/.local/state/ds4d/run")
    xdg = config.directories(
        {
            "HOME": "/h",
            "XDG_RUNTIME_DIR": "/run/user/1",
            "XDG_CACHE_HOME": "/c",
            "XDG_STATE_HOME": "s",
        }
    )
    assert (xdg.runtime, xdg.cache) == (Path("/run/user/1/ds4d"), Path("/c/ds4d"))
    assert xdg.state == Path("/h/.local/state/ds4d")  # a relative XDG path does not count
    relative = config.directories({"HOME": "/h", "XDG_RUNTIME_DIR": "run"})
    assert relative.runtime == user.runtime
    unit = config.directories(
        {
            "CONFIGURATION_DIRECTORY": "/etc/ds4d",
            "STATE_DIRECTORY": "/var/lib/ds4d:/var/lib/other",
            "CACHE_DIRECTORY": "/var/cache/ds4d",
            "RUNTIME_DIRECTORY": "/run/ds4d",
            "NOTIFY_SOCKET": "@systemd",
        }
    )
    assert (unit.config, unit.state) == (Path("/etc/ds4d"), Path("/var/lib/ds4d"))
    assert (user.notify, unit.notify) == (None, "@systemd")
    assert (unit.cache, unit.runtime) == (Path("/var/cache/ds4d"), Path("/run/ds4d"))


def test_sockets_come_by_name_if_they_are_for_us():
    passed = {
        "LISTEN_PID": US,
        "LISTEN_FDS": "5",
        "LISTEN_FDNAMES": "api:control:api:odd",
    }
    assert config.directories(passed).passed == {
        "api": (3, 5),
        "control": (4,),
        "odd": (6,),
        "unknown": (7,),
    }
    assert config.directories(passed | {"LISTEN_PID": "1"}).passed == {}
    assert config.directories({"LISTEN_FDS": "2"}).passed == {}
    assert config.directories({"LISTEN_PID": US, "LISTEN_FDS": "0"}).passed == {}


def test_the_watchdog_is_ours_unless_it_names_another():
    assert config.directories({"WATCHDOG_USEC": "60000000"}).watchdog_us == 60_000_000
    ours = {"WATCHDOG_USEC": "3", "WATCHDOG_PID": US}
    assert config.directories(ours).watchdog_us == 3
    assert config.directories(ours | {"WATCHDOG_PID": "1"}).watchdog_us is None
    assert config.directories({"WATCHDOG_USEC": "0"}).watchdog_us is None
    assert config.directories({"HOME": "/h"}).watchdog_us is None


@pytest.mark.parametrize("bad", ["", "-1", "x", "1.5", "9" * 30, "٣"])
@pytest.mark.parametrize("name", ["LISTEN_FDS", "WATCHDOG_USEC"])
def test_a_number_that_systemd_cannot_have_said_is_named(name, bad):
    with pytest.raises(ConfigError, match=f"^{name}: not a number that systemd sets") as caught:
        config.read(environ={"LISTEN_PID": US, "LISTEN_FDS": "0", name: bad})
    assert caught.value.problems[0][0] == name


def test_a_service_is_told_from_a_shell_below_one():
    assert config.directories({"NOTIFY_SOCKET": "/run/n"}).under_systemd
    assert config.directories({"INVOCATION_ID": "7"}).under_systemd
    assert config.directories({"INVOCATION_ID": "7", "SYSTEMD_EXEC_PID": US}).under_systemd
    assert not config.directories({"INVOCATION_ID": "7", "SYSTEMD_EXEC_PID": "1"}).under_systemd
    assert not config.directories({"NOTIFY_SOCKET": ""}).under_systemd
    assert not config.directories({"HOME": "/h"}).under_systemd


def test_the_journal_is_where_stderr_still_goes():
    stat = os.fstat(2)
    stream = f"{stat.st_dev}:{stat.st_ino}"
    assert config.directories({"JOURNAL_STREAM": stream}).journal
    assert not config.directories({"JOURNAL_STREAM": "1:2"}).journal
    assert not config.directories({"JOURNAL_STREAM": "nonsense"}).journal
    assert not config.directories({"HOME": "/h"}).journal


def test_children_do_not_inherit_what_was_said_to_us(monkeypatch, tmp_path):
    said = {
        "CONFIGURATION_DIRECTORY": str(tmp_path),
        "LISTEN_PID": US,
        "LISTEN_FDS": "0",
        "LISTEN_FDNAMES": "",
        "NOTIFY_SOCKET": "/run/n",
        "WATCHDOG_PID": US,
        "WATCHDOG_USEC": "5",
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    paths = config.read().config.paths
    assert (paths.notify, paths.watchdog_us, paths.passed) == ("/run/n", 5, {})
    assert set(said) & set(os.environ) == {"CONFIGURATION_DIRECTORY"}
    given = dict(said)
    config.read(environ=given)
    assert given == said


def test_children_do_not_inherit_the_sockets():
    code = """
import os
from ds4d import config
paths = config.read().config.paths
print(paths.passed, os.get_inheritable(3), sorted(n for n in os.environ if "LISTEN" in n))
"""
    start = 'LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=api exec "$0" -c "$1" 3</dev/null'
    done = subprocess.run(
        ["sh", "-c", start, sys.executable, code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'api': (3,)} False []\n"


def test_what_systemd_said_is_kept_when_the_settings_are_read_again(tmp_path):
    loaded = config.read(
        environ={
            "CONFIGURATION_DIRECTORY": str(tmp_path),
            "LISTEN_PID": US,
            "LISTEN_FDS": "1",
            "LISTEN_FDNAMES": "api",
            "SECRET": "not ours to keep",
        }
    )
    assert loaded.again().config.paths.passed == {"api": (3,)}
    assert loaded.environ == {}


@pytest.mark.parametrize(
    ("uid", "installed", "ours"), [(0, True, True), (0, False, False), (1000, True, False)]
)
def test_root_looks_after_the_service_where_one_is_installed(
    tmp_path: Path, uid: int, installed: bool, ours: bool
) -> None:
    if installed:
        (tmp_path / "etc/ds4d").mkdir(parents=True)
    paths = config.administered({"HOME": "/home/a"}, system=tmp_path, uid=uid)
    own = config.directories({"HOME": "/home/a"})
    assert paths.state == (tmp_path / "var/lib/ds4d" if ours else own.state)
    assert paths.config == (tmp_path / "etc/ds4d" if ours else own.config)
    asked = config.administered(
        {"HOME": "/home/a", "NOTIFY_SOCKET": "/n"}, system=tmp_path, uid=uid
    )
    assert asked.state == own.state  # the service itself is told by systemd
