"""Short stories: events, and the questions about them, between sentences that no question is about."""

from __future__ import annotations

import re
from functools import cache

from training.facts import Fact, ask, sentence
from training.words import Words, listed

# An event: its statement, then groups of questions about one part of it, named before the colon. {p} and {q} are
# persons, {o} and {u} things, {s} a spot, {t} a place, {v} a value, {n} a number.
EVENTS = (
    (
        "{p} put the {o} under the {s}.",
        "s: Where did {p} put the {o}?; Where is the {o}?; Under what did {p} put the {o}?; Where can I find the {o}?",
        "p: Who put the {o} under the {s}?; Who put away the {o}?; Which person put the {o} under the {s}?",
        "o: What did {p} put under the {s}?; What is under the {s}?; Which thing is under the {s}?",
    ),
    (
        "{p} hid the {o} in the {s}.",
        "s: Where did {p} hide the {o}?; Where is the {o} hidden?; In which place did {p} hide the {o}?",
        "p: Who hid the {o}?; Who hid the {o} in the {s}?; Which person hid the {o}?",
        "o: What did {p} hide in the {s}?; What is hidden in the {s}?; Which thing did {p} hide in the {s}?",
    ),
    (
        "{p} found the {o} near the {s}.",
        "s: Where did {p} find the {o}?; Near what did {p} find the {o}?; In which place did {p} find the {o}?",
        "p: Who found the {o}?; Who found the {o} near the {s}?; Which person found the {o}?",
        "o: What did {p} find?; What did {p} find near the {s}?; Which thing did {p} find?",
    ),
    (
        "{p} gave the {o} to {q}.",
        "q: To whom did {p} give the {o}?; Who got the {o} from {p}?; Which person got the {o}?",
        "p: Who gave the {o} to {q}?; From whom did {q} get the {o}?; Which person gave the {o} to {q}?",
        "o: What did {p} give to {q}?; What did {q} get from {p}?; Which thing did {p} give to {q}?",
    ),
    (
        "{p} bought {n} {u}s in {t}.",
        "n: How many {u}s did {p} buy?; How many {u}s did {p} buy in {t}?; What number of {u}s did {p} buy?",
        "t: Where did {p} buy the {u}s?; In which town did {p} buy {u}s?; In what place did {p} buy the {u}s?",
        "p: Who bought the {u}s?; Who bought {n} {u}s?; Which person bought {n} {u}s?",
    ),
    (
        "{p} travelled to {t} by {h}.",
        "t: Where did {p} travel?; To which town did {p} travel?; Which town did {p} travel to?",
        "h: How did {p} travel to {t}?; By what did {p} travel?; How did {p} come to {t}?",
        "p: Who travelled to {t}?; Who travelled by {h}?; Which person travelled to {t}?",
    ),
    (
        "{p} met {q} at the {s}.",
        "q: Whom did {p} meet?; Whom did {p} meet at the {s}?; Which person did {p} meet?",
        "s: Where did {p} meet {q}?; At which place did {p} meet {q}?; In what place did {p} meet {q}?",
        "p: Who met {q}?; Who met {q} at the {s}?; Which person met {q}?",
    ),
    (
        "{p} wrote the word {v} on the {s}.",
        "v: What did {p} write?; Which word did {p} write on the {s}?; What word is on the {s}?",
        "s: Where did {p} write the word {v}?; On what did {p} write?; In what place is the word {v}?",
        "p: Who wrote the word {v}?; Who wrote on the {s}?; Which person wrote on the {s}?",
    ),
    (
        "{p} told {q} that the password is {v}.",
        "v: What is the password?; Which password did {p} tell {q}?; What did {p} tell {q}?; Give me the password.",
        "p: Who told {q} the password?; Who told {q} that the password is {v}?; Which person told {q} the password?",
        "q: Whom did {p} tell the password?; Who heard the password from {p}?; Who got the password from {p}?",
    ),
    (
        "{p} sold the {o} for {n} coins.",
        "n: For how many coins did {p} sell the {o}?; How much did the {o} cost?; What was the price of the {o}?",
        "p: Who sold the {o}?; Who sold the {o} for {n} coins?; Which person sold the {o}?",
        "o: What did {p} sell?; What did {p} sell for {n} coins?; Which thing did {p} sell?",
    ),
    (
        "The {o} belongs to {p}.",
        "p: Whose is the {o}?; To whom does the {o} belong?; Who owns the {o}?; Which person does the {o} belong to?",
        "o: What belongs to {p}?; Which thing belongs to {p}?; What does {p} own?",
    ),
    (
        "The {o} is in room {n}.",
        "n: In which room is the {o}?; Where is the {o}?; What room is the {o} in?; Which room has the {o}?",
        "o: What is in room {n}?; Which thing is in room {n}?; What can I find in room {n}?",
    ),
)

_FILLERS = (
    "It was a {w} day.",
    "The {w} morning went by and nothing happened.",
    "A {a} stood near the {s}.",
    "Far away there was a {s}.",
    "Everybody spoke about the {x} and the {y}.",
    "The {x} was {w} that day.",
    "Then it was {w} again for a while.",
    "Some {x} was left, but no {y}.",
    "An old song about {x} and {y} was heard from the {s}.",
    "The road to the {s} was {w}.",
    "There was {x} on the ground, and {y} in the air.",
    "Later the {x} became {w}.",
)

_SLOT = re.compile(r"\{([a-z])\}")


@cache
def _parts(group: str) -> tuple[str, tuple[str, ...]]:
    part, _, questions = group.partition(": ")
    return part, tuple(questions.split("; "))


def event(words: Words, persons: list[str]) -> Fact | None:
    """Return an event of one or two of the persons, with one question about each of its parts.

    No two events of a conversation share what identifies the answer; None if none is left.
    """
    rng = words.rng
    for _ in range(12):
        statement, *groups = rng.choice(EVENTS)
        first, second = rng.sample(persons, 2)
        values = {"p": first, "q": second, "h": words.pick(listed("vehicles")), "n": str(rng.randint(2, 99))}
        slots = _SLOT.findall(statement)
        taken = {f"{statement} {slot} {values[slot]}" for slot in slots if slot in values}
        if "password" in statement:
            taken.add(statement)
        if taken.isdisjoint(words.used):
            break
    else:
        return None
    words.used |= taken
    for slot in slots:
        if slot not in values:
            values[slot] = _MAKERS[slot](words)
    answer = sentence(statement.format(**values))
    asks = []
    for group in groups:
        part, questions = _parts(group)
        asks.append(ask(words, questions, values, answer, values[part]))
    return Fact(answer, tuple(asks))


_MAKERS = {
    "o": Words.thing,
    "u": Words.thing,
    "s": lambda words: words.fresh(words.spot),
    "t": Words.place,
    "v": Words.value,
}


def filler(words: Words) -> str:
    rng = words.rng
    text = rng.choice(_FILLERS)
    return text.format(w=rng.choice(listed("weather")), a=words.word(), s=words.spot(), x=words.word(), y=words.word())


def story(words: Words, facts: list[Fact], fillers: int) -> str:
    """Tell events in their order, with other sentences between them."""
    lines = [sentence(fact.statement) for fact in facts]
    for _ in range(fillers):
        lines.insert(words.rng.randint(0, len(lines)), filler(words))
    text = ""
    rest = 0
    for line in lines:  # paragraphs of random length
        rest -= 1
        text += line + ("\n\n" if rest < 0 else " ")
        rest = words.rng.randint(2, 8) if rest < 0 else rest
    return text.strip()
