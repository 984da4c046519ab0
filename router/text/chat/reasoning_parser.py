"""Reasoning parser: text between two markers at the beginning of an output is reasoning.

Models also call a tool before the end marker, or without one: a marker that begins a call ends the reasoning, too.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from router.text.chat.incremental_parser import IncrementalParser, Parse, ParseError, Stripper
from router.text.chat.output_parser import DeltaKind, OutputDelta


class PlainTextParser:
    """All output is content."""

    reasoning = False
    reasoning_end: int | None = 0
    num_reasoned = 0

    def push(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(DeltaKind.CONTENT, text)] if text else []

    def flush(self, finished: bool = False) -> list[OutputDelta]:
        return []


class Thinking(NamedTuple):
    """The markers of reasoning, and whether the prompt ends with the start marker."""

    start: str
    end: str
    opened: bool = False


class ReasoningParser(IncrementalParser):
    """Reasoning, stripped of white space, and then content. Base of the tool parsers, which find calls in the content.

    Output that begins without a start marker, which the prompt has not opened either, has no reasoning. A marker in the
    reasoning without a valid call behind it is reasoning: models write about their markers.
    """

    call_markers: ClassVar[tuple[str, ...]] = ()  # texts that precede calls

    def __init__(self, thinking: Thinking | None = None) -> None:
        super().__init__()
        self._thinking = thinking
        self._stray_end: tuple[str, ...] = ()  # end marker of reasoning that a call has ended
        self._thought = Stripper(strip_start=True)
        self._stripper = Stripper(strip_start=False)  # white space at the end is content only if more content follows
        self._num_calls = 0
        self.reasoning = self._begun = thinking is not None and thinking.opened
        self.reasoning_end: int | None = None if thinking else 0

    @property
    def num_reasoned(self) -> int:
        if self.reasoning_end is not None:
            return self.reasoning_end
        return self._num_dropped + (self._at if self._mark is None else self._mark) if self._begun else 0

    def _calls(self, marker: str) -> Parse[None]:
        """Parse what follows a marker of calls."""
        raise NotImplementedError

    def _parse(self) -> Parse[None]:
        if self._thinking is not None:
            yield from self._reason(self._thinking)
        yield from self._output()
        self._content(self._stripper.held, ends=True)

    def _reason(self, thinking: Thinking) -> Parse[None]:
        yield from self._spaces()
        if (yield from self._accept(thinking.start)):
            self.reasoning = self._begun = True
        elif not self.reasoning:
            self._at = 0
        while self.reasoning:
            marker = yield from self._until((thinking.end, *self.call_markers), self._write)
            if marker in self.call_markers:
                yield from self._try_calls(self._calls(marker), marker)
            else:
                self.reasoning = False
                yield from self._spaces()
        if self.reasoning_end is None:
            self.reasoning_end = self._offset

    def _output(self) -> Parse[None]:
        """Parse what follows the reasoning: content and calls."""
        while marker := (yield from self._until((*self.call_markers, *self._stray_end), self._content)):
            if marker in self._stray_end:
                self._stray_end = ()
                self._stripper = Stripper(strip_start=True)
            else:
                yield from self._try_calls(self._calls(marker), marker)

    def _write(self, text: str) -> None:
        """Emit text outside calls."""
        if self.reasoning:
            self._emit(DeltaKind.REASONING, self._thought.push(text))
        else:
            self._content(text)

    def _content(self, text: str, ends: bool = False) -> None:
        self._emit(DeltaKind.CONTENT, text if ends else self._stripper.push(text))

    def _begin_call(self) -> None:
        """Note that a call begins at the mark. The text before it cannot turn into content any more."""
        self._num_calls += 1
        if self.reasoning and self._thinking is not None:
            self.reasoning = False
            assert self._mark is not None
            self.reasoning_end = self._num_dropped + self._mark
            self._stray_end = (self._thinking.end,)
        self._stripper = Stripper(strip_start=True)
        self._mark = None

    def _try_calls(self, calls: Parse[None], marker: str = "") -> Parse[None]:
        """Parse calls; text after the last complete part is none of a call, except for an end tag that is cut off."""
        self._mark = self._at - len(marker)
        num_begun = self._num_calls
        try:
            yield from calls
        except ParseError as exc:
            rest = self._text[self._at :]
            if self._ended and self._num_calls > num_begun and any(text.startswith(rest) for text in exc.expected):
                self._at = len(self._text)
                self._mark = None
        if self._mark is not None:
            self._write(self._text[self._mark : self._at])
        self._mark = None
