"""Reasoning in the text of models: what stands between two markers at its beginning."""

from __future__ import annotations

from router.text.chat.pieces import OutputParser, OutputPiece, PieceKind
from router.text.chat.text_reader import Reader, Steps, Trimmed


class PlainText:
    """An output without anything to find in it."""

    reasoning = False

    def push(self, text: str) -> list[OutputPiece]:
        return [OutputPiece(PieceKind.CONTENT, text)] if text else []

    def flush(self) -> list[OutputPiece]:
        return []


class ReasoningReader(Reader):
    """Text between ``start`` and ``end`` is reasoning, without the white space at its ends; ``rest`` reads the rest.

    ``opened``: the prompt has the start already, as templates of models that always reason write it. Without a start at
    its beginning the output is all rest.
    """

    def __init__(self, start: str, end: str, opened: bool, rest: OutputParser) -> None:
        super().__init__()
        self._start = start
        self._end = end
        self._rest = rest
        self._passing = False
        self.reasoning = opened

    def push(self, text: str) -> list[OutputPiece]:
        return self._rest.push(text) if self._passing else super().push(text)

    def flush(self) -> list[OutputPiece]:
        pieces = [] if self._passing else super().flush()
        return pieces + self._rest.flush()

    def _read(self) -> Steps[None]:
        before = ""
        if not self.reasoning:
            before = yield from self._spaces()
            self.reasoning = yield from self._accept(self._start)
        if self.reasoning:
            tell = Trimmed(lambda text: self._tell(PieceKind.REASONING, text))
            yield from self._until((self._end,), tell)
            self.reasoning = False
            yield from self._spaces()
            before = ""
        self._pieces += self._rest.push(before + self._text[self._at :])
        self._passing = True
