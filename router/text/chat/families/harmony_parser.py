"""Parser of the harmony format of gpt-oss: an output is a sequence of messages in channels.

    <|channel|>analysis<|message|>…<|end|>                                                        reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>  a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                                      content

The recipient may stand before the channel: ``assistant to=functions.NAME<|channel|>commentary json``, without
``functions.``, or in another channel. Commentary without a recipient is content: the model explains what it does. The
source is OpenAI's description of the format (https://cookbook.openai.com/articles/openai-harmony). Messages of the same
kind are separated by a newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from router.text.chat.incremental_parser import Parse, ParseError
from router.text.chat.output_parser import DeltaKind
from router.text.chat.reasoning_parser import Thinking
from router.text.chat.tool_parsers import ToolParser, json_in_text

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
_ENDS = (
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|start|>",
    "<|channel|>",
)  # end of a message; the last two begin the next message
_BEGINS = ("<|start|>", "<|channel|>")
_FUNCTIONS = "functions."
_MESSAGE = "<|message|>"
_MAX_HEADER = 256  # characters
_RECIPIENT = re.compile(r"[\w.-]*")
_HEADER = re.compile(r"(?:<\|(?:start|channel|constrain)\|>|[ \t]*to=[\w.-]*|[A-Za-z]+|[ \t]+)*")  # any part, any order
_SHORT_HEADER = re.compile(  # parts of a header without <|message|>
    r"(?:<\|start\|>)?(?:assistant)?(?: to=[\w.-]+)?<\|channel\|> ?(?:analysis|commentary|final)"
    r"(?: to=[\w.-]+)? ?(?:<\|constrain\|>\w*)? ?"
)
_CHANNEL = re.compile(r"<\|channel\|> ?(analysis|commentary|final)")
_TO = re.compile(r"to=([\w.-]*)")
_NO_ARGUMENTS = ("", "null", '""')


class HarmonyParser(ToolParser):
    """``separated``: reasoning is not content. ``in_answer``: the output continues a final message."""

    call_markers = _BEGINS

    def __init__(
        self,
        names: Collection[str],
        parallel: bool = True,
        thinking: Thinking | None = None,
        *,
        separated: bool = True,
        in_answer: bool = False,
    ) -> None:
        super().__init__(names, parallel)
        self._separated = separated
        self._in_answer = in_answer
        self._kinds = set[DeltaKind]()  # kinds of the messages so far
        self.reasoning_end = None if separated else 0
        self._begun = separated

    def _output(self) -> Parse[None]:
        if self._in_answer:
            yield from self._body(DeltaKind.CONTENT)
        while (yield from self._peek()):
            yield from self._message()

    def _message(self) -> Parse[None]:
        """Parse a message, or text outside messages up to the next possible begin of a message."""
        self._mark = begin = self._at
        try:
            channel, recipient = yield from self._header()
        except ParseError:
            self._end_reasoning()
            self._content(self._text[self._mark : self._at])
            self._mark = None
            yield from self._text_before(_BEGINS, self._content)
            return
        name = recipient.removeprefix(_FUNCTIONS)
        if name in self._names:
            yield from self._call_body(name)
            return
        if recipient:  # the recipient is no tool of the request
            self._end_reasoning()
            self._content(self._text[begin : self._at])
        self._mark = None
        reasons = channel == "analysis" and self._separated
        yield from self._body(DeltaKind.REASONING if reasons else DeltaKind.CONTENT)

    def _header(self) -> Parse[tuple[str, str]]:
        """Parse the header of a message. Return channel and recipient.

        Models write parts twice, or none between a channel and the text. A header that the end of the output cuts off
        is skipped. Raises ParseError for other text.
        """
        begin = self._at
        started = yield from self._accept("<|start|>")
        yield from self._accept("assistant")
        if (yield from self._accept(" to=")):
            yield from self._match(_RECIPIENT)
        if not started and not (yield from self._comes(("<|channel|>", "<|constrain|>", _MESSAGE))):
            raise ParseError("a header expected")
        complete = yield from self._skip_header(begin)
        header = self._text[begin : self._at]
        short = None if complete else _SHORT_HEADER.match(header)
        recipients = _TO.findall(header)
        if not complete and self._is_cut_off(header[short.end() :] if short else "", recipients):
            self._mark = self._at = len(self._text)
            raise ParseError("a header is cut off")
        if short:
            self._at = begin + short.end()
            recipients = _TO.findall(short[0])
        elif not complete:
            raise ParseError("a header does not end")
        channels = _CHANNEL.findall(header)
        return channels[-1] if channels else "", self._recipient(recipients)

    def _skip_header(self, begin: int) -> Parse[bool]:
        """Skip a header that begins at ``begin``, as far as there is one. Return whether ``<|message|>`` ends it."""
        while True:
            header = _HEADER.match(self._text, begin, begin + _MAX_HEADER)
            assert header is not None
            self._at = header.end()
            if self._text.startswith(_MESSAGE, self._at):
                self._at += len(_MESSAGE)
                return True
            rest = self._text[self._at : self._at + len(_MESSAGE)]
            if self._ended or len(self._text) >= begin + _MAX_HEADER or not any(m.startswith(rest) for m in MARKERS):
                return False
            yield

    def _is_cut_off(self, behind: str, recipients: Sequence[str]) -> bool:
        """Return whether the text ends inside a header; ``behind``: its end, which may be text without a header."""
        rest = self._text[self._at :]
        begun = all(
            any(name.startswith(recipient) for function in self._names for name in (function, _FUNCTIONS + function))
            for recipient in recipients
        )
        return (
            self._ended
            and begun
            and any(word.startswith(behind) for word in ("json", "code"))
            and any(marker.startswith(rest) for marker in MARKERS)
        )

    def _recipient(self, recipients: Sequence[str]) -> str:
        """Return the first recipient that is no tool of the request, else a tool; "" without recipients."""
        for recipient in recipients:
            if recipient.removeprefix(_FUNCTIONS) not in self._names:
                return recipient
        return recipients[0] if recipients else ""

    def _end_reasoning(self) -> None:
        """Note that no reasoning comes next."""
        if self.reasoning_end is None:
            self.reasoning_end = self._offset if self._mark is None else self._num_dropped + self._mark

    def _text_before(self, markers: Sequence[str], emit: Callable[[str], None]) -> Parse[None]:
        """Emit text up to a marker. One that begins a message is left to the next header."""
        marker = yield from self._until(markers, emit)
        if marker in _BEGINS:
            self._at -= len(marker)

    def _call_body(self, name: str) -> Parse[None]:
        self._mark = None
        self._end_reasoning()
        self._mark = self._at
        self._call(name)
        yield from self._spaces()
        if (yield from self._peek()) == "{":
            yield from self._text_before(_ENDS, self._arguments)
            return
        held: list[str] = []
        yield from self._text_before(_ENDS, held.append)
        text = "".join(held)
        if text.strip() in _NO_ARGUMENTS and (text or not self._ended):
            text = "{}"
        elif text.startswith('"'):
            with suppress(ParseError):
                text = json_in_text(text.rstrip())
        self._arguments(text)

    def _body(self, kind: DeltaKind) -> Parse[None]:
        self.reasoning = kind is DeltaKind.REASONING
        if not self.reasoning:
            self._end_reasoning()
        if kind in self._kinds:
            self._emit_kind(kind, "\n")
        self._kinds.add(kind)
        yield from self._text_before(_ENDS, partial(self._emit_kind, kind))
        self.reasoning = False

    def _emit_kind(self, kind: DeltaKind, text: str) -> None:
        if kind is DeltaKind.CONTENT:
            self._content(text)
        else:
            self._emit(kind, text)
