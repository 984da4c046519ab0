"""Tool calls in the text of models: a format as data, and the readers of the three families that are in use.

What is no call stays content, word by word, but for white space around calls. A call is told as soon as its name is
known and its arguments begin; from there on they are passed on as they come, whatever follows. A name that is none of
the request's tools makes no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress

from router.text.chat.pieces import PieceKind
from router.text.chat.text_reader import Malformed, Reader, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]*")


class ToolReader(Reader):
    """Base of the readers: what calls are made of, and what becomes of text that is none."""

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._parallel = parallel
        self._num_calls = 0
        self._space = ""  # white space that is content only if more content follows
        self._after_call = False

    @property
    def reasoning(self) -> bool:
        return False

    def _content(self, text: str) -> None:
        text = self._space + text
        if self._after_call:
            text = text.lstrip()
        body = text.rstrip()
        self._space = text[len(body) :]
        if body:
            self._after_call = False
            self._tell(PieceKind.CONTENT, body)

    def _end_content(self) -> None:
        if not self._after_call:
            self._tell(PieceKind.CONTENT, self._space)

    def _call(self, name: str) -> None:
        """A call begins. Nothing before is given back any more."""
        self._num_calls += 1
        self._space = ""
        self._after_call = True
        self._mark = None
        if self._wanted:
            self._tell(PieceKind.CALL, name)

    def _arguments(self, text: str) -> None:
        if self._wanted:
            self._tell(PieceKind.ARGUMENTS, text)

    @property
    def _wanted(self) -> bool:
        """Without parallel calls only the first counts."""
        return self._parallel or self._num_calls == 1

    def _attempt(self, calls: Steps[None], marker: str = "") -> Steps[None]:
        """Read calls; what was read since the last thing that made sense is content."""
        self._mark = self._at - len(marker)
        with suppress(Malformed):
            yield from calls
        if self._mark is not None:
            self._content(self._text[self._mark : self._at])
        self._mark = None

    def _makes_sense(self) -> None:
        self._mark = self._at

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise Malformed(f"{name} is no tool")
        return name

    def _call_object(self) -> Steps[None]:
        """``{"name": …, "arguments": {…}}``: keys in any order, others are read over; Llama's word is parameters."""
        yield from self._expect("{")
        name = ""
        held: list[str] | None = None  # arguments that came before the name
        told = False
        while True:
            key = yield from self._key()
            if key == "name" and not name:
                name = self._known(_decoded((yield from self._string())))
                if held is not None:
                    self._tell_whole(name, "".join(held))
                    told = True
            elif key in ("arguments", "parameters") and not told and held is None:
                if name:
                    told = True
                    yield from self._stream_arguments(name)
                else:
                    held = []
                    yield from self._object(held.append)
            else:
                yield from self._value()
            yield from self._spaces()
            if not (yield from self._accept(",")):
                break
        yield from self._expect("}")
        if not told:
            self._tell_whole(self._known(name), "{}")
        self._makes_sense()

    def _key(self) -> Steps[str]:
        yield from self._spaces()
        key = _decoded((yield from self._string()))
        yield from self._spaces()
        yield from self._expect(":")
        yield from self._spaces()
        return key

    def _stream_arguments(self, name: str) -> Steps[None]:
        if (yield from self._peek()) != "{":
            raise Malformed("arguments must be an object")
        self._call(name)
        yield from self._object(self._arguments)
        self._makes_sense()

    def _tell_whole(self, name: str, arguments: str) -> None:
        self._call(name)
        self._arguments(arguments)
        self._makes_sense()

    def _call_list(self) -> Steps[None]:
        """``[{"name": …}, …]``."""
        yield from self._expect("[")
        yield from self._spaces()
        while True:
            yield from self._call_object()
            yield from self._spaces()
            if not (yield from self._accept(",")):
                break
            yield from self._spaces()
        yield from self._expect("]")
        self._makes_sense()


class HermesReader(ToolReader):
    """Hermes 2 and later, Qwen2.5, Qwen3: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number."""

    def _read(self) -> Steps[None]:
        while marker := (yield from self._until(("<tool_call>",), self._content)):
            yield from self._attempt(self._body(), marker)
        self._end_content()

    def _body(self) -> Steps[None]:
        yield from self._spaces()
        yield from self._call_object()
        yield from self._spaces()
        yield from self._expect("</tool_call>")
        self._makes_sense()


class LlamaReader(ToolReader):
    """Llama 3.1 and later: the whole output, or what follows ``<|python_tag|>``, is ``{"name": …, "parameters": {…}}``.

    Several calls are separated by white space or a semicolon.
    """

    def _read(self) -> Steps[None]:
        self._content((yield from self._spaces()))
        if (yield from self._peek()) == "{":
            yield from self._attempt(self._body())
        while marker := (yield from self._until(("<|python_tag|>",), self._content)):
            yield from self._attempt(self._body(), marker)
        self._end_content()

    def _body(self) -> Steps[None]:
        yield from self._spaces()
        while True:
            yield from self._call_object()
            yield from self._spaces()
            yield from self._accept(";")
            yield from self._spaces()
            if (yield from self._peek()) != "{":
                return


class MistralReader(ToolReader):
    """Mistral: ``[TOOL_CALLS]`` and a list of calls, or since its tokenizer v11 ``[TOOL_CALLS]name{…}`` for each.

    Between name and arguments newer ones write ``[ARGS]``, and some ``[CALL_ID]`` with an id.
    """

    def _read(self) -> Steps[None]:
        while marker := (yield from self._until(("[TOOL_CALLS]",), self._content)):
            yield from self._attempt(self._body(), marker)
        self._end_content()

    def _body(self) -> Steps[None]:
        yield from self._spaces()
        first = yield from self._peek()
        if first == "[":
            yield from self._call_list()
        elif first == "{":
            yield from self._call_object()
        else:
            name = self._known((yield from self._match(_NAME)))
            if (yield from self._accept("[CALL_ID]")):
                yield from self._match(_NAME)
            yield from self._accept("[ARGS]")
            yield from self._spaces()
            yield from self._stream_arguments(name)


class ListReader(ToolReader):
    """The list of calls that ``tool_choice`` "required" makes any model write."""

    def _read(self) -> Steps[None]:
        yield from self._attempt(self._call_list())
        yield from self._until((), self._content)
        self._end_content()


class NamedReader(ToolReader):
    """The arguments that a named ``tool_choice`` makes any model write: all of the output, of one function."""

    def _read(self) -> Steps[None]:
        (name,) = self._names
        self._call(name)
        yield from self._until((), self._arguments)


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError as exc:  # a wrong escape
        raise Malformed(text) from exc
