"""Conversations: a document with questions, tools, small talk; written as the chat template renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from training import chat
from training.agents import AgentSession
from training.facts import Ask, entity_facts, fact_sheet
from training.stories import event, filler, story
from training.tools import Tool, ToolCase, Turn, json_ask, tool_cases
from training.words import Words

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CHARACTERS_PER_TOKEN = 2.9
_SMALL_TALK: tuple[tuple[Callable[[Words], Ask], str], ...] = (
    (chat.talk, "talk"),
    (chat.arithmetic, "sums"),
    (chat.repetition, "repeat"),
    (chat.repetition, "repeat"),
)
TALK = 0.25  # weight of conversations without a document; documents have 1
_TOOLS = 0.2  # weight of conversations with tools
_AGENTS = 0.15  # weight of sessions of agents
_SHORTEST_WITH_TOOLS = 600  # tokens


@dataclass
class Conversation:
    turns: list[Turn] = field(default_factory=list)
    tools: Sequence[Tool] = ()


def exchange(asked: Ask, task: str) -> list[Turn]:
    return [Turn("user", asked.question), Turn("assistant", asked.answer, task)]


def rendered(turns: Sequence[Turn], tools: Sequence[Tool]) -> list[Turn]:
    """Return the turns as the chat template writes them: tools in the system message, results as the user's."""
    turns = list(turns)
    if tools:
        listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
        system = f"{turns.pop(0).content}\n\n" if turns and turns[0].role == "system" else ""
        turns.insert(0, Turn("system", f"{system}{TOOLS_BEFORE}{listed}{TOOLS_AFTER}"))
    return [
        Turn("user", f"<tool_response>\n{turn.content}\n</tool_response>") if turn.role == "tool" else turn
        for turn in turns
    ]


@dataclass
class Row:
    """Tokens of a conversation; ``answers`` are spans (start, end, task) that the model must produce."""

    tokens: list[int]
    answers: list[tuple[int, int, str]]


