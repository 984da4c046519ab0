"""Tool parsers of families that write arguments as JSON, and of the outputs that ``tool_choice`` forces.

Text outside calls stays content, verbatim, except for white space around calls. A call is emitted as soon as its name
is known and its arguments begin; then the arguments are emitted as they arrive. A name that is none of the request's
tools makes no call. Calls are read with the faults that models make: without their last tags, several in one tag,
arguments as a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress

from router.text.chat.incremental_parser import Parse, ParseError
from router.text.chat.output_parser import DeltaKind
from router.text.chat.reasoning_parser import ReasoningParser, Thinking

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_BEGIN_OF_ARGUMENTS = ("{", '"', "`")
_CUT_STRING = re.compile(r'"(?:[^"\\]|\\[^u]|\\u[0-9A-Fa-f]{4})*')  # a string up to an escape that is cut off
_CONTROL = re.compile(r"[\x00-\x1f]")


class ToolParser(ReasoningParser):
    """Base of the tool parsers: the syntax of calls, and the handling of content around them."""

    def __init__(self, names: Collection[str], parallel: bool = True, thinking: Thinking | None = None) -> None:
        super().__init__(thinking)
        self._names = frozenset(names)
        self._parallel = parallel

    def _call(self, name: str) -> None:
        """Begin a call."""
        self._begin_call()
        self._emit_allowed(DeltaKind.CALL, name)

    def _arguments(self, text: str) -> None:
        self._emit_allowed(DeltaKind.ARGUMENTS, text)

    def _emit_allowed(self, kind: DeltaKind, text: str) -> None:
        """Emit a part of a call. Without parallel calls only the first call is emitted."""
        if self._parallel or self._num_calls == 1:
            self._emit(kind, text)

    def _commit(self) -> None:
        self._mark = self._at

    def _check_name(self, name: str) -> str:
        if name not in self._names:
            raise ParseError(f"{name} is no tool")
        return name

    def _call_object(self) -> Parse[None]:
        """Parse ``{"name": …, "arguments": {…}}``: keys in any order, unknown ones skipped; Llama writes parameters.

        OpenAI's form, with the two in an object ``function``, is read, too.
        """
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
                    yield from self._arguments_of(name)
                else:
                    held = []
                    yield from self._hold_arguments(held)
            elif key == "function" and not emitted and held is None and (yield from self._peek()) == "{":
                emitted = True
                yield from self._call_object()
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

    def _arguments_of(self, name: str) -> Parse[None]:
        """Parse the arguments of a call, and emit them as they arrive; those in a string, once it is complete."""
        if (yield from self._peek()) == "{":
            self._call(name)
            yield from self._object(self._arguments)
            self._commit()
            return
        held: list[str] = []
        try:
            yield from self._hold_arguments(held)
        finally:
            if held:
                self._emit_call(name, "".join(held))

    def _hold_arguments(self, held: list[str]) -> Parse[None]:
        """Add arguments to ``held``: an object, one that is written as a string, or null or "" for none.

        Where the text ends inside of them, the part that is there is added before ParseError.
        """
        first = yield from self._peek()
        if first == '"':
            begin = self._at
            try:
                yield from self._string()
            except ParseError:
                cut = _CUT_STRING.match(self._text, begin)
                held += [json_in_text(cut[0] + '"', cut_off=True)] if cut else []
                raise
            held.append(json_in_text(self._text[begin : self._at]))
        elif first == "n":
            yield from self._expect("null")
            held.append("{}")
        else:
            yield from self._object(held.append)

    def _emit_call(self, name: str, arguments: str) -> None:
        self._call(name)
        self._arguments(arguments)
        self._commit()

    def _call_objects(self) -> Parse[None]:
        """Parse a list of calls, or calls one behind the other."""
        first = yield from self._peek()
        if first == "[":
            yield from self._call_list()
            return
        while True:
            yield from self._call_object()
            yield from self._spaces()
            if (yield from self._accept(",")) or (yield from self._accept(";")):
                yield from self._spaces()
            if (yield from self._peek()) != "{":
                return

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

    call_markers = ("<tool_call>",)

    def _calls(self, marker: str) -> Parse[None]:
        yield from self._spaces()
        yield from self._call_objects()
        yield from self._spaces()
        yield from self._expect("</tool_call>")
        self._commit()


class LlamaToolParser(ToolParser):
    """Llama 3.1 and later: the whole output, or what follows ``<|python_tag|>``, is ``{"name": …, "parameters": {…}}``.

    Several calls are separated by white space or a semicolon, or are a list.
    """

    call_markers = ("<|python_tag|>",)

    def _output(self) -> Parse[None]:
        self._content((yield from self._spaces()))
        if (yield from self._peek()) in ("{", "["):
            yield from self._try_calls(self._call_objects())
        yield from super()._output()

    def _calls(self, marker: str) -> Parse[None]:
        yield from self._spaces()
        yield from self._call_objects()


class MistralToolParser(ToolParser):
    """Mistral: ``[TOOL_CALLS]`` and a list of calls, or since its tokenizer v11 ``[TOOL_CALLS]name{…}`` for each.

    Between name and arguments newer ones write ``[ARGS]``, and some ``[CALL_ID]`` with an id.
    """

    call_markers = ("[TOOL_CALLS]",)

    def _calls(self, marker: str) -> Parse[None]:
        yield from self._spaces()
        if (yield from self._peek()) in ("[", "{"):
            yield from self._call_objects()
            return
        name = self._check_name((yield from self._match(_NAME)))
        yield from self._spaces()
        if (yield from self._accept("[CALL_ID]")):
            yield from self._match(_NAME)
        yield from self._accept("[ARGS]")
        yield from self._spaces()
        yield from self._arguments_of(name)


class DeepSeekToolParser(ToolParser):
    """DeepSeek-V3, R1 and V3.1, by their chat templates.

    Calls are between ``<｜tool▁calls▁begin｜>`` and ``<｜tool▁calls▁end｜>``. Each is between
    ``<｜tool▁call▁begin｜>`` and ``<｜tool▁call▁end｜>``: ``function<｜tool▁sep｜>NAME`` and a code block of JSON, or
    since V3.1 ``NAME<｜tool▁sep｜>`` and JSON. Models forget all of these tags but the separator, and the code block.
    """

    call_markers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")

    def _calls(self, marker: str) -> Parse[None]:
        list_marker, call_marker = self.call_markers
        yield from self._spaces()
        if marker == list_marker:
            yield from self._expect(call_marker)
        more = True
        while more:
            name = yield from self._match(_NAME)
            yield from self._expect("<｜tool▁sep｜>")
            yield from self._spaces()
            if (yield from self._peek()) not in _BEGIN_OF_ARGUMENTS:
                name = yield from self._match(_NAME)
                yield from self._spaces()
            in_block = yield from self._accept("```json")
            yield from self._spaces()
            yield from self._arguments_of(self._check_name(name))
            yield from self._spaces()
            if in_block and (yield from self._accept("```")):
                yield from self._spaces()
            yield from self._accept("<｜tool▁call▁end｜>")
            self._commit()
            yield from self._spaces()
            more = yield from self._accept(call_marker)
        if (yield from self._accept("<｜tool▁calls▁end｜>")):
            self._commit()


class RequiredToolParser(ToolParser):
    """Parses the list of calls that ``tool_choice`` "required" forces."""

    def _output(self) -> Parse[None]:
        yield from self._try_calls(self._call_list())
        yield from super()._output()


class NamedToolParser(ToolParser):
    """Parses the arguments that a named ``tool_choice`` forces: the whole output behind the reasoning."""

    def _output(self) -> Parse[None]:
        (name,) = self._names
        self._call(name)
        yield from self._until((), self._arguments)


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as exc:  # an invalid escape
        raise ParseError(text) from exc


def json_in_text(text: str, cut_off: bool = False) -> str:
    """Return the object that a JSON string holds, an empty one for "". Raises ParseError if it holds none."""
    arguments = _decoded(text).encode(errors="backslashreplace").decode().strip()  # a lone surrogate stays an escape
    if not arguments and not cut_off:
        return "{}"
    if not arguments.startswith("{") or not (cut_off or arguments.endswith("}")):
        raise ParseError("arguments must be an object")
    if not cut_off and _CONTROL.search(arguments):  # such as a newline that was escaped only once
        with suppress(ValueError, RecursionError):
            return json.dumps(json.loads(arguments, strict=False), ensure_ascii=False)
    return arguments
