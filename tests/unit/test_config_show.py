"""Settings shown to people: values with sources, the file to begin with, the list of help."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4d import config
from ds4d.config.tree import Config, conflicts, value_at
from ds4d.config.values import In, value_of
from ds4d.errors import ConfigError

NOTHING = {"HOME": "/home/nobody"}


def read(tmp_path: Path, text: str, **kw) -> config.Loaded:
    file = tmp_path / "ds4d.toml"
    file.write_text(text)
    return config.read(file, **{"environ": NOTHING, **kw})


def uncommented(text: str) -> str:
    return re.sub(r"(?m)^#(?=\w+ = )", "", text)


# The declarations


def test_every_key_has_a_sentence_and_a_reload_class():
    assert len(config.KEYS) > 40
    for key in config.KEYS.values():
        assert key.when in ("now", "next request", "restart")
        assert key.help[0].isalnum()
        assert key.help.endswith(".")
        assert not key.unset.endswith(".")
        assert key.expected
        assert key.kind is not float or isinstance(key.rule, In)  # else an int might not fit


def test_every_section_says_what_it_is_for():
    sections = {key.section for key in config.KEYS.values()} - {""}
    assert sections == set(config.SECTIONS)
    for purpose in config.SECTIONS.values():
        assert purpose.endswith(".")
        assert not purpose.startswith(("Config", "Api("))  # what a dataclass says by itself


def test_every_default_and_example_is_a_value_of_its_key(tmp_path):
    for key in config.KEYS.values():
        for value in (key.example, *key.defaults.values()):
            if value is not None:
                written = tomllib.loads(f"v = {config.as_toml(value)}")["v"]
                assert value_of(written, key) == value
    assert config.KEYS["lanes.max"].unit == "lanes"
    assert config.KEYS["api.aliases"].unit == ""


def test_a_default_is_told_by_profile_where_that_matters():
    assert config.KEYS["sched.queue_total"].default_text == "32"
    assert config.KEYS["model.path"].default_text == "not set (the embedded ds4-tiny)"
    assert config.KEYS["lanes.max"].default_text == (
        "4 in cpu-tiny; 3 in balanced, lean, prefill-fast, long-1m"
    )


def test_the_list_has_every_key_with_what_it_takes():
    lines = config.listing().splitlines()
    text = " ".join(config.listing().split())
    for name, key in config.KEYS.items():
        assert name in lines
        assert f"Takes {key.expected}. Default: {key.default_text}." in text
    assert max(map(len, lines)) <= 78


# Show


def test_what_is_in_effect_is_shown_with_where_it_is_from(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10-x.toml").write_text("[lanes]\nfrontiers = 3\n")
    loaded = read(
        tmp_path,
        'api.aliases = ["a", "b"]\n',
        environ=NOTHING | {"DS4D__API__KEEPALIVE_S": "2"},
        sets=["log.level=debug"],
    )
    lines = config.show(loaded).splitlines()
    assert lines[0] == (
        f"# settings in effect, digest {config.digest(loaded.config)}, "
        f"from {tmp_path}/ds4d.toml, {tmp_path}/conf.d/10-x.toml"
    )
    for text, source in [
        ("max = 4", "preset cpu-tiny"),
        ('aliases = ["a", "b"]', "ds4d.toml:1"),
        ("keepalive_s = 2.0", "DS4D__API__KEEPALIVE_S"),
        ("frontiers = 3", "conf.d/10-x.toml:2"),
        ('level = "debug"', "command line"),
        ('profile = "cpu-tiny"', "built-in"),
        ("# path is not set", "built-in: the embedded ds4-tiny"),
    ]:
        assert f"{text:<43} # {source}" in lines


def test_the_built_in_values_are_those_of_the_profile(tmp_path):
    loaded = read(tmp_path, 'profile = "lean"\nlanes.max = 1\nlog.level = "error"\n')
    text = config.show(loaded, defaults=True)
    shown = tomllib.loads(text)
    assert (shown["profile"], shown["lanes"]["max"], shown["log"]["level"]) == ("lean", 3, "info")
    assert f"{'max = 3':<43} # preset lean\n" in text
    assert read(tmp_path, text).config == read(tmp_path, 'profile = "lean"\n').config


def test_a_comment_cannot_be_left_by_the_name_of_a_file(tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "x\nlog.level = 'debug'\n.toml").write_text("lanes.max = 2\n")
    loaded = read(tmp_path, "")
    assert read(tmp_path, config.show(loaded)).config.log.level == "info"


def strategy(key: config.Key) -> st.SearchStrategy[object]:
    """Values that `key` can take, and None where it may be left out."""
    text = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1).filter(str.strip)
    if key.choices:
        values: st.SearchStrategy[object] = st.sampled_from(key.choices)
    elif isinstance(key.rule, In):
        low, high = key.rule.low, key.rule.high
        if key.kind is float:
            values = st.floats(low, high)
        else:
            step = key.rule.step
            values = st.integers(-(-int(low) // step), int(high) // step).map(lambda n: n * step)
    elif key.rule is not None:
        values = st.just(key.default)
    elif key.kind is bool:
        values = st.booleans()
    elif key.kind is Path:
        values = text.map(lambda name: Path("/") / name)
    elif key.kind is tuple:
        values = st.lists(text).map(tuple)
    else:
        values = text
    return values if key.default is not None else st.none() | values


@st.composite
def trees(draw: st.DrawFn) -> Config:
    profile = draw(st.sampled_from(sorted(config.PRESETS)))
    tree = config.load(sets=[f"profile={profile}"], environ=NOTHING)
    for name in draw(st.lists(st.sampled_from(sorted(config.KEYS.keys() - {"profile"})))):
        key = config.KEYS[name]
        value = draw(strategy(key))
        if value is None:
            value = key.defaults[profile]
        part = replace(getattr(tree, key.section), **{key.leaf: value})
        tree = replace(tree, **{key.section: part})
    return tree


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees().filter(lambda tree: not list(conflicts(tree))))
def test_what_is_shown_is_a_file_that_gives_the_same_settings(tmp_path, tree):
    loaded = replace(read(tmp_path, ""), config=tree)
    text = config.show(loaded)
    tomllib.loads(text)
    again = read(tmp_path, text).config
    assert again == tree
    assert config.digest(again) == config.digest(tree)
    assert config.diff(again, tree) == ()


# The file to begin with


@pytest.mark.parametrize("profile", config.PRESETS)
def test_the_template_changes_nothing_until_something_is_uncommented(tmp_path, profile):
    text = config.template(profile)
    plain = config.load(sets=[f"profile={profile}"], environ=NOTHING)
    assert read(tmp_path, text).config == plain
    assert read(tmp_path, uncommented(text)).config == plain
    given = tomllib.loads(uncommented(text))
    for name, key in config.KEYS.items():
        inside = given if not key.section else given[key.section]
        assert (key.leaf in inside) == (value_at(plain, name) is not None)


def test_the_template_says_of_every_key_what_it_takes_and_when_it_changes():
    text = config.template()
    assert text.startswith("# Settings of ds4d. ")
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for name, key in config.KEYS.items():
        assert key.help in flat
        assert f"Takes {key.expected}; {key.effect}." in flat
        assert re.search(rf"(?m)^#(?: For example: )?{key.leaf} = ", text), name
    for section, purpose in config.SECTIONS.items():
        assert purpose in flat
        assert f"\n[{section}]\n" in text


def test_the_examples_of_the_template_can_be_used_as_they_are(tmp_path):
    text = config.template().replace("# For example: ", "")
    loaded = read(tmp_path, text)
    assert loaded.config.model.context == 262_144
    assert loaded.config.model.path == Path("/var/lib/ds4d/models/current")


def test_a_template_of_no_profile_is_refused():
    with pytest.raises(ConfigError, match=r"profile: not known \(got huge, expected one of cpu-t"):
        config.template("huge")