class Writer:
    """Writes rows of a given length in tokens. ``talk``: weight of conversations without a document."""

    def __init__(self, words: Words, encode: Callable[[str], list[int]], talk: float = TALK) -> None:
        self.words = words
        self._talk_weight = talk
        self._encode = encode
        self._end = encode("<|im_end|>\n")
        self._roles = {role: encode(f"<|im_start|>{role}\n") for role in ("system", "user", "assistant")}

    def row(self, length: int, kind: str = "") -> Row:
        """Return a conversation of nearly ``length`` tokens, at most. ``kind``: document, tools, agent or talk."""
        rng = self.words.rng
        while True:
            with_tools = length >= _SHORTEST_WITH_TOOLS
            weights = (1.0, with_tools * _TOOLS, with_tools * _AGENTS, self._talk_weight)
            chosen = kind or rng.choices(("document", "tools", "agent", "talk"), weights)[0]
            row = self.fill(self.parts(chosen, length), length)
            if row.answers:
                return row

    def parts(self, kind: str, length: int) -> Iterator[Conversation]:
        """Return the endless exchanges of a new conversation, made for rows of ``length`` tokens."""
        self.words.start()
        makers = {"document": self._document, "tools": self._tools, "agent": self._agent, "talk": self._talk}
        return makers[kind](length)

    def fill(self, parts: Iterator[Conversation], length: int) -> Row:
        """Append exchanges until the next one does not fit."""
        row = Row([], [])
        for part in parts:
            tokens: list[int] = []
            answers = []
            for turn in rendered(part.turns, part.tools):
                tokens += self._roles[turn.role]
                start = len(tokens)
                tokens += self._encode(turn.content) + self._end
                if turn.task:
                    answers.append((start, len(tokens) - 1, turn.task))  # with <|im_end|>, without the newline
            if len(row.tokens) + len(tokens) > length:
                break
            row.answers += [(start + len(row.tokens), end + len(row.tokens), task) for start, end, task in answers]
            row.tokens += tokens
        return row

    def document(self, characters: int) -> tuple[str, list[tuple[Ask, str]]]:
        """Return a text of facts and stories and the questions that it answers, each with its task, shuffled."""
        words = self.words
        rng = self.words.rng
        texts: list[str] = []
        asks: list[tuple[Ask, str]] = []
        while sum(map(len, texts)) < characters:
            left = characters - sum(map(len, texts))
            kind = rng.random()
            if kind < 0.45:
                groups = [entity_facts(words, rng.randint(1, 6)) for _ in range(rng.randint(1, max(1, left // 250)))]
                texts.append(fact_sheet(words, groups))
                asks += [(ask, "facts") for group in groups for fact in group for ask in fact.asks]
                asks += [(json_ask(words, group)[0], "json") for group in groups[:6] if rng.random() < 0.5]
            elif kind < 0.9:
                persons = [words.person() for _ in range(rng.randint(2, 6))]
                count = rng.randint(1, max(1, min(16, left // 100)))
                events = [fact for _ in range(count) if (fact := event(words, persons))]
                texts.append(story(words, events, rng.randint(0, count)))
                asks += [(rng.choice(fact.asks), "story") for fact in events]
            else:
                texts.append(" ".join(filler(words) for _ in range(rng.randint(1, max(1, min(12, left // 60))))))
        rng.shuffle(texts)
        rng.shuffle(asks)
        return rng.choice(("\n\n", "\n\n", "\n")).join(texts), asks

    def _document(self, length: int) -> Iterator[Conversation]:
        rng = self.words.rng
        share = rng.uniform(0.15, 0.8)
        while True:
            text, asks = self.document(int(length * share * _CHARACTERS_PER_TOKEN))
            if asks:
                break
        first, task = asks.pop()
        placed = rng.random()
        if placed < 0.6:
            forms = (
                "{d}\n\n{q}",
                "{d}\n\n{q}",
                "{d}\n\nQuestion: {q}",
                "Read this:\n\n{d}\n\n{q}",
                "{q}\n\n{d}",
                "{d}\n{q}",
            )
            question = rng.choice(forms).replace("{q}", first.question).replace("{d}", text)
            system = [Turn("system", rng.choice(chat.SYSTEM))] if rng.random() < 0.3 else []
            yield Conversation([*system, Turn("user", question), Turn("assistant", first.answer, task)])
        elif placed < 0.8:
            instructed = rng.choice(("{d}", f"{rng.choice(chat.SYSTEM)}\n\n{{d}}")).replace("{d}", text)
            yield Conversation([Turn("system", instructed), *exchange(first, task)])
        else:
            said = rng.choice(("{d}", "Read this text:\n\n{d}", "Here is a text.\n\n{d}")).replace("{d}", text)
            read = Turn("assistant", "I have read it. What would you like to know?", "talk")
            yield Conversation([Turn("user", said), read, *exchange(first, task)])
        for asked, task in asks:
            if rng.random() < 0.06:
                yield self._small()
            yield Conversation(exchange(asked, task))
        while True:
            yield self._small()

    def _small(self) -> Conversation:
        """A short exchange that needs no document."""
        rng = self.words.rng
        words = self.words
        kind, task = rng.choice(_SMALL_TALK)
        return Conversation(exchange(kind(words), task))

    def _talk(self, _: int) -> Iterator[Conversation]:
        rng = self.words.rng
        words = self.words
        if rng.random() < 0.4:
            yield Conversation([Turn("system", rng.choice(chat.SYSTEM)), *self._small().turns])
        later: list[Ask] = []
        while True:
            if rng.random() < 0.2 and not any("name" in ask.question or "live" in ask.question for ask in later):
                now, then = chat.introduction(words)
                if then.question not in {ask.question for ask in later}:
                    later.append(then)
                    yield Conversation(exchange(now, "memory"))
            elif later and rng.random() < 0.3:
                yield Conversation(exchange(rng.choice(later), "memory"))
            else:
                yield self._small()

    def _tools(self, length: int) -> Iterator[Conversation]:
        rng = self.words.rng
        words = self.words
        cases = tool_cases(words, rng.randint(1, 2 if length < 1000 else 5))
        asked = rng.sample(cases, len(cases))
        system = [Turn("system", rng.choice(chat.SYSTEM))] if rng.random() < 0.4 else []
        first = self._small().turns if rng.random() < 0.15 else self._called(asked.pop())
        yield Conversation([*system, *first], [case.tool for case in cases])
        for case in asked:
            if rng.random() < 0.3:
                yield self._small()
            yield Conversation(self._called(case))
        while True:
            yield self._small() if rng.random() < 0.5 else Conversation(self._called_again(rng.choice(cases)))

    def _agent(self, length: int) -> Iterator[Conversation]:
        session = AgentSession(self.words, 2 if length < 1000 else 6)
        first = self._small().turns if self.words.rng.random() < 0.2 else session.task()
        yield Conversation([*session.opening(), *first], session.tools)
        while True:
            yield self._small() if self.words.rng.random() < 0.15 else Conversation(session.task())

    def _called(self, case: ToolCase) -> list[Turn]:
        return [
            Turn("user", case.request),
            Turn("assistant", case.call, "tool"),
            Turn("tool", case.response(self.words)),
            Turn("assistant", case.answer, "result"),
        ]

    def _called_again(self, case: ToolCase) -> list[Turn]:
        """Return the turns of a call with new values."""
        case.redraw(self.words)
        return self._called(case)
