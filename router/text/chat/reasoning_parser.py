"""Reasoning parser: text between two markers at the beginning of an output is reasoning."""

from __future__ import annotations

from router.text.chat.incremental_parser import IncrementalParser, Parse, Stripper
from router.text.chat.output_parser import DeltaKind, OutputDelta, OutputParser


class PlainTextParser:
    """All output is content."""

    reasoning = False

    def push(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(DeltaKind.CONTENT, text)] if text else []

    def flush(self) -> list[OutputDelta]:
        return []


class ReasoningParser(IncrementalParser):
    """Text between ``start`` and ``end`` is reasoning, stripped of white space; ``rest`` parses what follows.

    ``opened``: the prompt ends with the start marker already. Output that begins without a start marker is all for
    ``rest``.
    """

    def __init__(self, start: str, end: str, opened: bool, rest: OutputParser) -> None:
        super().__init__()
        self._start = start
        self._end = end
        self._rest = rest
        self._passing = False
        self._stripper = Stripper(strip_start=True)
        self.reasoning = opened

    def push(self, text: str) -> list[OutputDelta]:
        return self._rest.push(text) if self._passing else super().push(text)

    def flush(self) -> list[OutputDelta]:
        deltas = [] if self._passing else super().flush()
        return deltas + self._rest.flush()

    def _parse(self) -> Parse[None]:
        before = ""
        if not self.reasoning:
            before = yield from self._spaces()
            self.reasoning = yield from self._accept(self._start)
        if self.reasoning:
            yield from self._until((self._end,), self._reason)
            self.reasoning = False
            yield from self._spaces()
            before = ""
        self._deltas += self._rest.push(before + self._text[self._at :])
        self._passing = True

    def _reason(self, text: str) -> None:
        self._emit(DeltaKind.REASONING, self._stripper.push(text))
