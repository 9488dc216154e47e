"""`ds4ctl` against a daemon, and against all that is not quite one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from ds4d import wire
from ds4d.ctl import client, main
from ds4d.ctl.client import SYSTEM
from ds4d.ctl.commands import COMMANDS
from tests.daemon.ctl_server import hello, line, scripted
from tests.daemon.house import Waking, daemon_with, engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.daemon.house import House

RUN = [sys.executable, "-c", "import sys; from ds4d.ctl.main import main; sys.exit(main())"]
PONG = wire.Pong(at=1.0, uptime_s=99.0)
OP = wire.Op(op="drain-1", kind="drain")
BENCH = wire.Op(op="bench-1", kind="bench")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime directory of a user whose system has no daemon; it does not exist yet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(client, "SYSTEM", tmp_path / "system")
    return tmp_path / "ds4d"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that anybody may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="ds4d-test-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


class Said(str):
    """What a command wrote to stdout, with what it wrote to stderr and its exit code."""

    err: str
    code: int


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*argv: object) -> Said:
        capsys.readouterr()
        code = main.main([str(word) for word in argv])
        out, err = capsys.readouterr()
        said = Said(out)
        said.err, said.code = err, code
        assert "Traceback" not in err
        return said

    return run


# Nobody there


def test_no_socket_anywhere_names_every_place_that_was_looked_at(ctl: Any, user: Path) -> None:
    said = ctl("drain")
    assert (said, said.code) == ("", 3)
    assert said.err.splitlines() == [
        "ds4ctl: ds4d is not running: there is no socket at any of these places:",
        f"  {user}/control.sock",
        f"  {user.parent}/system/control.sock",
        "`systemctl start ds4d` or `ds4d serve` starts it; --socket names another place",
    ]
    assert f"{user}/monitor.sock" in ctl("status").err  # what only reads looks there, too
    told = json.loads(ctl("status", "--json"))["error"]
    assert told["message"].startswith("ds4d is not running: ")


def test_the_place_that_was_named_is_the_only_one(ctl: Any, user: Path, path: Path) -> None:
    said = ctl("--socket", path, "ping")
    assert said.code == 3
    assert said.err.startswith(f"ds4ctl: ds4d is not running: there is no such socket:\n  {path}\n")


def test_a_socket_that_a_killed_daemon_left_is_told_from_none(ctl: Any, path: Path) -> None:
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    said = ctl("--socket", path, "ping")
    assert said.code == 3
    assert f"{path} is there, but nobody listens on it" in said.err
    assert "`ds4d serve`" in said.err
    assert "systemctl" in client._look(SYSTEM / "control.sock")


def test_a_file_that_is_no_socket_is_called_that(ctl: Any, path: Path) -> None:
    path.write_text("hello")
    said = ctl("--socket", path, "ping")
    assert (said.code, said.err.splitlines()[0]) == (3, f"ds4ctl: {path} is not a socket")


def test_a_path_that_no_socket_can_have_is_one_sentence(ctl: Any, tmp_path: Path) -> None:
    said = ctl("--socket", tmp_path / ("x" * 200), "ping")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "too long" in said.err


def test_the_systems_daemon_answers_where_the_user_has_none(ctl: Any, user: Path) -> None:
    user.mkdir()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(user / "control.sock"))
    dead.close()
    (user.parent / "system").mkdir()
    with scripted(user.parent / "system" / "control.sock", {"ping": PONG}):
        assert ctl("ping").code == 0


def test_what_only_reads_is_content_with_the_monitor_socket(ctl: Any, user: Path) -> None:
    user.mkdir()
    with scripted(user / "monitor.sock", {"ping": PONG}):
        assert ctl("ping").code == 0
        assert ctl("undrain").code == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not")
def test_no_access_is_exit_4_and_names_the_group_that_has_it(open_folder: Path) -> None:
    inner = open_folder / "ds4d"
    inner.mkdir(mode=0o755)
    path = inner / "control.sock"

    def denied() -> subprocess.CompletedProcess[str]:
        code = (
            "import os, sys; from ds4d.ctl import client; from pathlib import Path\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try: client.connect([Path(sys.argv[1])], 5)\n"
            "except client.Failure as failure: print(failure); sys.exit(failure.exit_code)"
        )
        return subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
        )

    with scripted(path, {}):
        os.chown(path, 0, 4)  # adm, which every Debian has
        path.chmod(0o660)
        by_group = denied()
        assert by_group.returncode == 4, by_group.stderr
        assert f"permission denied for {path} (owner root, group adm)" in by_group.stdout
        assert "usermod -aG adm nobody" in by_group.stdout
        path.chmod(0o600)
        assert "only root may: use `sudo`\n" in denied().stdout
        inner.chmod(0o700)
        assert f"permission denied for {inner} (owner root" in denied().stdout


# Somebody there who does not answer


def test_a_listener_that_never_answers_is_told_with_its_process(ctl: Any, path: Path) -> None:
    with scripted(path, greeting=None):
        said = ctl("--socket", path, "--timeout", "0.05", "ping")
    assert said.code == 5
    assert f"process {os.getpid()} listens on {path} and has not answered for 0.05 s" in said.err


def test_a_listener_of_systemd_means_that_the_daemon_still_starts(
    ctl: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.Client, "_listener", lambda self: 1)
    with scripted(path, greeting=None):
        said = ctl("--socket", path, "--timeout", "0.05", "ping")
    assert said.code == 3
    assert "ds4d is still starting: systemd holds" in said.err


def test_a_listener_with_a_full_queue_is_no_hang(ctl: Any, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as waiting:
        full.bind(str(path))
        full.listen(0)
        for _ in range(2):
            one = waiting.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(str(path))
        said = ctl("--socket", path, "ping")
    assert said.code == 5
    assert "takes no connections any more" in said.err


def test_a_start_that_fails_behind_systemds_socket_is_no_running_daemon(
    ctl: Any, path: Path
) -> None:
    with scripted(path, {}, greeting=b"") as server:
        threading.Timer(0.05, server.close).start()
        said = ctl("--socket", path, "ping")
    assert said.code == 3
    assert "ended before it answered" in said.err


def test_another_major_of_the_protocol_is_refused_before_anything_is_asked(
    ctl: Any, path: Path
) -> None:
    greeting = hello(protocol=wire.Protocol(major=2, minor=0), version="9.1.0")
    with scripted(path, {"shutdown": wire.Done()}, greeting=greeting) as server:
        said = ctl("--socket", path, "shutdown")
        assert server.calls == []
    assert said.code == 1
    assert "ds4d 9.1.0 (process 4242) speaks protocol 2, this ds4ctl" in said.err


def test_a_newer_minor_of_the_protocol_is_fine(ctl: Any, path: Path) -> None:
    greeting = hello(protocol=wire.Protocol(major=wire.MAJOR, minor=99), features=["future"])
    with scripted(path, {"ping": PONG}, greeting=greeting):
        assert ctl("--socket", path, "ping") == "ds4d answers, up 1 min 39 s\n"


def test_who_is_turned_away_hears_why(ctl: Any, path: Path) -> None:
    error = wire.Error(code=wire.BUSY, message="there are 32 connections, and 32 may be")
    with scripted(path, greeting=line(id=None, error=error)):
        said = ctl("--socket", path, "ping")
    assert (said.code, said.err) == (6, "ds4ctl: there are 32 connections, and 32 may be\n")


@pytest.mark.parametrize(
    "junk",
    [b"SSH-2.0-OpenSSH_9.2\r\n", b'{"jsonrpc":"2.0"}\n', b"[]\n", b"x" * (wire.LINE_MAX + 2)],
)
def test_something_that_is_no_daemon_is_one_sentence(ctl: Any, path: Path, junk: bytes) -> None:
    with scripted(path, greeting=junk):
        said = ctl("--socket", path, "ping")
    assert (said.code, said.err) == (
        1,
        f"ds4ctl: whoever listens on {path} does not speak the control protocol of ds4d; --socket "
        "names another place\n",
    )


def test_an_answer_that_takes_too_long_is_exit_5(ctl: Any, path: Path) -> None:
    with scripted(path, {"ping": b""}):
        said = ctl("--socket", path, "--timeout", "0.05", "ping")
    assert said.code == 5
    assert "no answer within 0.05 s" in said.err


def test_a_daemon_that_goes_in_mid_call_is_told_so(ctl: Any, path: Path) -> None:
    with scripted(path, {"ping": None}):
        said = ctl("--socket", path, "ping")
    assert (said.code, said.err.splitlines()[0]) == (
        1,
        "ds4ctl: the daemon (process 4242) ended before it answered",
    )


# Answers


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (wire.NO_METHOD, 1),
        (wire.BAD_PARAMS, 2),
        (wire.INTERNAL, 1),
        (wire.BUSY, 6),
        (wire.WRONG_STATE, 6),
        (wire.NOT_FOUND, 1),
        (wire.DENIED, 4),
        (wire.DEADLINE, 5),
        (wire.IO, 1),
        (wire.CONFIG_INVALID, 7),
        (wire.UNSUPPORTED, 1),
    ],
)
def test_an_error_of_the_daemon_is_its_sentence_and_an_exit_code(
    ctl: Any, path: Path, code: int, exit_code: int
) -> None:
    with scripted(path, {"undrain": wire.Error(code=code, message="it does not drain")}):
        said = ctl("--socket", path, "undrain")
        assert (said, said.err, said.code) == ("", "ds4ctl: it does not drain\n", exit_code)
        said = ctl("--socket", path, "undrain", "--json")
        assert json.loads(said)["error"] == {
            "code": code,
            "message": "it does not drain",
            "data": None,
        }
        assert (said.err, said.code) == ("ds4ctl: it does not drain\n", exit_code)


def test_problems_of_a_configuration_have_a_line_each(ctl: Any, path: Path) -> None:
    problems = [
        wire.Problem(where="ds4d.toml:3", key="lanes.max", message="too large"),
        wire.Problem(where="command line", key="x.y", message="no such setting"),
    ]
    told = "ds4d.toml:3: lanes.max: too large\ncommand line: x.y: no such setting\n"
    error = wire.Error(code=wire.CONFIG_INVALID, message="2 problems", data=problems)
    answers = {"reload": error, "config.check": wire.Checked(problems=problems)}
    with scripted(path, answers):
        said = ctl("--socket", path, "reload")
        assert (said, said.err, said.code) == ("", f"ds4ctl: {told}", 7)
        said = ctl("--socket", path, "config", "check")
        assert (said, said.err, said.code) == (told, "", 7)
        said = ctl("--socket", path, "config", "check", "--json")
        assert (len(json.loads(said)["problems"]), said.code) == (2, 7)


def test_json_is_the_answer_as_it_came_even_if_it_cannot_be_read(ctl: Any, path: Path) -> None:
    newer = b'{"state":"dreaming","of":["sheep"]}'
    raw = b'{"jsonrpc":"2.0","id":1,"result":' + newer + b"}\n"
    with scripted(path, {"status": raw}):
        said = ctl("--socket", path, "status", "--json")
        assert (said, said.code) == (newer.decode() + "\n", 0)
        said = ctl("--socket", path, "status")
    assert (said, said.code, said.err.count("\n")) == ("", 1, 1)
    assert "--json shows it as it came" in said.err


def test_text_from_elsewhere_cannot_steer_the_terminal(ctl: Any, path: Path) -> None:
    evil = "\033]0;owned\007\033[2Jx\rds4d is fine"
    with scripted(
        path, {"undrain": wire.Done(text=evil), "ping": wire.Error(code=3, message=evil)}
    ):
        for said in (ctl("--socket", path, "undrain"), ctl("--socket", path, "ping")):
            assert not re.search(r"[\033\007\r]", said + said.err)
            assert "ds4d is fine" in said + said.err


def test_options_may_stand_on_either_side_of_the_command(ctl: Any, path: Path) -> None:
    with scripted(path, {"ping": PONG}):
        expected = msgspec.json.encode(PONG).decode() + "\n"
        assert ctl("--json", "--socket", path, "ping") == expected
        assert ctl("ping", "--socket", path, "--json") == expected
        assert ctl("--json", "ping", "--socket", path) == expected


def test_an_argument_that_is_no_text_is_one_sentence(ctl: Any, path: Path) -> None:
    with scripted(path) as server:
        said = ctl("--socket", path, "cancel", "\udcff")
        assert (said.err, said.code) == ("ds4ctl: an argument is not text in UTF-8\n", 2)
        assert server.calls == []


ARGUMENTS: dict[str, tuple[str, Any]] = {  # command line: method, its parameters
    "sessions --phase idle --limit 3": ("sessions", {"phase": "idle", "limit": 3}),
    "close 7 --force": ("session.close", {"id": 7, "force": True}),
    "cancel chatcmpl-1": ("request.cancel", {"request": "chatcmpl-1"}),
    "undrain": ("undrain", {}),
    "reload --dry-run": ("reload", {"dry_run": True, "allow_partial": False, "file": None}),
    "reload --allow-partial": ("reload", {"dry_run": False, "allow_partial": True, "file": None}),
    "config show --defaults": ("config.show", {"defaults": True}),
    "config check": ("config.check", {"file": None}),
    "lanes set 3": ("lanes.set", {"max": 3}),
    "log level debug": ("log.level", {"level": "debug", "logger": "ds4d", "ttl_s": None}),
    "log level info --logger ds4d.api --for 60": (
        "log.level",
        {"level": "info", "logger": "ds4d.api", "ttl_s": 60.0},
    ),
    "metrics": ("metrics", {}),
    "shutdown": ("shutdown", {"mode": "graceful"}),
    "shutdown --fast": ("shutdown", {"mode": "fast"}),
    "drain --deadline 5 --stop --no-wait": ("drain", {"deadline_s": 5.0, "stop": True}),
}


@pytest.mark.parametrize("typed", ARGUMENTS)
def test_a_command_asks_what_was_typed(ctl: Any, path: Path, typed: str) -> None:
    method, params = ARGUMENTS[typed]
    with scripted(path) as server:
        ctl("--socket", path, *typed.split())
        assert server.calls == [(method, params)]


def test_a_file_is_named_to_the_daemon_by_its_absolute_path(
    ctl: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with scripted(path) as server:
        ctl("--socket", path, "config", "check", "new.toml")
        ctl("--socket", path, "reload", "--file", "new.toml")
        assert [params["file"] for _, params in server.calls] == [f"{tmp_path}/new.toml"] * 2


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("", "arguments are required: COMMAND; `ds4ctl --help`"),
        ("fly", "invalid choice: 'fly'"),
        ("lanes", "`ds4ctl lanes --help`"),
        ("lanes set 0", "'0' is not a count of at least 1; `ds4ctl lanes set --help`"),
        ("close x", "'x' is not a whole number"),
        ("drain --deadline -1", "'-1' is not a time in seconds, such as 30"),
        ("drain --deadline nan", "'nan' is not a time in seconds"),
        ("drain --deadline 1e300", "'1e300' is not a time in seconds"),
        ("ping --timeout 0", "in no time at all nothing can answer"),
        ("close 99999999999999999999", "is not a whole number"),
        ("drain --dead 3", "unrecognized arguments: --dead 3; `ds4ctl drain --help`"),
        ("log level loud", "invalid choice: 'loud'"),
        ("status extra", "unrecognized arguments: extra; `ds4ctl status --help`"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_2(ctl: Any, typed: str, says: str) -> None:
    said = ctl(*typed.split())
    assert (said, said.code, said.err.count("\n")) == ("", 2, 1)
    assert says in said.err


def test_every_method_of_the_protocol_has_a_command_or_a_reason() -> None:
    internal = {"subscribe", "unsubscribe", "op.wait", "op.cancel"}  # parts of others, or ds4top's
    parser = main.parser()
    made = set()
    samples = {"id": "1", "request": "r", "n": "1", "level": "info"}
    for command in COMMANDS:
        words = command.words.split()
        words += [samples[a[0][0]] for a in command.arguments if a[0][0] in samples]
        made.add(command.call(parser.parse_args(words)).METHOD)
    assert made | internal == {kind.METHOD for kind in wire.Params.__subclasses__()}


def test_a_fault_of_our_own_is_a_sentence_and_a_file(
    ctl: Any, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def broken(*given: Any) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(client, "connect", broken)
    said = ctl("--socket", path, "ping")
    (kept,) = (tmp_path / "ds4d").glob("crash-*.txt")
    assert said.code == 1
    assert (
        said.err == f"ds4ctl: unexpected ZeroDivisionError: a fault; its traceback is in {kept}\n"
    )
    assert "ZeroDivisionError: a fault" in kept.read_text()


# Operations


def progress(text: str, op: str = OP.op, **more: Any) -> wire.OpProgress:
    return wire.OpProgress(op=op, kind=op.partition("-")[0], text=text, **more)


def ended(**more: Any) -> wire.OpProgress:
    return progress("done", ended=True, **more)


def test_a_drain_is_waited_for_and_ends_in_one_line(ctl: Any, path: Path) -> None:
    done = ended(result=wire.Done(text="drained: 3 requests have ended, none was cut"))
    other = line(method="update", params={"sub": 1, "seq": 1, "at": 0.0})
    answers = {"drain": [OP, progress("3 running"), other, progress("1 running"), done]}
    with scripted(path, answers) as server:
        said = ctl("--socket", path, "drain")
        assert said == "drained: 3 requests have ended, none was cut\n"
        assert (said.err, said.code) == ("", 0)  # nobody watches how far it is
        assert server.calls == [("drain", {"deadline_s": None, "stop": False})]
        said = ctl("--socket", path, "drain", "--json")
        assert json.loads(said)["result"] == {
            "text": "drained: 3 requests have ended, none was cut"
        }


def test_an_operation_that_ends_the_daemon_has_ended_once_that_is_heard(
    ctl: Any, path: Path
) -> None:
    """The daemon hangs up then, before it could answer anything more."""
    done = ended(result=wire.Done(text="drained; shutting down"))
    other = msgspec.structs.replace(done, op="bench-1")
    with scripted(path, {"drain": [OP, other, done, None]}):
        said = ctl("--socket", path, "drain", "--stop")
    assert (said, said.code) == ("drained; shutting down\n", 0)


def test_a_drain_need_not_be_waited_for(ctl: Any, path: Path) -> None:
    with scripted(path, {"drain": OP}):
        assert ctl("--socket", path, "drain", "--no-wait") == (
            "drain has begun, `ds4ctl status` shows it\n"
        )
        said = ctl("--socket", path, "drain", "--no-wait", "--json")
        assert json.loads(said) == {"op": "drain-1", "kind": "drain"}


def test_an_operation_that_fails_has_the_exit_code_of_its_error(ctl: Any, path: Path) -> None:
    failed = ended(error=wire.Error(code=wire.WRONG_STATE, message="taken back"))
    with scripted(path, {"drain": [OP, failed]}):
        said = ctl("--socket", path, "drain", "--json")
        assert (said.err, said.code) == ("ds4ctl: taken back\n", 6)
        assert json.loads(said)["error"]["code"] == wire.WRONG_STATE


def test_an_operation_may_take_longer_than_an_answer_unless_a_time_is_named(
    ctl: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "ANSWER_S", 0.2)

    def late(params: Any) -> wire.OpProgress:
        time.sleep(0.4)
        return ended(result=wire.Done(text="drained"))

    answers = {"drain": [OP, late], "bench": [BENCH, late], "ping": PONG}
    with scripted(path, answers):
        assert ctl("--socket", path, "drain") == "drained\n"
    with scripted(path.with_name("2"), answers):
        said = ctl("--socket", path.with_name("2"), "drain", "--timeout", "0.1")
        assert said.code == 5
        assert said.err.startswith(
            "ds4ctl: drain has not ended within 0.1 s (--timeout): the drain goes on; `ds4ctl undr"
        )
    with scripted(path.with_name("3"), answers):
        said = ctl("--socket", path.with_name("3"), "bench", "--timeout", "0.1")
        assert "(--timeout): bench is cancelled" in said.err


def test_a_daemon_that_hangs_in_an_operation_is_not_waited_for_for_ever(
    ctl: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "ANSWER_S", 0.1)
    with scripted(path, {"drain": OP, "ping": b""}) as server:
        said = ctl("--socket", path, "drain")
        assert [method for method, _ in server.calls] == ["drain", "ping"]
    assert said.code == 5
    assert "ds4ctl: process 4242 listens on " in said.err
    assert "`kill 4242` ends it" in said.err


def test_a_bench_is_a_table_with_the_median_of_its_runs(ctl: Any, path: Path) -> None:
    rows = [
        wire.BenchRow(
            run=run,
            concurrency=2,
            depth=0,
            prompt_tokens=512,
            answer_tokens=64,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=2000.0,
            first_token_ms=130.4,
            total_s=0.25,
        )
        for run, prefill in ((1, 4000.0), (2, 5000.0), (3, 1000.0))
    ]
    with scripted(path, {"bench": [BENCH, ended(op="bench-1", result=rows)]}) as server:
        said = ctl("--socket", path, "bench", "--concurrency", "2", "--no-exclusive")
        assert server.calls[0][1] == {
            "prompt_tokens": 512,
            "answer_tokens": 64,
            "depth": 0,
            "concurrency": 2,
            "runs": 3,
            "exclusive": False,
        }
        assert json.loads(ctl("--socket", path, "bench", "--json"))["result"][1]["run"] == 2
    table = [row.split() for row in said.splitlines()]
    assert table[0][0] == "RUN"
    assert table[-1] == ["median", "2", "0", "512", "64", "4,000.0", "2,000.0", "130", "0.25"]
    assert len({len(row) for row in said.splitlines()}) == 1


class Terminal:
    """`ds4ctl` in a terminal of its own."""

    def __init__(self, *argv: object) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        command = [*RUN, *map(str, argv)]
        self.process = subprocess.Popen(command, stdout=slave, stderr=slave, stdin=slave)
        os.close(slave)
        self.text = ""

    def until(self, text: str) -> str:
        """What has been shown, once `text` is in it; "" waits for the end."""
        while not text or text not in self.text:
            assert select.select([self.master], [], [], 30)[0], self.text
            try:
                more = os.read(self.master, 4096)
            except OSError:
                more = b""
            if not more:
                assert not text, self.text
                return self.text
            self.text += more.decode()
        return self.text

    def exit_code(self) -> int:
        self.until("")
        os.close(self.master)
        return self.process.wait(30)


def test_a_terminal_sees_how_far_a_drain_is_and_then_one_line(path: Path) -> None:
    done = ended(result=wire.Done(text="drained"))
    with scripted(path, {"drain": [OP, progress("2 running, 3 queued, 9 s left"), done]}):
        terminal = Terminal("--socket", path, "drain")
        assert terminal.exit_code() == 0
    last = terminal.text.rpartition("\033[K")[2]
    assert "drain: 2 running, 3 queued, 9 s left" in terminal.text
    assert last.strip() == "drained"


def test_ctrl_c_leaves_the_drain_going_and_says_how_to_undo_it(path: Path) -> None:
    with scripted(path, {"drain": [OP, progress("2 running")]}) as server:
        terminal = Terminal("--socket", path, "drain")
        terminal.until("2 running")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.exit_code() == 130
        assert [method for method, _ in server.calls] == ["drain"]
    assert "the drain goes on; `ds4ctl undrain` takes it back" in terminal.text


def test_ctrl_c_says_that_a_bench_is_cancelled_which_the_daemon_does(path: Path) -> None:
    with scripted(path, {"bench": [BENCH, progress("run 1 of 3", op="bench-1")]}):
        terminal = Terminal("--socket", path, "bench")
        terminal.until("run 1 of 3")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.exit_code() == 130
    assert "ds4ctl: bench is cancelled" in terminal.text


def test_colours_are_for_terminals(path: Path, ctl: Any) -> None:
    status = wire.Status(
        state="ready",
        version="0.1.0",
        pid=1,
        boot="b",
        uptime_s=1.0,
        profile="cpu-tiny",
        config_files=[],
        config_hash="0",
        urls=[],
    )
    with scripted(path, {"status": status}):
        said = ctl("--socket", path, "status")
        assert "\033" not in said
        assert "ds4d is ready, up 1.0 s" in said
    with scripted(path.with_name("2"), {"status": status}):
        terminal = Terminal("--socket", path.with_name("2"), "status")
        assert terminal.exit_code() == 0
    assert "ds4d is \033[1;32mready\033[0m" in terminal.text


def test_a_reader_that_goes_early_is_no_error(path: Path) -> None:
    text = wire.MetricsText(text="x 1\n" * 200_000)
    with scripted(path, {"metrics": text}):
        process = subprocess.Popen(
            [*RUN, "--socket", str(path), "metrics"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert (process.wait(30), process.stderr.read()) == (0, b"")
        process.stderr.close()


def test_an_output_that_takes_nothing_is_one_sentence(path: Path) -> None:
    with scripted(path, {"metrics": wire.MetricsText(text="x 1\n" * 200_000), "ping": PONG}):
        for command in ("metrics", "ping"):
            with open("/dev/full", "wb") as full:
                done = subprocess.run(
                    [*RUN, "--socket", str(path), command],
                    stdout=full,
                    stderr=subprocess.PIPE,
                    check=False,
                )
            assert (done.returncode, done.stderr) == (
                1,
                b"ds4ctl: the output cannot be written: No space left on device\n",
            )


def test_a_caller_may_close_what_it_does_not_want_to_read(path: Path) -> None:
    with scripted(path, {"ping": PONG}):
        command = f'exec "$@" --socket {path} ping'
        for closed, says in ((">&-", b""), ("2>&-", b"ds4d answers, up 1 min 39 s\n")):
            shell = ["bash", "-c", f"{command} {closed}", "bash", *RUN]
            done = subprocess.run(shell, capture_output=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, says, b"")


def test_a_file_named_from_a_directory_that_is_gone_is_one_sentence(
    ctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    said = ctl("config", "check", "x.toml")
    assert said.code == 2
    assert "argument FILE: 'x.toml' lies in a directory that is gone; " in said.err


# The real one


async def typed(house: House, *words: str, code: int = 0) -> str:
    """What `ds4ctl` says to this daemon's operator."""
    socket_of = house.runtime / "control.sock"
    done = await anyio.run_process([*RUN, "--socket", str(socket_of), *words], check=False)
    assert done.returncode == code, (words, done)
    return (done.stdout + done.stderr).decode()


