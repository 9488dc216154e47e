"""The systemd units against what the daemon does: exit codes, times, sockets, settings."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ds4d import config, errors
from ds4d.notify import EXTENSION_S

UNITS = Path(__file__).resolve().parents[2] / "ops/systemd"
SOCKETS = sorted(UNITS.glob("*.socket"))
DROP_INS = sorted((UNITS / "drop-ins").glob("*.conf"))

Unit = dict[str, list[str]]


def read(path: Path) -> Unit:
    """Key to all its values; keys of different sections have different names here."""
    text = path.read_text().replace("\\\n", " ")
    found: Unit = {}
    for line in text.splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def seconds(unit: Unit, key: str) -> int:
    (value,) = unit[key]
    return int(value)


def tmpfiles() -> list[list[str]]:
    lines = (UNITS / "tmpfiles.conf").read_text().splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


SERVICE = read(UNITS / "ds4d.service")
SETTINGS = config.load(environ={"HOME": "/nowhere"})


def test_a_hang_ends_within_two_minutes() -> None:
    assert seconds(SERVICE, "WatchdogSec") + SETTINGS.runtime.engine_stall_s == 120


def test_systemd_waits_longer_than_a_stop_may_drain() -> None:
    assert seconds(SERVICE, "TimeoutStopSec") >= SETTINGS.runtime.stop_drain_s + 30


def test_a_start_that_hangs_ends_after_one_extension() -> None:
    assert seconds(SERVICE, "TimeoutStartSec") <= EXTENSION_S


def test_what_the_next_start_would_meet_again_is_not_restarted() -> None:
    (codes,) = SERVICE["RestartPreventExitStatus"]
    final = {errors.UsageError, errors.MemoryRefusedError, errors.ConfigError}
    assert {int(code) for code in codes.split()} == {error.exit_code for error in final}
    again = {errors.DeviceError.exit_code, errors.TemporaryError.exit_code}
    assert not again & {int(code) for code in codes.split()}


def test_an_end_for_good_closes_the_doors() -> None:
    (codes,) = SERVICE["RestartPreventExitStatus"]
    (command,) = SERVICE["ExecStopPost"]
    assert re.findall(r"exited:(\d+)", command) == ["0", *codes.split()]
    assert re.findall(r"\S+\.socket", command) == SERVICE["Sockets"][0].split()


def test_the_service_takes_all_sockets_that_there_are() -> None:
    (named,) = SERVICE["Sockets"]
    assert sorted(named.split()) == [path.name for path in SOCKETS]


@pytest.mark.parametrize("path", SOCKETS, ids=lambda path: path.stem)
def test_a_socket_has_the_name_by_which_the_daemon_takes_it(path: Path) -> None:
    unit = read(path)
    (name,) = unit["FileDescriptorName"]
    assert path.stem == f"ds4d-{name}"
    assert name in ("api", "control", "monitor")
    assert unit["Service"] == ["ds4d.service"]
    (listen,) = unit["ListenStream"]
    if name == "api":
        assert (listen,) == SETTINGS.api.listen
    else:
        assert listen == f"/run/ds4d/{name}.sock"
        assert (unit["SocketMode"], unit["SocketGroup"]) == (["0660"], ["ds4d-admin"])


def test_the_groups_that_the_units_name_are_made_by_sysusers() -> None:
    made = {line.split()[1] for line in (UNITS / "sysusers.conf").read_text().splitlines()[1:]}
    named = {SERVICE["User"][0], SERVICE["Group"][0]}
    named |= {read(path)["SocketGroup"][0] for path in SOCKETS if "SocketGroup" in read(path)}
    assert named == made
    assert "SupplementaryGroups" not in SERVICE  # video and render need not exist


def test_the_sockets_directory_is_the_daemons_before_the_sockets_are_made() -> None:
    """Else systemd would hand root's directory, and with it the control socket, to the daemon."""
    assert ["d", "/run/ds4d", "0755", "ds4d", "ds4d", "-"] in tmpfiles()
    assert SERVICE["RuntimeDirectory"] == ["ds4d"]
    assert SERVICE["RuntimeDirectoryMode"] == ["0755"]
    assert SERVICE["RuntimeDirectoryPreserve"] == ["yes"]


