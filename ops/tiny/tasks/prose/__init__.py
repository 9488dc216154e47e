"""Paragraphs of plain English about what was asked.

Offers the task and its tables. A paragraph follows a plan, with one of the interchangeable wordings
for every sentence; who, where and what are drawn once and fit together. Everything else is free, so
that a model learns the language and no text by heart.
"""

from ops.tiny.tasks.prose.plans import ASKS, CONTINUE, PLANS, WITH_WORD
from ops.tiny.tasks.prose.scene import Scene
from ops.tiny.tasks.prose.writing import LEAST, MOST, paragraph, written

__all__ = [
    "ASKS",
    "CONTINUE",
    "LEAST",
    "MOST",
    "PLANS",
    "WITH_WORD",
    "Scene",
    "paragraph",
    "written",
]