async def test_a_real_daemon_is_shown(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        await house.chat()
        assert (await typed(house, "ping")).startswith("ds4d answers, up ")
        status = await typed(house, "status")
        assert status.startswith("● ds4d is ready, up ")
        assert all(len(text) <= 80 for text in status.splitlines() if str(tmp_path) not in text)
        assert f"API: {house.url}" in status
        assert json.loads(await typed(house, "status", "--json"))["model"]["name"] == "fake"
        assert "\nds4d_" in await typed(house, "metrics")
        assert "[lanes]" in await typed(house, "config", "show")
        assert "[lanes]" in await typed(house, "config", "show", "--defaults")


async def test_a_real_daemon_does_what_it_is_told(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        await house.chat()
        (one,) = json.loads(await typed(house, "sessions", "--json"))["sessions"]
        head, row = (await typed(house, "sessions")).splitlines()
        assert (head.split()[:2], row.split()[:2]) == (["ID", "PHASE"], [str(one["id"]), "idle"])
        assert f"session {one['id']} is closed" in await typed(house, "close", str(one["id"]))
        assert await typed(house, "sessions") == "no sessions\n"
        assert "4711" in await typed(house, "close", "4711", code=1)
        assert "nobody" in await typed(house, "cancel", "nobody", code=1)
        assert "2 of 4 lanes may be used" in await typed(house, "lanes", "set", "2")
        assert "expected 1 to 4" in await typed(house, "lanes", "set", "64", code=2)
        log = await typed(house, "log", "level", "debug", "--for", "60")
        assert "logs from debug on (was " in log
        assert "ds4ctl: " in await typed(house, "undrain", code=6)
        assert "none was cut" in await typed(house, "drain")
        assert "ds4d is drained" in await typed(house, "status")
        assert "takes work again" in await typed(house, "undrain")
        assert "goes down" in await typed(house, "shutdown")
        await house.ends()


async def test_a_real_daemon_is_reloaded_all_or_nothing(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        assert await typed(house, "reload") == "nothing has changed\n"
        house.configure("[sched]\nqueue_total = 7\n")
        assert "would apply at once" in await typed(house, "reload", "--dry-run")
        assert "applied:\n  sched.queue_total: 32 -> 7\n" in await typed(house, "reload")
        house.configure("[memory]\nreserve_mib = 77\n[sched]\nqueue_total = 8\n")
        assert "needs a restart" in await typed(house, "reload", code=7)
        partly = await typed(house, "reload", "--allow-partial")
        assert "waits for a restart:\n  memory.reserve_mib: " in partly
        house.configure("[lanes]\nmax = 99\n")
        assert "ds4d.toml:2: lanes.max: too large" in await typed(house, "reload", code=7)
        assert "ds4d.toml:2: " in await typed(house, "config", "check", code=7)


async def test_a_real_daemon_is_measured(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        small = ["--prompt-tokens", "32", "--answer-tokens", "4"]
        table = await typed(house, "bench", *small)
        assert [row.split()[0] for row in table.splitlines()[2:]] == ["1", "2", "3", "median"]
        assert "--help" in await typed(house, "bench", "--runs", "0", code=2)
        assert "concurrency" in await typed(house, "bench", "--concurrency", "999", code=2)


async def test_a_daemon_that_loads_says_what_and_how_far(tmp_path: Path) -> None:
    waking = Waking(engine())
    waking.gate.clear()
    async with daemon_with(waking, tmp_path) as house:
        command = [*RUN, "--socket", str(house.runtime / "control.sock"), "status"]
        done = await anyio.run_process(command)
        waking.gate.set()
        assert done.stdout.decode().startswith(
            "● ds4d is loading: kernels, 40 % of all loading, for"
        )


async def test_a_drain_that_also_stops_ends_both(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        assert "shutting down" in await typed(house, "drain", "--stop")
        await house.ends()
