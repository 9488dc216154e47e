"""ds4d as a system service: its units under a real systemd, in a throw-away container.

The files are put there by `ops/scripts/install`; only the virtual environment is made of the
interpreter and packages that run these tests. Times are shorter than those of the shipped unit.
"""

from __future__ import annotations

import http.client
import json
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import nspawn
from tests.e2e.nspawn import Machine, wait

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message

ROOT = Path(__file__).resolve().parents[2]
VENV = "/opt/ds4d/versions/test"
PORT = 30007
SETTINGS = "/etc/ds4d/ds4d.toml"
FAULT = "/etc/ds4d/fault"
PATIENT = "/etc/systemd/system/ds4d.service.d/patient.conf"
DOORS = ("ds4d-api.socket", "ds4d-control.socket", "ds4d-monitor.socket")
HELLO = [{"role": "user", "content": "Hello! Who are you?"}]
READY_S = 100.0  # kernels may have to be compiled

QUICK = "/etc/systemd/system/ds4d.service.d/quick.conf"
QUICKLY = """
[Unit]
StartLimitIntervalSec=0
[Service]
RestartSec=1
WatchdogSec=4
TimeoutStopSec=4
ExecStart=
ExecStart=/opt/ds4d/current/bin/python /opt/src/tests/e2e/faulty.py serve \
    --config ${CONFIGURATION_DIRECTORY}/ds4d.toml
"""
STOP_S = 4.0  # TimeoutStopSec


