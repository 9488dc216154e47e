"""Settings: sources, precedence, and problems that are all told at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ds4d import config
from ds4d.errors import ConfigError

NOTHING = {"HOME": "/home/nobody"}
OPEN = "api.insecure_no_auth=true"


def load(tmp_path: Path, text: str | None = None, **kw) -> config.Config:
    return read(tmp_path, text, **kw).config


def read(tmp_path: Path, text: str | None = None, **kw) -> config.Loaded:
    file = None
    if text is not None:
        file = tmp_path / "ds4d.toml"
        file.write_text(text)
    return config.read(file=file, **{"environ": NOTHING, **kw})


def problems(tmp_path: Path, text: str | None = None, **kw) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **kw)
    assert caught.value.exit_code == 78
    lines = [": ".join(filter(None, problem)) for problem in caught.value.problems]
    assert str(caught.value).splitlines() == lines
    return lines


def test_a_bare_laptop_needs_no_setting(tmp_path):
    c = load(tmp_path)
    assert c.profile == "cpu-tiny"
    assert (c.model.path, c.model.context) == (None, None)  # the embedded file's own 8,192
    assert (c.lanes.max, c.prefill.chunk, c.sched.queue_total) == (4, 256, 32)
    assert c.api.listen == ("127.0.0.1:30007",)
    assert (c.api.default_max_tokens, c.api.min_headroom) == (32_768, 512)
    assert (c.runtime.drain_s, c.runtime.stop_drain_s, c.runtime.engine_stall_s) == (120, 30, 60)
    assert c.memory.simulate_total_gib is None
    assert (c.control.socket_mode, c.control.monitor_mode) == ("0600", "0600")


def test_each_source_goes_before_the_one_below_it(tmp_path):
    (tmp_path / "conf.d").mkdir()
    text = "[lanes]\nmax = 2\n"
    assert load(tmp_path, text).lanes.max == 2
    (tmp_path / "conf.d" / "10.toml").write_text("lanes.max = 3\n")
    (tmp_path / "conf.d" / "20.toml").write_text("lanes.max = 5\n")
    (tmp_path / "conf.d" / "ignored.txt").write_text("lanes.max = 9\n")
    (tmp_path / "conf.d" / ".#30.toml").write_text("lanes.max = 9\n")
    assert load(tmp_path, text).lanes.max == 5
    environ = NOTHING | {"DS4D__LANES__MAX": "6"}
    assert load(tmp_path, text, environ=environ).lanes.max == 6
    assert load(tmp_path, text, environ=environ, sets=["lanes.max=7"]).lanes.max == 7


def test_a_profile_sets_what_nobody_else_has_set(tmp_path):
    text = 'profile = "balanced"\nlanes.max = 2\n'
    c = load(tmp_path, text)
    assert (c.profile, c.model.context, c.prefill.chunk) == ("balanced", 262_144, 8192)
    assert c.lanes.max == 2
    environ = NOTHING | {"DS4D__PROFILE": "long-1m"}
    assert load(tmp_path, text, environ=environ).model.context == 1 << 20
    assert load(tmp_path, text, environ=environ, sets=["profile=cpu-tiny"]).model.context is None


@pytest.mark.parametrize("profile", config.PRESETS)
def test_every_profile_is_valid_as_it_is(tmp_path, profile):
    assert load(tmp_path, sets=[f"profile={profile}"]).profile == profile
    given = "".join(f"{key} = {value}\n" for key, value in config.PRESETS[profile].items())
    assert load(tmp_path, f'profile = "{profile}"\n{given}') == load(
        tmp_path, sets=[f"profile={profile}"]
    )


def test_every_value_knows_where_it_is_from(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10-x.toml").write_text("# a drop-in\n[lanes]\nfrontiers = 3\n")
    loaded = read(
        tmp_path,
        '[api]\naliases = [\n  "a", # ]\n  "b",\n]\nstrict_model = true\nkeepalive_s = 1\n',
        environ=NOTHING | {"DS4D__API__KEEPALIVE_S": "2"},
        sets=["log.level=debug"],
    )
    sources = loaded.sources
    assert sources.keys() == config.KEYS.keys()
    assert sources["api.aliases"] == "ds4d.toml:2"
    assert sources["api.strict_model"] == "ds4d.toml:6"
    assert sources["api.keepalive_s"] == "DS4D__API__KEEPALIVE_S"
    assert sources["lanes.frontiers"] == "conf.d/10-x.toml:3"
    assert sources["lanes.max"] == "preset cpu-tiny"
    assert sources["api.listen"] == "built-in"
    assert sources["log.level"] == "command line"
    assert loaded.files == (tmp_path / "ds4d.toml", tmp_path / "conf.d" / "10-x.toml")


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
        sets=['api.allowed_hosts=["box", "[::7]"]', "model.path=/m/x", "memory.reserve_mib=1_0"],
    )
    assert c.api.aliases == ("a", "b")
    assert c.api.strict_model is True
    assert c.model.name == "123"
    assert (c.api.keepalive_s, type(c.api.keepalive_s)) == (2.0, float)
    assert c.api.allowed_hosts == ("box", "[::7]")
    assert c.model.path == Path("/m/x")
    assert c.memory.reserve_mib == 10


@pytest.mark.parametrize("name", ["DS4D_LANES__MAX", "DS4D_LANES_MAX", "ds4d__lanes__max"])
def test_a_variable_that_is_nearly_a_setting_is_not_passed_over(tmp_path, name):
    (line,) = problems(tmp_path, environ={name: "2"})
    assert line == f"{name}: not of the form DS4D__SECTION__KEY"
    assert config.load(environ={"DS4D_PYTHON": "python3.12"})  # of our scripts


def test_problems_of_a_file_come_in_the_order_of_its_lines(tmp_path):
    text = "api.keepalive_s = 0\n[lanes]\nmax = 0\n[api.x]\ny = 1\n"
    assert [line.partition(": ")[0] for line in problems(tmp_path, text)] == [
        "ds4d.toml:1",
        "ds4d.toml:3",
        "ds4d.toml:4",
    ]


def test_a_relative_path_begins_where_it_was_written(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    text = 'model.path = "m/x.gguf"\napi.api_keys_file = "~/keys"\n'
    c = load(tmp_path, text, sets=["model.constants=tmp/p.json"])
    assert c.model.path == tmp_path / "m/x.gguf"
    assert c.api.api_keys_file == Path("~/keys").expanduser()
    assert c.model.constants == Path("/tmp/p.json")
    (line,) = problems(tmp_path, sets=["model.path=~no-such-user/x"])
    assert line == (
        "command line: model.path: nobody's home directory (got ~no-such-user/x, expected a path)"
    )


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
        "ds4d.toml:8: api.listen: wrong type (got 127.0.0.1:1, expected a list, each host:port)",
        "ds4d.toml:9: api.keepalive_s: wrong type (got true, expected 0.05..60 s)",
        "ds4d.toml:10: api.strict_modell: no such setting (got false, expected api.strict_model)",
        "ds4d.toml:11: api.max_body_mib: too small (got 0, expected 1..512 MiB)",
        "ds4d.toml:14: prefill.chunk: not allowed "
        "(got 200, expected 128..8192 tokens, a multiple of 128)",
        "ds4d.toml:16: nowhere.x: no such setting (got 1, expected a key of api, control, lanes, "
        "log, memory, metrics, model, prefill, profile, runtime, sched)",
        "DS4D__LANES__MAXX: lanes.maxx: no such setting (got 1, expected lanes.max)",
        "DS4D__LOG__LEVEL: log.level: not known "
        "(got loud, expected one of debug, info, warning, error)",
        "command line: lanes.max: wrong type (got two, expected 1..64 lanes)",
    ]


def test_check_returns_the_problems_instead_of_raising_them(tmp_path):
    file = tmp_path / "ds4d.toml"
    file.write_text("lanes.max = 2\n")
    assert config.check(file, NOTHING) is None
    file.write_text("lanes.max = 0\n")
    error = config.check(file, NOTHING)
    assert error is not None
    assert error.problems == (
        ("ds4d.toml:1", "lanes.max", "too small (got 0, expected 1..64 lanes)"),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lanes = 3", "1: lanes: a section, not a setting (got 3, expected keys in it, such as l"),
        ("[[lanes]]\nmax = 3", "1: lanes: a section, not a setting"),
        ("\n[lanes.max]\nx = 1", "2: lanes.max: wrong type (got a table, expected 1..64 lanes)"),
        ("\n[lanes]\nmax.x.y = 1", "3: lanes.max: wrong type (got a table"),
        ("[nowhere]", "1: nowhere: no such setting (got a table, expected a key of api, "),
        ('"lanes.max" = 3', '1: "lanes.max": no such setting (got 3, expected lanes.max)'),
        ("queue_total = 3", "1: queue_total: no such setting (got 3, expected sched.queue_total)"),
        ('model.name = ""', "1: model.name: empty (got '', expected text)"),
        ('api.aliases = ["a", " "]', "1: api.aliases: empty (got ' ', expected a list of texts)"),
        ('model.path = "/a\\u0000"', "1: model.path: not plain text (got '/a\\x00', expected a p"),
        ('model.name = "a\\nb"', "1: model.name: not plain text (got 'a\\nb', expected text)"),
        ('"a\\u001b[2J" = 1', "1: '\"a\\x1b[2J\"': no such setting"),
        ("runtime.drain_s = 9007199254740993", "1: runtime.drain_s: too large"),
        ("runtime.drain_s = nan", "1: runtime.drain_s: too small (got nan, expected 0..86400 s)"),
        ("runtime.drain_s = inf", "1: runtime.drain_s: too large"),
        ("lanes.max = 0x" + "f" * 9000, "1: lanes.max: too large (got a number of thousands of"),
        ("log.level = 2020-01-01", "1: log.level: wrong type (got 2020-01-01, expected one of"),
        ("lanes.max = 2.0", "1: lanes.max: wrong type (got 2.0, expected 1..64 lanes)"),
    ],
)
def test_a_value_that_is_no_value_of_its_key_is_told_in_one_line(tmp_path, text, says):
    (line,) = problems(tmp_path, text)
    assert line.startswith(f"ds4d.toml:{says}")
    assert line.isprintable()


@pytest.mark.parametrize("bad", ["0o600", "rw", "0666", "0602", "0400", "0770", "00600", "0608"])
def test_no_mode_lets_everybody_command_the_daemon(tmp_path, bad):
    (line,) = problems(tmp_path, sets=[f"control.socket_mode={bad}"])
    assert line.startswith(f"command line: control.socket_mode: not allowed (got {bad}, expected")


def test_a_group_may_command_and_everybody_may_watch_if_the_operator_says_so(tmp_path):
    assert load(tmp_path, sets=["control.socket_mode=660"]).control.socket_mode == "660"
    assert load(tmp_path, sets=["control.monitor_mode=0666"]).control.monitor_mode == "0666"
    assert "not allowed" in problems(tmp_path, sets=["control.monitor_mode=0066"])[0]


@pytest.mark.parametrize("good", ["*", "null", "http://localhost:3000", "chrome-extension://abc"])
def test_an_origin_has_a_scheme_and_no_path(tmp_path, good):
    assert load(tmp_path, sets=[f"api.cors_origins={good}"]).api.cors_origins == (good,)
    (line,) = problems(tmp_path, sets=[f"api.cors_origins={good}/"])
    assert "not an origin" in line


def test_a_file_that_is_no_toml_names_the_line(tmp_path):
    (line,) = problems(tmp_path, "[api]\nlisten = \n")
    assert line == "ds4d.toml:2: not TOML: Invalid value (got listen =)"
    (line,) = problems(tmp_path, "[api]\nx = '''never closed\n")
    assert line.startswith("ds4d.toml:3: ")
    (line,) = problems(tmp_path, "x = " + "[" * 5000)
    assert line == "ds4d.toml: no file of settings: nested too deeply, or a number too long"
    (line,) = problems(tmp_path, "x = " + "1" * 5000)
    assert line.startswith("ds4d.toml: no file of settings")
    (line,) = problems(tmp_path, "#" * (1 << 16) + "\n")
    assert line == "ds4d.toml: no file of settings: larger than 64 KiB"
    (line,) = problems(tmp_path, "[control]\nsocket_mode = 0660\n")
    assert line.startswith("ds4d.toml:2: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    missing = tmp_path / "nope.toml"
    with pytest.raises(ConfigError, match=r"nope.toml: cannot be read: No such file"):
        config.load(file=missing, environ=NOTHING)
    missing.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load(file=missing, environ=NOTHING)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(file=tmp_path, environ=NOTHING)
    (tmp_path / "conf.d").write_text("")
    with pytest.raises(ConfigError, match=r"conf.d: cannot be read: Not a directory"):
        load(tmp_path, "")


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe.toml: cannot be read: it is a pipe, which a rel"):
        config.load(pipe, environ=NOTHING)
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be read: "):
            config.load(Path("/") / name, environ=NOTHING)
    assert config.load(Path(os.devnull), environ=NOTHING) == config.load(environ=NOTHING)


def test_all_files_are_read_however_many_are_broken(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "1.toml").write_text("x")
    (tmp_path / "conf.d" / "2.toml").mkdir()
    (tmp_path / "conf.d" / "3.toml").write_text("lanes.max = 0")
    (tmp_path / "conf.d" / "new\nline.toml").write_text("lanes.max = 0")
    starts = ("ds4d.toml:1: ", "conf.d/1.toml:1: ", str(tmp_path), "conf.d/3.toml:1: ", "'conf.d/n")
    lines = problems(tmp_path, "y")
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('model.name = """\n[lanes]\nmax = 1\n"""\nlanes.max = 0', 5),
        ("model.name = '''\nlanes.max = 1'''\nlanes.max = 0", 3),
        ('model.name = "# [" # "\n[ lanes ] # x\n"max" = 0', 3),
        ("[lanes]\nfrontiers = 3\r\n\r\n'max' = 0", 4),
        ("model.context = 256\nlanes = { frontiers = 3, max = 0 }", 2),
        ('api.aliases = [ # [\n"]",\n[]\n]\nlanes.max = 0', 5),
        ("[api]\n[lanes]\n[log]\n[lanes.x]\n[memory]\nreserve_mib = -1", 6),
        ('model.name = """a""""" # 2 quotes at the end\nlanes.max = 0', 2),
        ('model.name = "\\\\"\nlanes.max = 0', 2),
        ("\ufefflanes.max = 0", 1),
    ],
)
def test_the_line_is_that_of_the_key_whatever_stands_around_it(tmp_path, text, line):
    last = problems(tmp_path, text)[-1]
    assert last.startswith((f"ds4d.toml:{line}: lanes.max", f"ds4d.toml:{line}: memory.reserve"))


def test_an_empty_section_says_nothing(tmp_path):
    text = "".join(f"[{section}]\n" for section in config.SECTIONS)
    assert load(tmp_path, text) == load(tmp_path)


def test_a_door_beyond_loopback_needs_keys_or_a_plain_word_for_it(tmp_path):
    text = '[api]\nlisten = ["127.0.0.1:1", "0.0.0.0:30007"]\n'
    (line,) = problems(tmp_path, text)
    assert line.startswith("ds4d.toml:2: api.listen: reachable from other machines without a key")
    assert load(tmp_path, text + "insecure_no_auth = true\n").api.insecure_no_auth
    keyed = load(tmp_path, text + 'api_keys_file = "~/keys"\n')
    assert keyed.api.api_keys_file == Path("~/keys").expanduser()


def test_values_that_do_not_go_together_are_told_at_one_of_them(tmp_path):
    assert problems(tmp_path, "[api]\nlisten = []\n") == [
        "ds4d.toml:2: api.listen: no address (got [], expected at least one host:port)"
    ]
    (line,) = problems(tmp_path, sets=["api.listen=h:1,h:1", OPEN])
    assert line == "command line: api.listen: twice the same address (got h:1, expected it once)"
    (line,) = problems(tmp_path, sets=["api.listen=h:9", "metrics.listen=h:9", OPEN])
    assert line == (
        "command line: metrics.listen: taken by api.listen (got h:9, expected another port)"
    )
    assert load(tmp_path, sets=["metrics.listen=127.0.0.1:30007"])  # not used on loopback
    (line,) = problems(tmp_path, sets=["model.context=1024", "prefill.chunk=2048"])
    assert line == (
        "command line: prefill.chunk: longer than a session "
        "(got 2048, expected at most model.context, 1024)"
    )
    (line,) = problems(tmp_path, sets=["model.context=1024", "profile=balanced"])
    assert line.startswith("preset balanced: prefill.chunk: longer than a session (got 8192, ")


def test_a_wrong_value_is_not_blamed_twice(tmp_path):
    """What a key would be without its wrong value says nothing about the others."""
    assert len(problems(tmp_path, sets=["api.listen=0.0.0.0:1", "api.insecure_no_auth=yes"])) == 1
    assert len(problems(tmp_path, sets=["prefill.chunk=4096", "model.context=255"])) == 1


@pytest.mark.parametrize(
    "bad", ["30007", "host", "host:", ":1", "h:70000", "::1:5", "[::1]", "a b:1"]
)
def test_an_address_is_host_and_port(tmp_path, bad):
    assert "expected host:port" in problems(tmp_path, sets=[f'api.listen=["{bad}"]'])[0]
    assert "expected host:port" in problems(tmp_path, sets=[f"metrics.listen={bad}"])[0]


def test_good_addresses_come_apart():
    assert config.host_and_port("[::1]:80") == ("::1", 80)
    assert config.host_and_port("localhost:0") == ("localhost", 0)
    listen = config.load(sets=["api.listen=[::1]:80, 127.0.0.1:80"], environ=NOTHING).api.listen
    assert listen == ("[::1]:80", "127.0.0.1:80")
    assert config.is_loopback("127.8.9.1")
    assert config.is_loopback("::1")
    assert not config.is_loopback("0.0.0.0")
    assert not config.is_loopback("127.0.0.1.evil.test")


def test_the_file_of_the_configuration_directory_is_found_and_may_be_missing(tmp_path):
    environ = {"CONFIGURATION_DIRECTORY": str(tmp_path)}
    assert config.load(environ=environ).lanes.max == 4
    (tmp_path / "ds4d.toml").write_text("lanes.max = 2\n")
    assert config.load(environ=environ).lanes.max == 2


# Anything at all

words = st.sampled_from([*config.KEYS, *config.SECTIONS, "x", "api", '"a.b"', "max", "''"])
values = st.sampled_from(
    [
        *("1", "-1", "1e400", "nan", "true", "0b1", "0660", "1979-05-27T07:32:00Z"),
        *('"a"', '"\\ud7ff"', "'''\n'''", '"""\n["""'),
        *("[]", '["a", 1]', "[[[]]]", "{}", "{max = 1}"),
    ]
)
statements = st.one_of(
    st.builds("{} = {}".format, words, values),
    st.builds("[{}]".format, words),
    st.builds("[[{}]]".format, words),
    st.just("# [ ' \" ]"),
    st.just(""),
)
files = st.one_of(
    st.lists(statements).map("\n".join).map(str.encode),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.binary(),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=files, variable=st.text(min_size=1), value=st.text(), item=st.text())
@example(data=b"a = " + b"{a=" * 3000, variable="X", value="", item="")
@example(data=b"." * 3000, variable="API", value="\udcff", item="=")
def test_nothing_but_problems_comes_of_garbage(tmp_path, data, variable, value, item):
    (tmp_path / "g.toml").write_bytes(data)
    environ = NOTHING | {f"DS4D__{variable}": value}
    try:
        config.load(tmp_path / "g.toml", [item], environ)
    except ConfigError as error:
        assert error.problems
        assert len(str(error).splitlines()) == len(error.problems)
    else:
        pytest.fail("there is no such environment variable")  # it has no section


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=files)
def test_a_file_alone_gives_settings_or_problems_with_their_lines(tmp_path, data):
    (tmp_path / "g.toml").write_bytes(data)
    try:
        loaded = config.read(tmp_path / "g.toml", environ=NOTHING)
    except ConfigError as error:
        n_lines = data.count(b"\n") + 1
        for where, _, message in error.problems:
            assert message.isprintable()
            number = where.removeprefix("g.toml").removeprefix(":")
            assert not number or 1 <= int(number) <= n_lines
    else:
        assert loaded.config.profile in config.PRESETS
