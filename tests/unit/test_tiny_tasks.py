"""The answers of ds4-tiny's short tasks are right: each is computed a second time, from the words
that are said alone."""

from __future__ import annotations

import json
import random
import re
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from ops.tiny.dialogue import Dialogue
from ops.tiny.tasks import copying, formats, lists, lookup, objects, schema_json, sums
from ops.tiny.tasks.alternatives import expanded
from ops.tiny.tasks.copying import COPY, JOINS, MARKS
from ops.tiny.tasks.formats import FORMAT, SEPARATORS, WRAPS
from ops.tiny.tasks.lists import LIST, NOTHING
from ops.tiny.tasks.lookup import LOOK
from ops.tiny.tasks.objects import OBJECT
from ops.tiny.tasks.phrasing import (
    ABSENT,
    NTH,
    NUMBERS,
    TABLES,
    Asked,
    near,
    parse,
    posed,
)
from ops.tiny.tasks.recall import RECALL
from ops.tiny.tasks.schemas import READ
from ops.tiny.tasks.sums import SUM
from ops.tiny.words import Words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Json = dict[str, Any]
DRAWS = 1000  # of each form


# --- reading an instruction back ------------------------------------------------------------------


def flat(of: list[list[str]]) -> list[str]:
    """Each phrasing once."""
    return list(dict.fromkeys(phrase for kept in of for phrase in kept))


@cache
def patterns(table: str, name: str) -> list[re.Pattern[str]]:
    """The phrasings of a form as patterns, the most telling one first."""
    tables = {"copy": COPY, "look": LOOK, "list": LIST, "sum": SUM, "format": FORMAT,
              "object": OBJECT, "recall": RECALL}  # fmt: skip
    seen, unseen = tables[table][name]
    phrases = sorted(flat(seen + unseen), key=lambda p: (-len(re.sub(r"\{.\}", "", p)), p))
    made = []
    for phrase in phrases:
        named: set[str] = set()
        pattern = ""
        for part in re.split(r"(\{\w\})", phrase):
            if re.fullmatch(r"\{\w\}", part):
                key = part[1]
                one = {"l": ".", "c": r"\S+", "h": r"\S+"}.get(
                    key, ".+?"
                )  # a letter, a word, words
                if table == "sum" and key in "ab":
                    one = r"\d+"
                pattern += f"(?P={key})" if key in named else f"(?P<{key}>{one})"
                named.add(key)
            else:
                pattern += re.escape(part)
        made.append(re.compile(pattern, re.DOTALL))
    return made


def readings(table: str, name: str, head: str) -> Iterator[dict[str, str]]:
    """What stands in the places of each phrasing that `head` can be made of."""
    for pattern in patterns(table, name):
        if found := pattern.fullmatch(head):
            yield found.groupdict()


def fields(table: str, name: str, head: str) -> dict[str, str] | None:
    """The most telling reading."""
    return next(readings(table, name, head), None)


def form_of(table: str, names: str, head: str) -> tuple[str, dict[str, str]]:
    for name in names.split(","):
        found = fields(table, name, head)
        if found is not None:
            return name, found
    raise AssertionError(f"no phrasing of {names} gives {head!r}")


def items_of(text: str) -> list[str]:
    """The items of a list in any notation."""
    if "\n" in text or re.match(r"- |\d+\. ", text):
        return [re.sub(r"^(- |\d+\. )", "", line) for line in text.split("\n")]
    if "; " in text:
        return text.split("; ")
    if ", " in text or " and " in text:
        return re.split(r", | and ", text)
    return text.split(" ")


# --- copying --------------------------------------------------------------------------------------


def _repeat(head: str, text: str) -> str:
    quoted = len(text) > 2 and text[0] == text[-1] == '"'
    return text[1:-1] if quoted else text


def _times(head: str, text: str) -> str:
    how = form_of("copy", "times", head)[1]["n"]
    n = 2 if how == "twice" else NUMBERS.index(how.removesuffix(" times"))
    return " ".join([text] * n)


def _case(head: str, text: str) -> str:
    name, _ = form_of("copy", "upper,lower,title", head)
    if name == "title":
        return re.sub(r"(^| )(.)", lambda m: m[1] + m[2].upper(), text)
    return text.upper() if name == "upper" else text.lower()


def _nth(head: str, text: str) -> str:
    n = form_of("copy", "nth", head)[1]["n"]
    return text.split()[{"last": -1, "second to last": -2}.get(n) or NTH.index(n)]


def _some(head: str, text: str) -> str:
    found = form_of("copy", "some", head)[1]
    n = NUMBERS.index(found["n"])
    words = text.split()
    return " ".join(words[:n] if found["e"] == "first" else words[-n:])


def _signs(head: str, text: str) -> str:
    several = re.search(r"\b(letters|digits)\b", head)
    found = form_of("copy", "signs" if several else "sign", head)[1]
    n = NUMBERS.index(found["n"]) if "n" in found else 1
    return found["x"][:n] if found["e"] == "first" else found["x"][-n:]


def _between(head: str, text: str) -> str:
    left, right = MARKS[form_of("copy", "between", head)[1]["m"]]
    return text.split(left, 1)[1].rsplit(right, 1)[0]


def _quoted(head: str, text: str) -> str:
    return re.search(r"([\"'])(.*)\1", text)[2]


def _spell(head: str, text: str) -> str:
    name, _ = form_of("copy", "spell,blanks", head)
    return ("-" if name == "spell" else " ").join(text)


def _side(head: str, text: str) -> str:
    name, found = form_of("copy", "before,after", head)
    left, right = text.split(found["m"])
    return (left if name == "before" else right).strip()


