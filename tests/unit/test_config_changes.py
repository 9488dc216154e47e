"""A configuration read again: what has changed, from when on, and what a reload takes over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds4d import config
from ds4d.errors import ConfigError

NOTHING = {"HOME": "/home/nobody"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ds4d.toml"
    path.write_text("")
    return path


def read(file: Path, text: str, **kw) -> config.Loaded:
    file.write_text(text)
    return config.read(file, **{"environ": NOTHING, **kw})


def test_the_same_sources_are_read_again(file):
    environ = NOTHING | {"DS4D__API__ALIASES": "a"}
    first = read(file, "lanes.max = 2\n", environ=environ, sets=["log.level=debug"])
    assert first.again() == first
    file.write_text("lanes.max = 3\n")
    (file.parent / "conf.d").mkdir()
    (file.parent / "conf.d" / "1.toml").write_text("sched.queue_total = 7\n")
    second = first.again()
    assert (second.config.lanes.max, second.config.sched.queue_total) == (3, 7)
    assert (second.config.api.aliases, second.config.log.level) == (("a",), "debug")
    assert second.config.paths is first.config.paths
    assert [path.name for path in second.files] == ["ds4d.toml", "1.toml"]


def test_another_file_can_be_read_instead(file):
    first = read(file, "lanes.max = 2\n", sets=["log.level=debug"])
    other = file.with_name("other.toml")
    other.write_text("lanes.max = 9\n")
    second = first.again(other)
    assert (second.config.lanes.max, second.config.log.level) == (9, "debug")
    assert second.sources["lanes.max"] == "other.toml:1"
    assert second.again().config.lanes.max == 9
    assert first.again().config.lanes.max == 2


def test_a_file_that_has_gone_does_not_bring_the_built_in_values_back(file):
    environ = {"CONFIGURATION_DIRECTORY": str(file.parent)}
    file.write_text("lanes.max = 2\n")
    loaded = config.read(environ=environ)
    assert loaded.config.lanes.max == 2
    file.unlink()
    with pytest.raises(ConfigError, match=r"ds4d.toml: cannot be read: No such file"):
        loaded.again()
    none = config.read(environ=environ)
    assert none.again() == none
    file.write_text("lanes.max = 3\n")
    assert none.again().config.lanes.max == 3


def test_a_bad_file_leaves_what_was_loaded_as_it_is(file):
    loaded = read(file, "lanes.max = 2\n")
    file.write_text("lanes.max = 0\nlog.level = 1\n")
    with pytest.raises(ConfigError) as caught:
        loaded.again()
    assert [where for where, _, _ in caught.value.problems] == ["ds4d.toml:1", "ds4d.toml:2"]
    assert loaded.config.lanes.max == 2


def test_each_changed_key_says_from_when_on_it_holds(file):
    old = read(file, 'model.path = "/a"\n').config
    text = "lanes.max = 2\nprefill.chunk = 128\napi.aliases = ['x', 'y\"']\ncontrol.socket_mode="
    new = read(file, f"{text} '0660'\n").config
    assert [(c.key, c.old, c.new, c.when) for c in config.diff(old, new)] == [
        ("model.path", '"/a"', "unset", "restart"),
        ("api.aliases", "[]", r'["x", "y\""]', "now"),
        ("lanes.max", "4", "2", "now"),
        ("prefill.chunk", "256", "128", "next request"),
        ("control.socket_mode", '"0600"', '"0660"', "restart"),
    ]
    assert config.diff(old, old) == ()


def test_what_needs_a_restart_is_kept(file):
    old = read(file, 'model.path = "/a"\nlanes.max = 4\n').config
    new = read(file, 'model.path = "/b"\nlanes.max = 8\nlog.level = "debug"\n').config
    new = replace(new, paths=replace(new.paths, state=Path("/elsewhere")))
    merged = config.merge(old, new)
    assert (merged.model.path, merged.lanes.max, merged.log.level) == (Path("/a"), 8, "debug")
    assert merged.paths == old.paths
    assert config.merge(old, new, keep={"lanes.max"}).lanes.max == 4
    assert all(c.when == "restart" for c in config.diff(merged, new))
    assert config.merge(old, old) == old


def test_a_door_does_not_lose_its_keys_by_half_a_reload(file):
    """The new settings are fine as a whole; the old address without the old keys is not."""
    old = read(file, 'api.listen = ["0.0.0.0:30007"]\napi.api_keys_file = "/k"\n').config
    new = read(file, "").config
    with pytest.raises(ConfigError, match="reachable from other machines without a key") as caught:
        config.merge(old, new)
    assert caught.value.problems[0][:2] == ("without a restart", "api.listen")


def test_a_kept_value_is_shown_with_where_it_was_from(file):
    old = read(file, 'lanes.max = 4\nmodel.path = "/a"\n')
    new = read(file, '\n\nmodel.path = "/b"\nlanes.max = 8\n')
    held = config.adopt(old, new)
    assert (held.config.lanes.max, held.sources["lanes.max"]) == (8, "ds4d.toml:4")
    assert held.config.model.path == Path("/a")
    assert held.sources["model.path"] == "ds4d.toml:2 at start"
    shown = 'path = "/a"'.ljust(43)
    assert f"{shown} # ds4d.toml:2 at start\n" in config.show(held)
    assert config.adopt(held, new).sources["model.path"] == "ds4d.toml:2 at start"
    assert config.adopt(held, old).sources == old.sources
    kept = config.adopt(old, new, keep={"lanes.max"})
    assert (kept.config.lanes.max, kept.sources["lanes.max"]) == (4, "ds4d.toml:1 at start")


def test_the_digest_changes_with_any_value_and_with_nothing_else(file):
    plain = read(file, "").config
    digest = config.digest(plain)
    assert len(digest) == 12
    assert int(digest, 16) >= 0
    elsewhere = replace(plain, paths=replace(plain.paths, state=Path("/elsewhere")))
    assert config.digest(elsewhere) == digest
    assert config.digest(read(file, "lanes.max = 4  # as it is\n").config) == digest
    others = [
        read(file, f"{name} = {config.as_toml(key.example)}\n").config
        for name, key in config.KEYS.items()
        if key.example is not None
    ]
    assert len({digest, *map(config.digest, others)}) == len(others) + 1
