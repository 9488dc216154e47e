"""`ds4d model install|verify|list|use|rollback|remove`, and what the daemon asks of a target."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from ds4d.errors import ConfigError, Ds4Error, ModelFileError, TemporaryError, UsageError
from ds4d.model import gguf, install, synth
from ds4d.model.install import drafter, manifest, verbs
from ds4d.model.install.directory import Models
from ds4d.model.install.fetch import Patience
from ds4d.model.quants import Quant, Tensor
from tests.unit.bad_server import BadServer, chunked, claiming, cut, stalling, status

TEXTS = {"effort": "Think — hard.\n\n", "tools": "## Tools\n\nCall <X> them.\n"}
BLOCKS = {
    name: (len(text.encode()), hashlib.sha256(text.encode()).hexdigest())
    for name, text in TEXTS.items()
}
ENCODER = f"EFFORT = {TEXTS['effort']!r}\nTOOLS = {TEXTS['tools']!r}\n"


def digest(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """The servers here are on loopback, whatever stands before the rest of the world."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "one.gguf", seed=1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "two.gguf", seed=2)


def make_model(path, seed):
    synth.write_model(path, synth.geometry("micro"), seed=seed)
    return path


class House:
    """A models directory and the command line upon it."""

    def __init__(self, path, capsys):
        self.path = path
        self.configured = path / "current"
        self.out = self.err = ""
        self._capsys = capsys

    def __call__(self, *argv):
        """The exit code; `out` and `err` are what was said."""
        self._capsys.readouterr()
        code = call(self.path, self.configured, *argv)
        self.out, self.err = self._capsys.readouterr()
        return code

    def fails(self, kind, says, *argv):
        with pytest.raises(kind, match=says) as error:
            self(*argv)
        assert "\n" not in str(error.value)
        self.out, self.err = self._capsys.readouterr()

    def link(self, which):
        path = self.path / which
        return os.readlink(path) if path.is_symlink() else None

    @property
    def links(self):
        return self.link("current"), self.link("previous")

    def record(self, name):
        return json.loads((self.path / name / "model.json").read_bytes())


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def call(path, configured, *argv):
    parser = Parser()
    verbs.add(parser.add_subparsers(dest="model_verb", required=True))
    return verbs.run(
        parser.parse_args([str(a) for a in argv]),
        models=path,
        blocks=BLOCKS,
        configured=configured,
        patience=Patience(attempts=4, sleep=lambda seconds: None),
    )


@pytest.fixture
def ds4d_model(tmp_path, capsys):
    return House(tmp_path / "state" / "models", capsys)


@pytest.fixture
def encoder(tmp_path):
    path = tmp_path / "encoding.py"
    path.write_text(ENCODER)
    return path


# Installing


