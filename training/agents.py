"""Sessions of an agent with tools of a terminal: shell, files, edits, patches, plans, and lookups of a server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.tools import Tool, Turn, call_text
from training.words import Words, listed

_FOLDERS = ("src", "docs", "notes", "data", "lib", "test", "home", "tmp")
_ENDINGS = ("md", "txt", "py", "toml", "json", "csv", "js", "yml")
_PATHS = ("path", "file_path", "file", "filename", "name")
_MISHAPS = (
    "failed: No such file or directory (os error 2)",
    "Error: text not found in the file",
    "verification failed: invalid hunk",
    "aborted by user",
    "The user does not want this tool to run.",
    "Permission denied",
)
_VAGUE = (
    "Go on.",
    "Continue.",
    "Do it.",
    "Do something useful.",
    "Mend it.",
    "Try again.",
    "And now?",
    "Next.",
    "Yes.",
)
_SYSTEM = (
    "You are an agent in a terminal.",
    "You are a coding agent. Be brief.",
    "You help with the files of a project.",
    "Read a file before you edit it.",
    "Run commands to look at files.",
    "Be brief.",
    "Edit files with care.",
    "Answer with a call if a tool is needed.",
)


@dataclass(frozen=True)
class _Kind:
    """Names that programs give to one kind of tool, its descriptions, and names of each of its string arguments."""

    names: Sequence[str]
    descriptions: Sequence[str]
    arguments: Sequence[Sequence[str]]


_KINDS = {
    "shell": _Kind(
        ("Bash", "bash", "shell", "exec_command", "run_command", "run", "terminal", "execute", "local_shell"),
        ("Run a command.", "Run a command in a shell.", "Runs a shell command and returns its output.", "A shell."),
        (("command", "cmd", "script", "line"),),
    ),
    "read": _Kind(
        ("Read", "read_file", "view", "open_file", "show_file", "get_file", "cat"),
        ("Read a file.", "Show a file.", "Read a file, or an image.", "Returns the lines of a file."),
        (_PATHS,),
    ),
    "edit": _Kind(
        ("Edit", "edit_file", "replace", "str_replace", "change_text"),
        ("Replace a text in a file.", "Edit a file.", "Change a part of a file."),
        (_PATHS, ("old_string", "old", "before", "search"), ("new_string", "new", "after", "replacement")),
    ),
    "write": _Kind(
        ("Write", "write_file", "create_file", "save"),
        ("Write a file.", "Create a file.", "Saves a text as a file."),
        (_PATHS, ("content", "text", "contents")),
    ),
    "list": _Kind(
        ("LS", "list_files", "list_dir", "files"),
        ("List a folder.", "Names of the files in a folder."),
        (("path", "folder", "dir", "directory"),),
    ),
    "search": _Kind(
        ("Grep", "grep", "search", "find_text"),
        ("Search in files.", "Find lines with a text."),
        (("pattern", "query", "text", "regex"),),
    ),
    "patch": _Kind(
        ("apply_patch", "patch", "edit_files"),
        ("Edit files. The input is a patch.", "Apply a patch to files."),
        (("input", "patch"),),
    ),
    "image": _Kind(
        ("view_image", "show_image", "look_at"), ("Show an image to the model.", "Look at an image."), (_PATHS,)
    ),
}
_GRAMMAR = (
    '\n\n\'{a}\' follows this lark grammar:\nstart: "*** Begin Patch" LF line+ "*** End Patch"\nline: /[^\\n]*/ LF\n'
    "%import common.LF"
)
_EXTRA = (
    ("timeout", {"type": "integer", "minimum": 0, "maximum": 9999}, 1000),
    ("timeout", {"type": "number", "enum": [1000, 120000]}, 1000),
    ("limit", {"type": "integer", "exclusiveMinimum": 0, "maximum": 2000}, 100),
    ("all", {"type": "boolean", "default": False}, True),
    ("background", {"type": "boolean"}, False),
    ("explanation", {"type": "string"}, "As asked."),
)


@dataclass
class _AgentTool:
    """A tool as a request describes it: the schemas of its arguments by name."""

    name: str
    description: str
    required: dict[str, Any]
    optional: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # values of optional arguments, seldom used

    def function(self, rng: random.Random) -> Tool:
        schema: dict[str, Any] = {"type": "object", "properties": {**self.required, **self.optional}}
        schema["required"] = list(self.required)
        if rng.random() < 0.6:
            schema["additionalProperties"] = False
        if rng.random() < 0.2:
            schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
        strict = {"strict": False} if rng.random() < 0.3 else {}
        function = {"name": self.name, "description": self.description, **strict, "parameters": schema}
        return {"type": "function", "function": function}

    def call(self, rng: random.Random, *values: Any) -> Turn:
        arguments = dict(zip(self.required, values, strict=True))
        if self.extra and rng.random() < 0.1:
            arguments |= self.extra
        return Turn("assistant", call_text(self.name, arguments), "agent")


class AgentSession:
    """Tools, and tasks for them in a project of a few files. Tasks have one call or several, one after the other."""

    def __init__(self, words: Words, most_tools: int) -> None:
        """Draw one to ``most_tools`` tools."""
        self._words = words
        self._rng = words.rng
        self._files = [self._file() for _ in range(self._rng.randint(2, 5))]
        kinds = self._rng.sample([*_KINDS, "plan", "lookup"], self._rng.randint(1, most_tools))
        self._tools = {kind: self._tool(kind) for kind in kinds}
        self.tools = [tool.function(self._rng) for tool in self._tools.values()]
        self._last = self._rng.choice(self._files)

    def opening(self) -> list[Turn]:
        """Return the system message of the agent's program, and its words about the project."""
        rng = self._rng
        texts = rng.sample(_SYSTEM, rng.randint(1, 3))
        if rng.random() < 0.5:
            texts.append(f"<env>\nWorking directory: /srv/{self._words.word()}\nPlatform: linux\n</env>")
        rng.shuffle(texts)
        return [Turn("system", rng.choice((" ", "\n", "\n\n")).join(texts))] if rng.random() < 0.8 else []

    def task(self) -> list[Turn]:
        """Return a request, calls with their results, and the answer."""
        rng = self._rng
        kinds = [rng.choice(list(self._tools))]
        while rng.random() < 0.3:
            kinds.append(rng.choice(list(self._tools)))
        turns: list[Turn] = []
        for kind in kinds:
            request, call, result, answer = self._made(kind)
            failed = rng.random() < 0.15
            if not turns:
                vague = rng.random() < 0.15
                turns.append(Turn("user", self._noted(rng.choice(_VAGUE) if vague else request)))
            turns += [call, Turn("tool", self._shown(rng.choice(_MISHAPS) if failed else result))]
        turns.append(Turn("assistant", "That did not work." if failed else answer, "agent"))
        return turns

    def _noted(self, request: str) -> str:
        if self._rng.random() < 0.1:
            return f"<system-reminder>\n{self._rng.choice(_SYSTEM)}\n</system-reminder>\n{request}"
        return request

    def _shown(self, result: str) -> str:
        form = self._rng.choice(("{r}", "{r}", "{r}", "Process exited with code 0\nOutput:\n{r}", '{"output": "{r}"}'))
        return form.replace("{r}", result)

    def _made(self, kind: str) -> tuple[str, Turn, str, str]:
        """Return request, call, result and answer."""
        self._last = path = self._rng.choice(self._files) if self._rng.random() < 0.6 else self._last
        makers: dict[str, Callable[[str], tuple[str, Sequence[Any], str, str]]] = {
            "shell": self._shell,
            "read": self._read,
            "edit": self._edit,
            "write": self._write,
            "list": self._list,
            "search": self._search,
            "patch": self._patch,
            "image": self._image,
            "plan": self._plan,
            "lookup": self._lookup,
        }
        request, values, result, answer = makers[kind](path)
        return request, self._tools[kind].call(self._rng, *values), result, answer

    # ---------------------------------------------------------------- one kind each: request, arguments, result, answer

    def _shell(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        rng = self._rng
        value = self._words.value()
        program = {"py": "python3", "js": "node"}.get(path.rpartition(".")[2], "cat")
        number = rng.randint(1, 40)
        names = " ".join(self._files)
        request, command, result, answer = rng.choice(
            (
                (f"Run {path}.", f"{program} {path}", value, f"It printed {value}."),
                ("List the files.", "ls", "\n".join(self._files), f"The files are {names}."),
                ("Which files are here?", "ls", "\n".join(self._files), f"The files are {names}."),
                ("Run the tests.", "pytest -q", f"{number} passed", f"All {number} tests pass."),
                ("Do the tests pass?", "pytest -q", f"1 failed, {number} passed", "One test fails."),
                ("Which files are changed?", "git status -s", f" M {path}", f"{path} is changed."),
                (f"How many lines has {path}?", f"wc -l {path}", f"{number} {path}", f"{path} has {number} lines."),
                (f"Show {path}.", f"cat {path}", value, f"{path} says: {value}"),
                (f"Delete {path}.", f"rm {path}", "", f"{path} is deleted."),
                ("What is the date?", "date", "Tue May 5 12:00:00 2026", "It is May 5."),
            )
        )
        (schema,) = self._tools["shell"].required.values()
        return request, [command.split() if schema["type"] == "array" else command], result, answer

    def _read(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        lines = [self._words.value() for _ in range(self._rng.randint(1, 3))]
        numbered = self._rng.random() < 0.5
        text = "\n".join(f"{number:6}\t{line}" if numbered else line for number, line in enumerate(lines, 1))
        request = self._rng.choice((f"Read {path}.", f"What is in {path}?", f"Open {path}.", f"What does {path} say?"))
        return request, [path], text, f"{path} says: {', '.join(lines)}"

    def _edit(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        old = self._words.word()
        new = self._words.word()
        forms = (
            f"Change {old} to {new} in {path}.",
            f"Replace {old} by {new} in {path}.",
            f"In {path}, {old} is {new}.",
        )
        return self._rng.choice(forms), [path, old, new], f"{path} has been updated.", f"{path} says {new} now."

    def _write(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        text = self._words.value()
        request = self._rng.choice(
            (f"Write {text} to {path}.", f"Create {path} with {text}.", f"Add {text} to {path}.")
        )
        return request, [path, text], f"{path} is written.", f"{path} says {text} now."

    def _list(self, _: str) -> tuple[str, Sequence[Any], str, str]:
        folder = self._rng.choice((".", *_FOLDERS))
        request = self._rng.choice(("List {f}.", "Which files are in {f}?", "Show me the files in {f}."))
        names = self._rng.sample(self._files, min(len(self._files), 3))
        where = "here" if folder == "." else folder
        return request.format(f=where), [folder], "\n".join(names), f"There are {', '.join(names)}."

    def _search(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        word = self._words.word()
        request = self._rng.choice((f"Where is {word}?", f"Find {word}.", f"Which file has the word {word}?"))
        return request, [word], f"{path}:{self._rng.randint(1, 40)}: {word}", f"{word} is in {path}."

    def _patch(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        request, (path, old, new), _, answer = self._edit(path)
        patch = f"*** Begin Patch\n*** Update File: {path}\n-{old}\n+{new}\n*** End Patch\n"
        return request, [patch], f"Success. Updated the following files:\nM {path}", answer

    def _image(self, _: str) -> tuple[str, Sequence[Any], str, str]:
        path = f"{self._words.word()}.png"
        return f"Look at {path}.", [path], "[image]", "I read text only."

    def _plan(self, path: str) -> tuple[str, Sequence[Any], str, str]:
        name, schema = next(iter(self._tools["plan"].required.items()))
        rng = self._rng
        step, status = schema["items"]["properties"]
        chosen = rng.sample(
            (f"Read {path}", "Run the tests", f"Edit {path}", "Look around", "Tell the user"), rng.randint(1, 2)
        )
        states = schema["items"]["properties"][status]["enum"]
        steps = [{step: text[:16].rstrip(), status: states[1 if n == 0 else 0]} for n, text in enumerate(chosen)]
        request = rng.choice(
            ("Make a plan.", "Plan first.", f"{path} is wrong. Find out why.", "The test fails.", f"Improve {path}.")
        )
        return request, [steps], rng.choice(("Plan updated", f"The {name} is saved.")), f"First: {chosen[0]}."

    def _lookup(self, _: str) -> tuple[str, Sequence[Any], str, str]:
        name, schema = next(iter(self._tools["lookup"].required.items()))
        value = self._words.value()
        chosen = self._rng.choice(schema["enum"])
        noun = self._tools["lookup"].description.split()[1]
        request = f"What is the {noun} of the {name} {chosen}?"
        return request, [chosen], f'{{"{noun}": "{value}"}}', f"The {noun} is {value}."

    # ---------------------------------------------------------------- files and tools

    def _file(self) -> str:
        name = f"{self._words.word()}.{self._rng.choice(_ENDINGS)}"
        return f"{self._rng.choice(_FOLDERS)}/{name}" if self._rng.random() < 0.15 else name

    def _tool(self, kind: str) -> _AgentTool:
        rng = self._rng
        if kind == "plan":
            step, status = rng.choice((("step", "status"), ("content", "status"), ("text", "state")))
            states = rng.choice((["pending", "in_progress", "completed"], ["open", "doing", "done"]))
            item = {
                "type": "object",
                "properties": {step: {"type": "string"}, status: {"type": "string", "enum": states}},
            }
            item |= {"required": [step, status]}
            plan = {"type": "array", "items": item}
            return _AgentTool(
                rng.choice(("update_plan", "TodoWrite", "set_plan", "todo")),
                "Show the plan.",
                {rng.choice(("plan", "todos", "steps")): plan},
            )
        if kind == "lookup":
            noun = self._words.word()
            server = self._words.word()
            key = rng.choice(listed("nouns"))
            parts = rng.sample(
                ("names", "colours", "days", "of", "each", "and", "their", "months", "last"), rng.randint(0, 6)
            )
            choices = [self._words.word() for _ in range(rng.randint(2, 4))]
            return _AgentTool(
                "_".join((f"mcp__{server}__{noun}", *parts)),
                f"The {noun} of a {key}.",
                {key: {"type": "string", "enum": choices}},
            )
        template = _KINDS[kind]
        name = rng.choice(template.names)
        description = rng.choice(template.descriptions)
        arguments = [rng.choice(names) for names in template.arguments]
        if kind == "patch" and rng.random() < 0.6:
            description += _GRAMMAR.replace("{a}", arguments[0])
        required = {argument: self._schema(argument) for argument in arguments}
        if name == "local_shell":
            required = {"command": {"type": "array", "items": {"type": "string"}}}
        made = _AgentTool(name, description, required)
        if kind not in ("patch", "image") and rng.random() < 0.4:
            argument, schema, value = rng.choice(_EXTRA)
            made.optional = {argument: schema}
            made.extra = {argument: value}
        return made

    def _schema(self, argument: str) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.25:
            schema["description"] = f"The {argument.replace('_', ' ')}"
        if rng.random() < 0.3:
            schema["maxLength"] = rng.choice((64, 80, 100, 120))
        return schema
