"""Settings: TOML files, drop-ins, environment and command line to one frozen `Config`.

Owns every key with its default, unit, range and purpose (`tree`), where values come from
(`sources`), how configurations differ (`changes`), how they are shown (`show`), and the directories
of the daemon (`paths`); alone in the package it reads the environment. Does not know what is built
from a `Config`.
"""

from ds4d.config.changes import Changed, adopt, diff, digest, merge
from ds4d.config.forms import host_and_port, is_loopback
from ds4d.config.paths import administered, directories
from ds4d.config.show import listing, show, template
from ds4d.config.sources import FILE_NAME, Loaded, check, load, read
from ds4d.config.tree import (
    KEYS,
    PRESETS,
    SECTIONS,
    Api,
    Config,
    Control,
    Lanes,
    Log,
    Memory,
    Metrics,
    Model,
    Paths,
    Prefill,
    Runtime,
    Sched,
)
from ds4d.config.values import Key, When, as_toml

__all__ = [
    "FILE_NAME",
    "KEYS",
    "PRESETS",
    "SECTIONS",
    "Api",
    "Changed",
    "Config",
    "Control",
    "Key",
    "Lanes",
    "Loaded",
    "Log",
    "Memory",
    "Metrics",
    "Model",
    "Paths",
    "Prefill",
    "Runtime",
    "Sched",
    "When",
    "administered",
    "adopt",
    "as_toml",
    "check",
    "diff",
    "digest",
    "directories",
    "host_and_port",
    "is_loopback",
    "listing",
    "load",
    "merge",
    "read",
    "show",
    "template",
]
