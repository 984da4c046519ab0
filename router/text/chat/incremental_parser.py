"""Incremental parser: parses text that arrives in parts as if it were complete.

A parser is one straight-line generator that pauses wherever it needs more characters. So its result depends on the
characters only, never on where the text was split.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from router.text.chat.output_parser import DeltaKind, OutputDelta
from router.text.stop_strings import partial_match

Result = TypeVar("Result")
Parse = Generator[None, None, Result]  # pauses where more text is needed

_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")


class ParseError(Exception):
    """The text does not have the syntax that its beginning suggested. ``expected``: texts that could have come."""

    def __init__(self, why: str, expected: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.expected = expected


class IncrementalParser(ABC):
    """Base of parsers. Text before ``_at`` is parsed; text from ``_mark`` on may turn out to be content."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_dropped = 0  # characters before ``_text``
        self._pushed: list[str] = []  # text that is not yet part of ``_text``
        self._num_pushed = 0  # characters in ``_pushed``
        self._mark: int | None = None
        self._ended = False
        self._finished = False  # the model has ended the text
        self._deltas: list[OutputDelta] = []
        self._parsing = self._parse()

    @abstractmethod
    def _parse(self) -> Parse[None]:
        """Parse the whole text."""

    def push(self, text: str) -> list[OutputDelta]:
        """Text that is held is joined by parts of at least 1/64 of it: one by one would take quadratic time."""
        self._pushed.append(text)
        self._num_pushed += len(text)
        if 64 * self._num_pushed < len(self._text):
            return []
        return self._advance()

    def flush(self, finished: bool = False) -> list[OutputDelta]:
        self._ended = True
        self._finished = finished
        return self._advance()

    def _advance(self) -> list[OutputDelta]:
        self._text += "".join(self._pushed)
        self._pushed.clear()
        self._num_pushed = 0
        next(self._parsing, None)
        deltas = self._deltas
        self._deltas = []
        return deltas

    def _emit(self, kind: DeltaKind, text: str) -> None:
        if text:
            self._deltas.append(OutputDelta(kind, text))

    def _drop_parsed(self) -> None:
        """Drop parsed text that cannot turn out to be content any more."""
        if self._mark is None:
            self._text = self._text[self._at :]
            self._num_dropped += self._at
            self._at = 0

    @property
    def _offset(self) -> int:
        """Parsed characters of the whole text."""
        return self._num_dropped + self._at

    def _peek(self) -> Parse[str]:
        """Return the next character; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _accept(self, literal: str) -> Parse[bool]:
        """Skip ``literal`` if it comes next, and return whether it did."""
        while not self._text.startswith(literal, self._at):
            rest = self._text[self._at : self._at + len(literal)]
            if self._ended or not literal.startswith(rest):
                return False
            yield
        self._at += len(literal)
        return True

    def _comes(self, literals: Sequence[str]) -> Parse[bool]:
        """Return whether one of the texts comes next."""
        longest = max(map(len, literals))
        while True:
            rest = self._text[self._at : self._at + longest]
            if any(rest.startswith(literal) for literal in literals):
                return True
            if self._ended or not any(literal.startswith(rest) for literal in literals):
                return False
            yield

    def _expect(self, literal: str) -> Parse[None]:
        if not (yield from self._accept(literal)):
            raise ParseError(f"{literal} expected", (literal,))

    def _match(self, pattern: re.Pattern[str]) -> Parse[str]:
        """Skip the longest match and return it. The pattern must match the empty string."""
        start = self._at
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text) or self._ended:
                return self._text[start : self._at]
            yield

    def _spaces(self) -> Parse[str]:
        return self._match(_SPACE)

    def _until(self, markers: Sequence[str], emit: Callable[[str], None]) -> Parse[str]:
        """Emit text up to the first of ``markers``, and skip that marker. Return it, or "" at the end of the text."""
        while True:
            if markers and (match := _any_of(tuple(markers)).search(self._text, self._at)):
                emit(self._text[self._at : match.start()])
                self._at = match.end()
                return match[0]
            held = 0 if self._ended else partial_match(self._text[self._at :], markers)
            end = len(self._text) - held
            emit(self._text[self._at : end])
            self._at = end
            self._drop_parsed()
            if self._ended:
                return ""
            yield

    def _string(self) -> Parse[str]:
        """Return a JSON string as written, with quotes. Needs ``_mark``, which keeps the text."""
        assert self._mark is not None
        start = self._at
        yield from self._expect('"')
        yield from self._string_end(lambda text: None)
        return self._text[start : self._at]

    def _string_end(self, emit: Callable[[str], None]) -> Parse[None]:
        """Emit the rest of a JSON string, with its closing quote."""
        while True:
            match = _STRING_END.match(self._text, self._at)
            assert match is not None
            emit(self._text[self._at : match.end()])
            self._at = match.end()
            if self._text.startswith('"', self._at):
                emit('"')
                self._at += 1
                return
            if self._ended:
                emit(self._text[self._at :])  # a lone backslash
                self._at = len(self._text)
                raise ParseError("a string does not end")
            self._drop_parsed()
            yield

    def _object(self, emit: Callable[[str], None]) -> Parse[None]:
        """Emit a JSON object as written, while it arrives. Only strings and nesting are checked.

        Raises ParseError when the text ends inside the object, after emitting that part.
        """
        yield from self._nested("{", emit)

    def _nested(self, opening: str, emit: Callable[[str], None]) -> Parse[None]:
        """Emit an object or an array."""
        yield from self._expect(opening)
        emit(opening)
        depth = 1
        while depth:
            match = _STRUCTURE.search(self._text, self._at)
            end = match.end() if match else len(self._text)
            emit(self._text[self._at : end])
            self._at = end
            if match is None:
                if self._ended:
                    raise ParseError("an object does not end")
                self._drop_parsed()
                yield
            elif match[0] == '"':
                yield from self._string_end(emit)
            else:
                depth += 1 if match[0] in "{[" else -1

    def _value(self) -> Parse[None]:
        """Skip a JSON value."""
        first = yield from self._peek()
        if first == '"':
            yield from self._string()
        elif first in ("{", "["):
            yield from self._nested(first, lambda text: None)
        elif not (yield from self._match(_SCALAR)):
            raise ParseError("a value expected")


@lru_cache(maxsize=256)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for any of the texts. A search for each would look at a long text again and again."""
    return re.compile("|".join(map(re.escape, texts)))


class Stripper:
    """Holds back white space at the end of a text; with ``strip_start``, drops it at the start."""

    def __init__(self, strip_start: bool) -> None:
        self._strip_start = strip_start
        self.held = ""

    def push(self, text: str) -> str:
        """Return the text up to its last character that is no white space."""
        text = self.held + text
        if self._strip_start:
            text = text.lstrip()
        body = text.rstrip()
        self.held = text[len(body) :]
        self._strip_start = self._strip_start and not body
        return body