def test_a_local_file_is_copied_checked_and_made_current(ds4d_model, one, encoder):
    assert ds4d_model("install", one, "--name", "a", "--encoder", encoder) == 0
    a = ds4d_model.path / "a"
    assert sorted(p.name for p in a.iterdir()) == ["model.json", "one.gguf", "prompt.json"]
    assert (a / "one.gguf").read_bytes() == one.read_bytes()
    assert json.loads((a / "prompt.json").read_text("utf-8")) == TEXTS
    assert ds4d_model.links == ("a", None)
    record = ds4d_model.record("a")
    assert record["sha256"] == digest(one.read_bytes())
    assert record["size"] == one.stat().st_size
    assert (record["checked"], record["against"], record["release"]) == ("nothing", None, None)
    assert record["source"] == str(one)
    assert "nothing was known to compare it with; the sha256 computed here is" in ds4d_model.out
    assert "current  yes\nnext: systemctl restart ds4d\n" in ds4d_model.out
    for path in (ds4d_model.path, *ds4d_model.path.rglob("*")):
        if not path.is_symlink() and not path.name.endswith(".lock"):
            assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_what_is_made_can_be_read_by_others_whatever_the_umask(ds4d_model, one, encoder):
    before = os.umask(0o077)
    try:
        assert ds4d_model("install", one, "--name", "a", "--encoder", encoder) == 0
    finally:
        os.umask(before)
    for path in (ds4d_model.path, *(ds4d_model.path / "a").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_a_second_model_waits_until_it_is_used(ds4d_model, one, two):
    ds4d_model("install", one)
    assert ds4d_model("install", two) == 0
    assert ds4d_model.links == ("one", None)
    assert "current  no, one is: `ds4d model use two` changes that" in ds4d_model.out
    assert ds4d_model("use", "two") == 0
    assert ds4d_model.links == ("two", "one")
    assert "two is current now, one is previous\nnext: systemctl restart" in ds4d_model.out
    assert ds4d_model("use", "two") == 0
    assert ds4d_model.links == ("two", "one")  # saying it twice loses no way back
    assert "two is current already" in ds4d_model.out


def test_rollback_swaps_and_swaps_back(ds4d_model, one, two):
    ds4d_model("install", one)
    ds4d_model.fails(UsageError, "no model is previous .*nothing to go back to", "rollback")
    ds4d_model("install", two, "--use")
    assert ds4d_model.links == ("two", "one")
    assert ds4d_model("rollback") == 0
    assert ds4d_model.links == ("one", "two")
    assert ds4d_model("rollback") == 0
    assert ds4d_model.links == ("two", "one")


@pytest.mark.parametrize("verb", ["rollback", "list", "verify", "use a", "remove a"])
def test_nothing_is_made_by_asking_a_directory_that_is_not_there(ds4d_model, verb):
    with contextlib.suppress(UsageError):
        ds4d_model(*verb.split())
    assert not ds4d_model.path.exists()


def test_where_a_daemon_serves_something_else_the_line_to_write_is_said(ds4d_model, one, tmp_path):
    ds4d_model.configured = None
    ds4d_model("install", one)
    line = f'path = "{ds4d_model.path}/current"'
    assert "ds4d serves the embedded model; for this one put into ds4d.toml" in ds4d_model.out
    assert line in ds4d_model.out
    ds4d_model.configured = tmp_path / "m.gguf"
    ds4d_model("use", "one")
    assert f"ds4d serves {tmp_path}/m.gguf" in ds4d_model.out
    assert line in ds4d_model.out


def test_models_lie_where_the_daemon_has_its_current_one(ds4d_model, one, tmp_path):
    ds4d_model.configured = tmp_path / "srv" / "current"
    assert ds4d_model("install", one) == 0
    assert (tmp_path / "srv" / "current" / "one.gguf").exists()
    assert not ds4d_model.path.exists()
    assert ds4d_model("install", one, "--dir", tmp_path / "other") == 0
    assert (tmp_path / "other" / "current" / "one.gguf").exists()
    ds4d_model.configured = None
    assert ds4d_model("install", one) == 0
    assert (ds4d_model.path / "current" / "one.gguf").exists()
    assert ds4d_model.path.parent.stat().st_mode & 0o777 == 0o700  # the daemon's own


def test_an_installed_name_is_not_installed_again(ds4d_model, one, two):
    ds4d_model("install", one, "--name", "a")
    ds4d_model.fails(UsageError, "a: is installed already", "install", two, "--name", "a")
    assert ds4d_model.record("a")["sha256"] == digest(one.read_bytes())


@pytest.mark.parametrize("name", ["current", "previous", "a/b", ".a", "a.part", "", "x" * 101])
def test_a_name_that_would_be_in_the_way_is_refused(ds4d_model, one, name):
    ds4d_model.fails(UsageError, "not a name", "install", one, "--name", name or "..")


def test_a_file_that_is_no_model_never_becomes_current(ds4d_model, one, tmp_path):
    ds4d_model("install", one)
    for content, says in (
        (b"GGUX" + bytes(99), "begins with b'GGUX"),
        (one.read_bytes()[:-200], "expected all of its data and padding inside"),
        (b"GGUF", "the file ends after 4 bytes"),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(content)
        ds4d_model.fails(ModelFileError, says, "install", bad, "--use")
        assert ds4d_model.links == ("one", None)
        assert not (ds4d_model.path / "bad").exists()
        ds4d_model("remove", "bad.part")
    assert sorted(p.name for p in ds4d_model.path.iterdir() if p.name[0] != ".") == [
        "current",
        "one",
    ]


def test_a_file_by_its_link_costs_no_disk_and_is_left_as_it_is(ds4d_model, tmp_path):
    original = make_model(tmp_path / "m.gguf", seed=3)
    original.chmod(0o640)
    assert ds4d_model("install", original, "--link", "--sha256", digest(original.read_bytes())) == 0
    linked = ds4d_model.path / "m" / "m.gguf"
    if os.geteuid() == 0:
        assert f"note: {linked} is closed to all users but root" in ds4d_model.out
    assert linked.samefile(original)
    assert linked.stat().st_mode & 0o777 == 0o640
    assert ds4d_model.record("m")["checked"] == "sha256"
    ds4d_model.fails(
        ModelFileError, "has sha256", "install", original, "--link", "--name", "n",
        "--sha256", "0" * 64,
    )  # fmt: skip
    # What the failed attempt has left is a name of the original; a copy must not write to it.
    content = original.read_bytes()
    assert ds4d_model("install", original, "--name", "n") == 0
    assert original.read_bytes() == content
    assert not (ds4d_model.path / "n" / "m.gguf").samefile(original)


# What it is compared with


def test_size_and_digest_come_from_a_manifest(ds4d_model, one, tmp_path):
    toml = tmp_path / "manifest.toml"
    toml.write_text(
        f'[[model]]\nrelease = "1.5"\nname = "ours-1.5"\nfile = "on?.gguf"\n'
        f'size = {one.stat().st_size}\nsha256 = "{digest(one.read_bytes())}"\n'
    )
    assert ds4d_model("install", one, "--manifest", toml) == 0
    record = ds4d_model.record("ours-1.5")
    assert (record["checked"], record["release"]) == ("sha256", "1.5")
    assert record["against"] == str(toml)
    assert f"checked  size and sha256 as in {toml}: {record['sha256']}" in ds4d_model.out


def test_a_manifest_may_come_over_http(ds4d_model, one):
    text = f'[[model]]\nrelease = "r"\nfile = "*"\nsize = {one.stat().st_size}\n'
    with BadServer(text.encode(), status(503), cut(5)) as server:
        assert ds4d_model("install", one, "--manifest", server.url("m.toml")) == 0
    assert ds4d_model.record("one")["checked"] == "size"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[model", "not a manifest"),
        ('[[model]]\nrelease = "1"\nfile = "*"\nsize = 5\nsha265 = "x"\n', "sha265"),
        ('[[model]]\nrelease = "1"\nfile = "*"\n', "needs a size or a sha256"),
        ('[[model]]\nrelease = "1"\nfile = "*"\nsize = -5\n', r"size.*model\[0\]|model\[0\].*size"),
        ('[[model]]\nrelease = "1"\nfile = "*"\nsha256 = "ABC"\n', "sha256"),
        ('[[model]]\nrelease = "1"\nfile = "other.gguf"\nsize = 5\n', "no entry for one.gguf"),
        *(
            (f'[[model]]\nrelease = "1"\nfile = "*"\nname = "{name}"\nsize = 5\n', says)
            for name, says in (
                *(("../x", "name"), ("/etc/x", "name"), ("модель", "name"), ("a\\n", "name")),
                *(("current", "current: not a name"), ("x.part", "x.part: not a name")),
            )
        ),
        (f'[[model]]\nrelease = "1"\nfile = "*"\nsha256 = "{"a" * 64}\\n"\n', "sha256"),
        (
            '[[model]]\nrelease = "1"\nfile = "*"\nsize = 5\n'
            '[[model]]\nrelease = "2"\nfile = "one*"\nsize = 6\n',
            "2 entries for one.gguf .releases 1, 2.: name one with --release",
        ),
    ],
)
def test_a_manifest_that_does_not_say_it_is_one_sentence(ds4d_model, one, tmp_path, text, says):
    toml = tmp_path / "manifest.toml"
    toml.write_text(text)
    ds4d_model.fails((ConfigError, UsageError), says, "install", one, "--manifest", toml)
    assert not ds4d_model.path.exists()


def test_the_shipped_manifest_knows_the_0731_target_by_its_size(ds4d_model, one):
    entry = manifest.shipped().find("model", "DeepSeek-V4-Flash-0731-IQ2.gguf", None)
    assert (entry.release, entry.size, entry.sha256) == ("0731", 86_720_111_488, None)
    ds4d_model.fails(
        ModelFileError,
        "expected 86,720,111,488 as in the manifest shipped with ds4d .*; --unverified takes",
        "install", one, "--release", "0731",
    )  # fmt: skip


def test_size_only_is_said_and_the_computed_digest_recorded(ds4d_model, one, monkeypatch):
    n_bytes = one.stat().st_size
    tables = f'[[model]]\nrelease = "0731"\nname = "flash-0731"\nfile = "*"\nsize = {n_bytes}\n'
    monkeypatch.setattr(manifest, "shipped", lambda: manifest.read(tables, "the manifest shipped"))
    assert ds4d_model("install", one) == 0
    record = ds4d_model.record("flash-0731")
    assert (record["checked"], record["sha256"]) == ("size", digest(one.read_bytes()))
    assert (
        "checked  size only, as in the manifest shipped: no digest was known; the sha256 computed "
        f"here is {record['sha256']}, and is recorded\n"
    ) in ds4d_model.out


def test_a_manifest_that_is_named_counts_even_where_the_rest_is_unverified(
    ds4d_model, one, tmp_path
):
    toml = tmp_path / "manifest.toml"
    toml.write_text('[[model]]\nrelease = "1"\nfile = "one*"\nsize = 5\n')
    argv = ("--manifest", toml, "--unverified")
    ds4d_model.fails(ModelFileError, "expected 5 as in", "install", one, *argv)
    toml.write_text('[[model]]\nrelease = "1"\nfile = "two*"\nsize = 5\n')
    assert ds4d_model("install", one, *argv) == 0


def test_a_url_of_which_nothing_is_known_needs_a_word(ds4d_model, one):
    with BadServer(one.read_bytes()) as server:
        ds4d_model.fails(
            UsageError,
            "nothing is known to compare it with: give --sha256 or --manifest, or .*--unverified",
            "install", server.url("one.gguf"),
        )  # fmt: skip
        assert server.asked == []
        assert ds4d_model("install", server.url("one.gguf"), "--unverified") == 0
    assert ds4d_model.record("one")["checked"] == "nothing"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["install"], "nothing to install"),
        (["install", "--size", "5", "--encoder", "x"], "--size says something about SRC"),
        (["install", "--encoder", "x"], "no model is current .*say which with --name"),
        (["install", "m.gguf", "--drafter-sha256", "0" * 64], "--drafter, which is missing"),
        (["install", "http://h/m.gguf", "--link"], "--link takes a file of this machine"),
        (["install", "http://h/get", "--unverified"], "give it a --name"),
        (["install", "none.gguf"], "none.gguf: No such file"),
        (["use", "x"], "no model is installed"),
        (["verify", "x"], "x: is not installed in .*installed: nothing"),
        (["verify"], "no model is current in .*: name one"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_one_sentence(ds4d_model, argv, says):
    ds4d_model.fails(UsageError, says, *argv)


@pytest.mark.parametrize("size", ["0", "x", "-5", "1.5", "", "١"])
def test_a_size_that_is_none_is_refused_by_the_parser(ds4d_model, size):
    ds4d_model.fails(
        UsageError, "is not a number of bytes|expected", "install", "m", "--size", size
    )


# Over HTTP


def test_a_download_that_is_cut_twenty_times_is_installed(ds4d_model, one):
    body = one.read_bytes()
    step = len(body) // 25
    with BadServer(body, *[cut(step)] * 20) as server:
        code = ds4d_model("install", server.url("m.gguf"), "--sha256", digest(body))
    assert code == 0
    assert server.sent == len(body)
    assert len(server.asked) == 21
    assert (ds4d_model.path / "m" / "m.gguf").read_bytes() == body
    assert ds4d_model.links == ("m", None)


WRONG = {
    "wrong bytes": (lambda body: BadServer(body[:-1] + b"?"), ModelFileError, "has sha256"),
    "claims less": (lambda body: BadServer(body, claiming(len(body) - 7)), ModelFileError, "has "),
    "claims more": (lambda body: BadServer(body, claiming(len(body) + 7)), ModelFileError, "has "),
    "has less": (lambda body: BadServer(body[:-7]), ModelFileError, "as in the command line"),
    "has more": (
        lambda body: BadServer(body, chunked(body + b"1234567")),
        ModelFileError,
        "sends more than",
    ),
    "gives up": (
        lambda body: BadServer(body, cut(5000), *[status(503)] * 9),
        TemporaryError,
        "given up after 4 attempts",
    ),
    "forbids": (lambda body: BadServer(body, status(403)), UsageError, "answers 403"),
}


@pytest.mark.parametrize("what", WRONG)
def test_whatever_goes_wrong_current_and_previous_stay(ds4d_model, one, two, what):
    ds4d_model("install", one)
    ds4d_model("install", two, "--use")
    before = ds4d_model.links
    body = one.read_bytes()
    make, error, says = WRONG[what]
    argv = ("--size", len(body), "--sha256", digest(body), "--name", "three", "--use")
    with make(body) as server:
        ds4d_model.fails(error, says, "install", server.url("m.gguf"), *argv)
    assert ds4d_model.links == before
    assert not (ds4d_model.path / "three").exists()
    with BadServer(body) as server:  # and the same command does it once the source is right
        assert ds4d_model("install", server.url("m.gguf"), *argv) == 0
    assert ds4d_model.links == ("three", "two")
    assert (ds4d_model.path / "three" / "m.gguf").read_bytes() == body
    assert ds4d_model("verify") == 0


def test_a_probe_that_shows_another_size_saves_the_download(ds4d_model, one):
    with BadServer(one.read_bytes()) as server:
        ds4d_model.fails(
            ModelFileError,
            "bytes, expected 999 as in the command line$",
            "install", server.url("m.gguf"), "--size", "999",
        )  # fmt: skip
    assert server.sent == 0


def test_too_little_space_is_said_before_anything_is_fetched(ds4d_model, one, monkeypatch):
    free = one.stat().st_size - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: argparse.Namespace(free=free))
    with BadServer(one.read_bytes()) as server:
        argv = ("install", server.url("m.gguf"), "--unverified")
        ds4d_model.fails(
            TemporaryError, f"{free + 1:,} bytes are needed, {free:,} are free: make room for 1 ",
            *argv,
        )  # fmt: skip
        assert server.sent == 0
        assert not ds4d_model.path.exists()
        server.acts.extend([cut(5000), *[status(503)] * 4])
        monkeypatch.undo()
        ds4d_model.fails(TemporaryError, "given up", *argv)
        there = free + 1 - 5000
        monkeypatch.setattr("shutil.disk_usage", lambda path: argparse.Namespace(free=there))
        assert ds4d_model(*argv) == 0  # what is there already needs no room again