def _line(head: str, text: str) -> str:
    name, found = form_of("copy", "line,end line", head)
    at = int(found["n"]) - 1 if name == "line" else {"first": 0, "last": -1}[found["e"]]
    return text.split("\n")[at].strip()


def _join(head: str, text: str) -> str:
    for how, mark in JOINS.items():
        if how and head.endswith(f" {how}"):
            return text.replace(" ", mark)
    return text.replace(" ", "")


def _replace(head: str, text: str) -> str:
    found = form_of("copy", "replace", head)[1]
    return re.sub(rf"(?<!\S){re.escape(found['a'])}(?!\S)", lambda _: found["b"], text)


def _remove(head: str, text: str) -> str:
    a = form_of("copy", "remove", head)[1]["a"]
    return " ".join(word for word in text.split() if word != a)


def _swap(head: str, text: str) -> str:
    found = form_of("copy", "swap", head)[1]
    other = {found["a"]: found["b"], found["b"]: found["a"]}
    return " ".join(other.get(word, word) for word in text.split())


def _add(head: str, text: str) -> str:
    found = form_of("copy", "add", head)[1]
    return f"{text} {found['b']}" if found["e"] == "end" else f"{found['b']} {text}"


# --- looking up -----------------------------------------------------------------------------------


def parts_of(text: str) -> list[tuple[str, str]]:
    """Keys and values of a text of pairs in any notation."""
    gap = "\n" if "\n" in text else "; " if "; " in text else ", "
    marks = r"(?: = |=|: | -> | => | means | stands for | is |\t| \| | - )"
    out = []
    for part in text.split(gap):
        if found := re.fullmatch(r"\[(\S+)\] (.*)", part):
            out.append(found.groups())
            continue
        pattern = rf'"?([^\s"=]+?)"?{marks}"?(.*?)"?'
        bare = re.sub(r"^(- |\* |The )", "", part)
        if found := re.fullmatch(pattern, part) or re.fullmatch(pattern, bare):
            out.append(found.groups())
    return out


def _pairs(head: str, text: str) -> str:
    pairs = parts_of(text)
    values, keys = dict(pairs), {v: k for k, v in pairs}
    name, found = form_of("look", "key,several,translate,value", head)
    if name == "key" and found["v"] in keys:
        return keys[found["v"]]
    for n in ("several", "translate"):
        if several := fields("look", n, head):
            names = re.split(r", | and ", several["k"]) if n == "several" else several["k"].split()
            if values.keys() >= set(names) and (len(names) > 1 or n == "translate"):
                return "; ".join(values[k] for k in names)
    for pattern in patterns("look", "value"):
        found_value = pattern.fullmatch(head)
        if found_value and found_value["k"] in values:
            return values[found_value["k"]]
    several = fields("look", "several", head)
    if several and several["k"] in values:
        return values[several["k"]]
    return ABSENT


def _env(head: str, text: str) -> str:
    pairs = {}
    for line in text.split("\n"):
        if not line.startswith("#"):
            key, _, value = re.sub("^(export|set) ", "", line).partition("=")
            pairs[key] = value[1:-1] if value.startswith('"') else value
    return pairs.get(form_of("look", "value", head)[1]["k"], ABSENT)


def _sections(head: str, text: str) -> str:
    found = form_of("look", "nested", head)[1]
    made: dict[str, dict[str, str]] = {}
    if text[0] == "{":
        made = json.loads(text)
    else:
        for line in text.split("\n"):
            if line[0] == "[" or line[-1] == ":":
                inner = made[line.strip("[]:")] = {}
            else:
                key, value = re.split(" = |: ", line.strip(), maxsplit=1)
                inner[key] = value
    return made[found["s"]].get(found["k"], ABSENT)


def _members(head: str, text: str) -> str:
    return str(json.loads(text).get(form_of("look", "value", head)[1]["k"], ABSENT))


def _table(head: str, text: str) -> str:
    lines = text.split("\n")
    if lines[0][0] == "|":
        rows = [line[2:-2].split(" | ") for line in lines if not line.startswith("| ---")]
    else:
        gap = next(g for g in ("\t", "; ", ",") if g in lines[0])
        rows = [line.split(gap) for line in lines]
    for found in readings("look", "row", head):
        if found["c"] in rows[0] and found.get("h", rows[0][0]) == rows[0][0]:
            column = rows[0].index(found["c"])
            if named := [row[0] for row in rows[1:] if row[column] == found["v"]]:
                return named[0]
    for found in readings("look", "cell", head):
        if named := [row for row in rows[1:] if row[0] == found["k"] and found["c"] in rows[0]]:
            return named[0][rows[0].index(found["c"])]
    return ABSENT


def _numbered(head: str, text: str) -> str:
    items = [re.sub(r"^(\d+[.):]|#\d+|\(\d+\)) ", "", line) for line in text.split("\n")]
    for found in readings("look", "number", head):
        if found["v"] in items:
            return str(items.index(found["v"]) + 1)
    n = next(int(f["n"]) for f in readings("look", "item", head) if f["n"].isdigit())
    return items[n - 1] if n <= len(items) else ABSENT


def _has(head: str, text: str) -> str:
    name, found = form_of("look", "has number,has", head)
    lines = text.split("\n")
    at = [i for i, line in enumerate(lines) if found["v"] in line.split()]
    if not at:
        return ABSENT
    return str(at[0] + 1) if name == "has number" else lines[at[0]]


def _means(head: str, text: str) -> str:
    return dict(parts_of(text)).get(form_of("look", "means", head)[1]["k"], ABSENT)


# --- lists and sums -------------------------------------------------------------------------------


