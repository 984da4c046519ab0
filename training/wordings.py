"""Wordings of questions and requests. A quarter of them is held out for the evaluation, none of small talk (chat.py).

A wording is a template: "What is the job of {e}?". ``variants`` derives others of equal meaning from it. So each
way to ask is met in some template, while the held-out pairs of template and way are never trained.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from functools import cache

_RULES = (
    (r"What is (the .+|\{\w\}'s .+)\?", ("Tell me {0}.", "Give me {0}.", "Say {0}.", "I need {0}.", "Name {0}.")),
    (r"What is (the .+|\{\w\}'s .+)\?", ("I want to know {0}.", "Can you tell me {0}?", "What was {0}?")),
    (r"What is (?!the |\{)(.+)\?", ("Tell me what is {0}.", "Which thing is {0}?", "What can I find {0}?")),
    (r"What (\w+ (?:does|did|is|has) .+)\?", ("Which {0}?", "Tell me: what {0}?")),
    (r"Which (\w+ (?:does|did|is|has) .+)\?", ("What {0}?", "Tell me: which {0}?")),
    (r"What (did .+)\?", ("Which thing {0}?", "Tell me: what {0}?")),
    (r"Who (.+)\?", ("Which person {0}?", "Tell me who {0}.", "Name the person who {0}.", "Do you know who {0}?")),
    (r"Who (.+)\?", ("What is the name of the person who {0}?", "Who was it that {0}?")),
    (r"Whom (.+)\?", ("Which person {0}?", "Who {0}?", "Tell me: whom {0}?")),
    (r"To whom (.+)\?", ("To which person {0}?", "Which person {0}?")),
    (r"Where (does|did|is) (.+)\?", ("In which place {0} {1}?", "In what place {0} {1}?", "At which place {0} {1}?")),
    (r"Where (does|did|is) (.+)\?", ("Tell me: where {0} {1}?", "Where, please, {0} {1}?")),
    (r"Where is (.+)\?", ("Where can I find {0}?", "Where can {0} be found?", "What is the place of {0}?")),
    (r"In which town (.+)\?", ("In what town {0}?", "In which city {0}?", "Which town {0}?", "In what place {0}?")),
    (r"How many (.+)\?", ("What number of {0}?", "Tell me: how many {0}?")),
    (r"How (does|did) (.+)\?", ("In what way {0} {1}?", "Tell me: how {0} {1}?", "By what {0} {1}?")),
    (r"How old is (.+)\?", ("Tell me how old {0} is.", "Which age does {0} have?", "How many years old is {0}?")),
    (r"When (was|is) (.+)\?", ("On which day {0} {1}?", "Tell me: when {0} {1}?", "At what date {0} {1}?")),
)  # fmt: skip
_RULES_COMPILED = tuple((re.compile(pattern), forms) for pattern, forms in _RULES)

_LEADS = (
    "Please tell me: ", "Now: ", "Next question. ", "According to the text: ", "Question: ", "Tell me please: ",
    "My question: ", "Hello! ", "Hi. ", "Good. ", "One more question: ", "I want to know: ", "Can you help? ",
    "From the text: ", "Do you know? ", "Thanks. ", "Another one: ", "Answer this: ", "Look at the text. ",
)  # fmt: skip
_ENDS = (" Please.", " Thank you.", " Answer in one sentence.", " Use the text.", " Do you know?", " Be brief, please.")


def variants(template: str) -> list[str]:
    """Return the template and others of the same meaning."""
    wordings = {template: None}
    for pattern, forms in _RULES_COMPILED:
        if match := pattern.fullmatch(template):
            groups = match.groups()
            for form in forms:
                text = form
                for index, group in enumerate(groups):
                    text = text.replace(f"{{{index}}}", group)
                wordings[text] = None
    return list(wordings)


@cache
def split(templates: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return which of the templates and their variants are trained, and which are held out; neither is empty."""
    texts = sorted({text for template in templates for text in variants(template)}, key=_number)
    held_out = [text for text in texts if _number(text) % 4 == 0] or texts[:1]
    trained = [text for text in texts if text not in held_out]
    return (trained, held_out) if trained else (held_out[1:] or held_out, held_out[:1])


def choose(rng: random.Random, templates: Sequence[str], evaluating: bool) -> str:
    """Draw a wording that is trained, or one that is held out."""
    return rng.choice(split(tuple(templates))[evaluating])


def dressed(rng: random.Random, question: str, evaluating: bool) -> str:
    """Now and then put some words before or after a question, or write it carelessly."""
    if rng.random() < 0.4:
        question = choose(rng, _LEADS, evaluating) + question
    if rng.random() < 0.12:
        question += choose(rng, _ENDS, evaluating)
    if rng.random() < 0.06:
        question = question[:1].lower() + question[1:]
    return question[:-1] if rng.random() < 0.06 and question[-1] in "?." else question


def _number(text: str) -> int:
    return zlib.crc32(text.encode())
