"""The tools of /v1/responses as functions of a chat, and calls of these functions in the form of their tool.

function           ──► the function
custom             ──► a function with one string argument, ``input``       call: custom_tool_call
local_shell        ──► a function with a command                            call: local_shell_call
namespace          ──► its tools, NAMESPACE.NAME                            call: with name and namespace
web_search, mcp …  ──► left out: they run at a provider, not at the client; the response has a warning
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pdserve.errors import RequestError, shown

Tool = dict[str, Any]

SHELL = "local_shell"
INPUT = "input"  # the argument of a custom tool
# Tools that run at OpenAI, or have their own form of calls. Names may end with a version.
_LEFT_OUT: tuple[str, ...] = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "mcp",
    "tool_search",
)
_LEFT_OUT += ("shell", "apply_patch", "programmatic_tool_calling")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_SHELL_FUNCTION = {
    "name": SHELL,
    "description": "Run a command on the user's machine and return its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "program and arguments"},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


class ToolOrigin(msgspec.Struct, frozen=True):
    """The tool behind a function."""

    kind: str  # function, custom or local_shell
    name: str
    namespace: str | None = None


class OfferedTools(msgspec.Struct, frozen=True):
    functions: list[Tool] = []
    tools: list[Tool] = []
    origins: dict[str, ToolOrigin] = {}
    left_out: list[str] = []

    @property
    def warnings(self) -> list[str]:
        return [
            f"tools of type {shown(kind)} are left out: they do not run here" for kind in dict.fromkeys(self.left_out)
        ]


def offered_tools(tools: list[Tool]) -> OfferedTools:
    """Raises RequestError that names the tool."""
    offered = OfferedTools()
    for index, tool in enumerate(tools):
        converted = list(_functions(tool, f"tools[{index}]", None, offered.left_out))
        for origin, function in converted:
            offered.origins[str(function["function"].get("name"))] = origin
            offered.functions.append(function)
        if converted or tool.get("type") == "namespace":
            offered.tools.append(tool)
    return offered


def function_name(name: Any, namespace: Any) -> Any:
    """Return the name of a function inside a namespace, as the model reads it."""
    if not isinstance(name, str) or not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(("_", ".")) else f"{namespace}.{name}"


def _functions(tool: Tool, where: str, namespace: str | None, left_out: list[str]) -> Iterator[tuple[ToolOrigin, Tool]]:
    kind = tool.get("type")
    match kind:
        case "function":
            function = {name: tool[name] for name in _FUNCTION_FIELDS if name in tool}
            yield _named(kind, function, namespace)
        case "custom":
            function = {"name": tool.get("name"), "description": _custom_description(tool, where)}
            yield _named(kind, {**function, "parameters": _INPUT_SCHEMA}, namespace)
        case "local_shell":
            yield _named(kind, _SHELL_FUNCTION, namespace)
        case "namespace" if namespace is None:
            inner = tool.get("tools")
            name = tool.get("name")
            if not isinstance(name, str) or not isinstance(inner, list) or not all(isinstance(x, dict) for x in inner):
                raise RequestError(f"{where}: a namespace needs a name and a list of tools", where)
            for index, inner_tool in enumerate(inner):
                yield from _functions(inner_tool, f"{where}.tools[{index}]", name, left_out)
        case str() if kind.startswith(_LEFT_OUT):
            left_out.append(kind)
        case _:
            kinds = "function, custom, local_shell, namespace"
            raise RequestError(f"{where} has type {shown(kind)}; use one of {kinds}", where)


def _named(kind: str, function: Tool, namespace: str | None) -> tuple[ToolOrigin, Tool]:
    origin = ToolOrigin(kind, str(function.get("name")), namespace)
    named = {**function, "name": function_name(function.get("name"), namespace)}
    return origin, {"type": "function", "function": named}


def _custom_description(tool: Tool, where: str) -> str:
    """The description of a custom tool, with the grammar of its input."""
    description = tool.get("description") or ""
    form = tool.get("format") or {}
    if not isinstance(description, str) or not isinstance(form, dict):
        raise RequestError(f"{where}: description must be a string and format an object", where)
    if form.get("type") != "grammar":
        return description
    return f"{description}\n\n{INPUT!r} follows this {form.get('syntax')} grammar:\n{form.get('definition')}".strip()


def chat_tool_choice(choice: str | Tool, left_out: list[str]) -> str | Tool:
    """Return ``tool_choice`` in chat form. Raises RequestError if it names a tool that is left out."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": function_name(choice.get("name"), choice.get("namespace"))}}
    if kind == SHELL:
        return {"type": "function", "function": {"name": SHELL}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if isinstance(tools, list):
            offered = [tool for tool in tools if not (isinstance(tool, dict) and tool.get("type") in left_out)]
            tools = [chat_tool_choice(tool, left_out) for tool in offered]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    if isinstance(kind, str) and kind.startswith(_LEFT_OUT):
        raise RequestError(f"tool_choice names {shown(kind)}, which does not run here; use 'auto'", "tool_choice")
    return choice


def custom_arguments(text: str) -> str:
    """Return the arguments of the function behind a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool; arguments of another form, such as unfinished ones, as they are."""
    fields = _object(arguments)
    text = fields.get(INPUT)
    return text if isinstance(text, str) else arguments


def shell_action(arguments: str) -> dict[str, Any]:
    """Return the action of a shell call. Arguments of another form are the command: it fails by its name."""
    fields = _object(arguments)
    command = fields.get("command")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        command = [command] if isinstance(command, str) else [arguments]
    directory = fields.get("working_directory")
    timeout = fields.get("timeout_ms")
    return {
        "type": "exec",
        "command": command,
        "env": {},
        "timeout_ms": timeout if isinstance(timeout, int) else None,
        "working_directory": directory if isinstance(directory, str) else None,
        "user": None,
    }


def shell_arguments(action: Any) -> str:
    """Return the arguments of the function behind a shell call."""
    fields: Mapping[str, Any] = action if isinstance(action, dict) else {}
    names = ("command", "working_directory", "timeout_ms")
    return json.dumps({name: fields[name] for name in names if fields.get(name) is not None}, ensure_ascii=False)


def _object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