def test_the_state_directory_is_the_daemons_before_root_installs_a_model_in_it() -> None:
    """Else systemd would hand it over at the first start, and the model in it as well."""
    assert ["d", "/var/lib/ds4d", "0700", "ds4d", "ds4d", "-"] in tmpfiles()
    assert SERVICE["StateDirectory"] == ["ds4d"]
    assert SERVICE["StateDirectoryMode"] == ["0700"]


def test_the_unit_calls_nothing_that_a_small_system_lacks() -> None:
    """Such as kill, which is a package of its own."""
    commands = [SERVICE[key][0].lstrip("+-") for key in ("ExecReload", "ExecStopPost")]
    assert {command.split()[0] for command in commands} == {"sh"}


def test_the_door_of_an_address_that_comes_late_opens_at_boot() -> None:
    assert read(UNITS / "ds4d-api.socket")["FreeBind"] == ["yes"]


def test_kernels_can_be_compiled_and_their_figures_read() -> None:
    assert SERVICE["MemoryDenyWriteExecute"] == ["no"]
    assert SERVICE["ProcSubset"] == ["all"]


@pytest.mark.parametrize("path", DROP_INS, ids=lambda path: path.stem)
def test_settings_in_drop_ins_are_ones_that_the_daemon_knows(path: Path) -> None:
    environ = dict(one.split("=", 1) for one in read(path).get("Environment", []))
    settings = config.load(environ=environ | {"HOME": "/nowhere"})
    if "DS4D__PROFILE" in environ:
        assert settings.profile == path.stem
    if "TimeoutStopSec" in read(path):
        assert seconds(read(path), "TimeoutStopSec") >= settings.runtime.stop_drain_s + 30


def test_the_installer_offers_the_drop_ins_that_there_are() -> None:
    script = (UNITS.parent / "scripts/install").read_text()
    offered = re.search(r"^drop_in_names=\((.*)\)$", script, re.MULTILINE)
    assert offered is not None
    by_version = {"systemd-253", "systemd-254"}
    assert set(offered[1].split()) | by_version == {path.stem for path in DROP_INS}


def analyze(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for path in (UNITS / "ds4d.service", *SOCKETS):
        text = path.read_text().replace("/opt/ds4d/current/bin/ds4d", "/bin/true")
        (tmp_path / path.name).write_text(text)
    return subprocess.run(
        ["systemd-analyze", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def test_systemd_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    names = ["ds4d.service", *(path.name for path in SOCKETS)]
    done = analyze(tmp_path, "verify", "--man=no", *(f"./{name}" for name in names))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("path", DROP_INS, ids=lambda path: path.stem)
def test_systemd_understands_the_drop_ins_of_its_version(tmp_path: Path, path: Path) -> None:
    folder = tmp_path / "ds4d.service.d"
    folder.mkdir()
    (folder / path.name).write_text(path.read_text())
    if needed := re.fullmatch(r"systemd-(\d+)", path.stem):
        version = analyze(tmp_path, "--version").stdout.split()[1]
        if int(version) < int(needed[1]):
            pytest.skip(f"this systemd is {version}")
    done = analyze(tmp_path, "verify", "--man=no", "./ds4d.service")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_service_is_shut_in(tmp_path: Path) -> None:
    """The scale of `systemd-analyze security` goes from 0 to 10; up to 2 it calls a service OK."""
    done = analyze(
        tmp_path, "security", "--offline=true", "--no-pager", "--threshold=20", "ds4d.service"
    )
    assert done.returncode == 0, done.stdout[-200:]