def test_a_dry_run_tells_all_and_touches_nothing(ds4d_model, one, encoder):
    body = one.read_bytes()
    with BadServer(body) as server:
        argv = ("install", server.url("m.gguf"), "--sha256", digest(body), "--encoder", encoder)
        assert ds4d_model(*argv, "--dry-run") == 0
        assert server.sent == 0
    assert not ds4d_model.path.exists()
    for part in (
        f"makes {ds4d_model.path}/m\n",
        f"model    m.gguf: {len(body):,} bytes from {server.url('m.gguf')}\n",
        f"compared with: the command line: sha256 {digest(body)}",
        f"texts    from {encoder}",
        f"disk     {len(body):,} bytes are needed, ",
        "current  it becomes current",
    ):
        assert part in ds4d_model.out


SCRIPT = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.unit.test_install import call
    from ds4d.errors import Ds4Error
    try:
        sys.exit(call(Path(sys.argv[1]), None, *sys.argv[2:]))
    except Ds4Error as error:
        sys.exit(f"ds4d: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    """
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_in_mid_download_goes_on_with_the_rest(ds4d_model, one, how):
    body = one.read_bytes()
    half = len(body) // 2
    with BadServer(body, stalling(half)) as server:
        argv = ("install", server.url("m.gguf"), "--sha256", digest(body), "--name", "a")
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, ds4d_model.path, *argv],
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            part = ds4d_model.path / "a.part" / "m.gguf"
            wait_for(lambda: part.exists() and part.stat().st_size == half, process)
            process.send_signal(how)
            _, err = process.communicate(timeout=60)
        assert process.returncode == (-9 if how == signal.SIGKILL else 130)
        if how == signal.SIGINT:
            assert f"stopped: what was fetched is kept in {ds4d_model.path}/a.part" in err
            assert "Traceback" not in err
        assert not (ds4d_model.path / "a").exists()
        assert ds4d_model.links == (None, None)
        server.stop.set()
        assert ds4d_model(*argv) == 0
    assert server.asked == [None, f"bytes={half}-"]
    assert server.sent == len(body)
    assert (ds4d_model.path / "a" / "m.gguf").read_bytes() == body


