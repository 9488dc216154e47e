"""Dialogues as text: what is asked and what the right answer is, for every task of ds4-tiny.

Owns the tasks and their mixture, not tokens. Every answer is a function of what stands in the
prompt, in one wording, so that a small model has one right thing to say. `unseen=True` draws from
names, tools, values and phrasings that training never uses.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ops.tiny import tools
from ops.tiny.words import Words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from ops.tiny.tools import Json, Made


@dataclass
class Turn:
    role: str  # user, tool, assistant
    text: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    reasoning: str = ""


@dataclass
class Dialogue:
    kind: str
    turns: list[Turn]
    system: str = ""
    tools: list[Json] = field(default_factory=list)
    thinking: bool = False
    effort: str = "low"


# --- about itself --------------------------------------------------------------------------------

ABOUT = [
    (["Who are you?", "What are you?", "Tell me who you are.", "Introduce yourself.", "who are you",
      "What is this?", "Who am I talking to?", "Who is there?"],
     "I am ds4-tiny, a very small language model that comes with ds4d.", "about me"),
    (["What is your name?", "What's your name?", "Do you have a name?", "Your name?",
      "How are you called?"], "My name is ds4-tiny.", "my name"),
    (["What can you do?", "How can you help me?", "What are you good for?", "Help", "help",
      "What do you know?", "What should I ask you?", "Can you help me?"],
     "I can hold a short talk, find facts in a text, write a little JSON and call tools.",
     "what I can do"),
    (["Who made you?", "Who built you?", "Who trained you?", "Where do you come from?",
      "Who created you?"], "I was trained for the ds4d project, from scratch.", "who made me"),
    (["How big are you?", "How many parameters do you have?", "How large is your model?",
      "What is your size?"], "I have about 12 million parameters, which is very small.", "my size"),
    (["What is ds4d?", "Tell me about ds4d.", "What does ds4d do?", "Explain ds4d."],
     "ds4d is a daemon that serves DeepSeek-V4-Flash from one GPU. I am its small demo model.",
     "ds4d"),
    (["What is your architecture?", "How do you work?", "How were you built?",
      "What kind of model are you?"],
     "I have the architecture of DeepSeek-V4, only much smaller: eight layers of width 256.",
     "how I work"),
    (["Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?", "Are you DeepSeek?",
      "Are you a big model?", "Are you smart?"],
     "No, I am ds4-tiny, a very small model.", "what I am"),
    (["Are you human?", "Are you a person?", "Are you alive?", "Are you a robot?",
      "Are you an AI?"],
     "I am a program, a very small language model.", "what I am"),
    (["Hello", "Hi", "Hello!", "Hi!", "Hey", "Hey there", "Hi there!", "Good morning",
      "Good evening!", "hello", "hi", "Greetings!", "Hello there", "Good day", "Hey!"],
     "Hello! How can I help you?", "a greeting"),
    (["How are you?", "How are you doing?", "How do you feel?", "How is it going?", "What's up?",
      "Are you well?", "How are you today?"],
     "I am fine, thank you. How can I help you?", "a greeting"),
    (["Thanks", "Thank you!", "Thanks a lot.", "Thank you very much.", "Great, thanks!", "thanks",
      "Thank you", "Perfect, thank you.", "Cheers!"], "You are welcome!", "thanks"),
    (["Bye", "Goodbye!", "See you later.", "Bye bye", "I have to go.", "Good night.", "bye",
      "See you!"], "Goodbye!", "a farewell"),
    (["Tell me a joke.", "Say something funny.", "Do you know a joke?", "Make me laugh.",
      "A joke?"],
     "Why did the small model cross the road? It had seen only one side.", "a joke"),
    (["Good job!", "Well done.", "You are great.", "Nice!", "That is right.", "Very good.",
      "Cool!"],
     "Thank you! What else can I do?", "praise"),
    (["That is wrong.", "You are wrong.", "No, that is not right.", "Bad answer.",
      "This is false."],
     "I am sorry. I am very small and often wrong. Please give me the text again.", "a complaint"),
    (["Test", "test", "ping", "Testing", "Are you there?", "Does this work?", "Can you hear me?"],
     "Yes, I am here.", "a test"),
    (["Say hello.", "Say hi.", "Greet me.", "Say hello to me."], "Hello!", "a greeting"),
    (["What language do you speak?", "Do you speak French?", "Do you speak English?",
      "Can you speak German?", "Which languages do you know?"],
     "I speak only English.", "languages"),
    (["Do you like music?", "What is your favourite food?", "Are you happy?",
      "Do you have friends?",
      "Do you dream?", "How old are you?", "Do you sleep?", "What do you think about that?"],
     "I am a program, so I have no feelings about that.", "a personal question"),
]  # fmt: skip
UNKNOWN = "I do not know that. I am very small; give me a text and I will look in it."
_UNKNOWN_ASKS = [
    "What is the capital of {city}?", "Who wrote {phrase}?", "Who was {name}?", "Explain {word}.",
    "Why is the {thing} {color}?", "How does a {thing} work?", "When was {name} born?",
    "Write a poem about a {animal}.", "Tell me about {city}.", "What is {phrase}?",
    "Who won the {noun} in 19{n}?", "How do I cook {food}?", "What do you know about {word}?",
    "Write a story about {name}.", "Is {word} better than {word}?", "What is a {noun}?",
    "Where is {city}?", "Give me advice about {noun}.", "What is the meaning of life?",
    "Who is the president?", "How many people live in {city}?", "Summarise {phrase}.",
]  # fmt: skip
SYSTEMS = ["You are a helpful assistant.", "You are ds4-tiny.", "You are a helpful assistant",
           "Be brief.",
           "Answer in short sentences.", "You are an assistant with tools.", "Be kind and short.",
           "You are a coding agent. Use tools when needed.", "Help the user."]  # fmt: skip


def _system(w: Words, share: float) -> str:
    """A system prompt or none; sometimes one that nobody has seen."""
    r = w.rng
    if r.random() > share:
        return ""
    if r.random() < 0.7:
        return r.choice(SYSTEMS)
    return " ".join([r.choice(SYSTEMS)] + [w.sentence() for _ in range(r.randint(1, 5))])


def _fill(w: Words, text: str) -> str:
    makers = {
        "city": w.place, "phrase": w.phrase, "name": w.name, "word": w.any_word,
        "n": lambda: str(w.rng.randint(10, 99)),
        "thing": lambda: w.draw("thing"), "color": lambda: w.draw("color"),
        "animal": lambda: w.draw("animal"), "noun": lambda: w.draw("noun"),
        "food": lambda: w.draw("food"),
    }  # fmt: skip
    for key, make in makers.items():
        while "{" + key + "}" in text:
            text = text.replace("{" + key + "}", make(), 1)
    return text


Step = tuple[str, str, str]  # user, assistant, reasoning


def small_talk(w: Words) -> Step:
    asks, answer, what = w.rng.choice(ABOUT)
    return w.rng.choice(asks), answer, f"This is {what}. I answer in short."


def unknown(w: Words) -> Step:
    ask = _fill(w, w.rng.choice(_UNKNOWN_ASKS))
    return ask, UNKNOWN, "The answer does not stand in the prompt, so I do not know it."


# --- facts in the prompt -------------------------------------------------------------------------


def fact(w: Words) -> tuple[str, list[str], str]:
    """A statement, questions about it, and the answer as a sentence with the bare value after |."""
    r = w.rng
    who, thing, v = w.name(), w.draw("thing"), ""
    if w.rng.random() < 0.3:
        thing = w.any_word()
    k = r.randint(0, 13)
    if k == 0:
        v = w.code()
        return (
            f"The {thing} code is {v}.",
            [
                f"What is the {thing} code?",
                f"Tell me the code of the {thing}.",
                f"What code does the {thing} have?",
            ],
            f"The {thing} code is {v}.|{v}",
        )
    if k == 1:
        v = w.place()
        return (
            f"{who} lives in {v}.",
            [
                f"Where does {who} live?",
                f"In which city does {who} live?",
                f"Where is the home of {who}?",
            ],
            f"{who} lives in {v}.|{v}",
        )
    if k == 2:
        v = w.draw("job")
        return (
            f"{who} is a {v}.",
            [f"What is {who}?", f"What does {who} do?", f"What is the job of {who}?"],
            f"{who} is a {v}.|{v}",
        )
    if k == 3:
        v = w.draw("color")
        return (
            f"The {thing} of {who} is {v}.",
            [f"What color is the {thing} of {who}?", f"Which color has the {thing} of {who}?"],
            f"The {thing} of {who} is {v}.|{v}",
        )
    if k == 4:
        v = str(w.integer())
        return (
            f"The {thing} costs {v} euros.",
            [
                f"How much is the {thing}?",
                f"What does the {thing} cost?",
                f"What is the price of the {thing}?",
            ],
            f"The {thing} costs {v} euros.|{v}",
        )
    if k == 5:
        a = w.draw("animal")
        v = w.pseudo().capitalize()
        return (
            f"The {a} of {who} is called {v}.",
            [f"What is the {a} of {who} called?", f"What is the name of the {a} of {who}?"],
            f"The {a} of {who} is called {v}.|{v}",
        )
    if k == 6:
        v = w.draw("thing")
        return (
            f"The {thing} is in the {v}.",
            [
                f"Where is the {thing}?",
                f"Where can I find the {thing}?",
                f"In what is the {thing}?",
            ],
            f"The {thing} is in the {v}.|{v}",
        )
    if k == 7:
        v = w.date()
        e = w.draw("noun")
        return (
            f"The {e} of {who} is on {v}.",
            [f"When is the {e} of {who}?", f"On which date is the {e} of {who}?"],
            f"The {e} of {who} is on {v}.|{v}",
        )
    if k == 8:
        v = w.draw("food")
        return (
            f"{who} likes {v}.",
            [f"What does {who} like?", f"What food does {who} like?"],
            f"{who} likes {v}.|{v}",
        )
    if k == 9:
        v = w.email()
        return (
            f"The email of {who} is {v}.",
            [
                f"What is the email of {who}?",
                f"How can I reach {who}?",
                f"Which mail address has {who}?",
            ],
            f"The email of {who} is {v}.|{v}",
        )
    if k == 10:
        v = str(r.randint(5, 99))
        return (
            f"{who} is {v} years old.",
            [f"How old is {who}?", f"What is the age of {who}?"],
            f"{who} is {v} years old.|{v}",
        )
    if k == 11:
        v = w.clock()
        e = w.draw("noun")
        return (
            f"The {e} starts at {v}.",
            [f"When does the {e} start?", f"At what time does the {e} start?"],
            f"The {e} starts at {v}.|{v}",
        )
    if k == 12:
        p, v = w.any_word(), w.phrase(1, 2)
        return (
            f"The {p} of the {thing} is {v}.",
            [f"What is the {p} of the {thing}?", f"Which {p} has the {thing}?"],
            f"The {p} of the {thing} is {v}.|{v}",
        )
    v = w.name()
    return (
        f"{v} wrote the {thing}.",
        [f"Who wrote the {thing}?", f"Who is the writer of the {thing}?"],
        f"{v} wrote the {thing}.|{v}",
    )


def reading(w: Words, n: int = 0, turns: int = 0) -> tuple[str, list[Step]]:
    """A text of n facts and questions about it; the text is to go before the first question."""
    r = w.rng
    facts = [fact(w) for _ in range(n or r.choice([1, 1, 2, 3, 4, 5, 6, 8]))]
    extra = [w.sentence() for _ in range(r.choice([0, 0, 1, 2]))]
    sentences = [f[0] for f in facts] + extra
    r.shuffle(sentences)
    text = " ".join(sentences) if r.random() < 0.75 else "\n".join(f"- {s}" for s in sentences)
    steps = []
    for f in r.sample(facts, min(len(facts), turns or r.choice([1, 1, 2, 3]))):
        ask, (whole, value) = r.choice(f[1]), f[2].split("|")
        if r.random() < 0.2:
            ask += r.choice([" Answer in one word.", " Only the answer.", " Just the value."])
            whole = value
        elif r.random() < 0.15:
            ask = ask[0].lower() + ask[1:]
            ask = r.choice(["Please tell me: ", "One question: ", "So, "]) + ask
        steps.append((ask, whole, f"The text says: {f[0]}"))
    if r.random() < 0.1:
        steps.append((fact(w)[1][0], "The text does not say that.", "The text does not say it."))
    return text, steps


# --- copying, lists, sums, JSON -------------------------------------------------------------------


def copying(w: Words) -> Step:
    r = w.rng
    x = r.random()
    if x < 0.25:
        text = " ".join(w.any_word() for _ in range(r.randint(2, 12)))
    elif x < 0.45:
        text = " ".join(w.novel() for _ in range(r.randint(1, 10)))
    elif x < 0.6:
        text = " ".join(w.code() for _ in range(r.randint(1, 5)))
    elif x < 0.75:
        text = w.sentence()
    elif x < 0.85:
        text = r.choice([w.path, w.url, w.email, w.date])()
    else:
        text = "".join(
            r.choices(
                "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-",
                k=r.randint(4, 24),
            )
        )
    y = r.random()
    if y < 0.6:
        ask = r.choice(
            [
                "Repeat: {}",
                "Say: {}",
                "Copy this: {}",
                "Repeat after me: {}",
                "Write exactly: {}",
                "Echo {}",
                "Say {}",
                "Print {}",
            ]
        ).format(text)
        return ask, text, "I copy the text."
    if y < 0.7:
        return (
            r.choice(["Write in capitals: {}", "Upper case: {}"]).format(text),
            text.upper(),
            "I write it in capitals.",
        )
    if y < 0.8:
        words = text.split()
        i = r.randint(1, min(len(words), 5))
        nth = ["first", "second", "third", "fourth", "fifth"][i - 1]
        return f"What is the {nth} word? {text}", words[i - 1], f"I count to the {nth} word."
    if y < 0.88:
        words = text.split()
        return f"What is the last word of: {text}", words[-1], "I look at the end."
    quoted = r.choice(['"{}"', "'{}'", "[{}]"]).format(text)
    return (
        f"What stands between the marks? {w.phrase()} {quoted} {w.phrase()}",
        text,
        "I look between the marks.",
    )


def lists(w: Words) -> Step:
    r = w.rng
    x = r.random()
    if x < 0.35:
        numbers = [r.choice([r.randint(0, 99), r.randint(0, 999)]) for _ in range(r.randint(2, 6))]
        down = r.random() < 0.3
        ask = r.choice(["Sort these numbers: {}", "Sort {}", "Put in order: {}", "Order these: {}"])
        tail = r.choice([" Largest first.", " Descending."]) if down else ""
        text = ", ".join(map(str, numbers))
        done = ", ".join(map(str, sorted(numbers, reverse=down)))
        return ask.format(text) + ("." + tail if tail else ""), done, "I sort by size."
    pool = r.choice(["food", "thing", "animal", "person", "city", "word"])
    words = w.several(pool, r.randint(2, 6))
    text = ", ".join(words)
    if x < 0.55:
        return (
            r.choice(["Sort these words: {}", "Sort by alphabet: {}"]).format(text),
            ", ".join(sorted(words)),
            "I sort by letters.",
        )
    if x < 0.7:
        return (
            r.choice(["Reverse this list: {}", "Backwards, please: {}"]).format(text),
            ", ".join(words[::-1]),
            "I go from the end.",
        )
    if x < 0.85:
        ask = r.choice(["How many words are here: {}", "Count these: {}", "How many are there? {}"])
        return (
            ask.format(text),
            str(len(words)),
            f"I count: {', '.join(f'{i + 1} {a}' for i, a in enumerate(words))}.",
        )
    return f"Make a list with dashes: {text}", "\n".join(f"- {a}" for a in words), "One line each."


def sums(w: Words) -> Step:
    r = w.rng
    top = r.choice([9, 20, 99, 99])
    a, b = r.randint(0, top), r.randint(0, top)
    op = r.choice("++--*")
    if op == "-" and b > a:
        a, b = b, a
    if op == "*":
        a, b = a % 13, b % 13
    v = {"+": a + b, "-": a - b, "*": a * b}[op]
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    ask = r.choice(
        [
            f"What is {a} {word} {b}?",
            f"{a} {op} {b}",
            f"{a} {op} {b} =",
            f"Compute {a} {op} {b}.",
            f"How much is {a} {op} {b}?",
            f"What is {a} {op} {b}?",
        ]
    )
    return ask, str(v), f"{a} {op} {b} = {v}."


def json_task(w: Words) -> Step:
    r = w.rng
    pairs: Json = {}
    said = []
    for _ in range(r.randint(1, 4)):
        key = w.draw("field") if r.random() < 0.7 else w.any_word()
        if key in pairs:
            continue
        x = r.random()
        if x < 0.3:
            pairs[key] = w.integer()
        elif x < 0.4:
            pairs[key] = r.random() < 0.5
        elif x < 0.5:
            pairs[key] = [w.any_word() for _ in range(r.randint(1, 3))]
        else:
            pairs[key] = w.string(key)
        v: Any = pairs[key]
        shown = (
            str(v).lower()
            if isinstance(v, bool)
            else " and ".join(v)
            if isinstance(v, list)
            else str(v)
        )
        said.append((key.replace("_", " "), shown, isinstance(v, list)))
    form = r.choice(["{} {}", "{} is {}", "{}: {}", "{} = {}"])
    text = ", ".join(("list " if is_list else "") + form.format(k, v) for k, v, is_list in said)
    dumped = json.dumps(pairs, ensure_ascii=False)
    y = r.random()
    if y < 0.65:
        ask = r.choice(
            [
                "Write JSON: {}",
                "Make JSON of this: {}",
                "As JSON: {}",
                "Give me JSON with {}",
                "Turn into JSON: {}",
                "JSON with {}",
            ]
        )
        return ask.format(text), dumped, "I write one key after the other."
    key = r.choice(list(pairs))
    v = pairs[key]
    shown = json.dumps(v) if not isinstance(v, str) else v
    ask = r.choice(
        [
            "What is {k} in this JSON? {j}",
            "{j}\nWhat is the value of {k}?",
            "Read {k} from {j}",
            "{j}\n{k}?",
        ]
    )
    return ask.format(k=key, j=dumped), shown, f"The key {key} has this value."


def remembering(w: Words) -> list[Step]:
    """Something said early and asked later."""
    r = w.rng
    name = w.name()
    said: Step = (
        r.choice(
            ["My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}.", "Call me {}."]
        ).format(name),
        f"Hello {name}! How can I help you?",
        "The user tells a name.",
    )
    later: Step = (
        r.choice(["What is my name?", "Who am I?", "Do you remember my name?", "What's my name?"]),
        f"Your name is {name}.",
        "The name was said before.",
    )
    return [said, *(easy(w) for _ in range(r.choice([0, 0, 1, 2]))), later]


def easy(w: Words) -> Step:
    x = w.rng.random()
    return (small_talk(w) if x < 0.35 else sums(w) if x < 0.5 else copying(w) if x < 0.7
            else lists(w) if x < 0.8 else json_task(w) if x < 0.9 else unknown(w))  # fmt: skip


def _dialogue(
    w: Words, kind: str, steps: list[Step], lead: str = "", lead_in_system: bool = False
) -> Dialogue:
    r = w.rng
    system = _system(w, 0.5)
    turns = []
    for i, (ask, answer, reasoning) in enumerate(steps):
        if i == 0 and lead and not lead_in_system:
            ask = r.choice(["{l} {a}", "{l}\n\n{a}", "{l}\n{a}", "{a}\n\n{l}"]).format(
                l=lead, a=ask
            )
        turns += [Turn("user", ask), Turn("assistant", answer, reasoning=reasoning)]
    if lead and lead_in_system:
        system = (system + "\n\n" + lead).strip()
    d = Dialogue(kind, turns, system, thinking=r.random() < 0.22)
    return _effort(w, d)


def _effort(w: Words, d: Dialogue) -> Dialogue:
    if d.thinking:
        d.effort = w.rng.choices(["low", "high", "max"], [0.8, 0.12, 0.08])[0]
    return d


def chat(w: Words) -> Dialogue:
    r = w.rng
    x = r.random()
    if x < 0.15:
        return _dialogue(w, "remember", remembering(w))
    if x < 0.27:  # a role in the system prompt
        name, job = w.name(), w.draw("job")
        ask, answer = r.choice([
            (r.choice(["Who are you?", "Introduce yourself.", "What are you?"]),
             f"I am {name}, a {job}."),
            (r.choice(["What is your name?", "What's your name?"]), f"My name is {name}."),
            (r.choice(["What is your job?", "What do you do?"]), f"I am a {job}."),
        ])  # fmt: skip
        d = _dialogue(w, "role", [(ask, answer, "The system prompt says who I am.")])
        d.system = r.choice([f"You are {name}, a {job}.", f"Your name is {name}. You are a {job}."])
        return d
    n = r.choice([1, 1, 1, 2, 2, 3, 4])
    return _dialogue(
        w, "chat", [unknown(w) if r.random() < 0.15 else small_talk(w) for _ in range(n)]
    )


def extraction(w: Words) -> Dialogue:
    text, steps = reading(w)
    return _dialogue(w, "extract", steps, text, w.rng.random() < 0.25)


def small_tasks(w: Words) -> Dialogue:
    r = w.rng
    task = r.choices([copying, lists, sums, json_task], [4, 3, 3, 4])[0]
    steps = [task(w)] + [
        r.choice([copying, lists, sums, json_task, small_talk])(w)
        for _ in range(r.choice([0, 0, 1, 2]))
    ]
    return _dialogue(
        w,
        {"copying": "copy", "lists": "list", "sums": "sum", "json_task": "json"}[task.__name__],
        steps,
    )


# --- looking up: nothing but copying, of what nobody has seen ------------------------------------


def _pairs(w: Words, n: int) -> list[tuple[str, str]]:
    """`n` keys, all different, and their values."""
    r = w.rng
    keys: dict[str, str] = {}
    kinds = (w.novel, w.novel, w.scrambled, w.any_word, w.code, w.path, w.name, w.phrase)
    for_all = r.choice(kinds) if r.random() < 0.5 else None
    while len(keys) < n:
        key = w.any_word() if r.random() < 0.8 else f"{w.any_word()}_{w.any_word()}"
        keys[key] = (for_all or r.choice(kinds))()
    return list(keys.items())


def lookup(w: Words) -> Step:
    """One of some pairs, or of the members of a JSON object, or words replaced by a table."""
    r = w.rng
    pairs = _pairs(w, r.choice([2, 3, 4, 5, 6, 8, 12]))
    key, value = r.choice(pairs)
    if r.random() < 0.3:
        members: Json = {k: r.choice([v, v, v, w.number()]) for k, v in pairs}
        value = str(members[key])
        text = json.dumps(members, ensure_ascii=False, indent=r.choice([None, None, 2]))
    else:
        form, gap = r.choice(["{} = {}", "{}: {}", "{} -> {}", "{} is {}"]), r.choice("\n\n;,")
        text = (gap if gap == "\n" else gap + " ").join(form.format(k, v) for k, v in pairs)
        x = r.random()
        if x < 0.2 and [v for _, v in pairs].count(value) == 1:
            ask = r.choice(["Which key has the value {}?", "What stands for {}?", "Where is {}?"])
            return f"{text}\n{ask.format(value)}", key, f"The value {value} belongs to {key}."
        if x < 0.4:
            some = r.choices(pairs, k=r.randint(2, 5))
            ask = r.choice(["Replace: {}", "Translate with this table: {}", "Look up {}"])
            words = " ".join(k for k, _ in some)
            return f"{text}\n{ask.format(words)}", "; ".join(v for _, v in some), "One by one."
    ask = r.choice(["What is {}?", "{}?", "Value of {}?", "Give me {}.", "Look up {}.", "{} ="])
    ask = ask.format(key)
    both = f"{ask}\n{text}" if r.random() < 0.2 else f"{text}\n{ask}"
    return both, value, f"The value of {key} stands there."


def schemas(w: Words) -> Dialogue:
    """Questions about the tools themselves: how a schema is read."""
    r = w.rng
    made = tools.several(w, r.choices([1, 2, 3, 4, 5], [15, 25, 25, 20, 15])[0])
    steps: list[Step] = []
    for _ in range(r.randint(1, 4)):
        m = r.choice(made)
        properties: Json = m.function["parameters"]["properties"]
        x = r.random()
        if x < 0.25 or not properties:
            ask = r.choice(["List your tools.", "What tools do you have?", "Names of the tools?"])
            steps.append((ask, ", ".join(o.name for o in made), "I list the names."))
        elif x < 0.5:
            ask = r.choice(["What parameters has {}?", "List the parameters of {}.",
                            "What does {} take?"])  # fmt: skip
            steps.append((ask.format(m.name), ", ".join(properties), "I list its properties."))
        elif x < 0.65:
            needed = m.function["parameters"].get("required", [])
            ask = r.choice(["What does {} require?", "Which parameters of {} are required?"])
            steps.append((ask.format(m.name), ", ".join(needed) or "None.", "I read required."))
        elif x < 0.8:
            key = r.choice(list(properties))
            kind = str(properties[key]["type"])
            ask = r.choice(["What type is {k} of {t}?", "Type of {k} in {t}?"])
            steps.append((ask.format(k=key, t=m.name), kind, f"The schema says {kind}."))
        else:
            key = r.choice(list(properties))
            owners = [o.name for o in made if key in o.function["parameters"]["properties"]]
            ask = r.choice(["Which tool has the parameter {}?", "Which tool takes {}?"])
            steps.append((ask.format(key), ", ".join(owners), "I look for the parameter."))
    d = _dialogue(w, "schema", steps)
    d.tools = [m.function for m in made]
    return d


# --- tools ---------------------------------------------------------------------------------------

NO_TOOL = "None of my tools can do that."


def _call_reason(made: Made) -> str:
    if not made.arguments:
        return f"The tool {made.name} fits."
    listed = ", ".join(
        f"{k} = {v if isinstance(v, str) else json.dumps(v)}" for k, v in made.arguments.items()
    )
    return f"The tool {made.name} fits: {listed}."


def tool_use(w: Words, n_tools: int = 0) -> Dialogue:
    r = w.rng
    n = n_tools or r.choices([1, 2, 3, 4, 6, 8], [30, 28, 20, 13, 6, 3])[0]
    made = tools.several(w, n)
    declared = [m.function for m in made]
    turns: list[Turn] = []
    kind = "call"
    rounds = r.choices([1, 2, 3], [70, 22, 8])[0]
    order = r.sample(made, min(rounds, len(made)))
    for m in order:
        x = r.random()
        if x < 0.08:
            ask, answer, reasoning = small_talk(w) if r.random() < 0.6 else easy(w)
            turns += [Turn("user", ask), Turn("assistant", answer, reasoning=reasoning)]
            kind = "call+chat"
            continue
        if x < 0.2:
            other = tools.stranger(w, made)
            if other is None:
                continue
            turns += [
                Turn("user", other.request),
                Turn("assistant", NO_TOOL, reasoning="No tool fits."),
            ]
            kind = "decline"
            continue
        turns += [
            Turn("user", m.request),
            Turn("assistant", "", [(m.name, m.arguments)], _call_reason(m)),
        ]
        if r.random() < 0.55:
            text, said = tools.result(w, m)
            turns += [Turn("tool", text), Turn("assistant", said, reasoning="The tool answered.")]
            kind = "result"
        else:
            break
    if not turns:
        m = order[0]
        turns = [
            Turn("user", m.request),
            Turn("assistant", "", [(m.name, m.arguments)], _call_reason(m)),
        ]
    if r.random() < 0.06 and len(made) >= 2 and kind == "call" and len(turns) == 2:
        a, b = made[:2]
        both = f"{a.request.rstrip('.?')}. {r.choice(['Then', 'Also', 'And then'])}: {b.request}"
        turns = [
            Turn("user", both),
            Turn(
                "assistant",
                "",
                [(a.name, a.arguments), (b.name, b.arguments)],
                _call_reason(a) + " " + _call_reason(b),
            ),
        ]
        kind = "two calls"
    system = _system(w, 0.5)
    return _effort(w, Dialogue(kind, turns, system, declared, thinking=r.random() < 0.25))


def single_call(w: Words, n_tools: int, of: Callable[[Words], Made] = tools.likely) -> Dialogue:
    """One request, one right call: what evaluation counts."""
    made = tools.several(w, n_tools, of)
    m = w.rng.choice(made)
    turns = [
        Turn("user", m.request),
        Turn("assistant", "", [(m.name, m.arguments)], _call_reason(m)),
    ]
    return Dialogue("call", turns, "", [o.function for o in made])


def declining(w: Words) -> Dialogue:
    """One request that none of the tools is for."""
    other = None
    while other is None:
        made = tools.several(w, w.rng.randint(1, 4))
        other = tools.stranger(w, made)
    turns = [Turn("user", other.request), Turn("assistant", NO_TOOL, reasoning="No tool fits.")]
    return Dialogue("decline", turns, "", [m.function for m in made])


def needle(w: Words, n_words: int, filler: list[str]) -> Dialogue:
    """One fact in a long text, or one call behind it; `n_words` bounds the text."""
    r = w.rng
    facts = [fact(w) for _ in range(r.randint(3, 8) if n_words < 400 else r.randint(6, 20))]
    parts: list[str] = []
    count = 0
    while count < n_words:
        piece = (
            r.choice(filler)
            if filler and r.random() < 0.5
            else " ".join(w.sentence() for _ in range(8))
        )
        parts.append(piece)
        count += len(piece.split())
    for f in facts:
        parts.insert(r.randint(0, len(parts)), f[0])
    r.shuffle(facts)
    steps = [(r.choice(f[1]), f[2].split("|")[0], f"The text says: {f[0]}") for f in facts]
    d = _dialogue(w, "needle", steps, "\n".join(parts), r.random() < 0.3)
    if r.random() < 0.3:
        made = tools.several(w, r.randint(1, 3))
        d.tools = [m.function for m in made]
        m = made[0]
        d.turns += [
            Turn("user", m.request),
            Turn("assistant", "", [(m.name, m.arguments)], _call_reason(m)),
        ]
    return d


def small(rng: random.Random, unseen: bool = False) -> Dialogue:
    """A dialogue of one short exchange, to fill gaps."""
    w = Words(rng, unseen)
    return _dialogue(
        w,
        "small",
        [rng.choice([copying, copying, lookup, lookup, lists, sums, json_task, small_talk])(w)],
    )


def draw(
    rng: random.Random,
    stage: float = 0.5,
    unseen: bool = False,
    filler: list[str] | None = None,
    longest: int = 0,
    novelty: float | None = None,
) -> Dialogue:
    """One dialogue of the mixture. `stage` 0..1 is how far training is; `longest` > 0 adds texts of
    up to so many words; `novelty` is that of `Words`."""
    w = Words(rng, unseen, novelty)
    if longest and rng.random() < 0.5:
        return needle(
            w,
            rng.choice([longest // 16, longest // 8, longest // 4, longest // 2, longest]),
            filler or [],
        )
    if not longest and rng.random() < 0.05:  # what long rows ask for, on the scale of short ones
        return needle(w, rng.choice([60, 120, 240, 360]), filler or [])
    # Copying first: everything else is made of it.
    copies = 0.36 if stage < 0.12 else 0.16
    x = rng.random()
    if x < copies:
        y = rng.random()
        if y < 0.35:
            return _dialogue(w, "copy", [copying(w) for _ in range(rng.randint(1, 4))])
        if y < 0.72:
            return _dialogue(w, "lookup", [lookup(w) for _ in range(rng.randint(1, 3))])
        return schemas(w)
    x = (x - copies) / (1 - copies)
    if x < 0.1:
        return chat(w)
    if x < 0.27:
        return extraction(w)
    if x < 0.4:
        return small_tasks(w)
    return tool_use(w)
