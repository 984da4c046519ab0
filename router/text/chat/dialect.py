"""How a model writes tool calls and reasoning: told by a flag, or seen in its chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from uuid import uuid4

import msgspec

from pdserve.errors import ConfigError
from router.text.chat.tool_calls import HermesReader, LlamaReader, MistralReader, ToolReader

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"


class ToolFormat(msgspec.Struct, frozen=True):
    """``markers`` are texts that a model writes as special tokens; ``sign`` gives a template of the family away."""

    reader: Callable[[Collection[str], bool], ToolReader]
    markers: tuple[str, ...]
    sign: str
    short_ids: bool = False  # templates of Mistral take ids of nine letters and digits, and no others


class ReasoningFormat(msgspec.Struct, frozen=True):
    """What stands before and after reasoning."""

    start: str
    end: str


class Opening(msgspec.Struct, frozen=True):
    """How an output may begin: with reasoning or not (None), which the prompt may have ``opened`` already."""

    reasoning: ReasoningFormat | None = None
    opened: bool = False


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(HermesReader, ("<tool_call>", "</tool_call>"), "<tool_call>"),
    "llama3_json": ToolFormat(LlamaReader, ("<|python_tag|>",), "<|python_tag|>"),
    "mistral": ToolFormat(MistralReader, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), "[TOOL_CALLS]", short_ids=True),
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
# Names that users of vLLM know, of formats that are the same.
_ALIASES = {"qwen3": "think", "deepseek_r1": "think", "qwen": "hermes", "llama3": "llama3_json"}
# Families that use Hermes' tags around something else.
_NOT_HERMES = ("<function=", "<arg_key>")


class Dialect(msgspec.Struct, frozen=True):
    """What is looked for in a model's output; None: nothing."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def opening_after(self, prompt: str, continued: str | None = None) -> Opening:
        """What follows a rendered chat. ``continued`` is the content of a last message that goes on.

        Templates of models that always reason end a prompt in the start of it, and where reasoning is switched off they
        write some that is over. Elsewhere in a prompt the markers are anybody's text.
        """
        form = self.reasoning
        if form is None:
            return Opening()
        if continued is not None:
            opened = continued.rfind(form.start) > continued.rfind(form.end)
            return Opening(form, opened=True) if opened else Opening()
        end = prompt.rstrip()
        return Opening() if end.endswith(form.end) else Opening(form, end.endswith(form.start))

    def new_call_id(self) -> str:
        short = self.tools is not None and self.tools.short_ids
        return uuid4().hex[:9] if short else "call_" + uuid4().hex[:24]


def find_dialect(template: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> Dialect:
    """The dialect of the model with this chat template. Names are of the tables above, "auto" or "none"."""
    tools = _tools_seen_in(template) if tool_parser == AUTO else tool_parser
    reasoning = _reasoning_seen_in(template) if reasoning_parser == AUTO else reasoning_parser
    for flag, name, chosen in (
        ("--tool-call-parser", tools, tool_parser),
        ("--reasoning-parser", reasoning, reasoning_parser),
    ):
        why = "seen in the chat template" if chosen == AUTO else "as asked for"
        logger.info("%s: %s (%s)", flag, name, why if name != NONE or chosen != AUTO else "the chat template has none")
    return Dialect(TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning))


def tool_parser_name(text: str) -> str:
    """For the command line. Raises ConfigError on a name that is in no table."""
    return _checked(text, TOOL_FORMATS, "--tool-call-parser")


def reasoning_parser_name(text: str) -> str:
    return _checked(text, REASONING_FORMATS, "--reasoning-parser")


def _checked(text: str, table: Collection[str], flag: str) -> str:
    known = [AUTO, NONE, *table]
    name = text if text in known else _ALIASES.get(text, text)
    if name not in known:
        raise ConfigError(f"{flag} {text!r} is not known; choose one of {', '.join(known)}")
    return name


def _tools_seen_in(template: str) -> str:
    for name, form in TOOL_FORMATS.items():
        if form.sign in template and not (name == "hermes" and any(other in template for other in _NOT_HERMES)):
            return name
    return "llama3_json" if _LLAMA_WORDS in template else NONE


def _reasoning_seen_in(template: str) -> str:
    return next((name for name, form in REASONING_FORMATS.items() if form.end in template), NONE)


# How Llama 3's templates ask for calls, also those that never write the tag themselves.
_LLAMA_WORDS = '{"name": function name, "parameters": dictionary'