def wait_for(there, process):
    deadline = time.monotonic() + 60
    while not there():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_is_really_full_is_told_and_what_fits_is_kept(ds4d_model, one):
    """On a file system of its own, smaller than the model by a little."""
    ds4d_model.path.mkdir(parents=True)
    body = one.read_bytes()
    kib = len(body) // 1024 - 40
    with BadServer(body, chunked(body)) as server:  # says no length, so that it cannot be foreseen
        server.on_probe = chunked(b"")
        argv = ["install", server.url("m.gguf"), "--sha256", digest(body)]
        steps = (
            'mount -t tmpfs -o size="$1k" none "$2" || exit 99; '
            '"$3" -c "$4" "$2" "${@:5}"; code=$?; ls -s "$2/m.part" >&2; '
            'mount -o remount,size="$(($1 * 4))k" "$2"; '
            '"$3" -c "$4" "$2" "${@:5}" && cmp "$2/current/m.gguf" "$BODY" && exit $code'
        )
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", steps, "-", str(kib), ds4d_model.path,
             sys.executable, SCRIPT, *argv],
            env=os.environ | {"BODY": str(one)},
            capture_output=True,
            text=True,
        )  # fmt: skip
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip("needs to mount a file system")
    assert done.returncode == 1, done.stderr
    assert "the disk is full after " in done.stderr
    assert "the same command goes on from it" in done.stderr
    assert "Traceback" not in done.stderr
    first = int(server.asked[1].removeprefix("bytes=").removesuffix("-"))
    assert 0 < first <= kib * 1024
    assert server.asked == [None, f"bytes={first}-"]