class Service:
    """The unit, as `systemctl` and the daemon's clients see it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        command = ["journalctl", "--lines=0", "--show-cursor"]
        self._cursor = machine.run(*command).stdout.split()[-1]

    def systemctl(self, *arguments: str, check: bool = True) -> int:
        done = self.machine.run("systemctl", *arguments, check=False, timeout=READY_S)
        if check and done.returncode != 0:
            raise AssertionError(f"{done.stderr}\n{self.journal()}")
        return done.returncode

    def show(self, name: str, unit: str = "ds4d.service") -> str:
        command = ["systemctl", "show", f"--property={name}", "--value", unit]
        return self.machine.run(*command).stdout.rstrip("\n")

    def pid(self) -> int:
        return int(self.show("MainPID"))

    def n_restarts(self) -> int:
        return int(self.show("NRestarts"))

    def ctl(self, *arguments: str, user: str = "root", check: bool = True) -> Any:
        return self.machine.run("runuser", "-u", user, "--", "ds4ctl", *arguments, check=check)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ctl("status", "--json").stdout)
        return found

    def journal(self) -> str:
        """What the unit has said since this object was made."""
        command = ["journalctl", "--no-pager", "--output=cat", "--unit=ds4d.service"]
        return self.machine.run(*command, f"--after-cursor={self._cursor}").stdout

    def doors(self) -> set[str]:
        return {self.show("ActiveState", door) for door in DOORS}

    def settings(self, text: str) -> None:
        self.machine.write(SETTINGS, text)

    def fault(self, command: str) -> None:
        """One of those of faulty.py; none with an empty one."""
        self.machine.write(FAULT, command)

    def streams(self, n: int, n_tokens: int) -> list[Stream]:
        """`n` of them, all under way, and slow until `fault` says otherwise."""
        self.fault("step 0.05")
        made = [Stream(self.machine, n_tokens) for _ in range(n)]
        wait("all streams flow", lambda: all(stream.goes_on() for stream in made))
        return made

    def let_end(self, running: list[Stream]) -> None:
        """Each goes to its end, and none was broken."""
        assert all(stream.goes_on() for stream in running)
        self.fault("")
        for stream in running:
            stream.join(60)
            assert (stream.is_alive(), stream.error, stream.finish) == (False, None, "length")

    def until_restarted(self, pid: int) -> None:
        wait("another process is ready", lambda: self.pid() not in (0, pid) and self.is_ready())

    def is_ready(self) -> bool:
        return self.show("ActiveState") == "active"

    def get(self, path: str) -> tuple[int, Message, bytes]:
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: str = "") -> tuple[int, Message, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        connection.sock = self.machine.connect(PORT)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def chat(self) -> tuple[int, Message, Any]:
        body = json.dumps({"messages": HELLO, "max_tokens": 4})
        status, headers, text = self.ask("POST", "/v1/chat/completions", body)
        return status, headers, json.loads(text)


class Stream(threading.Thread):
    """A client that reads an answer of `n_tokens` to its end."""

    def __init__(self, machine: Machine, n_tokens: int) -> None:
        super().__init__(daemon=True)
        self.n_tokens = n_tokens
        self.n_chunks = 0
        self.finish: str | None = None
        self.error: str | None = None
        self._connection = http.client.HTTPConnection("127.0.0.1", PORT)
        self._connection.sock = machine.connect(PORT, timeout=60)
        self.start()

    def run(self) -> None:
        body = {"messages": HELLO, "max_tokens": self.n_tokens, "ignore_eos": True, "stream": True}
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(body))
            for line in self._connection.getresponse():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")))
        except (OSError, http.client.HTTPException) as error:
            self.error = self.error or repr(error)
        finally:
            self._connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]["code"]
        for choice in event.get("choices", ()):
            self.n_chunks += bool(choice["delta"].get("content"))
            self.finish = choice["finish_reason"] or self.finish

    def goes_on(self) -> bool:
        return self.is_alive() and self.n_chunks > 0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if (reason := nspawn.why_not()) is not None:
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    cache = base.parent / "systemd-cache"  # kernels stay for the next run
    cache.mkdir(exist_ok=True)
    places = {
        ROOT: "/opt/src",
        Path(sys.base_prefix): "/opt/python",
        Path(sysconfig.get_path("platlib")): "/opt/platlib",
        Path(sysconfig.get_path("purelib")): "/opt/purelib",  # in most environments the same
    }
    try:
        with nspawn.booted(
            base / "nspawn.log", read_only=places, writable={cache: "/var/cache/ds4d"}
        ) as booted:
            _make_venv(booted)
            booted.run("/opt/src/ops/scripts/install", "--no-venv", "--no-start")
            booted.write(SETTINGS, "")
            yield booted
    except nspawn.CannotBoot as error:
        pytest.skip(str(error))


def _make_venv(machine: Machine) -> None:
    """Out of what runs us, at places where the service may look (it sees no home directory)."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = f"{VENV}/lib/{version}/site-packages"
    machine.write(f"{VENV}/pyvenv.cfg", "home = /opt/python/bin\n")
    places = "/opt/purelib\n/opt/platlib\n/opt/src\n/opt/src/tui\n"  # one may be missing
    machine.write(f"{site}/all.pth", places)
    machine.path(f"{VENV}/bin").mkdir()
    machine.path(f"{VENV}/bin/python").symlink_to(f"/opt/python/bin/{version}")
    for name, module in (("ds4d", "ds4d.cli"), ("ds4ctl", "ds4d.ctl.main")):
        script = f"#!{VENV}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        machine.write(f"{VENV}/bin/{name}", script, 0o755)
    machine.path("/opt/ds4d/current").symlink_to("versions/test")
    # Where an interpreter with a shared library finds it, since that one has moved.
    machine.environ["LD_LIBRARY_PATH"] = "/opt/python/lib"
    machine.run("systemctl", "set-environment", "LD_LIBRARY_PATH=/opt/python/lib")


@pytest.fixture
def service(machine: Machine) -> Iterator[Service]:
    """Ready, with default settings and short times."""
    made = Service(machine)
    if not machine.path(QUICK).exists():
        machine.write(QUICK, QUICKLY)
        made.systemctl("daemon-reload")
        made.systemctl("stop", "ds4d")
    made.systemctl("start", "ds4d")
    yield made
    machine.path(FAULT).unlink(missing_ok=True)
    if machine.path(SETTINGS).read_text():
        machine.write(SETTINGS, "")
        made.systemctl("stop", "ds4d")
    sys.stdout.write(made.journal())  # for the report of a failure


def test_the_units_as_shipped_start_to_ready(machine: Machine) -> None:
    service = Service(machine)
    service.systemctl("start", "ds4d")  # returns when READY=1 has come
    assert service.show("ActiveState") == "active"
    assert service.show("StatusText").startswith("ready")
    assert service.doors() == {"active"}
    assert service.chat()[0] == 200
    assert service.status()["state"] == "ready"


