"""What is asked without regard to what was said before: topics, the unknown, other requests.

Owns topics.txt, unknown.txt and asks.txt, each phrasing with its one answer; does not draw them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ops.tiny.tasks.about.slots import SLOTS
from ops.tiny.tasks.about.stanzas import Phrasings, read, read_named

FOLDER = Path(__file__).parent


class Topic(NamedTuple):
    what: str
    answer: str
    asks: Phrasings
    of_me: bool  # a role changes the answer


TOPICS = [
    Topic(s.name.removeprefix("*"), s.one(), s.phrasings(), s.name.startswith("*"))
    for s in read(FOLDER / "topics.txt", SLOTS)
]
_UNKNOWN = read_named(FOLDER / "unknown.txt", SLOTS, needed=["unknown"], others=False)["unknown"]
UNKNOWN, UNKNOWN_ASKS = _UNKNOWN.one(), _UNKNOWN.phrasings()
_NAMES = ("all told", "by name", "correcting", "who", "who and job", "conditions", "tools")
_ASKS = read_named(FOLDER / "asks.txt", SLOTS | {""}, needed=_NAMES, others=False)
ALL_TOLD, BY_NAME, CORRECTING, WHO, WHO_AND_JOB, CONDITIONS, COUNT_TOOLS = (
    _ASKS[name].phrasings() for name in _NAMES
)
