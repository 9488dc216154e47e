"""Itself, small talk, roles, what the user said of himself, and what it does not know.

Offers what other tasks, the mixture and the evaluation use. The phrasings stand in the tables
beside the code, which stanzas.py reads: every question has one answer, no phrasing for training
equals one held out, and those that are near one are few.
"""

from ops.tiny.tasks.about.roles import RULES, TRAITS
from ops.tiny.tasks.about.slots import Slots, an
from ops.tiny.tasks.about.small import small_talk, unknown
from ops.tiny.tasks.about.stanzas import TableError
from ops.tiny.tasks.about.talk import chat
from ops.tiny.tasks.about.told import NOT_TOLD, TOLD, easy, remembering, statement
from ops.tiny.tasks.about.topics import (
    ALL_TOLD,
    BY_NAME,
    CONDITIONS,
    CORRECTING,
    COUNT_TOOLS,
    TOPICS,
    UNKNOWN,
    UNKNOWN_ASKS,
    WHO,
    WHO_AND_JOB,
)
from ops.tiny.tasks.about.typed import worded, worn

__all__ = [
    "ALL_TOLD", "BY_NAME", "CONDITIONS", "CORRECTING", "COUNT_TOOLS", "NOT_TOLD", "RULES", "TOLD",
    "TOPICS", "TRAITS", "UNKNOWN", "UNKNOWN_ASKS", "WHO", "WHO_AND_JOB", "Slots", "TableError",
    "an", "chat", "easy", "remembering", "small_talk", "statement", "unknown",
    "worded", "worn",
]  # fmt: skip
