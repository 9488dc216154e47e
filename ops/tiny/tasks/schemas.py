"""Questions about the tools themselves: how a schema of tools is read.

Owns the questions; the tools that a dialogue offers are made by `ops.tiny.tools`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.tiny import tools
from ops.tiny.dialogue import dialogue
from ops.tiny.tasks.phrasing import TABLES, chosen, plainly

if TYPE_CHECKING:
    from ops.tiny.dialogue import Dialogue, Json, Step
    from ops.tiny.tools import Made
    from ops.tiny.words import Words

READ = TABLES["schemas"]


def _properties(m: Made) -> dict[str, Json]:
    found: dict[str, Json] = m.function["parameters"].get("properties", {})
    return found


def _required(m: Made) -> list[str]:
    found: list[str] = m.function["parameters"].get("required", [])
    return found


def _about_tools(w: Words, made: list[Made]) -> Step:
    r = w.rng
    if r.random() < 0.3:
        return chosen(w, READ["how many"]), str(len(made)), "I count the tools."
    return chosen(w, READ["tools"]), ", ".join([m.name for m in made]), "I list the names."


def _about_tool(w: Words, made: list[Made], m: Made) -> Step:
    """What one tool takes, or what it is for."""
    r = w.rng
    properties = _properties(m)
    required = _required(m)
    said = m.function.get("description")
    k = r.randint(0, 6 if said else 4)
    if k < 2:
        ask, of = "parameters", list(properties)
    elif k < 4:
        ask, of = "required", required
    elif k == 4:
        ask, of = "optional", [p for p in properties if p not in required]
    elif k == 5 or sum(o.function.get("description") == said for o in made) > 1:
        return chosen(w, READ["description"]).format(t=m.name), said, "I read its description."
    else:
        ask = chosen(w, READ["described"]).format(d=said)
        return ask, m.name, "I compare the descriptions."
    text = chosen(w, READ[ask]).format(t=m.name)
    return text, ", ".join(of) or "None.", f"I read what is {ask}."


def _about_parameter(w: Words, made: list[Made], m: Made, key: str) -> Step:
    r = w.rng
    schema = _properties(m)[key]
    kind = str(schema["type"])
    of = schema.get("items", schema)  # a list of choices offers those of its items
    x = r.random()
    if x < 0.7:
        if "enum" in of:
            ask = chosen(w, READ["choices"]).format(k=key, t=m.name)
            return ask, ", ".join(map(str, of["enum"])), "I read the enum."
        if "properties" in of and x < 0.45:
            ask = chosen(w, READ["members"]).format(k=key, t=m.name)
            return ask, ", ".join(of["properties"]), "I read its properties."
        if "items" in schema:
            item = str(schema["items"]["type"])
            ask = chosen(w, READ["items"]).format(k=key, t=m.name)
            return ask, item, f"The items are of type {item}."
    if x < 0.3:
        return chosen(w, READ["type"]).format(k=key, t=m.name), kind, f"The schema says {kind}."
    if x < 0.45 and schema.get("description"):
        ask = chosen(w, READ["meaning"]).format(k=key, t=m.name)
        return ask, schema["description"], "I read its description."
    if x < 0.75:
        needed = key in _required(m)
        ask = chosen(w, READ["needs"]).format(k=key, t=m.name)
        return ask, "Yes." if needed else "No.", "I look into required."
    owners = [o.name for o in made if key in _properties(o)]
    return chosen(w, READ["owner"]).format(k=key), ", ".join(owners), "I look for the parameter."


def schemas(w: Words) -> Dialogue:
    """Questions about the tools themselves: how a schema is read."""
    r = w.rng
    made = tools.several(w, r.choices((1, 2, 3, 4, 5), (15, 25, 25, 20, 15))[0])
    steps: list[Step] = []
    for _ in range(r.randint(1, 5)):
        m = r.choice(made)
        properties = list(_properties(m))
        x = r.random()
        if x < 0.15:
            ask, answer, why = _about_tools(w, made)
        elif x < 0.45 or not properties:
            ask, answer, why = _about_tool(w, made, m)
        else:
            ask, answer, why = _about_parameter(w, made, m, r.choice(properties))
        steps.append((plainly(w, ask), answer, why))
    return dialogue(w, "schema", steps, tools=[m.function for m in made])
