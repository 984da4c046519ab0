"""Text that arrives in pieces, read as if it were all there.

A parser is written as one straight line of reading, a generator that pauses wherever it needs characters that have not
come yet. So what it finds depends on the characters only, never on where a piece ended.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from router.text.chat.pieces import OutputPiece, PieceKind

Result = TypeVar("Result")
Steps = Generator[None, None, Result]  # pauses where more text is needed

_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")


class Malformed(Exception):
    """What was read is not what it seemed to be."""


class Reader(ABC):
    """Base of parsers. Text before ``_at`` has been read; from ``_mark`` on, it may have to be given back."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._ended = False
        self._pieces: list[OutputPiece] = []
        self._steps = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the whole text."""

    def push(self, text: str) -> list[OutputPiece]:
        self._text += text
        self._advance()
        return self._take()

    def flush(self) -> list[OutputPiece]:
        self._ended = True
        self._advance()
        return self._take()

    def _advance(self) -> None:
        next(self._steps, None)

    def _take(self) -> list[OutputPiece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _tell(self, kind: PieceKind, text: str) -> None:
        if text:
            self._pieces.append(OutputPiece(kind, text))

    def _forget(self) -> None:
        """Let go of the text that was read, unless it may have to be given back."""
        if self._mark is None:
            self._text = self._text[self._at :]
            self._at = 0

    def _peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _accept(self, literal: str) -> Steps[bool]:
        """Read over ``literal`` if it comes next."""
        while True:
            if self._text.startswith(literal, self._at):
                self._at += len(literal)
                return True
            rest = self._text[self._at : self._at + len(literal)]
            if self._ended or not literal.startswith(rest):
                return False
            yield

    def _expect(self, literal: str) -> Steps[None]:
        if not (yield from self._accept(literal)):
            raise Malformed(f"{literal} expected")

    def _match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read what matches, to its end. The pattern must be able to match anything's beginning, even nothing."""
        start = self._at
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or self._ended:
                return self._text[start : self._at]
            yield

    def _spaces(self) -> Steps[str]:
        return (yield from self._match(_SPACE))

    def _until(self, markers: Sequence[str], tell: Callable[[str], None]) -> Steps[str]:
        """Hand over text up to the first of ``markers``, and read over that. Empty when none comes."""
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, marker = min(found)
                tell(self._text[self._at : at])
                self._at = at + len(marker)
                return marker
            end = len(self._text) if self._ended else len(self._text) - self._possible_marker(markers)
            tell(self._text[self._at : end])
            self._at = end
            self._forget()
            if self._ended:
                return ""
            yield

    def _possible_marker(self, markers: Sequence[str]) -> int:
        """Length of the longest end of the text that a marker begins with."""
        room = len(self._text) - self._at
        for length in range(min(max(map(len, markers), default=1) - 1, room), 0, -1):
            end = self._text[-length:]
            if any(marker.startswith(end) for marker in markers):
                return length
        return 0

    def _string(self) -> Steps[str]:
        """A JSON string as it is written, quotes included. Only where text is kept."""
        assert self._mark is not None
        start = self._at
        yield from self._expect('"')
        yield from self._string_end(lambda text: None)
        return self._text[start : self._at]

    def _string_end(self, tell: Callable[[str], None]) -> Steps[None]:
        """The rest of a string, with its closing quote."""
        while True:
            found = _STRING_END.match(self._text, self._at)
            assert found is not None
            tell(self._text[self._at : found.end()])
            self._at = found.end()
            if self._text.startswith('"', self._at):
                tell('"')
                self._at += 1
                return
            if self._ended:
                tell(self._text[self._at :])  # a lone backslash
                self._at = len(self._text)
                raise Malformed("a string does not end")
            self._forget()
            yield

    def _object(self, tell: Callable[[str], None]) -> Steps[None]:
        """A JSON object as it is written, handed over while it comes. Only strings and nesting are looked at.

        Raises Malformed at the end of a text in which the object does not end; what there is of it was handed over.
        """
        yield from self._expect("{")
        tell("{")
        depth = 1
        while depth:
            found = _STRUCTURE.search(self._text, self._at)
            end = found.end() if found else len(self._text)
            tell(self._text[self._at : end])
            self._at = end
            if found is None:
                if self._ended:
                    raise Malformed("an object does not end")
                self._forget()
                yield
            elif found[0] == '"':
                yield from self._string_end(tell)
            else:
                depth += 1 if found[0] in "{[" else -1

    def _value(self) -> Steps[None]:
        """Read over a JSON value."""
        first = yield from self._peek()
        if first == '"':
            yield from self._string()
        elif first == "{":
            yield from self._object(lambda text: None)
        elif not (yield from self._match(_SCALAR)):
            raise Malformed("a value expected")


class Trimmed:
    """Passes text on without the white space at its ends."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._held: str | None = None  # white space that text may yet follow; None: nothing was passed on so far

    def __call__(self, text: str) -> None:
        if self._held is None:
            text = text.lstrip()
            if not text:
                return
            self._held = ""
        held = self._held + text
        body = held.rstrip()
        self._held = held[len(body) :]
        if body:
            self._tell(body)
