"""A paragraph from a plan.

Owns how a plan becomes a text of the right length that holds what was asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny.tasks.prose.plans import (
    ABOUT_NAME,
    ABOUT_WORD,
    ASKS,
    CONTINUE,
    ENDING,
    PLANS,
    WITH_WORD,
)
from ops.tiny.tasks.prose.scene import Scene

if TYPE_CHECKING:
    from ops.tiny.dialogue import Step
    from ops.tiny.tasks.prose.plans import Sentence
    from ops.tiny.words import Words

LEAST, MOST = 60, 110  # words of an answer
# Slots whose values a plan in thought may name.
_TELLING = frozenset(
    """thing thing2 color color2 animal animal2 food food2 job place place2 weather season day room
    spot matter noise vehicle plant drink many skill kin daytime size look""".split()
)


def written(w: Words, scene: Scene, sentences: list[Sentence]) -> list[str]:
    """A wording of every sentence, its slots filled."""
    choice = w.rng.choice
    return [choice(choice(wordings)).format_map(scene) for wordings in sentences]


def paragraph(w: Words) -> Step:
    """A request for a paragraph about something, and one of the many that do."""
    r = w.rng
    plan = r.choice(PLANS)
    scene = Scene(w)
    topic, keys = r.choice(plan.topics)
    about = topic.format_map(scene)
    ask = r.choice(ASKS[plan.form][w.unseen]).replace("{t}", about)
    sentences = plan.sentences
    x = r.random()
    begun = plan.form == "story" and x < 0.15
    if "word" in scene:
        sentences = [sentences[0], ABOUT_NAME, *sentences[1:]]
    elif plan.form != "letter" and x > 0.88:
        sentences = [*sentences[:-1], ABOUT_WORD, sentences[-1]]
        form = r.choice(WITH_WORD[w.unseen])
        whole = ask if ask[-1] in ".?!" else ask + "."
        ask = form.format(a=whole, b=ask.rstrip(".?!"), word=scene["word"])
    if begun:
        sentences = [*sentences, ENDING]
    asked = [scene[key] for key in keys]
    while True:  # until the length is right and all that was asked for is there
        said = written(w, scene, sentences)
        if begun:
            first = said.pop(0)
        text = " ".join(said)
        if LEAST <= text.count(" ") + 1 <= MOST and (begun or all(a in text for a in asked)):
            break
    if begun:
        ask, about = r.choice(CONTINUE[w.unseen]).format(first=first), scene["who"]
    named = [v for k, v in scene.items() if k in _TELLING and v in text and v not in about]
    return ask, text, f"I write about {about}{': ' if named else ''}{', '.join(named[:3])}."
