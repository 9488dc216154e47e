"""Settings: sources, precedence, and problems that are all told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4d import config
from ds4d.errors import ConfigError

NOTHING = {"HOME": "/home/nobody"}


def load(tmp_path: Path, text: str | None = None, **kw) -> config.Config:
    file = None
    if text is not None:
        file = tmp_path / "ds4d.toml"
        file.write_text(text)
    return config.load(file=file, **{"environ": NOTHING, **kw})


def problems(tmp_path: Path, text: str | None = None, **kw) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **kw)
    assert caught.value.exit_code == 78
    return str(caught.value).splitlines()


def test_a_bare_laptop_needs_no_setting(tmp_path):
    c = load(tmp_path)
    assert c.profile == "cpu-tiny"
    assert (c.model.path, c.model.context) == (None, None)  # the embedded file's own 8,192
    assert (c.lanes.max, c.prefill.chunk, c.sched.queue_total) == (4, 256, 32)
    assert c.api.listen == ("127.0.0.1:30007",)
    assert (c.api.default_max_tokens, c.api.min_headroom) == (32_768, 512)
    assert c.runtime.stop_drain_s == 30
    assert c.memory.simulate_total_gib is None


def test_each_source_goes_before_the_one_below_it(tmp_path):
    (tmp_path / "conf.d").mkdir()
    text = "[lanes]\nmax = 2\n"
    assert load(tmp_path, text).lanes.max == 2
    (tmp_path / "conf.d" / "10.toml").write_text("lanes.max = 3\n")
    (tmp_path / "conf.d" / "20.toml").write_text("lanes.max = 5\n")
    (tmp_path / "conf.d" / "ignored.txt").write_text("lanes.max = 9\n")
    assert load(tmp_path, text).lanes.max == 5
    environ = NOTHING | {"DS4D__LANES__MAX": "6"}
    assert load(tmp_path, text, environ=environ).lanes.max == 6
    assert load(tmp_path, text, environ=environ, sets=["lanes.max=7"]).lanes.max == 7


def test_text_from_outside_a_file_gets_the_type_of_its_key(tmp_path):
    c = load(
        tmp_path,
        environ=NOTHING
        | {
            "DS4D__API__ALIASES": "a, b",
            "DS4D__API__STRICT_MODEL": "true",
            "DS4D__MODEL__NAME": "123",
            "DS4D__API__KEEPALIVE_S": "2",
        },
        sets=['api.allowed_hosts=["box", "b,c"]', "model.path=/m/x.gguf", "memory.reserve_mib=1_0"],
    )
    assert c.api.aliases == ("a", "b")
    assert c.api.strict_model is True
    assert c.model.name == "123"
    assert (c.api.keepalive_s, type(c.api.keepalive_s)) == (2.0, float)
    assert c.api.allowed_hosts == ("box", "b,c")
    assert c.model.path == Path("/m/x.gguf")
    assert c.memory.reserve_mib == 10


def test_all_problems_come_in_one_pass_each_with_its_place(tmp_path):
    text = """# a comment
profile = "cpu-tiny"

[lanes]
max = 99

[api]
listen = "127.0.0.1:1"
keepalive_s = true
strict_modell = false
"max_body_mib" = 0

[prefill]
chunk = 200
[nowhere]
x = 1
"""
    environ = NOTHING | {"DS4D__LOG__LEVEL": "loud", "DS4D__LANES__MAXX": "1"}
    assert problems(tmp_path, text, environ=environ, sets=["lanes.max=two", "broken"]) == [
        "--set broken: needs the form section.key=value",
        "ds4d.toml:5: lanes.max: too large (got 99, expected 1..64 lanes)",
        "ds4d.toml:8: api.listen: wrong type (got 127.0.0.1:1, expected a list of texts)",
        "ds4d.toml:9: api.keepalive_s: wrong type (got true, expected 0.05..60 s)",
        "ds4d.toml:10: api.strict_modell: no such setting (got false, expected api.strict_model)",
        "ds4d.toml:11: api.max_body_mib: too small (got 0, expected 1..512 MiB)",
        "ds4d.toml:14: prefill.chunk: not allowed "
        "(got 200, expected 128..8192 tokens, a multiple of 128)",
        "ds4d.toml:16: nowhere.x: no such setting (got 1, expected a key of "
        "api, lanes, log, memory, model, prefill, profile, runtime, sched)",
        "DS4D__LANES__MAXX: lanes.maxx: no such setting (got 1, expected lanes.max)",
        "DS4D__LOG__LEVEL: log.level: not known "
        "(got loud, expected one of debug, info, warning, error)",
        "command line: lanes.max: wrong type (got two, expected 1..64 lanes)",
    ]


def test_a_file_that_is_no_toml_names_the_line(tmp_path):
    (line,) = problems(tmp_path, "[api]\nlisten = \n")
    assert line.startswith("ds4d.toml:2: ")
    (line,) = problems(tmp_path, "[api]\nx = '''never closed\n")
    assert line.startswith("ds4d.toml:3: ")
    missing = tmp_path / "nope.toml"
    with pytest.raises(ConfigError, match=r"nope.toml: cannot be read: No such file"):
        config.load(file=missing, environ=NOTHING)
    missing.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load(file=missing, environ=NOTHING)


def test_a_door_beyond_loopback_needs_keys_or_a_plain_word_for_it(tmp_path):
    text = '[api]\nlisten = ["127.0.0.1:1", "0.0.0.0:30007"]\n'
    (line,) = problems(tmp_path, text)
    assert line.startswith("ds4d.toml:2: api.listen: reachable from other machines without a key")
    assert load(tmp_path, text + "insecure_no_auth = true\n").api.insecure_no_auth
    keyed = load(tmp_path, text + 'api_keys_file = "~/keys"\n')
    assert keyed.api.api_keys_file == Path("~/keys").expanduser()


@pytest.mark.parametrize(
    "bad", ["30007", "host", "host:", ":1", "h:70000", "::1:5", "[::1]", "a b:1"]
)
def test_an_address_is_host_and_port(tmp_path, bad):
    assert "expected host:port" in problems(tmp_path, sets=[f'api.listen=["{bad}"]'])[0]


def test_good_addresses_come_apart():
    assert config.host_and_port("[::1]:80") == ("::1", 80)
    assert config.host_and_port("localhost:0") == ("localhost", 0)
    assert config.is_loopback("127.8.9.1")
    assert config.is_loopback("::1")
    assert not config.is_loopback("0.0.0.0")
    assert not config.is_loopback("127.0.0.1.evil.test")


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


def test_the_file_of_the_configuration_directory_is_found_and_may_be_missing(tmp_path):
    environ = {"CONFIGURATION_DIRECTORY": str(tmp_path)}
    assert config.load(environ=environ).lanes.max == 4
    (tmp_path / "ds4d.toml").write_text("lanes.max = 2\n")
    assert config.load(environ=environ).lanes.max == 2


def test_every_key_has_bounds_that_hold_its_default(tmp_path):
    """Writing each default out as a file must give the same configuration."""
    plain = load(tmp_path)
    lines = []
    for name in config._KEYS:
        value: object = plain
        for part in name.split("."):
            value = getattr(value, part)
        if value is not None:
            shown = list(value) if isinstance(value, tuple) else value
            lines.append(
                f"{name} = {str(shown).lower() if isinstance(shown, bool) else repr(shown)}"
            )
    assert len(lines) > 20
    assert load(tmp_path, "\n".join(lines)) == plain
