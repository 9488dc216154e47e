"""Manual pages and shell completion: fresh, complete, and of use."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from ds4d import cli, config, errors
from ds4d.ctl import client
from ds4d.ctl import main as ctl
from ds4d.program import INTERRUPTED

ROOT = Path(__file__).parents[2]
MAN = ROOT / "docs" / "man"
PAGES = ["ds4d.1", "ds4ctl.1", "ds4top.1", "ds4d.toml.5"]


@pytest.fixture(scope="module")
def manuals():
    loader = SourceFileLoader("manuals", str(ROOT / "ops" / "scripts" / "manuals"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_what_is_committed_is_what_the_programs_say_now(manuals):
    stale = [path for path, text in manuals.made().items() if path.read_text("utf-8") != text]
    assert not stale, "run ops/scripts/manuals"


def test_nothing_else_lies_beside_it(manuals):
    made = set(manuals.made())
    there = {p for top in (MAN, ROOT / "ops" / "completion") for p in top.rglob("*") if p.is_file()}
    assert there == made


def rendered(page: str) -> str:
    if shutil.which("man") is None:
        pytest.skip("there is no man here")
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", str(MAN / page)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "MANWIDTH": "80", "LC_ALL": "C.UTF-8"},
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_a_page_renders_without_a_warning_in_80_columns(page):
    text = rendered(page)
    assert max(map(len, text.splitlines())) <= 80
    heads = re.findall(r"^[A-Z].*$", text, re.MULTILINE)[1:]  # without the header
    assert heads[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    assert heads[-1] == "SEE ALSO"
    assert "`" not in text


def test_a_page_has_every_verb_option_and_setting(manuals):
    for page, parser in (("ds4d.1", cli.parser()), ("ds4ctl.1", ctl.parser())):
        text = rendered(page)
        for words, _, leaf in manuals.leaves(parser):
            assert re.search(rf"^       {words}\b", text, re.MULTILINE), words
            for action in leaf._actions:
                for name in action.option_strings:
                    assert re.search(rf"(?<![\w-]){name}\b", text), (words, name)
    text = rendered("ds4d.toml.5")
    for name in config.KEYS:
        assert re.search(rf"^       {name.rpartition('.')[2]}\b", text, re.MULTILINE), name


def test_a_page_has_every_exit_code():
    def codes(page: str) -> set[int]:
        text = re.search(r"^EXIT STATUS\n(.*?)^\S", rendered(page), re.MULTILINE | re.DOTALL)
        assert text is not None
        return {int(n) for n in re.findall(r"^       (\d+) ", text[1], re.MULTILINE)}

    def all_of(kind: type) -> set[type]:
        return {kind}.union(*(all_of(each) for each in kind.__subclasses__()))

    raised = {
        kind.exit_code for kind in all_of(errors.Ds4Error) if kind.__module__ == "ds4d.errors"
    }
    assert codes("ds4d.1") == raised | {0, cli.BROKEN, INTERRUPTED}
    assert codes("ds4ctl.1") == {*range(client.CONFIG_INVALID + 1), INTERRUPTED}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("ds4d ", ["serve", "model", "config", "bench"]),
        ("ds4d se", ["serve"]),
        ("ds4d config ", ["init", "check"]),
        ("ds4d config init --f", ["--file", "--force"]),
        ("ds4d serve --profile long", ["long-1m"]),
        ("ds4d serve --set lanes.m", ["lanes.max="]),
        ("ds4d model inspect FOLDER/mod", ["FOLDER/model.gguf"]),
        ("ds4d model ro", ["rollback"]),
        ("ds4ctl dr", ["drain"]),
        ("ds4ctl --json dr", ["drain"]),
        ("ds4ctl --timeout 5 log level ", ["debug", "info", "warning", "error"]),
        ("ds4ctl drain --deadline 5 --st", ["--stop"]),
        ("ds4ctl sessions --phase pre", ["prefill"]),
        ("ds4ctl --socket FOLDER/mod", ["FOLDER/model.gguf"]),
        ("ds4top --th", ["--theme"]),
    ],
)
def test_bash_completes_what_is_typed(typed, expected, tmp_path):
    (tmp_path / "model.gguf").touch()
    words = typed.replace("FOLDER", str(tmp_path)).split(" ")
    script = (
        'source "$1"; shift\n'
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))\n'
        'function_=$(complete -p "$1"); function_=${function_#*-F }; ${function_%% *}\n'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    file = ROOT / "ops" / "completion" / "bash" / words[0]
    done = subprocess.run(
        ["bash", "--norc", "-u", "-c", script, "bash", str(file), *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [e.replace("FOLDER", str(tmp_path)) for e in expected]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize("program", ["ds4d", "ds4ctl", "ds4top"])
def test_other_shells_can_read_theirs(shell, program):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    name = {"zsh": f"_{program}", "fish": f"{program}.fish"}[shell]
    subprocess.run([shell, "-n", str(ROOT / "ops" / "completion" / shell / name)], check=True)