def _extreme(head: str, text: str) -> str:
    name, _ = form_of("list", "largest,smallest", head)
    numbers = list(map(int, items_of(text)))
    return str(max(numbers) if name == "largest" else min(numbers))


def _sort(head: str, text: str) -> str:
    name, _ = form_of("list", "sort down,sort", head)
    numbers = sorted(map(int, items_of(text)))
    return ", ".join(map(str, numbers if name == "sort" else numbers[::-1]))


def _sort_words(head: str, text: str) -> str:
    done = items_of(text)
    for i in range(len(done)):  # by exchanges, not by `sorted`
        for j in range(len(done) - 1 - i):
            if done[j].lower() > done[j + 1].lower():
                done[j], done[j + 1] = done[j + 1], done[j]
    return ", ".join(done)


def _list_nth(head: str, text: str) -> str:
    n = form_of("list", "nth", head)[1]["n"]
    return items_of(text)[-1 if n == "last" else NTH.index(n)]


def _length(head: str, text: str) -> str:
    name, _ = form_of("list", "longest,shortest", head)
    items = sorted(items_of(text), key=len)
    assert len(items[0]) != len(items[1]) or len(items[-1]) != len(items[-2])
    return items[-1] if name == "longest" else items[0]


def _doubles(head: str, text: str) -> str:
    name, _ = form_of("list", "unique,once,twice", head)
    items = items_of(text)
    if name == "twice":
        return next(a for i, a in enumerate(items) if a in items[:i])
    kept = [a for i, a in enumerate(items)
            if (a not in items[:i] if name == "unique" else items.count(a) == 1)]  # fmt: skip
    return ", ".join(kept) or NOTHING


def _begin(head: str, text: str) -> str:
    letter = form_of("list", "begin", head)[1]["l"]
    return ", ".join(a for a in items_of(text) if a.lower().startswith(letter.lower())) or NOTHING


def _contains(head: str, text: str) -> str:
    return "Yes." if form_of("list", "contains", head)[1]["x"] in items_of(text) else "No."


def _convert(head: str, text: str) -> str:
    name, _ = form_of("list", "lines,dashes,numbered,commas", head)
    lead = {"dashes": "- ", "numbered": "{}. "}.get(name, "")
    made = [lead.format(i + 1) + a for i, a in enumerate(items_of(text))]
    return (", " if name == "commas" else "\n").join(made)


def two_of(text: str) -> tuple[list[str], list[str]]:
    bare = re.sub(r"^(A: |First: )|(?<=\n)B: |\.$", "", text).replace(". Second: ", "\n")
    bare = re.sub(r"\]( and)? \[|; ", "\n", bare).strip("[]")
    a, b = bare.split("\n")
    return a.split(", "), b.split(", ")


def _merge(head: str, text: str) -> str:
    a, b = two_of(text)
    return ", ".join([*a, *b])


def _common(head: str, text: str) -> str:
    a, b = two_of(text)
    return ", ".join(item for item in a if item in b) or NOTHING


def _part(head: str, text: str) -> str:
    found = form_of("list", "head", head)[1]
    n, items = NUMBERS.index(found["n"]), items_of(text)
    return ", ".join(items[:n] if found["e"] == "first" else items[-n:])


def _change(head: str, text: str) -> str:
    name, found = form_of("list", "with,without", head)
    items = items_of(text)
    if name == "without":
        items.remove(found["x"])
    return ", ".join(items if name == "without" else [*items, found["x"]])


def _filter(head: str, text: str) -> str:
    name, found = form_of("list", "above,below,even,odd", head)
    test = {"above": lambda a: a > int(found["n"]), "below": lambda a: a < int(found["n"]),
            "even": lambda a: not a & 1, "odd": lambda a: a & 1}[name]  # fmt: skip
    return ", ".join(str(a) for a in map(int, items_of(text)) if test(a)) or NOTHING


def _sum(head: str, text: str) -> str:
    for name, sign in {"plus": "+", "minus": "-", "times": "*"}.items():
        if (found := fields("sum", name, head)) and found["a"].isdigit() and found["b"].isdigit():
            return str(eval(f"{found['a']} {sign} {found['b']}"))
    said = re.search(r"\d+( ?[-+*x] ?\d+)+", head)[0]
    return str(eval(said.replace("x", "*")))


def _compare(head: str, text: str) -> str:
    name, found = form_of("sum", "larger,smaller", head)
    pick = max if name == "larger" else min
    return str(pick(int(found["a"]), int(found["b"])))


