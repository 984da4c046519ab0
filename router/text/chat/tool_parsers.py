"""Tool parsers of families that write arguments as JSON, and of the outputs that ``tool_choice`` forces.

Text outside calls stays content, verbatim, except for white space around calls. A call is emitted as soon as its name
is known and its arguments begin; then the arguments are emitted as they arrive. A name that is none of the request's
tools makes no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress

from router.text.chat.incremental_parser import IncrementalParser, Parse, ParseError, Stripper
from router.text.chat.output_parser import DeltaKind

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class ToolParser(IncrementalParser):
    """Base of the tool parsers: the syntax of calls, and the handling of content around them."""

    reasoning = False
    _marker = ""  # precedes calls

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._parallel = parallel
        self._num_calls = 0
        self._stripper = Stripper(strip_start=False)  # its white space is content only if more content follows

    def _parse(self) -> Parse[None]:
        while marker := (yield from self._until((self._marker,), self._content)):
            yield from self._try_calls(self._calls(), marker)
        self._end_content()

    def _calls(self) -> Parse[None]:
        """Parse what follows a marker."""
        raise NotImplementedError

    def _content(self, text: str) -> None:
        self._emit(DeltaKind.CONTENT, self._stripper.push(text))

    def _end_content(self) -> None:
        self._emit(DeltaKind.CONTENT, self._stripper.held)

    def _call(self, name: str) -> None:
        """Begin a call. The text before it cannot turn into content any more."""
        self._num_calls += 1
        self._stripper = Stripper(strip_start=True)
        self._mark = None
        self._emit_allowed(DeltaKind.CALL, name)

    def _arguments(self, text: str) -> None:
        self._emit_allowed(DeltaKind.ARGUMENTS, text)

    def _emit_allowed(self, kind: DeltaKind, text: str) -> None:
        """Emit a part of a call. Without parallel calls only the first call is emitted."""
        if self._parallel or self._num_calls == 1:
            self._emit(kind, text)

    def _try_calls(self, calls: Parse[None], marker: str = "") -> Parse[None]:
        """Parse calls; text after the last complete part is content."""
        self._mark = self._at - len(marker)
        with suppress(ParseError):
            yield from calls
        if self._mark is not None:
            self._content(self._text[self._mark : self._at])
        self._mark = None

    def _commit(self) -> None:
        self._mark = self._at

    def _check_name(self, name: str) -> str:
        if name not in self._names:
            raise ParseError(f"{name} is no tool")
        return name

    def _call_object(self) -> Parse[None]:
        """Parse ``{"name": …, "arguments": {…}}``: keys in any order, unknown ones skipped; Llama writes parameters."""
        yield from self._expect("{")
        name = ""
        held: list[str] | None = None  # arguments that came before the name
        emitted = False
        more = True
        while more:
            key = yield from self._key()
            if key == "name" and not name:
                name = self._check_name(_decoded((yield from self._string())))
                if held is not None:
                    self._emit_call(name, "".join(held))
                    emitted = True
            elif key in ("arguments", "parameters") and not emitted and held is None:
                if name:
                    emitted = True
                    yield from self._stream_arguments(name)
                else:
                    held = []
                    yield from self._object(held.append)
            else:
                yield from self._value()
            yield from self._spaces()
            more = yield from self._accept(",")
        yield from self._expect("}")
        if not emitted:
            self._emit_call(self._check_name(name), "{}")
        self._commit()

    def _key(self) -> Parse[str]:
        yield from self._spaces()
        key = _decoded((yield from self._string()))
        yield from self._spaces()
        yield from self._expect(":")
        yield from self._spaces()
        return key

    def _stream_arguments(self, name: str) -> Parse[None]:
        if (yield from self._peek()) != "{":
            raise ParseError("arguments must be an object")
        self._call(name)
        yield from self._object(self._arguments)
        self._commit()

    def _emit_call(self, name: str, arguments: str) -> None:
        self._call(name)
        self._arguments(arguments)
        self._commit()

    def _call_list(self) -> Parse[None]:
        """Parse ``[{"name": …}, …]``."""
        yield from self._expect("[")
        more = True
        while more:
            yield from self._spaces()
            yield from self._call_object()
            yield from self._spaces()
            more = yield from self._accept(",")
        yield from self._expect("]")
        self._commit()


class HermesToolParser(ToolParser):
    """Hermes 2 and later, Qwen2.5, Qwen3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number."""

    _marker = "<tool_call>"

    def _calls(self) -> Parse[None]:
        yield from self._spaces()
        yield from self._call_object()
        yield from self._spaces()
        yield from self._expect("</tool_call>")
        self._commit()


class LlamaToolParser(ToolParser):
    """Llama 3.1 and later: the whole output, or what follows ``<|python_tag|>``, is ``{"name": …, "parameters": {…}}``.

    Several calls are separated by white space or a semicolon.
    """

    _marker = "<|python_tag|>"

    def _parse(self) -> Parse[None]:
        self._content((yield from self._spaces()))
        if (yield from self._peek()) == "{":
            yield from self._try_calls(self._calls())
        yield from super()._parse()

    def _calls(self) -> Parse[None]:
        yield from self._spaces()
        first = "{"
        while first == "{":
            yield from self._call_object()
            yield from self._spaces()
            yield from self._accept(";")
            yield from self._spaces()
            first = yield from self._peek()


class MistralToolParser(ToolParser):
    """Mistral: ``[TOOL_CALLS]`` and a list of calls, or since its tokenizer v11 ``[TOOL_CALLS]name{…}`` for each.

    Between name and arguments newer ones write ``[ARGS]``, and some ``[CALL_ID]`` with an id.
    """

    _marker = "[TOOL_CALLS]"

    def _calls(self) -> Parse[None]:
        yield from self._spaces()
        first = yield from self._peek()
        if first == "[":
            yield from self._call_list()
        elif first == "{":
            yield from self._call_object()
        else:
            name = self._check_name((yield from self._match(_NAME)))
            if (yield from self._accept("[CALL_ID]")):
                yield from self._match(_NAME)
            yield from self._accept("[ARGS]")
            yield from self._spaces()
            yield from self._stream_arguments(name)


class DeepSeekToolParser(ToolParser):
    """DeepSeek-V3, R1 and V3.1, by their chat templates.

    Calls are between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``. Each is between
    ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``: ``function<｜tool▁sep｜>NAME`` and a code block of JSON, or
    since V3.1 ``NAME<｜tool▁sep｜>`` and JSON.
    """

    _marker = "<｜tool▁calls▁begin｜>"

    def _calls(self) -> Parse[None]:
        begin = "<｜tool▁call▁begin｜>"
        yield from self._spaces()
        yield from self._expect(begin)
        more = True
        while more:
            name = yield from self._match(_NAME)
            yield from self._expect("<｜tool▁sep｜>")
            in_block = (yield from self._peek()) != "{"
            if in_block:
                name = yield from self._match(_NAME)
                yield from self._spaces()
                yield from self._expect("```json")
                yield from self._spaces()
            yield from self._stream_arguments(self._check_name(name))
            if in_block:
                yield from self._spaces()
                yield from self._expect("```")
            yield from self._spaces()
            yield from self._expect("<｜tool▁call▁end｜>")
            self._commit()
            yield from self._spaces()
            more = yield from self._accept(begin)
        yield from self._expect("<｜tool▁calls▁end｜>")
        self._commit()


class RequiredToolParser(ToolParser):
    """Parses the list of calls that ``tool_choice`` "required" forces."""

    def _parse(self) -> Parse[None]:
        yield from self._try_calls(self._call_list())
        yield from self._until((), self._content)
        self._end_content()


class NamedToolParser(ToolParser):
    """Parses the arguments that a named ``tool_choice`` forces: the whole output."""

    def _parse(self) -> Parse[None]:
        (name,) = self._names
        self._call(name)
        yield from self._until((), self._arguments)


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as exc:  # an invalid escape
        raise ParseError(text) from exc
