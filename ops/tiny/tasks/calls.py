"""Tool use: one call, several at once, rounds of them, reading results, declining, no tool needed.

Every answer follows from the schemas and the request. A request is declined only if none of its
words stands in any schema; calls that are asked for in one breath go into one block, in the order
of asking; calls that are asked for one after the other ("when that is done") follow each other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ops.tiny import tools
from ops.tiny.dialogue import Dialogue, Json, Turn, system, with_thinking

if TYPE_CHECKING:
    from collections.abc import Callable

    from ops.tiny.tools import Made
    from ops.tiny.words import Words

NO_TOOL = "None of my tools can do that."
Call = tuple[str, Json]


def _shown(arguments: Json) -> str:
    return ", ".join(
        f"{k} = {v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments.items()
    )


def reason(calls: list[Call]) -> str:
    """The reasoning before calls: which tool, and what goes where."""
    return " ".join(
        f"The tool {name} fits: {_shown(arguments)}." if arguments else f"The tool {name} fits."
        for name, arguments in calls
    )


def _calling(ask: str, calls: list[Call]) -> list[Turn]:
    return [Turn("user", ask), Turn("assistant", "", calls, reason(calls))]


# --- what one round may be -----------------------------------------------------------------------


def _joined(w: Words, each: list[Made]) -> str:
    """Several requests in one breath."""
    r = w.rng
    out = each[0].request.rstrip()
    for m in each[1:]:
        link = r.choice(w.either(_ALSO, _ALSO_UNSEEN))
        if not w.unseen and r.random() < 0.15:
            link = f" {w.marker()}, "
        starts = link.startswith(("\n", " Also:", " Then:"))
        if link.startswith((",", " and")):
            out = out.rstrip(".")
        elif out[-1] not in ".?!":
            out += "."
        out += link + (m.request if starts else m.inside())
    return out


_ALSO = [" Also ", " And ", " And also ", " Also: ", " Then: ", "\n", "\n- ", ", and ", " and ",
         " Besides, ", " At the same time ", " Plus, ", " In addition, ", " Additionally, ",
         " Second, ", " And: ", " Next, ", " And please ", " Also please ", "; ", "\n\n", " + ",
         ". And ", " On top of that, ", " While you are at it, ", " Another thing: ", " Further, ",
         "\n+ ", " as also ", " Not only that: ", " Likewise, ", " Equally, ", " Apart from that, ",
         " I also want this: ", " One more: ", " Together with that: "]  # fmt: skip
_ALSO_UNSEEN = [" Moreover, ", " As well, ", "\n* "]
_AFTER = [" After that, ", " When that is done, ", " Once you have the answer, ",
          " Then, when it is done, ", " As soon as that has worked, ", " Afterwards, ",
          " Next, when you know it, ", " If that works, ", " When you have the result, ",
          " Only after that, ", " When it has finished, ", " And when that is over, "]  # fmt: skip
_AFTER_UNSEEN = [" Having done so, ", " With that finished, "]


def _together(w: Words, made: list[Made]) -> tuple[str, list[Made], list[Call]] | None:
    """Two or three calls asked for at once: text, the tool of each, the calls."""
    r = w.rng
    m = r.choice(made)
    x = r.random()
    if x < 0.35 and m.several is not None:
        listed = m.several(w)
        if listed is not None:
            text, arguments = listed
            return text, [m] * len(arguments), [(m.name, a) for a in arguments]
    if x < 0.6 and m.again is not None:
        each = [m.again(w) for _ in range(r.choice((2, 2, 3)))]
    else:
        each = r.sample(made, min(len(made), r.choice((2, 2, 2, 3))))
        if len(each) < 2:
            return None
    calls = [(e.name, e.arguments) for e in each]
    if any(calls.count(c) > 1 for c in calls):
        return None
    return _joined(w, each), each, calls


def _results(w: Words, each: list[Made], calls: list[Call]) -> list[Turn]:
    """The results of calls and the answer that reports them all."""
    texts, answers = [], []
    for m in each:
        text, _, answer = tools.result(w, m)
        texts.append(Turn("tool", text))
        answers.append(answer)
    why = "The tool answered." if len(each) == 1 else "The tools answered."
    return [*texts, Turn("assistant", " ".join(answers), reasoning=why)]


_ONLY = ["Tell me only the {}.", "I only need the {}.", "What is the {}?", "I want to know the {}.",
         "Only the {}, please.", "Give me just the {}.", "Answer with the {} alone.",
         "The {} is enough.", "Just the {}.", "Say only the {}.", "How about the {}?",
         "Report the {}.", "Let me know the {}.", "I am asking for the {}.", "Which {} is it?",
         "The {} matters to me.", "Only tell me the {}.", "It is the {} that I need.",
         "Leave out all but the {}.", "I would like to have the {}.", "{} only.",
         "Of the answer I need the {}.", "Then tell me the {}."]  # fmt: skip
_ONLY_UNSEEN = ["All I want is the {}.", "Nothing but the {}."]
_LATER = ["And the {}?", "What was the {}?", "Which {} did it say?", "Tell me the {} again.",
          "What is the {}?", "The {}?", "Repeat the {}.", "Now the {}.", "What {} was it?",
          "Once more: the {}?", "And what about the {}?", "Say the {} again.", "{} again?",
          "I forgot the {}.", "How was the {}?", "Could you repeat the {}?", "And {}?",
          "Can I have the {} again?", "Give me the {} once again.", "I missed the {}.",
          "So what was the {}?", "Which {} was that?", "Please repeat the {}.", "The {} again.",
          "Remember the {}?", "Tell me once more what the {} was."]  # fmt: skip
_LATER_UNSEEN = ["Remind me, what was the {}?", "Say the {} once more."]


def _one(w: Words, m: Made, ends: bool) -> list[Turn]:
    """A request, its call, and unless the dialogue ends there the result and what is said of it."""
    r = w.rng
    ask = m.request
    call = (m.name, m.arguments)
    if ends:
        return _calling(ask, [call])
    text, said, answer = tools.result(w, m)
    why = "The tool answered."
    later: list[Turn] = []
    if said and r.random() < 0.25:
        key, answer = r.choice(said)
        ask += " " + r.choice(w.either(_ONLY, _ONLY_UNSEEN)).replace("{}", key.replace("_", " "))
        why = f"Only the {key.replace('_', ' ')} is asked for."
    if said and r.random() < 0.3:
        key, again = r.choice(said)
        ask_later = r.choice(w.either(_LATER, _LATER_UNSEEN)).replace("{}", key.replace("_", " "))
        later = [
            Turn("user", ask_later),
            Turn("assistant", again, reasoning="The result says it."),
        ]
    return [
        *_calling(ask, [call]),
        Turn("tool", text),
        Turn("assistant", answer, reasoning=why),
        *later,
    ]


def _chained(w: Words, a: Made, b: Made) -> list[Turn]:
    """Two calls one after the other, as asked; then the answer to both."""
    link = w.rng.choice(w.either(_AFTER, _AFTER_UNSEEN))
    first = a.request.rstrip()
    if first[-1] not in ".?!":
        first += "."
    one, two = tools.result(w, a), tools.result(w, b)
    return [
        *_calling(first + link + b.inside(), [(a.name, a.arguments)]),
        Turn("tool", one[0]),
        Turn("assistant", "", [(b.name, b.arguments)], reason([(b.name, b.arguments)])),
        Turn("tool", two[0]),
        Turn("assistant", f"{one[2]} {two[2]}", reasoning="The tools answered."),
    ]


def _refused(w: Words, made: list[Made]) -> list[Turn]:
    other = tools.stranger(w, made)
    if other is None:
        return []
    return [Turn("user", other.request), Turn("assistant", NO_TOOL, reasoning="No tool fits.")]


_RECKONS = ("calc", "arith", "expression", "math", "plus", "add", "multipl", "formula")


def _plain(w: Words, made: list[Made]) -> list[Turn]:
    """A question that needs no tool; no sum if a tool could reckon."""
    from ops.tiny.tasks import about, copying, facts, lists

    r = w.rng
    x = r.random()
    if x < 0.2:
        text, steps = facts.reading(w)
        ask, answer, why = steps[0]
        return [Turn("user", f"{text}\n{ask}"), Turn("assistant", answer, reasoning=why)]
    task = (about.small_talk if x < 0.5 else copying.copying if x < 0.7 else copying.lookup
            if x < 0.8 else lists.lists if x < 0.9 else lists.sums)  # fmt: skip
    if task is lists.sums and any(word in m.text for m in made for word in _RECKONS):
        task = copying.copying
    ask, answer, why = task(w)
    return [Turn("user", ask), Turn("assistant", answer, reasoning=why)]


# --- whole dialogues -----------------------------------------------------------------------------


def _opened(w: Words, kind: str, made: list[Made], turns: list[Turn]) -> Dialogue:
    declared = list(made)
    w.rng.shuffle(declared)
    return with_thinking(w, Dialogue(kind, turns, system(w), [m.function for m in declared]))


def tool_use(w: Words, rounds: int = 0) -> Dialogue:
    """One to eight tools and some rounds of using them."""
    r = w.rng
    n = r.choices((1, 2, 3, 4, 5, 6, 7, 8), (18, 20, 17, 14, 10, 8, 6, 7))[0]
    made = tools.several(w, n)
    rounds = rounds or r.choices((1, 2, 3, 4, 5, 6), (16, 22, 22, 18, 12, 10))[0]
    turns: list[Turn] = []
    for i in range(rounds):
        last = i == rounds - 1
        x = r.random()
        if x < 0.08:
            turns += _plain(w, made)
        elif x < 0.26:
            turns += _refused(w, made)
        elif x < 0.47:
            found = _together(w, made)
            if found is not None:
                text, each, calls = found
                turns += _calling(text, calls)
                if not last or r.random() < 0.5:
                    turns += _results(w, each, calls)
        elif x < 0.51 and len(made) > 1:
            turns += _chained(w, *(_fresh(w, m) for m in r.sample(made, 2)))
        else:
            turns += _one(w, _fresh(w, r.choice(made)), last and r.random() < 0.5)
    return _opened(w, "call", made, turns or _one(w, made[0], True))


def _fresh(w: Words, m: Made) -> Made:
    """Another request for the same tool, where it has one."""
    return m.again(w) if m.again is not None else m


# --- what evaluation counts: the last turn is the answer -----------------------------------------


def _until(make: Callable[[], Dialogue | None]) -> Dialogue:
    while True:
        d = make()
        if d is not None:
            return d


def single_call(w: Words, n_tools: int, thinking: bool = False) -> Dialogue:
    """One request, one right call."""
    made = tools.several(w, n_tools)
    m = w.rng.choice(made)
    turns = _calling(m.request, [(m.name, m.arguments)])
    return Dialogue("call", turns, "", [o.function for o in made], thinking)


def later_call(w: Words) -> Dialogue:
    """A call in the second or third round."""
    made = tools.several(w, w.rng.randint(2, 4))
    turns: list[Turn] = []
    for _ in range(w.rng.choice((1, 2))):
        turns += _one(w, _fresh(w, w.rng.choice(made)), ends=False)
    m = _fresh(w, w.rng.choice(made))
    turns += _calling(m.request, [(m.name, m.arguments)])
    return Dialogue("call", turns, "", [o.function for o in made])


def parallel(w: Words) -> Dialogue:
    """Two or three calls in one answer."""

    def attempt() -> Dialogue | None:
        made = tools.several(w, w.rng.randint(1, 4))
        found = _together(w, made)
        if found is None:
            return None
        text, _, calls = found
        return Dialogue("parallel", _calling(text, calls), "", [o.function for o in made])

    return _until(attempt)


def answer_result(w: Words) -> Dialogue:
    """The answer from a result, or from the results of two or three calls."""

    def attempt() -> Dialogue | None:
        r = w.rng
        made = tools.several(w, r.randint(1, 4))
        if r.random() < 0.2:
            found = _together(w, made)
            if found is None:
                return None
            text, each, calls = found
            turns = _calling(text, calls) + _results(w, each, calls)
        else:
            turns = _one(w, _fresh(w, r.choice(made)), ends=False)
        return Dialogue("result", turns, "", [o.function for o in made])

    return _until(attempt)


def declining(w: Words) -> Dialogue:
    """One request that none of the tools is for."""

    def attempt() -> Dialogue | None:
        made = tools.several(w, w.rng.randint(1, 5))
        turns = _refused(w, made)
        return Dialogue("decline", turns, "", [o.function for o in made]) if turns else None

    return _until(attempt)


def no_tool_needed(w: Words) -> Dialogue:
    """Tools are declared, but the question needs none."""
    made = tools.several(w, w.rng.randint(1, 4))
    return Dialogue("no tool", _plain(w, made), "", [o.function for o in made])
