"""Facts about persons and things: the sentences that state them, and the questions that they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from training.wordings import choose, dressed
from training.words import Words, listed


@dataclass(frozen=True)
class Ask:
    """A question, its answer, and the value that any right answer contains."""

    question: str
    answer: str
    value: str


@dataclass(frozen=True)
class Fact:
    statement: str
    asks: tuple[Ask, ...]
    subject: str = ""
    label: str = ""  # "city" in "city: Paris"
    value: str = ""


@dataclass(frozen=True)
class Attribute:
    """Sentences and questions about one property of a person. ``{e}`` stands for the person, ``{v}`` for the value."""

    label: str
    value: Callable[[Words], str]
    statements: Sequence[str]
    questions: Sequence[str]
    answer: str = ""  # the first statement unless given


ATTRIBUTES = (
    Attribute(
        "city",
        Words.place,
        ("{e} lives in {v}.", "The home of {e} is in {v}.", "{e} has a house in {v}.", "{v} is where {e} lives."),
        (
            "Where does {e} live?",
            "In which town does {e} live?",
            "What city does {e} live in?",
            "Where is the home of {e}?",
            "Which town does {e} live in?",
            "In what place does {e} have a house?",
        ),
    ),
    Attribute(
        "job",
        lambda w: w.pick(listed("jobs")),
        ("{e} works as a {v}.", "{e} is a {v}.", "The job of {e} is {v}.", "{e} earns money as a {v}."),
        (
            "What is the job of {e}?",
            "What does {e} do for a living?",
            "What work does {e} do?",
            "What is {e}'s job?",
            "Which job does {e} have?",
            "What does {e} work as?",
        ),
    ),
    Attribute(
        "colour",
        Words.colour,
        ("The favourite colour of {e} is {v}.", "{e}'s favourite colour is {v}.", "{e} likes the colour {v} best."),
        (
            "What is the favourite colour of {e}?",
            "What is {e}'s favourite colour?",
            "Which colour does {e} like best?",
            "What colour does {e} like?",
            "Which colour is the favourite of {e}?",
        ),
    ),
    Attribute(
        "pet",
        lambda w: w.pick(listed("animals")),
        ("{e} has a {v}.", "{e} keeps a {v} as a pet.", "The pet of {e} is a {v}."),
        (
            "What pet does {e} have?",
            "Which animal does {e} keep?",
            "What is the pet of {e}?",
            "What is {e}'s pet?",
            "Which pet does {e} keep?",
            "What animal does {e} have?",
        ),
    ),
    Attribute(
        "age",
        lambda w: str(w.rng.randint(3, 99)),
        ("{e} is {v} years old.", "The age of {e} is {v}.", "{e} turned {v} this year."),
        (
            "How old is {e}?",
            "What is the age of {e}?",
            "What is {e}'s age?",
            "Which age does {e} have?",
            "How many years old is {e}?",
        ),
    ),
    Attribute(
        "food",
        lambda w: w.pick(listed("foods")),
        ("{e} likes to eat {v}.", "The favourite food of {e} is {v}.", "{e} eats {v} every day."),
        (
            "What does {e} like to eat?",
            "What is the favourite food of {e}?",
            "What is {e}'s favourite food?",
            "Which food does {e} like?",
            "What does {e} eat every day?",
        ),
    ),
    Attribute(
        "instrument",
        lambda w: w.pick(listed("instruments")),
        ("{e} plays the {v}.", "The instrument of {e} is the {v}.", "{e} has played the {v} for years."),
        (
            "What instrument does {e} play?",
            "Which instrument does {e} play?",
            "What does {e} play?",
            "What is the instrument of {e}?",
            "Which instrument has {e} played?",
        ),
    ),
    Attribute(
        "hobby",
        lambda w: w.pick(listed("hobbies")),
        ("The hobby of {e} is {v}.", "{e}'s hobby is {v}.", "{e} enjoys {v}."),
        (
            "What is the hobby of {e}?",
            "What is {e}'s hobby?",
            "Which hobby does {e} have?",
            "What does {e} enjoy?",
            "What hobby does {e} enjoy?",
        ),
    ),
    Attribute(
        "language",
        lambda w: w.pick(listed("languages")),
        ("{e} speaks {v}.", "The language of {e} is {v}.", "{e} grew up with {v}."),
        (
            "What language does {e} speak?",
            "Which language does {e} speak?",
            "What is the language of {e}?",
            "What is {e}'s language?",
            "Which language is spoken by {e}?",
        ),
    ),
    Attribute(
        "birthday",
        Words.date,
        ("{e} was born on {v}.", "The birthday of {e} is {v}.", "{e}'s birthday is {v}."),
        (
            "When was {e} born?",
            "What is the birthday of {e}?",
            "When is {e}'s birthday?",
            "On which day was {e} born?",
            "When is the birthday of {e}?",
            "What is {e}'s birthday?",
        ),
    ),
    Attribute(
        "vehicle",
        lambda w: w.pick(listed("vehicles")),
        ("{e} travels by {v}.", "{e} goes to work by {v}.", "The vehicle of {e} is a {v}."),
        (
            "How does {e} travel?",
            "How does {e} go to work?",
            "What is the vehicle of {e}?",
            "Which vehicle does {e} have?",
            "What does {e} travel by?",
        ),
    ),
    Attribute(
        "friend",
        Words.person,
        ("The best friend of {e} is {v}.", "{e}'s best friend is {v}.", "{e} is best friends with {v}."),
        (
            "Who is the best friend of {e}?",
            "Who is {e}'s best friend?",
            "What is the name of {e}'s best friend?",
            "Which person is the best friend of {e}?",
        ),
    ),
)

_NEW_QUESTIONS = (
    "What is the {n} of {e}?",
    "What is {e}'s {n}?",
    "Which {n} does {e} have?",
    "Which {n} belongs to {e}?",
    "What is the {n} that {e} has?",
)
_BRIEFLY = ("Answer with the value only.", "Only the value, please.", "Give only the answer.", "One word, please.")


def ask(words: Words, templates: Sequence[str], forms: Mapping[str, str], answer: str, value: str) -> Ask:
    """Choose the words of a question. Sometimes only the value is asked for."""
    rng = words.rng
    question = choose(rng, templates, words.evaluating).format_map(forms)
    if rng.random() < 0.1 and not words.evaluating:
        return Ask(f"{dressed(rng, question, False)} {rng.choice(_BRIEFLY)}", value, value)
    return Ask(dressed(rng, question, words.evaluating), answer, value)


def fact_of(words: Words, entity: str, attribute: Attribute) -> Fact:
    value = attribute.value(words)
    forms = {"e": entity, "v": value}
    answer = (attribute.answer or attribute.statements[0]).format(**forms)
    asked = ask(words, attribute.questions, forms, answer, value)
    return Fact(words.rng.choice(attribute.statements).format(**forms), (asked,), entity, attribute.label, value)


def named_value(words: Words, entity: str, noun: str) -> Fact:
    """A fact of any kind: "The <noun> of <entity> is <value>."."""
    value = words.value()
    forms = {"e": entity, "n": noun, "v": value}
    answer = "The {n} of {e} is {v}.".format(**forms)
    statements = (answer, answer, "{e}'s {n} is {v}.".format(**forms), "{e} has the {n} {v}.".format(**forms))
    statement = words.rng.choice(statements)
    return Fact(statement, (ask(words, _NEW_QUESTIONS, forms, answer, value),), entity, noun, value)


def entity_facts(words: Words, count: int) -> list[Fact]:
    """Return facts of one new person, place or thing, each with another label."""
    rng = words.rng
    kind = rng.random()
    if kind < 0.65:
        person = words.person()
        return [fact_of(words, person, attribute) for attribute in rng.sample(ATTRIBUTES, min(count, len(ATTRIBUTES)))]
    if kind < 0.85:
        entity = f"the {words.thing() if rng.random() < 0.7 else words.spot()}"
    else:
        entity = rng.choice((words.place, words.person))()
    nouns: dict[str, None] = {}
    while len(nouns) < count:
        nouns[rng.choice(listed("things")) if rng.random() < 0.6 else words.word()] = None
    return [named_value(words, entity, noun) for noun in nouns]


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def fact_sheet(words: Words, facts: Sequence[Sequence[Fact]]) -> str:
    """Write facts, grouped by entity, in one of several layouts."""
    rng = words.rng
    layout = rng.random()
    if layout < 0.35:  # one sentence per fact, in any order
        mixed = [sentence(fact.statement) for group in facts for fact in group]
        rng.shuffle(mixed)
        return rng.choice((" ", "\n")).join(mixed)
    if layout < 0.6:  # a paragraph per entity
        return "\n\n".join(" ".join(sentence(fact.statement) for fact in group) for group in facts)
    if layout < 0.72:
        return "\n".join("; ".join([sentence(g[0].subject), *(f"{f.label}: {f.value}" for f in g)]) for g in facts)
    if layout < 0.86:
        return "\n\n".join("\n".join([f"# {g[0].subject}", *(f"- {f.label}: {f.value}" for f in g)]) for g in facts)
    return "\n\n".join(_pronouns(words, group) for group in facts)


def _pronouns(words: Words, group: Sequence[Fact]) -> str:
    """A paragraph that names its subject once."""
    subject = group[0].subject
    pronoun = "It" if subject.startswith("the ") else words.rng.choice(("He", "She"))
    own = {"It": "Its", "He": "His", "She": "Her"}[pronoun]
    rest = (f.statement.replace(f"{subject}'s", own).replace(subject, pronoun) for f in group[1:])
    fixed = (s.replace(f" of {pronoun} ", f" of {pronoun.lower()} ") for s in rest)
    return " ".join([sentence(group[0].statement), *(sentence(s) for s in fixed)])
