"""Tools to call, in the format of Qwen and Hermes, and JSON to fill in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.facts import Ask, Fact
from training.wordings import choose, dressed
from training.words import Words, listed

Tool = dict[str, Any]

_ABOUT = ("of", "for", "in")
_CALLS = (
    "Call {t} with {j}.",
    "Use {t} with {j}.",
    "Please call {t}: {j}",
    "Use the tool {t}: {j}.",
    "Please use {t} with {j}.",
    "Call the tool {t} with {j}.",
    "Run {t} with {j}.",
    "Call the function {t} with {j}, please.",
    "I need {t} with {j}.",
)
_REQUESTS = (
    "{v} the {n} {s}{m}.",
    "What is the {n} {s}{m}?",
    "Please {w} the {n} {s}{m}.",
    "I need the {n} {s}{m}.",
    "Tell me the {n} {s}{m}.",
    "Can you {w} the {n} {s}{m}?",
    "I want to know the {n} {s}{m}.",
    "Use a tool to {w} the {n} {s}{m}.",
    "Could you please {w} the {n} {s}{m}?",
    "Show me the {n} {s}{m}.",
    "Do you know the {n} {s}{m}?",
)
_AS_JSON = (
    "Give me {n} of {e} as JSON.",
    "Fill in this JSON for {e}: {j}",
    "Fill in for {e}: {j}",
    "Complete this JSON about {e}: {j}",
    "Answer in JSON with the fields {n} for {e}.",
    "Describe {e} as JSON with the keys {n}.",
    "Return a JSON object about {e}: {n}.",
    "Return {n} of {e} as a JSON object.",
    "Write the fields {n} for {e} in JSON.",
    "What are {n} of {e}? Answer in JSON.",
    "I need a JSON object with {n} of {e}.",
    "Please write {n} of {e} as JSON.",
    "JSON with {n} of {e}, please.",
    "Fill in this schema for {e}: {s}",
    "Write JSON about {e}. Schema: {s}",
    "Fill in the JSON about {e} with this schema: {s}",
    "Describe {e} with this schema: {s}",
    "Return JSON about {e} that fits this schema: {s}",
)


@dataclass(frozen=True)
class Turn:
    """A message. ``task`` names what an assistant's turn is trained for; "" trains nothing."""

    role: str
    content: str
    task: str = ""


def tool(name: str, description: str, arguments: dict[str, str]) -> Tool:
    """A function in OpenAI's form; the arguments are all required. ``arguments`` maps their names to JSON types."""
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


class ToolCase:
    """One tool, a request that needs it, the call, what the tool returns and the answer."""

    def __init__(self, words: Words) -> None:
        rng = words.rng
        self._weather = rng.random() < 0.25
        if self._weather:
            self._verb = "get"
            self.noun = "weather"
            self._about = "in"
            self._types = {"city": "string"}
        else:
            self._verb = rng.choice(listed("verbs"))
            self._about = rng.choice(_ABOUT)
            self.noun = rng.choice(listed("nouns")) if rng.random() < 0.5 else words.fresh(words.word)
            names = rng.sample(listed("arguments"), rng.choice((1, 1, 2, 3)))
            self._types = {n: "integer" if n in ("number", "id") and rng.random() < 0.6 else "string" for n in names}
        named = rng.choice(("tool", "lookup", "service"))
        self.name = f"{self._verb}_{self.noun}" if rng.random() < 0.7 else f"{self.noun}_{named}"
        forms = ("{v} the {n} {a} a {f}.", "{v} the {n} {a} a given {f}", "{v} {n}", "{v} the current {n}.")
        shown = self._verb.replace("_", " ").capitalize()
        text = rng.choice(forms).format(v=shown, n=self.noun, a=self._about, f=next(iter(self._types)))
        self.tool = tool(self.name, text, self._types)
        self.redraw(words)

    def redraw(self, words: Words) -> None:
        """Draw another request for the same tool."""
        self.arguments: dict[str, Any] = {
            name: words.rng.randrange(10000) if kind == "integer" else _text_value(words, name)
            for name, kind in self._types.items()
        }
        self.subject = f"{self._about} {next(iter(self.arguments.values()))}"
        self.request = self._request(words, self._verb.replace("_", " "))
        self.result = words.rng.choice(listed("weather")) if self._weather else words.value()

    def _request(self, words: Words, verb: str) -> str:
        rng = words.rng
        noun = self.noun
        subject = self.subject
        rest = list(self.arguments)[1:]
        more = "".join(f", {name} {self.arguments[name]}" for name in rest)
        if rng.random() < 0.35:
            pairs = rng.choice((" ", " = ", ": "))
            joined = ", ".join(f"{name}{pairs}{value}" for name, value in self.arguments.items())
            return choose(rng, _CALLS, words.evaluating).format(t=self.name, j=joined)
        text = dressed(rng, choose(rng, _REQUESTS, words.evaluating), words.evaluating)
        return text.format(v=verb.capitalize(), w=verb, n=noun, s=subject, m=more)

    @property
    def call(self) -> str:
        return call_text(self.name, self.arguments)

    def response(self, words: Words) -> str:
        forms = (json.dumps({self.noun: self.result}), self.result, json.dumps({"result": self.result}))
        return words.rng.choice(forms)

    @property
    def answer(self) -> str:
        return f"The {self.noun} {self.subject} is {self.result}."


def _text_value(words: Words, argument: str) -> str:
    if argument in ("city", "place"):
        return words.place()
    if argument in ("name", "user"):
        return words.person()
    if argument in ("id", "number", "key"):
        return words.code()
    return words.thing() if words.rng.random() < 0.5 else words.word()


def tool_cases(words: Words, count: int) -> list[ToolCase]:
    """Return cases with distinct tools."""
    cases: dict[str, ToolCase] = {}
    while len(cases) < count:
        case = ToolCase(words)
        if case.noun not in {other.noun for other in cases.values()}:
            cases[case.name] = case
    return list(cases.values())


def json_ask(words: Words, group: Sequence[Fact]) -> tuple[Ask, dict[str, Any]]:
    """Ask for some facts of one entity as a JSON object; return also its JSON schema."""
    rng = words.rng
    chosen = rng.sample(list(group), rng.randint(1, min(4, len(group))))
    subject = group[0].subject
    fields: dict[str, Any] = {fact.label: _json_value(fact) for fact in chosen}
    if rng.random() < 0.6:
        fields = {"name": subject.removeprefix("the "), **fields}
    properties = {name: {"type": "integer" if isinstance(value, int) else "string"} for name, value in fields.items()}
    schema = {"type": "object", "properties": properties, "required": list(fields)}
    names = ", ".join(fields)
    empty = json.dumps({name: 0 if isinstance(value, int) else "" for name, value in fields.items()})
    question = choose(rng, _AS_JSON, words.evaluating).format(n=names, e=subject, j=empty, s=json.dumps(schema))
    answer = json.dumps(fields, ensure_ascii=False)
    return Ask(question, answer, answer), schema


def _json_value(fact: Fact) -> int | str:
    return int(fact.value) if fact.label == "age" and fact.value.isdecimal() else fact.value