def _around(head: str, text: str) -> str:
    name, found = form_of("sum", "double,half,next,previous", head)
    a = int(found["a"])
    return str({"double": a * 2, "half": a // 2, "next": a + 1, "previous": a - 1}[name])


def _letters(head: str, text: str) -> str:
    name, found = form_of("sum", "letter,letters", head)
    if name == "letter":
        return str(sum(a == found["l"] for a in found["x"]))
    return str(len(found["x"]))


def _story(head: str, text: str) -> str:
    name, found = form_of("sum", "more,less,each", head)
    a, b = int(found["a"]), int(found["b"])
    return str({"more": a + b, "less": a - b, "each": a * b}[name])


# --- formats --------------------------------------------------------------------------------------

QUESTION = re.compile(r"(?:What is the|Give me the|Which) (\S+?)(?: is it)?[?.](?: |$)", re.M)


def facts_of(text: str) -> dict[str, str]:
    """The facts of a text, without the question about them."""
    bare = QUESTION.sub("", text).strip()
    if bare.startswith("The "):
        found = re.findall(r"The (\S+) is (.+?)\.(?= The |$)", bare)
    else:
        gap = "\n" if "\n" in bare else "; " if "; " in bare else ", "
        found = [re.split(" = | is |: ", part.removeprefix("- "), maxsplit=1)
                 for part in bare.split(gap)]  # fmt: skip
    return dict(found)


def filled(pattern: str, name: str, value: str) -> str:
    """The pattern with a name and a value in the places that it marks."""
    for a, b in formats._PLACES:
        places = {x: rf"(?:\{{{x}\}}|<{x}>|\${x}|(?<![A-Za-z]){x}(?![A-Za-z]))" for x in (a, b)}
        if all(re.search(place, pattern) for place in places.values()):
            either = re.compile("|".join(f"({place})" for place in places.values()))
            return either.sub(lambda m: name if m[1] else value, pattern)
    raise AssertionError(pattern)


def _format_pair(head: str, text: str) -> str:
    name = QUESTION.search(text)[1]
    pattern = form_of("format", "pair", head)[1]["f"]
    return filled(pattern, name, facts_of(text)[name])


def _format_pairs(head: str, text: str) -> str:
    pattern = form_of("format", "pairs", head)[1]["f"]
    for tail, gap in (("; ...", "; "), (", one per line", "\n"), (" with blanks between", " ")):
        if tail in pattern:
            form = pattern.split(tail)[0]
            return gap.join(filled(form, k, v) for k, v in facts_of(text).items())
    raise AssertionError(pattern)


def _date(head: str, text: str) -> str:
    for form in ("%Y-%m-%d", "%d %B %Y", "%B %d, %Y", "%Y/%m/%d"):
        try:
            day = datetime.strptime(text, form)
        except ValueError:
            continue
        wanted = form_of("format", "date", head)[1]["f"]
        return day.strftime(wanted.replace("YYYY", "%Y").replace("MM", "%m").replace("DD", "%d"))
    raise AssertionError(text)


def _wrap(head: str, text: str) -> str:
    left, right = WRAPS[form_of("format", "each word", head)[1]["m"]]
    return re.sub(r"\S+", lambda m: left + m[0] + right, text)


def _separate(head: str, text: str) -> str:
    return text.replace(" ", SEPARATORS[form_of("format", "separate", head)[1]["m"]])


def _tag(head: str, text: str) -> str:
    tag = form_of("format", "tag", head)[1]["t"]
    return f"{tag}{text}</{tag[1:]}"


def _yes(head: str, text: str) -> str:
    if found := re.fullmatch(r"Is (\d+) (larger|more|smaller|less) than (\d+)\?", text):
        a, b = int(found[1]), int(found[3])
        return "yes" if (a > b if found[2] in ("larger", "more") else a < b) else "no"
    if found := re.fullmatch(r"Is (.+) one of these: (.+)\?", text):
        return "yes" if found[1] in found[2].split(", ") else "no"
    facts, question = text.rsplit("\n", 1)
    found = re.fullmatch(r"Is the (\S+) (.+)\?", question)
    assert found
    return "yes" if facts_of(facts)[found[1]] == found[2] else "no"


def _fill(head: str, text: str) -> str:
    a, b = text.split("\n\n")
    template, facts = (a, b) if re.search(r"[{<\[]\S+[}>\]]", a) else (b, a)
    known = facts_of(facts)
    return re.sub(r"[{<\[]([^\s{<\[]+?)[}>\]]", lambda m: known[m[1]], template)


def _csv(head: str, text: str) -> str:
    columns = re.search(r"\((.+)\)$", head)[1].split(",")
    return ",".join(facts_of(text)[c] for c in columns)


def _markdown(head: str, text: str) -> str:
    a, b = re.search(r"with the columns (\S+) and (\S+)$", head).groups()
    rows = [(a, b), ("---", "---"), *facts_of(text).items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _ends(head: str, text: str) -> str:
    name, found = form_of("format", "begin,end,caps answer", head)
    value = facts_of(text)[QUESTION.search(text)[1]]
    if name == "caps answer":
        return value.upper()
    part = found["p"][1:-1]
    return f"{part} {value}" if name == "begin" else f"{value} {part}"


def _bullets(head: str, text: str) -> str:
    mark = form_of("format", "bullets", head)[1]["m"][1:-1]
    return "\n".join(f"{mark} {item}" for item in text.split(", "))


# --- objects --------------------------------------------------------------------------------------


def read(text: str) -> Any:
    """A value as words say it: JSON if it is JSON, else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object_value(head: str, text: str) -> str:
    made = json.loads(text)
    key = form_of("object", "value", head)[1]["k"]
    if key in made:
        return bare(made[key])
    for outer, inner in ((o, i) for o, v in made.items() if isinstance(v, dict) for i in v):
        if key in (f"{outer}.{inner}", f"{inner} of {outer}"):
            return bare(made[outer][inner])
    return ABSENT


def _object_keys(head: str, text: str) -> str:
    name, _ = form_of("object", "keys,count", head)
    made = json.loads(text)
    return ", ".join(made) if name == "keys" else str(len(made))


def _object_item(head: str, text: str) -> str:
    found = form_of("object", "item", head)[1]
    at = -1 if found["n"] == "last" else NTH.index(found["n"])
    return bare(json.loads(text)[found["k"]][at])


def _object_has(head: str, text: str) -> str:
    return "Yes." if form_of("object", "has", head)[1]["k"] in json.loads(text) else "No."


def _object_changed(head: str, text: str) -> str:
    made = json.loads(text)
    for name in ("rename", "add", "change", "remove"):
        for pattern in patterns("object", name):
            if not (m := pattern.fullmatch(head)):
                continue
            key, value = m["k"], m.groupdict().get("v", "")
            if name == "rename" and key in made:
                return json.dumps({value if k == key else k: v for k, v in made.items()})
            if name == "remove" and key in made:
                return json.dumps({k: v for k, v in made.items() if k != key})
            if name == "add" and key not in made and " " not in key:
                return json.dumps({**made, key: read(value)})
            if name == "change" and key in made:
                return json.dumps({**made, key: read(value)})
    raise AssertionError(head)


def _object_made(asked: Asked) -> bool:
    """Whether the words, taken in order, say the answer's members and nothing else."""
    made = json.loads(asked.answer)
    for form in ("{} {}", "{} is {}", "{}: {}", "{} = {}"):
        for gap in (", ", "; ", "\n"):
            for spoken in (False, True):
                said = []
                for key, value in made.items():
                    name = key.replace("_", " ") if spoken else key
                    kind = {list: "list ", dict: "object "}.get(type(value), "")
                    shown = (
                        " and ".join(map(str, value)) if isinstance(value, list)
                        else " and ".join(f"{k} {v}" for k, v in value.items())
                        if isinstance(value, dict) else bare(value)
                    )  # fmt: skip
                    said.append(kind + form.format(name, shown))
                    if isinstance(value, str) and read(value) != value:
                        return False  # a string that reads as a number
                if gap.join(said) == asked.text:
                    return True
    return False


COPIES = {
    "repeat": _repeat, "times": _times, "case": _case, "nth": _nth, "some": _some, "signs": _signs,
    "between": _between, "quoted": _quoted, "spell": _spell, "side": _side, "line": _line,
    "join": _join, "replace": _replace, "remove": _remove, "swap": _swap, "add": _add,
}  # fmt: skip
LOOKUPS = {
    "values": _pairs, "env": _env, "sections": _sections, "members": _members, "table": _table,
    "numbered": _numbered, "has": _has, "means": _means,
}  # fmt: skip
OF_LISTS = {
    "sort": _sort, "sort words": _sort_words, "extreme": _extreme, "nth": _list_nth,
    "reverse": lambda head, text: ", ".join(reversed(items_of(text))),
    "count": lambda head, text: str(len(items_of(text))), "length": _length, "doubles": _doubles,
    "begin": _begin, "contains": _contains, "convert": _convert, "merge": _merge,
    "common": _common, "part": _part, "change": _change, "filter": _filter,
    "every second": lambda head, text: ", ".join(
        a for i, a in enumerate(items_of(text)) if i % 2 == 0
    ),
    "position": lambda head, text: str(
        items_of(text).index(form_of("list", "position", head)[1]["x"]) + 1
    ),
    "times": lambda head, text: str(
        sum(a == form_of("list", "times", head)[1]["x"] for a in items_of(text))
    ),
}  # fmt: skip
OF_SUMS = {
    "sum": _sum, "three": _sum, "compare": _compare, "around": _around, "letters": _letters,
    "story": _story,
}  # fmt: skip
OF_FORMATS = {
    "pair": _format_pair, "all pairs": _format_pairs, "date": _date, "wrap": _wrap,
    "separate": _separate, "tag": _tag, "yes": _yes, "fill": _fill, "csv": _csv,
    "table": _markdown, "ends": _ends, "bullets": _bullets,
}  # fmt: skip
OF_OBJECTS = {
    "value": _object_value, "keys": _object_keys, "item": _object_item, "has": _object_has,
    "changed": _object_changed,
}  # fmt: skip
TASKS = [
    (copying.COPYING, COPIES), (lookup.LOOKUPS, LOOKUPS), (lists.LISTS, OF_LISTS),
    (sums.SUMS, OF_SUMS), (formats.FORMATS, OF_FORMATS), (objects.PAIRS, OF_OBJECTS),
]  # fmt: skip
FORMS = [
    pytest.param(forms[name][1], oracle, id=f"{oracle.__name__}-{name}")
    for forms, oracles in TASKS
    for name, oracle in oracles.items()
]
STEPS = [copying.copying, copying.lookup, lists.lists, lists.sums, lists.formats, objects.pairs]
DIALOGUES = [copying.schemas, objects.schema_json, lambda w: copying.recall(w, 20)]


def drawn(make: Callable[[Words], Any], n: int = DRAWS, seed: int = 1) -> Iterator[Any]:
    """Draws of training and of evaluation by turns."""
    rng = random.Random(seed)
    of = [Words(rng, unseen=False), Words(rng, unseen=True)]
    for i in range(n):
        yield make(of[i % 2])


@pytest.mark.parametrize(("make", "oracle"), FORMS)
def test_an_answer_is_what_its_words_ask_for(
    make: Callable[[Words], Asked], oracle: Callable[[str, str], str]
) -> None:
    for asked in drawn(make):
        assert asked.answer == oracle(asked.head, asked.text), asked


def test_every_form_has_an_answer_computed_twice() -> None:
    apart = {"name", "make"}  # below
    for forms, oracles in TASKS:
        assert set(forms) - apart == set(oracles)


def test_only_the_name_is_written_in_capitals() -> None:
    for asked in drawn(formats.FORMATS["name"][1]):
        name = re.fullmatch(r"The name is (.+)\.", asked.why)[1]
        assert asked.text.count(name) >= 1
        before, after = asked.answer.split(name.upper(), 1)
        assert before + name + after == asked.text


def test_an_object_made_of_words_says_what_the_words_say() -> None:
    for asked in drawn(objects.PAIRS["make"][1]):
        assert _object_made(asked), asked


@pytest.mark.parametrize("make", STEPS)
def test_a_step_is_plain_ascii_with_short_reasoning(
    make: Callable[[Words], tuple[str, str, str]],
) -> None:
    for ask, answer, why in drawn(make, 3000):
        assert ask.isascii() and answer.isascii() and why.isascii()
        assert ask and answer and why and answer == answer.strip()


def test_an_instruction_and_its_text_stand_whole_in_the_question() -> None:
    w = Words(random.Random(2))
    for _ in range(3000):
        asked = Asked("Sort these", w.phrase(), "x", "y")
        ask, answer, why = posed(w, asked)
        assert asked.text in ask and "ort these" in ask and (answer, why) == ("x", "y")


def test_a_key_at_the_start_keeps_its_letters() -> None:
    w = Words(random.Random(2))
    for _ in range(300):
        assert "Qwert_y" in posed(w, Asked("Qwert_y?", "Qwert_y = 1", "1", "y"))[0].replace(
            "Qwert_y = 1", ""
        )


# --- far back and schemas of tools ----------------------------------------------------------------


@pytest.mark.parametrize("n", [20, 60, 300])
def test_what_is_recalled_stands_once_in_the_list(n: int) -> None:
    for d in drawn(lambda w: copying.recall(w, n), 60):
        assert d.kind == "recall" and 20 <= len(d.turns) <= 80
        whole = d.system + "\n" + d.turns[0].text
        rows = re.split(r"\n|; |, (?!\S+ \S+\n)", whole)
        for ask, answer in zip(d.turns[::2], d.turns[1::2], strict=True):
            question = ask.text.rsplit("\n", 1)[-1]
            if answer.text == ABSENT:
                continue
            close = [i for i, row in enumerate(rows) if answer.text in row]
            assert close, (answer.text, question)
            words = [w.strip("?.,:#").removesuffix("'s") for w in question.split()]
            is_close = any(
                word and word in row
                for word in words
                for i in close
                for row in rows[max(0, i - 1) : i + 1]
            )
            assert is_close


def test_keys_and_values_of_a_list_to_recall_differ() -> None:
    w = Words(random.Random(4))
    for _ in range(200):
        pairs = lookup._pairs(w, 50)
        assert len({x for pair in pairs for x in pair}) == 100


@cache
def of_schemas() -> list[tuple[str, re.Pattern[str]]]:
    out = []
    for name, (seen, unseen) in READ.items():
        for phrase in flat(seen + unseen):
            pattern = re.escape(phrase.rstrip("?."))
            for key in "tkd":
                pattern = pattern.replace(rf"\{{{key}\}}", f"(?P<{key}>.+)")
            out.append((name, re.compile(pattern, re.DOTALL)))
    return out


def answers_about(d: Dialogue, ask: str) -> list[str]:
    """Every answer that some reading of the question gives."""
    tools = {t["name"]: t for t in d.tools}
    ask = ask.rstrip("?.")
    out = []
    for name, pattern in of_schemas():
        m = pattern.fullmatch(ask)
        if not m:
            continue
        found = m.groupdict()
        t = tools.get(found.get("t", ""))
        if "t" in found and t is None:
            continue
        parameters = t["parameters"] if t else {}
        properties = parameters.get("properties", {})
        required = parameters.get("required", [])
        p = properties.get(found.get("k", ""), {}) if t else {}
        of = p.get("items", p)
        if "k" in found and t and not p:
            continue
        match name:
            case "tools":
                out.append(", ".join(tools))
            case "how many":
                out.append(str(len(tools)))
            case "parameters":
                out.append(", ".join(properties) or "None.")
            case "required":
                out.append(", ".join(required) or "None.")
            case "optional":
                out.append(", ".join(x for x in properties if x not in required) or "None.")
            case "type":
                out.append(p["type"])
            case "choices":
                out.append(", ".join(map(str, of.get("enum", []))))
            case "items":
                out.append(p.get("items", {}).get("type", ""))
            case "members":
                out.append(", ".join(of.get("properties", {})))
            case "owner":
                takers = [n for n, x in tools.items()
                          if found["k"] in x["parameters"].get("properties", {})]  # fmt: skip
                out.append(", ".join(takers))
            case "description":
                out.append(t.get("description", "") if t else "")
            case "meaning":
                out.append(p.get("description", ""))
            case "described":
                out += [n for n, x in tools.items()
                        if x.get("description", "").rstrip("?.") == found["d"]]  # fmt: skip
            case "needs":
                out.append("Yes." if found["k"] in required else "No.")
    return out


def test_an_answer_about_tools_is_read_from_their_schemas() -> None:
    for d in drawn(copying.schemas, 1500):
        assert d.kind == "schema" and d.tools
        for ask, answer in zip(d.turns[::2], d.turns[1::2], strict=True):
            assert answer.text in answers_about(d, ask.text), (ask.text, answer.text)


# --- JSON to a schema -----------------------------------------------------------------------------


def check(value: Any, schema: Json) -> bool:
    """Whether `value` is an instance, by the keywords that our schemas use."""
    if "enum" in schema and value not in schema["enum"]:
        return False
    match schema.get("type"):
        case "object":
            of = schema.get("properties", {})
            return (
                isinstance(value, dict)
                and set(schema.get("required", [])) <= set(value)
                and set(value) <= set(of)
                and all(check(v, of[k]) for k, v in value.items())
            )
        case "array":
            return isinstance(value, list) and all(check(v, schema["items"]) for v in value)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
    return "enum" in schema


def schema_in(d: Dialogue) -> Json:
    """The schema, wherever it stands."""
    if d.schema is not None:
        return d.schema
    text = d.system if '"properties"' in d.system else d.turns[0].text
    start = min(
        i for i in (text.find('{"$schema"'), text.find('{"type"'), text.find("{\n")) if i > -1
    )
    found, _ = json.JSONDecoder().raw_decode(text[start:])
    return found


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def test_json_to_a_schema_is_an_instance_in_its_order_of_what_the_text_says() -> None:
    places = {"head": 0, "user": 0, "system": 0}
    for d in drawn(objects.schema_json, 4000):
        schema = schema_in(d)
        places["head" if d.schema else "system" if '"properties"' in d.system else "user"] += 1
        assert d.kind == "json schema" and schema["properties"]
        for ask, answer in zip(d.turns[::2], d.turns[1::2], strict=True):
            made = json.loads(answer.text)
            assert json.dumps(made, ensure_ascii=False) == answer.text and made
            assert check(made, schema), (schema, made)
            assert list(made) == [name for name in schema["properties"] if name in made]
            for leaf in leaves(made):
                assert isinstance(leaf, bool) or str(leaf) in ask.text
    assert all(share > 1100 for share in places.values())


def line_values(text: str) -> dict[str, str]:
    """Labels and values of the lines of a form."""
    out = {}
    for line in text.split("\n"):
        if " | " in line and line[0] != "|":
            continue  # all of it in one line
        if m := re.fullmatch(
            r"(?:[-*] )?(?:\*\*)?([^:=|*]+?)(?:\*\*)?(?:: | = | -> |\t)(.+)", line
        ):
            out[m[1].lower()] = m[2]
        elif m := re.fullmatch(r"\| (.+?) \| (.+) \|", line):
            out[m[1].lower()] = m[2]
    return out


def cast(said: str, schema: Json) -> Any:
    """A value of a line as its schema wants it."""
    match schema.get("type", "string"):
        case "integer":
            return int(said)
        case "number":
            return float(said)
        case "boolean":
            return said in ("yes", "true")
        case "array":
            return [cast(item, schema["items"]) for item in said.split(", ")]
    return said


def test_a_line_of_a_form_gives_the_value_of_the_property_that_it_names() -> None:
    compared = 0
    for d in drawn(objects.schema_json, 4000, seed=5):
        schema = schema_in(d)
        for ask, answer in zip(d.turns[::2], d.turns[1::2], strict=True):
            made = json.loads(answer.text)
            said = line_values(ask.text)
            for name, of in schema["properties"].items():
                flat = of.get("items", of).get("type") != "object"
                if "description" in of or not flat or " and " in said.get(name.lower(), ""):
                    continue
                for label in {name.lower(), name.lower().replace("_", " ")} & set(said):
                    if re.search(r"[.] |[.]$", said[label]):
                        continue  # a sentence, not a line of a form
                    assert name in made, (name, ask.text)
                    assert cast(said[label], of) == made[name], (ask.text, made)
                    compared += 1
    assert compared > 700


def test_an_optional_property_is_left_out_where_the_text_does_not_have_it() -> None:
    w = Words(random.Random(6))
    left_out = 0
    for _ in range(5000):
        made, kinds = schema_json.properties(w)
        text, values = schema_json.told(w, made, kinds)
        for p in made:
            assert p.name in values or not p.required
            if p.name not in values and p.label and " " in p.label:
                left_out += 1
                assert p.label.lower() not in text.lower()
    assert left_out > 100


def test_names_labels_and_choices_of_a_schema_never_meet() -> None:
    w = Words(random.Random(7))
    for _ in range(2000):
        made, _ = schema_json.properties(w)
        assert len({p.name for p in made}) == len(made)
        labels = [p.label for p in made if p.label]
        assert len(set(labels)) == len(labels)
        choices = [c for p in made for c in p.schema.get("enum", [])]
        assert len(set(choices)) == len(choices)
        kinds = [p.kind for p in made if p.kind in schema_json.KINDS]
        assert len(set(kinds)) == len(kinds)


# --- what is held out -----------------------------------------------------------------------------


class Recording(Words):
    """Words that keeps the phrasings that it was given to choose from."""

    def __init__(self, rng: random.Random, unseen: bool = False) -> None:
        super().__init__(rng, unseen)
        self.pairs: dict[int, tuple[list[Any], list[Any]]] = {}

    def either(self, seen: list[Any], unseen: list[Any]) -> list[Any]:
        self.pairs[id(seen)] = (seen, unseen)
        return super().either(seen, unseen)


@pytest.mark.parametrize("make", [*STEPS, *DIALOGUES])
def test_phrasings_held_out_for_evaluation_never_come_in_training(
    make: Callable[[Words], Any],
) -> None:
    w = Recording(random.Random(8))
    asks = []
    for _ in range(4000 if make in STEPS else 400):
        made = make(w)
        said = [t.text for t in made.turns[::2]] if isinstance(made, Dialogue) else [made[0]]
        asks += [ask.lower() for ask in said]
    ours = {id(seen) for table in TABLES.values() for seen, _ in table.values()}
    pairs = [pair for key, pair in w.pairs.items() if key in ours]
    assert pairs
    for _, unseen in pairs:
        for phrase in flat(unseen):
            pieces = [re.escape(p.strip(" ?.").lower()) for p in re.split(r"\{\w?\}", phrase)]
            if max(map(len, pieces)) > 12:
                pattern = re.compile(r"(?<!\w)" + ".{0,80}".join(pieces) + r"(?!\w)")
                assert not any(pattern.search(ask) for ask in asks), phrase


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_each_form_has_many_phrasings_and_a_few_held_out_ones(table: Any) -> None:
    few = 10 if table is schema_json.SAID else 25
    for name, (seen, unseen) in table.items():
        told, held = flat(seen), flat(unseen)
        assert len(told) >= few, name
        assert 2 <= len(held) <= 4 and all(len(kept) == 1 for kept in unseen), name
        for phrase in told + held:
            assert phrase == " ".join(phrase.split()) and "|" not in phrase
            assert all(len(place) < 2 for place in re.findall(r"\{(.*?)\}", phrase)), phrase


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_phrasing_of_training_is_a_held_out_one_but_for_one_word(table: Any) -> None:
    for name, (seen, unseen) in table.items():
        assert not [
            (phrase, held) for phrase in flat(seen) for held in flat(unseen) if near(phrase, held)
        ], name


@pytest.mark.parametrize(
    ("phrase", "close"),
    [
        ("put this in capitals.", True),
        ("Write this in capitals", True),
        ("Put this in big capitals", True),
        ("Put in capitals", True),
        ("Say the text in small letters", False),
    ],
)
def test_a_phrasing_is_near_a_held_out_one_if_one_word_differs(phrase: str, close: bool) -> None:
    assert near(phrase, "Put this in capitals") is close


def test_a_pattern_stands_for_each_choice_of_its_alternatives() -> None:
    assert expanded("{Say|Write {it|this}} {n}{| now}") == [
        "Say {n}", "Say {n} now", "Write it {n}", "Write it {n} now", "Write this {n}",
        "Write this {n} now",
    ]  # fmt: skip


def test_a_table_gives_each_form_its_phrasings_of_training_and_those_held_out() -> None:
    table = parse(
        """# said of a key
get it {k} ?{s}
  {Get|Read|Fetch|Find} {k}{| now} / {k}?

  # two places
  Show {k} of {s}
  ! What has {k}? / Tell me what {k} is
""",
        "some.txt",
    )
    many = [f"{verb} {{k}}{now}" for verb in ("Get", "Read", "Fetch", "Find")
            for now in ("", " now")]  # fmt: skip
    seen, unseen = table["get it"]
    assert seen == [many, many, ["{k}?"], ["Show {k} of {s}"]]
    assert unseen == [["What has {k}?"], ["Tell me what {k} is"]]


def test_what_is_near_a_held_out_phrasing_is_left_out_of_a_pattern() -> None:
    seen, _ = parse("say {k}\n  {Say|Tell me} the {k}\n  ! Write the {k}\n", "some.txt")["say"]
    assert seen == [["Tell me the {k}"]]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("  Say {k}", "some.txt: 'Say {k}' stands before any form"),
        ("Get {k}\n  Say {k}", "some.txt: 'Get {k}' is no form"),
        ("get {key}\n  Say {key}", "some.txt: 'get {key}' is no form"),
        ("get\n\tSay", "some.txt: '\\tSay' is no form"),
        ("get\n  Say\n  ! Tell\nget\n  Ask", "some.txt, get: two forms have this name"),
        ("get", "some.txt, get: it needs a phrasing"),
        ("get\n  Say this", "some.txt, get: it needs a held-out phrasing"),
        ("get\n  Say /  / Tell", "some.txt, get: an empty phrasing"),
        ("get\n  !", "some.txt, get: an empty phrasing"),
        ("get\n  Say it / Tell\n  ! Say it", "some.txt, get: 'Say it' is written twice"),
        ("get\n  Say caf\u00e9", "some.txt, get: 'Say caf\u00e9' is not ASCII"),
        ("get\n  {Say|Tell it", "some.txt, get: '{Say|Tell it' has a brace without its partner"),
        ("get\n  }Say{ it", "some.txt, get: '}Say{ it' has a brace without its partner"),
        ("get\n  Say / ! Tell", "some.txt, get: '! Tell' stands within a line"),
        ("get\n  Say|Tell", "some.txt, get: 'Say|Tell' has a `|` outside braces"),
        ("get\n  Say {|now} it", "some.txt, get: 'Say {|now} it' gives 'Say  it'; blanks stand"),
        ("get {k}\n  Say it", "'Say it' has the places none; those of its form are {k}"),
        ("get {k} ?{s}\n  {k} of {x}", "has the places {k} {x}; those of its form are {k} ?{s}"),
        ("get\n  Say\n  ! {Ask|Tell}", "'{Ask|Tell}' is held out and has alternatives"),
        ("get\n  Say it now\n  ! Say it here", "'Say it now' differs by one word or none"),
    ],
)
def test_an_error_in_a_table_is_reported_with_its_file_and_form(table: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(table, "some.txt")


def test_words_that_mean_nothing_stand_around_tasks_in_training_only() -> None:
    task = Asked("Sort these", "3, 1, 2", "1, 2, 3", "y")
    shares = []
    for unseen in (False, True):
        w = Words(random.Random(3), unseen)
        asks = [posed(w, task)[0] for _ in range(4000)]
        said = re.compile(r"[A-Za-z-]+( [A-Za-z-]+)?[:,.!>-]? Sort these|.*[.] [(\[]", re.DOTALL)
        told = [ask for ask in asks if said.match(ask)]
        shares.append(len(told) / len(asks))
    assert shares[0] > shares[1] + 0.05


def test_no_word_that_means_nothing_follows_a_text_to_be_copied() -> None:
    for seed in range(3):
        w = Words(random.Random(seed))
        for _ in range(2000):
            ask = posed(w, Asked("Repeat this", "Zor brin", "Zor brin", "y", True))[0]
            assert ask.endswith("Zor brin")


@pytest.mark.parametrize("make", [*STEPS, *DIALOGUES])
def test_the_same_seed_makes_the_same_task(make: Callable[[Words], Any]) -> None:
    for unseen in (False, True):
        twice = [
            [make(w) for _ in range(50)]
            for w in (Words(random.Random(9), unseen), Words(random.Random(9), unseen))
        ]
        assert twice[0] == twice[1]
