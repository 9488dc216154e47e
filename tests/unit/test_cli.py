"""The command line: verbs, exit codes, one sentence on stderr."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest

from ds4d import __version__, cli, config, events, program
from ds4d.errors import ConfigError, DeviceError, MemoryRefusedError, TemporaryError


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """No test reads or writes what the user has."""
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


def test_the_version_is_printed_by_the_module_too():
    done = subprocess.run(
        [sys.executable, "-m", "ds4d", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ds4d {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "VERB"),
        (["fly"], "fly"),
        (["serve", "--sett", "x"], "--sett"),
        (["serve", "extra"], "extra"),
        (["model"], "VERB"),
        (["model", "inspect"], "FILE"),
        (["model", "use"], "NAME; `ds4d model use --help`"),
        (["config"], "VERB; `ds4d config --help`"),
        (["config", "init", "--profile", "huge"], "huge"),
        (["config", "init", "--prof", "lean"], "--prof lean; `ds4d config init --help`"),
        (["bench", "--steps", "no"], "'no' is not a count of at least 1; `ds4d bench --help`"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_64(capsys, argv, says):
    assert cli.main(argv) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ds4d: ")
    assert err.count("\n") == 1
    assert says in err


def test_help_lists_every_setting_with_what_it_takes(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for name, key in config.KEYS.items():
        assert f"\n  {name}\n" in out
        assert f"Takes {key.expected}. Default: " in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_bad_settings_are_told_line_by_line_with_exit_78(capsys):
    argv = ["serve", "--set", "lanes.max=0", "--set", "x.y=1", "--listen", "nowhere"]
    assert cli.main(argv) == 78
    err = capsys.readouterr().err
    assert "lanes.max: too small" in err
    assert "x.y: no such setting" in err
    assert cli.main(["serve", "--listen", "nowhere"]) == 78
    assert capsys.readouterr().err == (
        "ds4d: command line: api.listen: not an address (got nowhere, expected host:port)\n"
    )
    assert cli.main(["serve", "--profile", "huge"]) == 78
    assert "profile: not known (got huge, expected one of cpu-tiny, " in capsys.readouterr().err


def test_inspect_of_a_file_that_is_no_model_is_one_sentence(capsys, tmp_path):
    for content in (None, b"", b"GGUX" + bytes(60)):
        file = tmp_path / "m.gguf"
        if content is not None:
            file.write_bytes(content)
        assert cli.main(["model", "inspect", str(file)]) == 78
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "m.gguf" in err
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (TemporaryError("the port is in use"), 75, "ds4d: the port is in use\n"),
        (MemoryRefusedError("too big"), 71, "ds4d: too big\n"),
        (
            ExceptionGroup("a", [ValueError("x"), ExceptionGroup("b", [DeviceError("gone")])]),
            70,
            "ds4d: gone\n",
        ),
    ],
)
def test_an_error_becomes_its_sentence_and_its_exit_code(monkeypatch, capsys, error, code, says):
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err == says


# Faults of our own


def crashes(home):
    return sorted((home / "state" / "ds4d").glob("crash-*.txt"))


def fail(argv):
    raise KeyError("k")


def test_a_fault_is_one_sentence_and_its_traceback_a_private_file(monkeypatch, capsys, home):
    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["model", "list"]) == 70
    (kept,) = crashes(home)
    assert capsys.readouterr().err == (
        f"ds4d: unexpected KeyError: 'k'; its traceback is in {kept}\n"
    )
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    text = kept.read_text()
    assert text.startswith(f"ds4d {__version__}, Python 3.")
    assert text.endswith("KeyError: 'k'\n")
    assert "in fail" in text


def test_only_the_newest_tracebacks_are_kept(monkeypatch, home):
    monkeypatch.setattr(cli, "_run", fail)
    for _ in range(program.CRASHES_KEPT + 3):
        cli.main([])
        newest = crashes(home)[-1]
    assert len(crashes(home)) == program.CRASHES_KEPT
    assert newest in crashes(home)


def test_a_fault_whose_traceback_cannot_be_kept_says_so(monkeypatch, capsys, home):
    (home / "state").write_text("a file where a folder should be")
    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main([]) == 70
    err = capsys.readouterr().err
    assert err.startswith("ds4d: unexpected KeyError: 'k'; its traceback could not be kept in ")
    assert err.count("\n") == 1


def test_under_the_journal_a_fault_is_in_the_log_too(monkeypatch, home):
    log = io.StringIO()
    events.configure("info", log, journal=True)
    directories = config.directories
    monkeypatch.setattr(config, "directories", lambda: replace(directories(), journal=True))
    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["serve"]) == 70
    assert "<3>cli.error" in log.getvalue()
    assert "<3>| KeyError: 'k'" in log.getvalue()


@pytest.mark.parametrize("argv", [["config", "init", "--file", "-"], ["config", "check"]])
def test_an_output_that_takes_nothing_is_no_fault(argv, home):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ds4d", *argv], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"ds4d: the output cannot be written: No space left on device\n"
    assert crashes(home) == []


def test_ctrl_c_is_no_fault(monkeypatch, capsys, home):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert cli.main([]) == 130
    assert (capsys.readouterr().err, crashes(home)) == ("", [])


# Settings


def test_init_writes_a_file_that_check_and_serve_can_read(capsys, home):
    file = home / "config" / "ds4d" / "ds4d.toml"
    assert cli.main(["config", "check"]) == 0
    assert capsys.readouterr().out == "no problems in the built-in values: there is no file\n"
    assert cli.main(["config", "init"]) == 0
    assert capsys.readouterr().out.startswith(f"{file} written; ")
    assert file.read_text() == config.template()
    assert os.listdir(file.parent) == ["ds4d.toml"]
    assert cli.main(["config", "check"]) == 0
    assert capsys.readouterr().out == f"no problems in {file}\n"
    assert config.load() == config.load(file=file)


def test_init_replaces_a_file_only_when_told_to(capsys, home):
    file = home / "mine.toml"
    file.write_text("# mine\n")
    file.chmod(0o640)
    assert cli.main(["config", "init", "--file", str(file)]) == 64
    assert capsys.readouterr().err == f"ds4d: {file} is there already; --force replaces it\n"
    assert file.read_text() == "# mine\n"
    link = home / "link.toml"
    link.symlink_to(file)
    argv = ["config", "init", "--file", str(link), "--profile", "lean", "--force"]
    assert cli.main(argv) == 0
    assert link.is_symlink()
    assert file.read_text() == config.template("lean")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_configuration_that_cannot_be_seen_is_not_taken_for_none(capsys, home):
    file = home / "config" / "ds4d" / "ds4d.toml"
    file.parent.mkdir(parents=True)
    file.symlink_to(home / "nowhere")
    assert cli.main(["config", "check"]) == 78
    assert capsys.readouterr().err == f"ds4d: {file}: cannot be read: No such file or directory\n"
    with pytest.raises(ConfigError, match="No such file"):
        config.read()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not")
def test_a_configuration_that_may_not_be_read_is_not_taken_for_none():
    code = (
        # What it needs later is imported now: the interpreter itself may lie where only root looks.
        "import os, sys, getpass, locale; from ds4d import cli; import ds4d.model.install.verbs\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "os.environ['CONFIGURATION_DIRECTORY'] = sys.argv[1]\n"
        "sys.exit(cli.main(['config', 'check']))"
    )
    with tempfile.TemporaryDirectory(prefix="ds4d-test-") as closed:  # for root alone
        done = subprocess.run(
            [sys.executable, "-c", code, closed], capture_output=True, text=True, check=False
        )
        assert done.returncode == 78
        assert f"{closed}/ds4d.toml: cannot be read: Permission denied\n" in done.stderr


def test_init_writes_to_stdout_for_a_dash(capsys, home):
    assert cli.main(["config", "init", "--file", "-", "--profile", "balanced"]) == 0
    assert capsys.readouterr().out == config.template("balanced")
    assert os.listdir(home) == []


def test_init_into_a_folder_that_is_not_there_is_one_sentence(capsys, home):
    assert cli.main(["config", "init", "--file", str(home / "no" / "x.toml")]) == 78
    err = capsys.readouterr().err
    assert err == f"ds4d: {home}/no/x.toml: cannot be written: No such file or directory\n"


def test_init_below_a_file_is_one_sentence(capsys, home):
    (home / "config").write_text("no folder")
    assert cli.main(["config", "init"]) == 78
    assert "cannot be written: " in capsys.readouterr().err


def test_check_tells_each_problem_with_file_and_line(capsys, home, monkeypatch):
    monkeypatch.setenv("DS4D__LOG__LEVEL", "loud")
    file = home / "ds4d.toml"
    file.write_text("[lanes]\nmax = 99\n[api]\nlistne = []\n")
    assert cli.main(["config", "check", str(file)]) == 78
    out, err = capsys.readouterr()
    assert out == ""
    for part in ("ds4d.toml:2: lanes.max: ", "ds4d.toml:4: api.listne: ", "DS4D__LOG__LEVEL: "):
        assert part in err
    assert cli.main(["config", "check", str(home / "none.toml")]) == 78
    assert "none.toml" in capsys.readouterr().err


# Models


def test_bad_settings_keep_models_from_being_looked_for_unless_a_folder_is_named(
    capsys, monkeypatch, home
):
    assert cli.main(["model", "list"]) == 0
    assert str(home / "state" / "ds4d" / "models") in capsys.readouterr().out
    monkeypatch.setenv("DS4D__LANES__MAX", "99")
    assert cli.main(["model", "list"]) == 78
    assert "DS4D__LANES__MAX: lanes.max: too large" in capsys.readouterr().err
    assert cli.main(["model", "list", "--dir", str(home)]) == 0
    assert capsys.readouterr().err == (
        "ds4d: the settings have problems, see `ds4d config check`\n"
    )


def test_the_help_of_a_verb_imports_no_other_verb():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from ds4d import cli\n"
            "cli.main(['config', 'init', '--file', '-'])\n"
            "sys.exit(bool({'numpy', 'ds4d.bench', 'ds4d.model'} & sys.modules.keys()))",
        ],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
