"""Parser of the harmony format of gpt-oss: an output is a sequence of messages in channels.

    <|channel|>analysis<|message|>…<|end|>                                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>  a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                                      content

The recipient may stand before the channel: ``assistant to=functions.NAME<|channel|>commentary json``. Commentary
without a recipient is content: the model explains what it does. The source is OpenAI's description of the format
(https://cookbook.openai.com/articles/openai-harmony). Messages of the same kind are separated by a newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial

from router.text.chat.incremental_parser import Parse, ParseError
from router.text.chat.output_parser import DeltaKind
from router.text.chat.tool_parsers import ToolParser

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
_ENDS = (
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|start|>",
    "<|channel|>",
)  # of a message; the last two begin the next one
_BEGINS = ("<|start|>", "<|channel|>")
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"[\w.-]*")
_WORD = re.compile(r"[a-z]*")
_CUT_HEADER = re.compile(r"(?:<\|start\|>)?(?:assistant)?(?:<\|channel\|>)?[a-z]*")


class HarmonyParser(ToolParser):
    """``separated``: reasoning is not content. ``in_answer``: the output continues a final message."""

    def __init__(
        self, names: Collection[str], parallel: bool = True, separated: bool = True, in_answer: bool = False
    ) -> None:
        super().__init__(names, parallel)
        self.reasoning = False
        self._separated = separated
        self._in_answer = in_answer
        self._kinds = set[DeltaKind]()  # that messages had

    def _parse(self) -> Parse[None]:
        if self._in_answer:
            yield from self._body(DeltaKind.CONTENT)
        while (yield from self._peek()):
            yield from self._message()
        self._end_content()

    def _message(self) -> Parse[None]:
        """Parse a message, or text that is none up to what may begin the next one."""
        self._mark = begin = self._at
        try:
            channel, recipient = yield from self._header()
        except ParseError:
            text = self._text[begin : self._at]
            if not (self._ended and text and self._at == len(self._text) and _CUT_HEADER.fullmatch(text)):
                self._content(text)
            self._mark = None
            yield from self._text_before(_BEGINS, self._content)
            return
        name = recipient.removeprefix(_FUNCTIONS)
        if recipient.startswith(_FUNCTIONS) and name in self._names:
            yield from self._call_body(name)
            return
        if recipient:  # no tool of the request
            self._content(self._text[begin : self._at])
        self._mark = None
        reasons = channel == "analysis" and self._separated
        yield from self._body(DeltaKind.REASONING if reasons else DeltaKind.CONTENT)

    def _header(self) -> Parse[tuple[str, str]]:
        """Parse up to ``<|message|>``, and return channel and recipient."""
        yield from self._accept("<|start|>")
        yield from self._accept("assistant")
        channel = recipient = ""
        if (yield from self._accept(" to=")):
            recipient = yield from self._match(_RECIPIENT)
        if (yield from self._accept("<|channel|>")):
            channel = yield from self._match(_WORD)
            if channel not in ("analysis", "commentary", "final"):
                raise ParseError(f"{channel} is no channel")
        if not recipient and (yield from self._accept(" to=")):
            recipient = yield from self._match(_RECIPIENT)
        yield from self._accept(" ")
        yield from self._accept("<|constrain|>")
        yield from self._match(_WORD)  # the form of the text, such as json
        yield from self._expect("<|message|>")
        return channel, recipient

    def _text_before(self, markers: Sequence[str], emit: Callable[[str], None]) -> Parse[None]:
        """Emit text up to a marker. One that begins a message is left to the next header."""
        marker = yield from self._until(markers, emit)
        if marker in _BEGINS:
            self._at -= len(marker)

    def _call_body(self, name: str) -> Parse[None]:
        self._call(name)
        pieces = 0

        def emit(text: str) -> None:
            nonlocal pieces
            pieces += len(text)
            self._arguments(text)

        yield from self._text_before(_ENDS, emit)
        if not pieces and not self._ended:
            self._arguments("{}")

    def _body(self, kind: DeltaKind) -> Parse[None]:
        if kind in self._kinds:
            self._emit_kind(kind, "\n")
        self._kinds.add(kind)
        self.reasoning = kind is DeltaKind.REASONING
        yield from self._text_before(_ENDS, partial(self._emit_kind, kind))
        self.reasoning = False

    def _emit_kind(self, kind: DeltaKind, text: str) -> None:
        if kind is DeltaKind.CONTENT:
            self._content(text)
        else:
            self._emit(kind, text)
