"""Settings for people: the values in effect with their sources, a file to begin with, a list.

Made from the declarations in `tree`; knows no setting by name.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from ds4d.config.changes import digest
from ds4d.config.sources import DROP_INS, ENVIRONMENT_PREFIX, built_in_sources
from ds4d.config.tree import DEFAULT_PROFILE, KEYS, PRESETS, SECTIONS, built_in, value_at
from ds4d.config.values import as_toml, printable, shown
from ds4d.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ds4d.config.sources import Loaded
    from ds4d.config.values import Key

_WIDTH: Final = 100
_HELP_WIDTH: Final = 76
_COMMENT_AT: Final = 43  # the column of sources, where the value leaves room

_HEAD: Final = f"""\
Settings of ds4d. A key after a "#" without a space shows the value that holds without this file;
take the "#" away to change it.

Later ones win: the built-in values, the preset of the profile, this file, drop-ins
({DROP_INS}/*.toml beside it, by name), the environment
({ENVIRONMENT_PREFIX}SECTION__KEY), the command line (--set section.key=value). A relative path
begins in the directory of the file that it stands in.

`ds4d config check` finds mistakes, `ds4ctl reload` (or `systemctl reload ds4d`) applies a change
that needs no restart, `ds4ctl config show` tells each value with its source.
"""


def show(loaded: Loaded, defaults: bool = False) -> str:
    """The settings as a TOML file, each with its source; a key that is not set is a comment.
    `defaults`: what would hold with nothing set but the profile."""
    profile = loaded.config.profile
    if defaults:
        values, sources = built_in(profile), built_in_sources(profile)
        sources["profile"] = loaded.sources["profile"]
        head = f"what holds without any setting in profile {profile}"
    else:
        values = {name: value_at(loaded.config, name) for name in KEYS}
        sources = dict(loaded.sources)
        files = ", ".join(printable(str(file)) for file in loaded.files) or "no file"
        head = f"settings in effect, digest {digest(loaded.config)}, from {files}"
    lines = [f"# {head}"]
    for section, keys in _by_section():
        if section:
            lines += ["", f"[{section}]"]
        for key in keys:
            value = values[key.name]
            text = f"# {key.leaf} is not set" if value is None else f"{key.leaf} = {as_toml(value)}"
            source = sources[key.name] + (f": {key.unset}" if value is None else "")
            lines.append(f"{text:<{_COMMENT_AT}} # {source}")
    return "\n".join(lines) + "\n"


def template(profile: str = DEFAULT_PROFILE) -> str:
    """A `ds4d.toml` in which every key is explained and commented out. Raises ConfigError."""
    if profile not in PRESETS:
        raise ConfigError(
            f"profile: not known (got {shown(profile)}, expected {KEYS['profile'].expected})"
        )
    values = built_in(profile)
    lines = "\n#\n".join("\n".join(_comment(part)) for part in _HEAD.split("\n\n")).splitlines()
    for section, keys in _by_section():
        if section:
            lines += ["", "", *_comment(SECTIONS[section]), f"[{section}]"]
        for key in keys:
            lines += ["", *_comment(key.help), *_comment(f"Takes {key.expected}; {key.effect}.")]
            if (value := values[key.name]) is None:
                lines += _comment(f"Not set: {key.unset}.")
                lines.append(f"# For example: {key.leaf} = {as_toml(key.example)}")
            else:
                chosen = key.name == "profile" and profile != DEFAULT_PROFILE
                lines.append(f"{'' if chosen else '#'}{key.leaf} = {as_toml(value)}")
    return "\n".join(lines) + "\n"


def listing() -> str:
    """Every key with what it is for and what it takes, as `--help` shows it."""
    lines: list[str] = []
    for name, key in KEYS.items():
        text = f"{key.help} Takes {key.expected}. Default: {key.default_text}."
        lines += [
            name,
            *textwrap.wrap(text, _HELP_WIDTH, initial_indent="    ", subsequent_indent="    "),
        ]
    return "\n".join(lines)


def _by_section() -> Iterator[tuple[str, list[Key]]]:
    """Those without a section first, under an empty name."""
    for section in ("", *SECTIONS):
        yield section, [key for key in KEYS.values() if key.section == section]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
