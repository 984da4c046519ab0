"""Tool parsers of families that write each argument between tags of its own, as plain text.

The parsers of Qwen3-Coder, Seed-OSS, GLM-4.5, MiniMax-M2 and DeepSeek-V3.2 are one parser with different tags. The
sources are the chat templates of ``Qwen/Qwen3-Coder-30B-A3B-Instruct``, ``ByteDance-Seed/Seed-OSS-36B-Instruct``,
``zai-org/GLM-4.5`` and ``MiniMaxAI/MiniMax-M2``, which render the calls of earlier turns in the form that the model
writes, and the encoding that ``deepseek-ai/DeepSeek-V3.2`` describes.

A string is emitted while it arrives; other values once they are complete, since only then it is known whether they are
JSON (typed_values.py). The tag that ends a value ends it only where one of the tags that may follow does follow, so
that a value may contain the tag: a model that writes files writes templates, too. Models forget end tags; where a
grammar holds the output they cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from router.text.chat.families.typed_values import TypedValues, escaped, quoted
from router.text.chat.incremental_parser import Parse, ParseError
from router.text.chat.reasoning_parser import Thinking
from router.text.chat.tool_parsers import ToolParser


class CallTags(msgspec.Struct, frozen=True):
    """The tags of a family.

    ``begin (function NAME function_end (key KEY key_end KIND kind_end value VALUE value_end)* call_end)+ end``
    """

    begin: str  # before a call, or before a list of calls
    end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""  # before a value
    kind_end: str = ""  # behind "true" or "false", which says whether the value is a string
    token: str = ""  # token of the vocabulary, inside the tags
    function: str = ""  # before the name
    function_end: str = ""  # behind the name; "" where a key or an end follows
    call_end: str = ""  # behind each call in a list
    line_around_values: bool = False  # a newline at the beginning and end of a value does not belong to it

    @property
    def opening(self) -> tuple[str, ...]:
        """The tags that may begin a call: models forget the one around a function."""
        return tuple(tag for tag in (self.begin, self.function) if tag)

    @property
    def closing(self) -> tuple[str, ...]:
        """The tags that may follow a value."""
        return tuple(tag for tag in (self.key, self.call_end, self.end) if tag)


QWEN3_CODER = CallTags(
    begin="<tool_call>",
    function="<function=",
    function_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    line_around_values=True,
)
SEED_OSS = msgspec.structs.replace(
    QWEN3_CODER, begin="<seed:tool_call>", end="</seed:tool_call>", line_around_values=False
)
GLM45 = CallTags(
    begin="<tool_call>",
    key="<arg_key>",
    key_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
)
MINIMAX_M2 = CallTags(
    begin="<minimax:tool_call>",
    function='<invoke name="',
    function_end='">',
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    call_end="</invoke>",
    end="</minimax:tool_call>",
)
DEEPSEEK_V32 = CallTags(
    begin="<｜DSML｜function_calls>",
    function='<｜DSML｜invoke name="',
    function_end='">',
    key='<｜DSML｜parameter name="',
    key_end='" string="',
    kind_end='">',
    value_end="</｜DSML｜parameter>",
    call_end="</｜DSML｜invoke>",
    end="</｜DSML｜function_calls>",
    token="｜DSML｜",
)
_MAX_NAME = 256  # characters of a function or an argument; longer ones are text


class TaggedToolParser(ToolParser):
    """Base of the parsers. ``functions``: the kinds of the arguments, by name of the function."""

    _tags: CallTags

    def __init__(
        self, functions: Mapping[str, TypedValues], parallel: bool = True, thinking: Thinking | None = None
    ) -> None:
        super().__init__(functions, parallel, thinking)
        self._values = functions

    def _calls(self, marker: str) -> Parse[None]:
        tags = self._tags
        if marker == tags.begin:
            yield from self._spaces()
            if (yield from self._peek()) in ("{", "["):  # the form of Hermes
                yield from self._call_objects()
                yield from self._spaces()
                yield from self._expect(tags.end)
                self._commit()
                return
            yield from self._expect(tags.function)
        yield from self._functions()

    def _functions(self) -> Parse[None]:
        """Parse calls from the first name on."""
        tags = self._tags
        ended = False
        while not ended:
            ended = yield from self._function((yield from self._name()))
            if not ended:
                yield from self._spaces()
                ended = yield from self._accept(tags.end)
                self._mark = self._at if ended else self._mark
            if not ended:
                yield from self._expect(tags.function)

    def _name(self) -> Parse[str]:
        """Return the name of a function of the request, behind its tags. Otherwise nothing is skipped."""
        tags = self._tags
        begin = self._at
        name = yield from self._text_before((tags.function_end,) if tags.function_end else (*tags.closing, "\n"))
        yield from self._accept(tags.function_end)
        try:
            return self._check_name(name.strip())
        except ParseError:
            self._at = begin
            raise

    def _text_before(self, ends: Sequence[str]) -> Parse[str]:
        """Return the text before the first of ``ends``. Raises ParseError if it is too long for a name."""
        start = self._at
        most = start + _MAX_NAME
        while True:
            positions = [at for end in ends if (at := self._text.find(end, start, most)) >= 0]
            if positions:
                self._at = min(positions)
                return self._text[start : self._at]
            if self._ended or len(self._text) >= most:
                raise ParseError("a name expected")
            yield

    def _function(self, name: str) -> Parse[bool]:
        """Parse the arguments of a call, and its end. Return whether that is the end of all calls, too."""
        self._call(name)
        yield from self._spaces()
        if (yield from self._peek()) == "{":  # arguments as one JSON object
            yield from self._object(self._arguments)
            self._commit()
            yield from self._spaces()
            return (yield from self._end_of_call())
        self._arguments("{")
        self._commit()
        try:
            yield from self._parameters(self._values[name])
            ended = yield from self._end_of_call()
        except ParseError:
            if self._finished or not self._ended:  # otherwise the call is cut off, and must not look complete
                self._arguments("}")
            raise
        self._arguments("}")
        self._commit()
        return ended

    def _end_of_call(self) -> Parse[bool]:
        if self._tags.call_end and (yield from self._accept(self._tags.call_end)):
            return False
        if not (yield from self._accept(self._tags.end)):
            raise ParseError("the end of a call expected", self._tags.closing)
        return True

    def _parameters(self, values: TypedValues) -> Parse[None]:
        tags = self._tags
        seen = set[str]()
        while (yield from self._accept(tags.key)):
            key, is_text = yield from self._parameter_head(values)
            self._arguments(f"{', ' if seen else ''}{quoted(key)}: ")
            seen.add(key)
            self._mark = None  # the value is no content any more
            yield from self._value_of(key, values, is_text, seen=seen)
            self._commit()

    def _parameter_head(self, values: TypedValues) -> Parse[tuple[str, bool]]:
        """Parse from the name up to the value. Return the name, and whether the value is text."""
        tags = self._tags
        key = yield from self._text_before((tags.key_end,))
        yield from self._expect(tags.key_end)
        is_text = values.is_text(key)
        if tags.kind_end:
            said = yield from self._text_before((tags.kind_end,))
            if said not in ("true", "false"):
                raise ParseError("true or false expected")
            is_text = is_text or (said == "true" and values.may_be_text(key))
            yield from self._expect(tags.kind_end)
        if tags.value:
            yield from self._spaces()
            yield from self._expect(tags.value)
        return key, is_text

    def _value_of(self, key: str, values: TypedValues, is_text: bool, *, seen: Collection[str]) -> Parse[None]:
        """Emit a value, and skip its end and the white space behind. Raises ParseError where the text ends inside.

        If its end tag is missing, the value ends where the next parameter begins, or with its call.
        """
        tags = self._tags
        held = _HeldLine()
        pieces: list[str] = []

        def write(text: str) -> None:
            if is_text:
                self._arguments(escaped(text))
            else:
                pieces.append(text)

        def add(text: str) -> None:
            write(held.push(text))

        if tags.line_around_values:
            yield from self._accept("\n")
        self._arguments('"' if is_text else "")
        marks = (tags.value_end, *(() if values.held else tags.closing))
        ended = tagged = False  # tagged: ended by its end tag
        while not ended and (mark := (yield from self._until(marks, add))):
            if mark == tags.value_end:
                blanks = yield from self._spaces()
                ended = tagged = yield from self._follows(tags.closing)
                add("" if ended else mark + blanks)
            elif mark == tags.key:
                ended = yield from self._is_parameter(values, seen)
                add("" if ended else mark)
            else:
                text = yield from self._up_to_end(mark)
                ended = True
                tagged = bool(text)
                add(text)
        complete = ended or self._finished
        if not complete or (tagged and not tags.line_around_values):
            write(held.text)
        if not is_text:
            self._arguments(values.json_of(key, "".join(pieces)) if complete else "".join(pieces))
        elif complete:
            self._arguments('"')
        if not ended:
            raise ParseError("a value does not end")

    def _is_parameter(self, values: TypedValues, seen: Collection[str]) -> Parse[bool]:
        """Return whether a key's tag inside a value begins the next parameter, and if so, go back to it."""
        at = self._at
        is_parameter = False
        with suppress(ParseError):
            key, _ = yield from self._parameter_head(values)
            is_parameter = values.may_have(key) and key not in seen
        self._at = at - len(self._tags.key) if is_parameter else at
        return is_parameter

    def _up_to_end(self, mark: str) -> Parse[str]:
        """Return the text of a value from ``mark`` on, the end of a call inside of the value.

        The value goes on up to its end tag. If none comes before the next call, or at all, it has ended at the mark.
        """
        tags = self._tags
        begin = self._at - len(mark)
        self._mark = begin
        text = ""
        while marker := (yield from self._until((tags.value_end, *self.call_markers), lambda text: None)):
            end = self._at - len(marker)
            if marker != tags.value_end:
                if (yield from self._is_call(marker)):
                    break
                continue
            yield from self._spaces()
            if (yield from self._follows(tags.closing)):
                text = self._text[begin:end]
                break
        if not text:
            self._at = begin
        self._mark = None
        return text

    def _is_call(self, marker: str) -> Parse[bool]:
        """Return whether the name of a function follows a marker of calls."""
        at = self._at
        is_call = False
        with suppress(ParseError):
            if marker == self._tags.begin:
                yield from self._spaces()
                yield from self._expect(self._tags.function)
            yield from self._name()
            is_call = True
        self._at = at
        return is_call

    def _follows(self, tags: Sequence[str]) -> Parse[bool]:
        """Return whether one of the tags comes next, cut off at the end of the text, or nothing."""
        return (yield from self._comes(tags)) or (
            self._ended and any(tag.startswith(self._text[self._at :]) for tag in tags)
        )


