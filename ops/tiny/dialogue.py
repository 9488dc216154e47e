"""A dialogue as text: what the tasks make and the encoder lays out.

Owns the shape and what all dialogues share: system prompts, thinking, how a text joins a question.
Knows no task and no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ops.tiny.words import Words

Json = dict[str, Any]
Step = tuple[str, str, str]  # the user's words, the answer, its reasoning
THINKING = 0.25  # share of dialogues with thinking on

SYSTEMS = ["You are a helpful assistant.", "You are ds4-tiny.", "You are a helpful assistant",
           "Be brief.", "Answer in short sentences.", "You are an assistant with tools.",
           "Be kind and short.", "You are a coding agent. Use tools when needed.",
           "Help the user.", "You are a helpful AI assistant.", "You help people with their work.",
           "You are a coding assistant.", "Answer exactly what is asked.", "Use the tools.",
           "You are a friendly assistant. Keep answers short.", "Follow the instructions.",
           "You are an agent. You work step by step.", "Assist the user as well as you can.",
           "You are a careful assistant that reads everything before answering."]  # fmt: skip
SYSTEMS_UNSEEN = ["You are a useful helper.", "Be precise and polite.",
                  "You work for the user. Call functions when they fit.",
                  "Your task is to help with whatever is asked."]  # fmt: skip


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
    schema: Json | None = None  # of the response, as `response_format` puts it into the prompt


def system(w: Words, share: float = 0.5) -> str:
    """A system prompt or none; sometimes one that nobody has seen."""
    r = w.rng
    if r.random() > share:
        return ""
    first = r.choice(w.either(SYSTEMS, SYSTEMS_UNSEEN))
    if r.random() < 0.75:
        return first
    return " ".join([first, *(w.sentence() for _ in range(r.randint(1, 5)))])


def turns_of(steps: list[Step]) -> list[Turn]:
    """The steps as turns of user and assistant, one after the other."""
    out = []
    for ask, answer, reasoning in steps:
        out += [Turn("user", ask), Turn("assistant", answer, reasoning=reasoning)]
    return out


def dialogue(
    w: Words,
    kind: str,
    steps: list[Step],
    lead: str = "",
    lead_in_system: bool = False,
    tools: list[Json] | None = None,
) -> Dialogue:
    """Steps as a dialogue; the text `lead` joins the first question or the system prompt."""
    r = w.rng
    said = system(w)
    turns = turns_of(steps)
    if lead and lead_in_system:
        said = (said + "\n\n" + lead).strip()
    elif lead:
        form = r.choice(["{l} {a}", "{l}\n\n{a}", "{l}\n{a}", "{a}\n\n{l}"])
        turns[0].text = form.replace("{a}", turns[0].text).replace("{l}", lead)
    return with_thinking(w, Dialogue(kind, turns, said, tools or []))


def with_thinking(w: Words, d: Dialogue) -> Dialogue:
    """Thinking on for some, with any effort."""
    r = w.rng
    d.thinking = r.random() < THINKING
    if d.thinking:
        d.effort = r.choices(["low", "high", "max"], [0.8, 0.12, 0.08])[0]
    return d