def test_a_size_that_nobody_says_is_unknown_until_it_is_there(ds4d_model, one):
    body = one.read_bytes()
    with BadServer(body, chunked(body)) as server:
        server.on_probe = chunked(body)
        argv = ("install", server.url("m.gguf"), "--unverified")
        assert ds4d_model(*argv, "--dry-run") == 0
        assert "m.gguf: unknown size from" in ds4d_model.out
        assert "disk     at least 0 bytes are needed" in ds4d_model.out
        assert ds4d_model(*argv) == 0
    assert ds4d_model.record("m")["size"] == len(body)


def test_two_installations_do_not_collide_and_a_rollback_need_not_wait(ds4d_model, one, two):
    ds4d_model("install", one)
    ds4d_model("install", two, "--use")
    with (ds4d_model.path / ".install.lock").open("a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        says = "another `ds4d model` .process [0-9]+. works here"
        ds4d_model.fails(TemporaryError, says, "install", one, "--name", "three")
        ds4d_model.fails(TemporaryError, says, "remove", "two")
        assert ds4d_model("rollback") == 0
    assert ds4d_model.links == ("one", "two")


# Drafters


def make_sidecar(path, model_path, *, width=None, metadata=None):
    with gguf.open_model(model_path) as model:
        g = model.geometry
    shapes = {
        "dspark.0.main_norm.weight": (width or g.width,),
        "dspark.0.attn_sinks.weight": (g.n_heads,),
        "dspark.0.attn_kv_a_norm.weight": (g.head_dim,),
        "dspark.2.markov_w1.weight": (g.n_vocab, 4),
    }
    tensors = [
        Tensor(name, Quant.F32, shape, np.zeros(4 * int(np.prod(shape)), np.uint8))
        for name, shape in shapes.items()
    ]
    gguf.write(path, metadata or {}, tensors)
    return path


def identity_of(path):
    with gguf.open_model(path) as model:
        return {
            drafter.TARGET_NAME: gguf.string(model.geometry.name),
            drafter.TARGET_CONTENT: gguf.string(drafter.content_of(model)),
        }


def test_a_drafter_that_names_its_target_is_installed_with_it(ds4d_model, one, tmp_path):
    sidecar = make_sidecar(tmp_path / "d.gguf", one, metadata=identity_of(one))
    assert ds4d_model("install", one, "--drafter", sidecar) == 0
    record = ds4d_model.record("one")["drafter"]
    assert record["identity"] == "matches"
    assert record["sha256"] == digest(sidecar.read_bytes())
    assert "drafter  drafter.gguf, made for this model" in ds4d_model.out
    target = install.resolve(ds4d_model.path / "current")
    assert target.drafter.read_bytes() == sidecar.read_bytes()
    assert ds4d_model("verify") == 0
    assert "ok    drafter: was made for this model" in ds4d_model.out


def test_a_drafter_that_says_nothing_is_installed_as_unknown(ds4d_model, one, tmp_path):
    sidecar = make_sidecar(tmp_path / "d.gguf", one)
    assert ds4d_model("install", one, "--drafter", sidecar) == 0
    assert ds4d_model.record("one")["drafter"]["identity"] == "unknown"
    assert "does not say which target it was made for (unknown)" in ds4d_model.out


def wrong_sidecars(one, two, tmp_path):
    other = identity_of(two)
    named = {drafter.TARGET_NAME: gguf.string("another")}
    release = {drafter.TARGET_RELEASE: gguf.string("preview")}
    yield make_sidecar(tmp_path / "content", one, metadata=other), "dspark.target.sha256 is"
    yield make_sidecar(tmp_path / "name", one, metadata=named), "dspark.target.name is 'another'"
    yield make_sidecar(tmp_path / "release", one, metadata=release), "release is 'preview'"
    yield make_sidecar(tmp_path / "width", one, width=96), "main_norm.weight has 96 rows"
    yield one, "not a DSpark sidecar"


@pytest.mark.parametrize("case", range(5))
def test_a_drafter_for_another_target_is_told_and_the_model_installed_without(
    ds4d_model, one, two, tmp_path, case
):
    sidecar, says = list(wrong_sidecars(one, two, tmp_path))[case]
    code = ds4d_model("install", one, "--release", "1.5", "--drafter", sidecar, "--name", "a")
    assert code == 1
    assert says in ds4d_model.err
    assert "this drafter is not installed" in ds4d_model.err
    assert "drafter  none" in ds4d_model.out
    assert ds4d_model.links == ("a", None)
    assert ds4d_model.record("a")["drafter"] is None
    assert sorted(p.name for p in (ds4d_model.path / "a").iterdir()) == ["model.json", "one.gguf"]


def test_releases_of_a_manifest_must_agree(ds4d_model, one, tmp_path):
    sidecar = make_sidecar(tmp_path / "d.gguf", one)
    toml = tmp_path / "m.toml"
    toml.write_text(
        f'[[model]]\nrelease = "0731"\nfile = "one*"\nsize = {one.stat().st_size}\n'
        f'[[drafter]]\nrelease = "preview"\nfile = "d*"\nsize = {sidecar.stat().st_size}\n'
    )
    assert ds4d_model("install", one, "--drafter", sidecar, "--manifest", toml) == 1
    assert "was made for release preview, the model is of 0731" in ds4d_model.err


def test_a_drafter_and_texts_are_added_to_what_is_installed(ds4d_model, one, tmp_path, encoder):
    ds4d_model("install", one)
    first = make_sidecar(tmp_path / "d1.gguf", one)
    second = make_sidecar(tmp_path / "d2.gguf", one, metadata=identity_of(one))
    wrong = make_sidecar(tmp_path / "d3.gguf", one, width=96)
    assert ds4d_model("install", "--drafter", first) == 0
    assert ds4d_model("install", "--drafter", second, "--encoder", encoder) == 0
    assert ds4d_model("install", "--drafter", wrong, "--name", "one") == 1
    drafter_file = ds4d_model.path / "one" / "drafter.gguf"
    assert drafter_file.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in ds4d_model.path.iterdir() if p.name[0] != ".") == [
        "current",
        "one",
    ]
    assert ds4d_model("verify") == 0