def test_systemd_has_nothing_to_complain_of(machine: Machine) -> None:
    files = [f"/usr/local/lib/systemd/system/{unit}" for unit in ("ds4d.service", *DOORS)]
    done = machine.run("systemd-analyze", "verify", "--man=no", *files)
    assert (done.stdout, done.stderr) == ("", "")
    done = machine.run("systemd-analyze", "security", "--no-pager", "ds4d.service")
    sys.stdout.write(done.stdout.splitlines()[-1] + "\n")


def test_admins_command_and_others_may_not_even_look(service: Service) -> None:
    service.machine.run("useradd", "--groups", "ds4d-admin", "alice")
    service.machine.run("useradd", "bob")
    for name in ("control", "monitor"):
        path = f"/run/ds4d/{name}.sock"
        assert service.machine.run("stat", "-c", "%U:%G %a", path).stdout == "root:ds4d-admin 660\n"
    service.ctl("log", "level", "info", user="alice")
    assert service.ctl("status", user="bob", check=False).returncode == 4
    # A directory of root's would be handed to the daemon at its start, with all that is in it.
    service.systemctl("restart", "ds4d")
    assert (
        service.machine.run("stat", "-c", "%G", "/run/ds4d/control.sock").stdout == "ds4d-admin\n"
    )


def test_a_reload_under_load_breaks_no_stream_whether_it_is_good_or_bad(service: Service) -> None:
    before = service.pid()
    running = service.streams(3, 500)

    service.settings('api.aliases = ["other"]\napi.list_aliases = true\n')
    service.systemctl("reload", "ds4d")
    wait("the new alias is listed", lambda: b'"other"' in service.get("/v1/models")[2])
    assert service.status()["reload"]["ok"] is True
    assert service.show("StatusText").startswith("ready")

    service.settings("lanes.max = 99\n")
    service.systemctl("reload", "ds4d")
    wait("systemd hears of it", lambda: "reload refused" in service.show("StatusText"))
    assert "ds4d.toml:1: lanes.max: too large (got 99" in service.show("StatusText")
    last = service.status()["reload"]
    assert (last["ok"], "lanes.max" in last["text"]) == (False, True)
    assert b'"other"' in service.get("/v1/models")[2]  # the old settings hold

    service.let_end(running)
    assert service.pid() == before


def test_a_start_may_take_longer_than_its_timeout_as_long_as_loading_moves(
    service: Service,
) -> None:
    service.machine.write(PATIENT, "[Service]\nTimeoutStartSec=6\n")
    service.fault("load 6")
    service.systemctl("daemon-reload")
    service.systemctl("restart", "ds4d")
    assert service.chat()[0] == 200


def test_an_engine_that_hangs_is_noticed_by_the_daemon_which_ends_with_70(service: Service) -> None:
    service.settings("runtime.engine_stall_s = 2\n")
    service.ctl("reload")
    before, n = service.pid(), service.n_restarts()
    (stream,) = service.streams(1, 2000)
    service.fault(f"{before} sleep")
    service.until_restarted(before)
    stream.join(60)
    assert stream.finish is None and stream.error is not None
    assert service.n_restarts() == n + 1
    assert "code=exited, status=70" in service.journal()
    assert service.chat()[0] == 200


def test_a_process_that_hangs_altogether_is_restarted_by_systemd(service: Service) -> None:
    before, n = service.pid(), service.n_restarts()
    (stream,) = service.streams(1, 2000)
    service.fault(f"{before} hold")
    service.until_restarted(before)
    stream.join(60)
    assert service.n_restarts() == n + 1
    journal = service.journal()
    assert "Watchdog timeout (limit 4s)!" in journal
    assert "Fatal Python error: Aborted" in journal
    assert "faulty.py" in journal  # where it hung
    assert service.chat()[0] == 200


def test_a_client_that_comes_while_a_killed_daemon_is_down_only_waits(service: Service) -> None:
    before, n = service.pid(), service.n_restarts()
    service.systemctl("kill", "--signal=KILL", "ds4d")
    status, _, body = service.get("/health")  # connected now, answered by the next process
    assert (status, service.n_restarts()) == (200, n + 1), body
    service.until_restarted(before)
    assert service.chat()[0] == 200


def test_a_restart_refuses_no_connection(service: Service) -> None:
    before = service.pid()
    service.systemctl("restart", "--no-block", "ds4d")
    n = 0
    while service.pid() in (0, before) or not service.is_ready():
        service.machine.connect(PORT).close()  # raises if there is no door
        n += 1
        time.sleep(0.02)
    assert n > 3
    assert service.chat()[0] == 200


