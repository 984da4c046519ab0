"""Texts as models write them, and what a client must get: tests/router/model_texts/, a file per format.

habit      what the model does
text       the output
opened     the prompt ends with the start marker of the reasoning
finish     "stop": the model ended the text; "length": a limit did
reasoning, content, calls: what the client gets; the arguments of a call that is cut off are a text
legal      a grammar of strict functions allows the text
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from router.text.chat.output_parser import Message
from router.text.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, ModelParsers, ReasoningState
from router.text.chat.tools import ToolUse, tool_use

FOLDER = Path(__file__).parents[1] / "router" / "model_texts"
FORMATS = (*TOOL_PARSERS, "required", "named")
_STRING = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": _STRING,
            "count": {"type": "integer"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "tags": {"type": "array"},
            "note": _STRING,
        },
        "required": ["path"],
        "additionalProperties": False,
    },
    "look": {"type": "object", "properties": {"place": _STRING}, "additionalProperties": False},
}


class ModelText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    habit: str
    text: str
    opened: bool = False
    finish: str = "stop"
    reasoning: str = ""
    content: str = ""
    calls: tuple[dict[str, Any], ...] = ()  # {name: arguments}
    legal: bool = False

    @property
    def expected(self) -> tuple[str, str, list[tuple[str, Any]]]:
        return self.reasoning, self.content, [item for call in self.calls for item in call.items()]


def texts_of(form: str) -> list[ModelText]:
    data = tomllib.loads((FOLDER / f"{form}.toml").read_text(encoding="utf-8"))
    return msgspec.convert(data["text"], list[ModelText])


def tools(strict: bool = False) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **({"strict": True} if strict else {})}}
        for name, schema in SCHEMAS.items()
    ]


def tool_choice_of(form: str) -> Any:
    named = {"type": "function", "function": {"name": "write"}}
    return {"required": "required", "named": named}.get(form, "auto")


def use_of(form: str, strict: bool = False) -> ToolUse:
    return tool_use(tools(strict), tool_choice_of(form), True)


def reasoning_of(form: str) -> str:
    """Return the name of the reasoning parser of a model with this format of calls."""
    return {"openai": "openai_gptoss", "mistral": "mistral", "seed_oss": "seed_oss"}.get(form, "think")


def parsers_of(form: str) -> ModelParsers:
    """Return the parsers of a model with this format of calls."""
    return ModelParsers(TOOL_PARSERS.get(form, TOOL_PARSERS["hermes"]), REASONING_PARSERS[reasoning_of(form)])


def state_of(form: str, opened: bool) -> ReasoningState:
    return ReasoningState(parsers_of(form).reasoning, opened)


def arguments_of(text: str) -> Any:
    """Return the arguments of a call, or their text if it is cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def found_in(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    return message.reasoning, message.content, [(call.name, arguments_of(call.arguments)) for call in message.calls]