def test_a_drafter_that_is_cut_off_does_not_cost_the_model(ds4d_model, one, tmp_path):
    sidecar = make_sidecar(tmp_path / "d.gguf", one)
    with BadServer(one.read_bytes()) as models, BadServer(sidecar.read_bytes()) as drafters:
        argv = ("install", models.url("m.gguf"), "--drafter", drafters.url("d.gguf"))
        drafters.acts.append(status(404))
        ds4d_model.fails(UsageError, "404", *argv, "--unverified")
        assert ds4d_model(*argv, "--unverified") == 0
    assert models.sent == one.stat().st_size
    assert (ds4d_model.path / "m" / "drafter.gguf").read_bytes() == sidecar.read_bytes()


def test_a_wish_that_was_dropped_leaves_nothing_behind(ds4d_model, one, tmp_path):
    sidecar = make_sidecar(tmp_path / "d.gguf", one)
    with BadServer(sidecar.read_bytes(), cut(100), *[status(503)] * 4) as drafters:
        with pytest.raises(TemporaryError):
            ds4d_model("install", one, "--drafter", drafters.url("d.gguf"), "--unverified")
    assert (ds4d_model.path / "one.part" / "drafter.gguf").exists()
    assert ds4d_model("install", one, "--unverified") == 0
    assert sorted(p.name for p in (ds4d_model.path / "one").iterdir()) == ["model.json", "one.gguf"]


# Texts


def test_an_encoder_without_all_texts_is_told_with_what_follows(ds4d_model, one, encoder):
    encoder.write_text(ENCODER.partition("\n")[0])
    assert ds4d_model("install", one, "--encoder", encoder) == 1
    assert f"{encoder}: does not hold the release's tools: none of its texts" in ds4d_model.err
    assert "texts    none: prompts carry ds4-tiny's texts" in ds4d_model.out
    assert not (ds4d_model.path / "one" / "prompt.json").exists()
    assert ds4d_model.links == ("one", None)


def test_an_encoder_that_is_none_is_told_before_the_download(ds4d_model, one, encoder):
    encoder.write_bytes(b"\x89PNG\r\n")
    with BadServer(one.read_bytes()) as server:
        argv = ("install", server.url("m.gguf"), "--unverified", "--encoder", encoder)
        ds4d_model.fails(ModelFileError, "not a Python file", *argv)
        assert server.sent == 0


# Verifying, listing, removing


def test_verify_tells_line_by_line(ds4d_model, one, encoder):
    ds4d_model("install", one, "--encoder", encoder, "--size", one.stat().st_size)
    assert ds4d_model("verify") == 0
    assert ds4d_model.out.splitlines() == [
        f"ok    model: one.gguf has {one.stat().st_size:,} bytes",
        f"ok    model: sha256 is {digest(one.read_bytes())}, as installed (size only, as in the "
        "command line: no digest was known)",
        ds4d_model.out.splitlines()[2],
        "ok    texts: all 2 are the release's, to the byte",
        "ok    drafter: none",
        "one: is as it was installed",
    ]
    assert ds4d_model.out.splitlines()[2].startswith("ok    model: micro, ")


def damage(path, kind):
    if kind == "byte":
        with path.joinpath("one.gguf").open("r+b") as file:
            file.seek(-40, os.SEEK_END)
            file.write(b"\xff" * 8)
    elif kind == "cut":
        with path.joinpath("one.gguf").open("r+b") as file:
            file.truncate(1000)
    elif kind == "gone":
        path.joinpath("one.gguf").unlink()
    elif kind == "texts":
        path.joinpath("prompt.json").write_text(json.dumps(TEXTS | {"tools": "other"}))
    elif kind == "no json":
        path.joinpath("prompt.json").write_text("{")
    elif kind == "record":
        path.joinpath("model.json").write_text('{"format": 1}')
    elif kind == "format":
        record = json.loads(path.joinpath("model.json").read_text())
        path.joinpath("model.json").write_text(json.dumps(record | {"format": 2}))
    else:
        path.joinpath("model.json").unlink()


