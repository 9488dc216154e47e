"""The fixed instruction texts of a prompt: reasoning effort, tools block, response format.

The release's own texts belong to the model and are not stored here: they come from a JSON file in
the model directory and every block is checked against its hash, so that one changed byte is caught.
ds4-tiny has its own words in `ds4d/data/prompt.json`; they also stand in for a missing file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from ds4d.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from ds4d.prompt.ask import Effort

Profile = Literal["0731", "preview"]

# Block: (bytes in UTF-8, sha256), spec/api.md 1.2.
RELEASE_BLOCKS = {
    "effort_high": (476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
    "effort_max": (528, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
    "tools_head": (890, "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c"),
    "tools_tail": (99, "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7"),
    "response_format_head": (
        80,
        "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112",
    ),
}

_LEVELS: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """`effort_high` and `effort_max` are texts A and B of spec/api.md 1.2: what high and max mean
    on profile 0731. The preview checkpoint was trained with every level one lower."""

    name: str
    profile: Profile
    effort_high: str
    effort_max: str
    tools_head: str
    tools_tail: str
    response_format_head: str

    def effort_text(self, effort: Effort) -> str:
        """What follows BOS when thinking is on."""
        if self.profile == "0731":
            return {"low": "", "high": self.effort_high, "max": self.effort_max}[effort]
        return {"low": "", "high": "", "max": self.effort_high}[effort]


def load(path: Path | None = None, profile: Profile = "0731") -> Constants:
    """The release's texts from `path`, or ds4-tiny's own when there is none (always 0731).

    Raises:
        ConfigError: an unreadable file, a missing block, a block with another hash than its own.
    """
    if path is None:
        embedded = resources.files("ds4d").joinpath("data", "prompt.json").read_text("utf-8")
        blocks = json.loads(embedded)
        return Constants(profile="0731", **blocks)
    blocks = _read(path)
    for block, (n_bytes, digest) in RELEASE_BLOCKS.items():
        text = blocks.get(block)
        if not isinstance(text, str):
            raise ConfigError(f"{path}: no text {block!r}")
        data = text.encode("utf-8", "replace")
        found = hashlib.sha256(data).hexdigest()
        if found != digest:
            raise ConfigError(
                f"{path}: {block} is not the release's text: {len(data)} bytes with sha256 {found},"
                f" expected {n_bytes} bytes with {digest}"
            )
    texts = {block: blocks[block] for block in RELEASE_BLOCKS}
    return Constants(name="release", profile=profile, **texts)


def _read(path: Path) -> dict[str, Any]:
    try:
        blocks = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON file in UTF-8: {error}") from error
    if not isinstance(blocks, dict):
        raise ConfigError(f"{path}: expected a JSON object with the texts of the release")
    return blocks


def effort_level(name: str) -> Effort | None:
    """The level behind a client's word for it; None: thinking off.

    Raises:
        RequestError: a word that is none of the vendor's; the caller knows which field held it.
    """
    if name == "none":
        return None
    if name not in _LEVELS:
        raise RequestError(f"expected one of none, {', '.join(_LEVELS)}, got {name[:40]!r}")
    return _LEVELS[name]
