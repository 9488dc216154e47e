"""The command line: verbs, exit codes, one sentence on stderr."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds4d import __version__, cli, config
from ds4d.errors import DeviceError, MemoryRefusedError, TemporaryError


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
    lines = {line.strip() for line in capsys.readouterr().out.splitlines()}
    for name, key in config._KEYS.items():
        assert any(line.startswith(f"{name} ") and line.endswith(key.expected) for line in lines)


def test_bad_settings_are_told_line_by_line_with_exit_78(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
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
    assert "profile: not known (got huge, expected one of cpu-tiny)" in capsys.readouterr().err


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
        (KeyError("k"), 70, "ds4d: unexpected KeyError: 'k'\n"),
    ],
)
def test_an_error_becomes_its_sentence_and_its_exit_code(monkeypatch, capsys, error, code, says):
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err == says
