"""`ops/scripts/install`, staged below a folder; Python and systemd are small programs of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/opt/ds4d"
UNITS = "usr/local/lib/systemd/system"

# What the script asks of Python. Each environment's pip appends its arguments to $LOG.
PYTHON = """#!/bin/bash
case "$1 $2" in
"-c import os, sys; print"*) echo "${REAL:-/usr/bin/python3}" ;;
"-c "*) exec REAL_PYTHON "$@" ;;
"-V "*) echo "Python 3.12.0" ;;
"-m venv")
    mkdir -p "$3/bin"
    echo "command = python3 -m venv $3" >"$3/pyvenv.cfg"
    cp "$0" "$3/bin/python" ;;
"-m pip")
    echo "$*" >>"$LOG"
    [ -z "$PIP_FAILS" ] || { echo "no route to host" >&2; exit 1; }
    bin=$(dirname "$0")
    mkdir -p "$bin/../lib/python3.12/site-packages"
    cp -R "${WHEEL:-/nowhere}" "$bin/../lib/python3.12/site-packages/ds4d" 2>/dev/null
    for name in ds4d ds4ctl ds4top; do echo "#!$bin/python" >"$bin/$name"; done ;;
"-m ds4d") [ "$3 $4" = "config init" ] && echo "# a template" >"$6" ;;
esac
"""
SYSTEMCTL = """#!/bin/bash
[ "$1" = --version ] && echo "systemd ${SYSTEMD:-252} (made up)" && exit
echo "systemctl $*" >>"$LOG"
"""
GETENT = """#!/bin/bash
[ "$*" = "group video" ] && echo video:x:44:
"""


@dataclass
class House:
    """A checkout, a stage and the programs that the script may call."""

    checkout: Path
    stage: Path
    tools: Path
    log: Path

    def install(
        self, *arguments: str, umask: int = 0o022, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        command = [self.checkout / "ops/scripts/install", "--root", self.stage, *arguments]
        variables = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "DS4D_PYTHON": str(self.tools / "python"),
            "LOG": str(self.log),
        }
        return subprocess.run(
            command,
            env=variables | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            umask=umask,
        )

    def done(self, *arguments: str, **environ: str) -> str:
        """What it says on both outputs."""
        done = self.install(*arguments, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def says(self, *arguments: str, code: int = 1, **environ: str) -> str:
        """The sentence with which it ends."""
        done = self.install(*arguments, **environ)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stderr.splitlines()[-1]

    def release(self, version: str) -> None:
        """The checkout becomes that of another version, units included."""
        (self.checkout / "ds4d/__init__.py").write_text(f'__version__ = "{version}"\n')
        unit = self.checkout / "ops/systemd/ds4d.service"
        text = (ROOT / "ops/systemd/ds4d.service").read_text()
        unit.write_text(text.replace("serving daemon", f"serving daemon {version}"))

    @property
    def prefix(self) -> Path:
        return self.stage / "opt/ds4d"

    def version(self, link: str) -> str:
        return os.readlink(self.prefix / link).removeprefix("versions/").rpartition("-")[0]

    def versions(self) -> list[str]:
        return sorted(path.name.rpartition("-")[0] for path in (self.prefix / "versions").iterdir())

    def unit(self) -> str:
        return (self.stage / UNITS / "ds4d.service").read_text()

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def files(self) -> dict[str, tuple[int, int]]:
        """All that lies in the stage, by what changes when somebody writes it."""
        found = {}
        for path in self.stage.rglob("*"):
            stat = path.lstat()
            found[str(path.relative_to(self.stage))] = (stat.st_ino, stat.st_mtime_ns)
        return found


@pytest.fixture
def house(tmp_path: Path) -> House:
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    for folder in ("ds4d", "tui", "ops/scripts"):
        (checkout / folder).mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    for name in ("install", "setup"):
        shutil.copy(ROOT / "ops/scripts" / name, checkout / "ops/scripts" / name)
    shutil.copytree(ROOT / "ops/systemd", checkout / "ops/systemd")
    for name in ("bash/ds4d", "zsh/_ds4d", "fish/ds4d.fish"):
        file = checkout / "ops/completion" / name
        file.parent.mkdir(parents=True)
        file.write_text(f"completion of {name}\n")
    (checkout / "docs/man").mkdir(parents=True)
    for name in ("ds4d.1", "ds4d.toml.5"):
        (checkout / "docs/man" / name).write_text(f"manual {name}\n")
    tools.mkdir()
    for name, text in (("python", PYTHON), ("systemctl", SYSTEMCTL), ("getent", GETENT)):
        (tools / name).write_text(text.replace("REAL_PYTHON", sys.executable))
        (tools / name).chmod(0o755)
    made = House(checkout, tmp_path / "stage", tools, tmp_path / "log")
    made.release("1.0.0")
    return made


# Installing


def test_everything_lies_where_systemd_man_and_shells_look(house: House) -> None:
    house.done("--yes")
    found = house.files()
    assert {
        f"{UNITS}/ds4d.service",
        f"{UNITS}/ds4d-api.socket",
        f"{UNITS}/ds4d-control.socket",
        f"{UNITS}/ds4d-monitor.socket",
        "usr/local/lib/sysusers.d/ds4d.conf",
        "usr/local/lib/tmpfiles.d/ds4d.conf",
        "usr/local/share/man/man1/ds4d.1",
        "usr/local/share/man/man5/ds4d.toml.5",
        "usr/local/share/bash-completion/completions/ds4d",
        "usr/local/share/zsh/site-functions/_ds4d",
        "usr/local/share/fish/vendor_completions.d/ds4d.fish",
        "etc/ds4d/ds4d.toml",
    } <= found.keys()
    for name in ("ds4d", "ds4ctl", "ds4top"):
        assert os.readlink(house.stage / "usr/local/bin" / name) == f"{PREFIX}/current/bin/{name}"
    assert house.version("current") == "1.0.0"


def test_a_staged_environment_names_the_place_where_it_will_be(house: House) -> None:
    house.done("--yes", "--prefix", "/srv/ds4d")
    folder = os.readlink(house.stage / "srv/ds4d/current")
    venv = house.stage / "srv/ds4d" / folder
    assert (venv / "bin/ds4d").read_text() == f"#!/srv/ds4d/{folder}/bin/python\n"
    assert str(house.stage) not in (venv / "pyvenv.cfg").read_text()
    assert "ExecStart=/srv/ds4d/current/bin/ds4d serve" in house.unit()
    assert "/opt/ds4d/" not in house.unit()


def test_staging_asks_nothing_of_the_running_system(house: House) -> None:
    house.done("--yes")
    assert [call for call in house.calls() if call.startswith("systemctl")] == []


def test_a_second_run_changes_nothing(house: House) -> None:
    house.done("--yes")
    before, calls = house.files(), house.calls()
    assert "version 1.0.0-" in house.done()  # not even a question
    assert house.files() == before
    assert house.calls() == calls


def test_a_dry_run_names_every_action_and_does_none(house: House) -> None:
    text = house.done("--dry-run")
    assert not house.stage.exists()
    assert house.calls() == []
    for part in (
        " -m venv ",
        " -m pip install ",
        "mv -T ",
        " config init ",
        f"{UNITS}/ds4d.service",
    ):
        assert part in text
    assert text.splitlines()[-1] == "ds4d: this was a dry run: nothing was changed"


def test_the_daemons_user_can_read_what_a_cautious_root_installs(house: House) -> None:
    assert house.install("--yes", umask=0o077).returncode == 0
    for path in house.stage.rglob("*"):
        if not path.is_symlink():
            wanted = 0o005 if path.is_dir() else 0o004
            assert path.stat().st_mode & wanted == wanted, path


def test_what_lies_elsewhere_is_found_again(house: House) -> None:
    house.done("--yes", "--prefix", "/srv/ds4d")
    house.release("2.0.0")
    house.done("--yes")
    assert len(list((house.stage / "srv/ds4d/versions").iterdir())) == 2
    assert not house.prefix.exists()
    house.done("uninstall")
    assert not (house.stage / "srv/ds4d").exists()
    assert not (house.stage / "usr/local/bin/ds4d").is_symlink()


def test_settings_that_are_there_stay(house: House) -> None:
    settings = house.stage / "etc/ds4d/ds4d.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('log.level = "debug"\n')
    house.done("--yes")
    assert settings.read_text() == 'log.level = "debug"\n'


def test_a_command_of_somebody_else_stays(house: House) -> None:
    other = house.stage / "usr/local/bin/ds4top"
    other.parent.mkdir(parents=True)
    other.write_text("another program\n")
    assert "ds4top is not ours and stays" in house.done("--yes")
    assert other.read_text() == "another program\n"
    house.done("uninstall")
    assert other.exists()


def test_without_manuals_and_completion_it_says_so(house: House) -> None:
    shutil.rmtree(house.checkout / "docs")
    shutil.rmtree(house.checkout / "ops/completion")
    text = house.done("--yes")
    assert "no manual pages here: skipped" in text
    assert "no shell completion here: skipped" in text


def test_the_program_can_be_somebody_elses(house: House) -> None:
    text = house.done("--no-venv")
    assert house.calls() == []
    assert not house.prefix.exists()
    assert "ds4d.toml is left to the package" in text
    assert (house.stage / UNITS / "ds4d.service").exists()
    theirs = house.prefix / "current"
    theirs.mkdir(parents=True)
    house.done("uninstall", "--no-venv")
    assert not (house.stage / UNITS / "ds4d.service").exists()
    assert theirs.exists()


# Downloads


def test_nothing_is_downloaded_without_a_yes(house: House) -> None:
    done = house.install()
    assert done.returncode == 1
    size, question = done.stderr.splitlines()
    assert "115 MB to download, 420 MB on disk" in size
    assert question == "ds4d: download them? There is no terminal to answer at: say --yes"
    assert not house.stage.exists()
    assert house.calls() == []


def test_a_wheelhouse_is_all_that_pip_may_use(house: House, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert "has no ds4d-1.0.0-*.whl; to fill it: pip wheel" in house.says(
        "--wheelhouse", str(wheels)
    )
    (wheels / "ds4d-1.0.0-py3-none-any.whl").touch()
    sources = str(house.checkout / "ds4d")
    house.done("--wheelhouse", str(wheels), WHEEL=sources)  # and nothing to ask
    (call,) = house.calls()
    assert call.endswith(f"--no-index --find-links {wheels} ds4d==1.0.0")


def test_a_wheel_of_other_sources_with_the_same_version_is_refused(
    house: House, tmp_path: Path
) -> None:
    wheels, other = tmp_path / "wheels", tmp_path / "other"
    wheels.mkdir()
    (wheels / "ds4d-1.0.0-py3-none-any.whl").touch()
    shutil.copytree(house.checkout / "ds4d", other)
    (house.checkout / "ds4d/new.py").touch()
    done = house.install("--wheelhouse", str(wheels), WHEEL=str(other))
    assert done.returncode == 1
    assert "was made of other sources; make it again: pip wheel --no-deps" in done.stderr
    assert not (house.prefix / "current").exists()


def test_a_download_that_fails_leaves_what_was_there(house: House) -> None:
    house.done("--yes")
    before = house.files()
    house.release("2.0.0")
    done = house.install("--yes", PIP_FAILS="1")
    assert done.returncode == 1
    assert "no route to host" in done.stderr
    assert "the packages could not be installed" in done.stderr
    after = house.files()
    del before["opt/ds4d/versions"], after["opt/ds4d/versions"]  # a folder came and went
    assert after == before


# Versions


def test_an_upgrade_keeps_the_previous_version_and_no_older_one(house: House) -> None:
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        house.release(version)
        house.done("--yes")
        assert house.version("current") == version
    assert house.version("previous") == "2.0.0"
    assert house.versions() == ["2.0.0", "3.0.0"]
    assert "serving daemon 3.0.0" in house.unit()


def test_the_same_version_with_other_sources_is_another_one(house: House) -> None:
    house.done("--yes")
    (house.checkout / "ds4d/new.py").touch()
    house.done("--yes")
    assert house.versions() == ["1.0.0", "1.0.0"]


def test_a_rollback_brings_back_units_too_and_goes_forward_again(house: House) -> None:
    house.done("--yes")
    house.release("2.0.0")
    house.done("--yes")
    for version, other in (("1.0.0", "2.0.0"), ("2.0.0", "1.0.0")):
        house.done("rollback")
        assert (house.version("current"), house.version("previous")) == (version, other)
        assert f"serving daemon {version}" in house.unit()
    assert house.versions() == ["1.0.0", "2.0.0"]


def test_a_rollback_needs_a_previous_version(house: House) -> None:
    house.done("--yes")
    assert house.says("rollback").endswith("there is no version to go back to")


def test_what_an_interrupted_attempt_left_is_made_anew(house: House) -> None:
    house.done("--yes")
    (house.prefix / "current/.complete").unlink()
    (house.prefix / "current/bin/ds4d").unlink()
    house.done("--yes")
    assert (house.prefix / "current/bin/ds4d").exists()
    assert len(house.versions()) == 1


# Drop-ins


@pytest.mark.parametrize(("systemd", "n"), [("252", 0), ("253", 1), ("255", 2)])
def test_what_only_newer_systemds_know_goes_to_them_alone(
    house: House, systemd: str, n: int
) -> None:
    house.done("--yes", SYSTEMD=systemd)
    assert len(list((house.stage / UNITS).glob("ds4d.service.d/10-systemd-*.conf"))) == n


def test_an_older_systemd_is_told_of(house: House) -> None:
    assert "this systemd is older than 252" in house.done("--yes", SYSTEMD="249")


def test_a_drop_in_is_renewed_by_upgrades(house: House) -> None:
    house.done("--yes", "--drop-in", "lean")
    lean = house.stage / UNITS / "ds4d.service.d/50-lean.conf"
    assert "DS4D__PROFILE=lean" in lean.read_text()
    (house.checkout / "ops/systemd/drop-ins/lean.conf").write_text("[Service]\nNice=1\n")
    house.done("--yes")
    assert lean.read_text() == "[Service]\nNice=1\n"
    assert not lean.with_name("50-gpu.conf").exists()


def test_the_unit_names_no_group_that_does_not_exist(house: House) -> None:
    house.done("--yes", "--drop-in=gpu")
    text = (house.stage / UNITS / "ds4d.service.d/50-gpu.conf").read_text()
    groups = [line for line in text.splitlines() if line.startswith("SupplementaryGroups=")]
    assert groups == ["SupplementaryGroups=video"]


# Removing


def test_uninstalling_keeps_settings_and_data(house: House) -> None:
    house.done("--yes", "--drop-in", "lean")
    model = house.stage / "var/lib/ds4d/models/model.gguf"
    model.parent.mkdir(parents=True)
    model.touch()
    text = house.done("uninstall")
    left = {name for name in house.files() if (house.stage / name).is_file()}
    assert left == {"etc/ds4d/ds4d.toml", "var/lib/ds4d/models/model.gguf"}
    assert "These stay: /etc/ds4d /var/lib/ds4d, the user ds4d" in text  # what is there, no more
    assert "to delete them too: ops/scripts/install uninstall --purge --yes" in text
    assert not house.prefix.exists()


def test_purging_needs_a_yes(house: House) -> None:
    house.done("--yes")
    before = house.files()
    assert "say --yes if you mean it" in house.says("uninstall", "--purge")
    assert house.files() == before
    house.done("uninstall", "--purge", "--yes")
    assert [name for name in house.files() if (house.stage / name).is_file()] == []


def test_a_purge_also_takes_what_systemctl_has_written_about_the_units(house: House) -> None:
    """A mask that stays would keep the door of the next installation shut."""
    house.done("--yes")
    etc = house.stage / "etc/systemd/system"
    (etc / "ds4d-control.socket.d").mkdir(parents=True)
    (etc / "ds4d-control.socket.d/override.conf").touch()
    (etc / "ds4d-api.socket").symlink_to("/dev/null")
    (house.stage / "run/ds4d").mkdir(parents=True)
    assert "/etc/systemd/system/ds4d-api.socket " in house.done("uninstall")
    house.done("uninstall", "--purge", "--yes")
    assert list(etc.iterdir()) == []
    assert not (house.stage / "run/ds4d").exists()


def test_uninstalling_twice_is_no_error(house: House) -> None:
    house.done("uninstall")
    house.done("uninstall")


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prefix", "opt"], "--prefix opt: expected an absolute path, and not /"),
        (["--prefix", "/"], "--prefix /: expected an absolute path, and not /"),
        (["--prefix", "/a/../b"], "--prefix /a/../b: expected a path without . and .."),
        (["--prefix", "/a b"], "--prefix /a b: expected letters, digits and / . _ + - only"),
        (["--prefix"], "--prefix needs a value"),
        (["--drop-in", "x"], "there is no drop-in x (expected one of gpu lean long-1m journal)"),
        (["--quick"], "there is no option --quick"),
        (["remove"], "there is no verb remove"),
        (["--purge"], "--purge goes with uninstall"),
    ],
)
def test_a_wrong_command_line_gets_a_sentence(
    house: House, arguments: list[str], sentence: str
) -> None:
    said = house.says(*arguments, code=64)
    assert said == f"ds4d: {sentence}; ops/scripts/install --help lists what there is"
    assert not house.stage.exists()


def test_a_python_in_a_home_directory_is_refused(house: House) -> None:
    """ProtectHome=yes would hide it from the service."""
    said = house.says("--yes", REAL="/home/alice/.pyenv/versions/3.12.0/bin/python3.12")
    assert "may not look into home directories, where /home/alice/.pyenv" in said
    assert "name another Python in DS4D_PYTHON" in said


def test_without_a_suitable_python_it_says_which_ones_are(house: House) -> None:
    said = house.says("--yes", DS4D_PYTHON="/nowhere/python")
    assert said.startswith("ds4d: no Python 3.11, 3.12 or 3.13 found")


def test_without_systemd_there_is_another_way(house: House) -> None:
    (house.tools / "systemctl").unlink()
    for name in ("bash", "dirname", "env", "cat", "sed", "readlink"):
        (house.tools / name).symlink_to(shutil.which(name) or "")
    assert "ops/scripts/run serves without it" in house.says(PATH=str(house.tools))


@pytest.mark.parametrize("script", ["ops/scripts/install", ".ci/run"])
def test_shellcheck_finds_nothing(script: str) -> None:
    places = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it comes with our tools
    shellcheck = shutil.which("shellcheck", path=places)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        [shellcheck, "--external-sources", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