class _HeldLine:
    """Holds back a newline at the end of a text."""

    def __init__(self) -> None:
        self.text = ""

    def push(self, text: str) -> str:
        text = self.text + text
        body = text.removesuffix("\n")
        self.text = text[len(body) :]
        return body


class Qwen3CoderToolParser(TaggedToolParser):
    """Qwen3-Coder, Qwen3.5: ``<tool_call><function=f><parameter=a>\\n1\\n</parameter></function></tool_call>``."""

    _tags = QWEN3_CODER
    call_markers = QWEN3_CODER.opening


class SeedOssToolParser(TaggedToolParser):
    """Seed-OSS: ``<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>``."""

    _tags = SEED_OSS
    call_markers = SEED_OSS.opening


class Glm45ToolParser(TaggedToolParser):
    """GLM-4.5 and later: ``<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``."""

    _tags = GLM45
    call_markers = GLM45.opening


class MiniMaxM2ToolParser(TaggedToolParser):
    """MiniMax-M2: ``<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke>…``."""

    _tags = MINIMAX_M2
    call_markers = MINIMAX_M2.opening


class DeepSeekV32ToolParser(TaggedToolParser):
    """DeepSeek-V3.2: as MiniMax-M2, but ``<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>``."""

    _tags = DEEPSEEK_V32
    call_markers = DEEPSEEK_V32.opening
