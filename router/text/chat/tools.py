"""The checked tools of a request."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

from pdserve.errors import RequestError, shown

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MODES = ("none", "auto", "required")


class ToolUse(msgspec.Struct, frozen=True):
    """Tools and tool_choice. ``named`` is the function that the output must call."""

    tools: tuple[dict[str, Any], ...] = ()  # the client's tools in OpenAI's form
    required: bool = False
    named: str = ""
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of arguments by name of the function; none: not given."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools}

    def without_strict(self, names: Collection[str]) -> ToolUse:
        """Return the use with these functions not strict."""
        tools = tuple(
            {**tool, "function": {**tool["function"], "strict": False}} if tool["function"]["name"] in names else tool
            for tool in self.tools
        )
        return msgspec.structs.replace(self, tools=tools)

    @property
    def must_call(self) -> bool:
        """Whether the output is held to tool calls."""
        return self.required or bool(self.named)


def tool_use(tools: list[dict[str, Any]], tool_choice: str | dict[str, Any], parallel: bool) -> ToolUse:
    """Check tools and tool_choice; "none" returns no tools. Raises RequestError that names the field."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"{len(tools)} tools exceed {MAX_TOOLS}; send fewer", "tools")
    names = [_checked_name(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if len(set(names)) != len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise RequestError(f"two tools have the name {twice!r}; rename one", "tools")
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        tools, tool_choice = _allowed(tool_choice, dict(zip(names, tools, strict=True)))
        names = [tool["function"]["name"] for tool in tools]
    named = _named(tool_choice)
    if not tools and (named or tool_choice == "required"):
        raise RequestError("tool_choice needs tools; give at least one", "tool_choice")
    if named and named not in names:
        raise RequestError(f"tool_choice names {shown(named)}, which is not in tools; use {names[0]!r}", "tool_choice")
    if tool_choice == "none":
        return ToolUse()
    return ToolUse(tuple(tools), tool_choice == "required", named, parallel)


def _checked_name(tool: dict[str, Any], where: str) -> str:
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where} has type {shown(tool['type'])}; only 'function' is supported", where)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function is missing", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        remedy = "use up to 128 letters, digits, '_', '-' and '.'"
        raise RequestError(f"{where}.function.name {shown(name)} is not a valid name; {remedy}", where)
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.function.description must be a string", where)
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.function.strict must be true or false", where)
    parameters = function.get("parameters")
    if parameters is not None and (
        not isinstance(parameters, dict) or (parameters.get("type") or "object") != "object"
    ):
        raise RequestError(f"{where}.function.parameters must be the JSON schema of an object", where)
    return name


def _allowed(tool_choice: dict[str, Any], tools: dict[str, dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the tools, of ``tools`` by name, that an allowed_tools choice lists, and its mode. Raises RequestError."""
    allowed = tool_choice.get("allowed_tools")
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        text = "an allowed_tools choice needs the mode 'auto' or 'required' and a list of at least one tool"
        raise RequestError(text, "tool_choice")
    names = dict.fromkeys(_named(tool if isinstance(tool, dict) else {}) for tool in listed)
    unknown = next((name for name in names if name not in tools), None)
    if unknown is not None:
        raise RequestError(f"tool_choice allows {shown(unknown)}, which is not in tools", "tool_choice")
    return [tool for name, tool in tools.items() if name in names], mode


def _named(tool_choice: str | dict[str, Any]) -> str:
    """Return the function that tool_choice names; empty for a mode."""
    if isinstance(tool_choice, str):
        if tool_choice not in _MODES:
            raise RequestError(
                f"tool_choice {shown(tool_choice)} is not known; use {', '.join(_MODES)} or a function", "tool_choice"
            )
        return ""
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if tool_choice.get("type") != "function" or not isinstance(name, str) or not name:
        shape = '{"type": "function", "function": {"name": …}}'
        raise RequestError(f"tool_choice must be one of {', '.join(_MODES)}, or {shape}", "tool_choice")
    return name