def test_wrong_settings_end_it_with_78_and_nobody_tries_again(service: Service) -> None:
    service.settings("lanes.max = 99\n")
    assert service.systemctl("restart", "ds4d", check=False) != 0
    assert service.show("ExecMainStatus") == "78"
    assert "ds4d.toml:1: lanes.max: too large (got 99, expected 1..64" in service.journal()
    # Nor does a client who knocks: the doors are closed.
    wait("the doors close", lambda: service.doors() == {"inactive"})
    with pytest.raises(ConnectionRefusedError):
        service.machine.connect(PORT)
    assert service.show("ActiveState") == "failed"
    assert service.n_restarts() == 0

    service.settings("")
    service.systemctl("start", "ds4d")
    assert service.chat()[0] == 200


def test_a_stop_lets_streams_end_and_refuses_new_ones(service: Service) -> None:
    """Longer than TimeoutStopSec, if runtime.stop_drain_s says so."""
    running = service.streams(3, 500)
    service.systemctl("stop", "--no-block", "ds4d")
    asked = time.monotonic()
    wait("new work is refused", lambda: service.chat()[0] == 503)
    status, headers, body = service.chat()
    assert (status, body["error"]["code"]) == (503, "draining")
    assert int(headers["Retry-After"]) >= 1
    time.sleep(max(asked + STOP_S + 0.5 - time.monotonic(), 0.0))
    service.let_end(running)
    wait("it is down", lambda: service.show("ActiveState") == "inactive")
    assert service.show("Result") == "success"
    wait("the doors close", lambda: service.doors() == {"inactive"})
    with pytest.raises(ConnectionRefusedError):
        service.machine.connect(PORT)


def test_a_stop_cuts_what_still_runs_at_its_deadline_and_says_so(service: Service) -> None:
    service.settings("runtime.stop_drain_s = 1\n")
    service.systemctl("restart", "ds4d")
    running = service.streams(3, 6000)
    service.systemctl("stop", "ds4d")
    for stream in running:
        stream.join(60)
        assert (stream.finish, stream.error) == (None, "draining")
    assert service.show("Result") == "success"  # not "timeout": it went by itself


def test_a_shutdown_through_the_control_socket_closes_the_doors(service: Service) -> None:
    service.ctl("shutdown")
    wait("it is down", lambda: service.show("ActiveState") == "inactive")
    wait("the doors close", lambda: service.doors() == {"inactive"})
    assert service.ctl("status", check=False).returncode == 3
    service.systemctl("start", "ds4d")
    assert service.chat()[0] == 200


def test_a_model_that_root_installs_is_served_and_stays_roots(service: Service) -> None:
    machine, models = service.machine, "/var/lib/ds4d/models"
    source = "/opt/src/ds4d/data/ds4-tiny.gguf"
    done = machine.run("ds4d", "model", "install", source, "--name", "mine")
    assert f'path = "{models}/current"' in done.stdout
    service.settings(f'model.path = "{models}/current"\n')
    assert machine.run("ds4d", "config", "check").stdout == f"no problems in {SETTINGS}\n"
    service.systemctl("restart", "ds4d")
    assert service.status()["model"]["file"] == f"{models}/mine/ds4-tiny.gguf"
    assert service.chat()[0] == 200
    assert machine.run("stat", "-c", "%U %a", models).stdout == "root 755\n"


def test_uninstalling_keeps_data_and_installing_again_finds_it(service: Service) -> None:
    machine, script = service.machine, "/opt/src/ops/scripts/install"
    done = machine.run(script, "--no-venv")
    assert "nothing has changed, so the service was left alone" in done.stderr

    machine.run(script, "uninstall", "--no-venv")
    assert service.show("LoadState") == "not-found"
    assert service.doors() == {"inactive"}
    assert machine.path(SETTINGS).exists()
    assert machine.run("stat", "-c", "%U %a", "/var/lib/ds4d").stdout == "ds4d 700\n"

    machine.run(script, "--no-venv", timeout=READY_S)
    assert service.chat()[0] == 200
    assert machine.run("systemctl", "is-enabled", "ds4d").stdout == "enabled\n"