DAMAGE = {
    "byte": "recorded was",
    "cut": "has 1,000 bytes, recorded were",
    "gone": "No such file",
    "texts": "tools has sha256",
    "no json": "not a JSON file",
    "record": "not a record of an installation",
    "format": "has format 2, expected 1",
    "no record": "model.json: cannot be read",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_found_and_never_made_current(ds4d_model, one, two, encoder, kind):
    ds4d_model("install", two)
    ds4d_model("install", one, "--encoder", encoder)
    damage(ds4d_model.path / "one", kind)
    assert ds4d_model("verify", "one") == 1
    assert DAMAGE[kind] in next(x for x in ds4d_model.out.splitlines() if x.startswith("wrong "))
    if kind != "byte":  # which only a digest finds
        ds4d_model.fails(ModelFileError, DAMAGE[kind], "use", "one")
        assert ds4d_model.links == ("two", None)
    assert ds4d_model("list") == 0
    assert "one" in ds4d_model.out
    if kind in ("record", "format", "no record", "cut", "gone"):
        assert DAMAGE[kind] in ds4d_model.err


def test_the_list_shows_what_there_is(ds4d_model, one, two, encoder):
    assert ds4d_model("list") == 0
    assert "no model is installed" in ds4d_model.out
    ds4d_model("install", one, "--release", "1.5", "--encoder", encoder)
    ds4d_model("install", two, "--use", "--sha256", digest(two.read_bytes()))
    with BadServer(one.read_bytes(), cut(9000), *[status(503)] * 4) as server:
        with pytest.raises(TemporaryError):
            ds4d_model("install", server.url("three.gguf"), "--unverified")
    assert ds4d_model("list") == 0
    lines = [line.split() for line in ds4d_model.out.splitlines()]
    assert lines[0] == "STATE NAME RELEASE SIZE CHECKED DRAFTER TEXTS INSTALLED".split()
    assert lines[1][:3] == ["previous", "one", "1.5"]
    assert lines[1][5:8] == ["nothing", "none", "release"]
    assert lines[2][:3] == ["current", "two", "unknown"]
    assert lines[2][5:8] == ["sha256", "none", "none"]
    assert lines[3][:2] == ["unfinished", "three.part"]
    assert ds4d_model("list", "--json") == 0
    rows = json.loads(ds4d_model.out)
    assert [r["state"] for r in rows] == ["previous", "current", "unfinished"]
    assert rows[0]["record"]["release"] == "1.5"


def test_all_but_the_current_one_can_be_removed(ds4d_model, one, two):
    """Also the previous one: it may be what fills the disk."""
    ds4d_model("install", one, "--name", "a")
    ds4d_model("install", two, "--name", "b", "--use")
    ds4d_model("install", two, "--name", "c")
    ds4d_model.fails(UsageError, "b: is current: .* another one, then", "remove", "b")
    ds4d_model.fails(UsageError, "d: is not installed in .*installed: a, b, c", "remove", "d")
    ds4d_model.fails(UsageError, "not installed", "remove", "../models/c")
    assert ds4d_model("remove", "c") == 0
    assert "no model is previous" not in ds4d_model.out
    assert ds4d_model("remove", "a") == 0
    assert ds4d_model.out.endswith("a is deleted; no model is previous now\n")
    assert sorted(p.name for p in ds4d_model.path.iterdir() if p.name[0] != ".") == ["b", "current"]
    ds4d_model.fails(UsageError, "no model is previous in .*: there is nothing to", "rollback")


def test_a_list_may_be_asked_for_while_an_installation_is_at_work(ds4d_model, one):
    ds4d_model("install", one)
    stage = ds4d_model.path / "two.part"
    stage.mkdir()
    (stage / "two.gguf").write_bytes(b"GGUF")
    (stage / ".two.gguf.state.tmp").symlink_to("renamed just now")
    assert ds4d_model("list") == 0
    assert "two.part" in ds4d_model.out


def test_a_removal_that_was_cut_short_is_finished_by_the_next_verb(ds4d_model, one, monkeypatch):
    ds4d_model("install", one)
    ds4d_model("install", one, "--name", "b")

    def crash(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        ds4d_model("remove", "b")
    monkeypatch.undo()
    assert (ds4d_model.path / ".b.removed" / "one.gguf").exists()
    assert not (ds4d_model.path / "b").exists()
    assert ds4d_model("install", one, "--name", "c") == 0
    assert not (ds4d_model.path / ".b.removed").exists()


def test_a_directory_that_was_renamed_by_hand_is_what_it_is_called(ds4d_model, one, encoder):
    ds4d_model("install", one, "--name", "a")
    ds4d_model("install", one, "--name", "b")
    (ds4d_model.path / "b").rename(ds4d_model.path / "c")
    assert ds4d_model("install", "--encoder", encoder, "--name", "c") == 0
    assert (ds4d_model.path / "c" / "prompt.json").exists()
    assert not (ds4d_model.path / "a" / "prompt.json").exists()


@pytest.mark.parametrize("which", ["current", "previous"])
def test_links_that_are_not_ours_are_told_and_left(ds4d_model, one, two, tmp_path, which):
    ds4d_model("install", one)
    ds4d_model("install", two, "--use")
    link = ds4d_model.path / which
    link.unlink()
    link.symlink_to(tmp_path)
    ds4d_model.fails(ConfigError, f"{which}: points to .*, expected a name", "rollback")
    assert os.readlink(link) == str(tmp_path)
    link.unlink()
    link.mkdir()
    ds4d_model.fails(ConfigError, f"{which}: is not a symlink", "rollback")
    assert link.is_dir()


@pytest.mark.parametrize("name", ["a", "a.part"])
def test_what_lies_there_under_another_flag_is_left_alone(ds4d_model, one, tmp_path, name):
    """A link in the place of a stage would let files of somebody else's be tidied away."""
    precious = tmp_path / "elsewhere" / "precious"
    precious.parent.mkdir()
    precious.touch()
    ds4d_model.path.mkdir(parents=True)
    taken = ds4d_model.path / name
    for make in (lambda: taken.symlink_to(precious.parent), taken.touch):
        make()
        with BadServer(one.read_bytes()) as server:
            argv = ("install", server.url("a.gguf"), "--unverified")
            ds4d_model.fails((UsageError, ConfigError), f"/{name}: is .*(another|move it)", *argv)
            assert server.asked == []
        taken.unlink()
    assert list(precious.parent.iterdir()) == [precious]


def test_an_error_of_the_file_system_is_one_sentence(ds4d_model, one):
    ds4d_model.path.parent.mkdir()
    ds4d_model.path.write_text("a file where the directory should be")
    with pytest.raises(Ds4Error) as error:
        ds4d_model("install", one)
    assert str(ds4d_model.path) in str(error.value)


# The daemon's side


def test_a_bare_file_is_a_target_of_which_nothing_is_recorded(one):
    target = install.resolve(one)
    assert target == install.Target(file=one)
    install.check(target, "none", fail)
    install.check(target, "size", fail)
    with pytest.raises(ModelFileError, match=r"no digest is recorded.*`ds4d model install`"):
        install.check(target, "full", fail)


def fail(what, share):
    raise AssertionError(what)


def test_a_bare_file_has_the_texts_beside_it(one, tmp_path):
    (tmp_path / "prompt.json").write_text("{}")
    file = tmp_path / "m.gguf"
    file.write_bytes(one.read_bytes())
    assert install.resolve(file).constants == tmp_path / "prompt.json"


@pytest.mark.parametrize("path", ["current", "one"])
def test_a_directory_is_resolved_to_its_files(ds4d_model, one, two, encoder, path):
    ds4d_model("install", one, "--encoder", encoder)
    target = install.resolve(ds4d_model.path / path)
    at = ds4d_model.path / "one"
    assert (target.file, target.constants) == (at / "one.gguf", at / "prompt.json")
    assert target.drafter is None
    assert target.record.name == "one"
    ds4d_model("install", two, "--use")
    assert target.file.exists()  # a later switch does not change what a daemon has resolved


def test_a_target_that_is_not_there_names_what_mends_it(ds4d_model, one, two):
    models = ds4d_model.path
    with pytest.raises(ModelFileError, match="No such file"):
        install.resolve(models / "one")
    with pytest.raises(ModelFileError, match=r"no model is current: `ds4d model install SRC`"):
        install.resolve(models / "current")
    ds4d_model("install", one)
    (models / "current").unlink()
    with pytest.raises(ModelFileError, match=r"no model is current: `ds4d model install SRC`"):
        install.resolve(models / "current")
    (models / "current").symlink_to("gone")
    with pytest.raises(ModelFileError, match=r"points to gone, which is not there: .*use NAME"):
        install.resolve(models / "current")
    with pytest.raises(ModelFileError, match=r"is the directory of all models.*current$"):
        install.resolve(models)
    (models / "empty").mkdir()
    with pytest.raises(ModelFileError, match=r"holds no model.json: `ds4d model install FILE`"):
        install.resolve(models / "empty")
    (models / "x.part").mkdir()
    with pytest.raises(ModelFileError, match="is not finished"):
        install.resolve(models / "x.part")
    (models / "loop").symlink_to("loop")
    with pytest.raises(ModelFileError, match="loop"):
        install.resolve(models / "loop")


@contextlib.contextmanager
def as_nobody():
    """Root may read everything, so that a closed door would keep nobody out."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("path", ["m.gguf", "current", "target", "target/model.json"])
def test_a_target_behind_a_closed_door_is_told_as_such(tmp_path, path):
    """As a model in someone's home is to the service."""
    closed = tmp_path / "closed"
    (closed / "target").mkdir(parents=True)
    (closed / "m.gguf").touch()
    (closed / "current").symlink_to("target")
    closed.chmod(0)
    with as_nobody(), pytest.raises(ModelFileError, match=r"permission denied: .*BindReadOnly"):
        install.resolve(closed / path)
    closed.chmod(0o755)


def test_a_directory_that_can_be_seen_but_not_entered_is_told_as_such(tmp_path):
    tmp_path.chmod(0o755)
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o444)
    with as_nobody(), pytest.raises(ModelFileError, match="permission denied"):
        install.resolve(target)
    target.chmod(0o755)


def test_sizes_and_digests_are_compared_as_asked(ds4d_model, one, tmp_path):
    sidecar = make_sidecar(tmp_path / "d.gguf", one)
    ds4d_model("install", one, "--drafter", sidecar)
    target = install.resolve(ds4d_model.path / "one")
    told = []
    install.check(target, "size", fail)
    install.check(target, "full", lambda what, share: told.append((what, share)))
    assert told[-1] == ("drafter", 1.0)
    assert ("model file", 1.0) in told
    with target.drafter.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"12345678")
    install.check(target, "size", fail)
    with pytest.raises(ModelFileError, match=r"drafter.gguf: has sha256 .*, recorded was"):
        install.check(target, "full", lambda what, share: None)
    with target.file.open("ab") as file:
        file.write(b"x")
    n = one.stat().st_size
    with pytest.raises(ModelFileError, match=f"has {n + 1:,} bytes, recorded were {n:,}"):
        install.check(target, "size", fail)
    install.check(target, "none", fail)


def test_a_switch_is_never_without_a_current_one(ds4d_model, one, two, monkeypatch):
    """A crash between the two links leaves both pointing to what runs."""
    ds4d_model("install", one)
    ds4d_model("install", two)
    models = Models(ds4d_model.path)
    point = models._point

    def crash(which, name):
        if which == "current":
            raise KeyboardInterrupt
        point(which, name)

    monkeypatch.setattr(models, "_point", crash)
    with pytest.raises(KeyboardInterrupt):
        models.switch("two")
    assert ds4d_model.links == ("one", "one")
    assert ds4d_model("use", "two") == 0
    assert ds4d_model.links == ("two", "one")
