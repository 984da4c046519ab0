"""Reading messages and commands, and the loop of a conversation."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape

from cli.chat.client import Answer, ChatClient
from cli.chat.conversation import Conversation
from cli.chat.interrupts import Interrupts
from cli.chat.screen import clean, markdown_screen, plain_screen
from pdserve.errors import PdserveError, RequestError, cut

_QUOTES = '"""'
COMMANDS = {
    "/system [TEXT]": "show the system prompt, or set it; /system none removes it",
    "/clear": "forget the conversation; the system prompt stays",
    "/retry": "answer the last message again",
    "/model [NAME]": "show the models, or use another one",
    "/help": "show this",
    "/exit": "end, as Ctrl-D does",
}
_HELP = f"""Several lines: begin and end with {_QUOTES}, end a line with \\, or paste them. Ctrl-C stops an answer."""


def read_message(read: Callable[[str], str]) -> str:
    """Read a line, lines between quotes, or lines that end with a backslash. Raises EOFError and KeyboardInterrupt."""
    line = read("> ")
    if line.lstrip().startswith(_QUOTES):
        rest = line.lstrip()[len(_QUOTES) :]
        lines = list(_until_quotes(rest, read))
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(". "))
    return "\n".join(lines).strip()


def _until_quotes(line: str, read: Callable[[str], str]) -> Iterator[str]:
    while _QUOTES not in line:
        yield line
        line = read(". ")
    yield line.partition(_QUOTES)[0]


class Chat:
    """A conversation on a terminal."""

    def __init__(
        self,
        client: ChatClient,
        conversation: Conversation,
        console: Console,
        interrupts: Interrupts,
        plain: bool,
    ) -> None:
        self._client = client
        self._interrupts = interrupts
        self._conversation = conversation
        self._console = console
        self._screen = plain_screen if plain else markdown_screen
        self._commands = {
            "system": self._system,
            "clear": self._clear,
            "retry": self._retry,
            "model": self._model,
            "help": self._help,
        }

    def run(self) -> None:
        """Read and answer messages until /exit or the end of input."""
        self._note(f"{self._conversation.model} at {self._client.url}. /help shows the commands.")
        while True:
            try:
                message = self._interrupts.read(lambda: read_message(input))
            except KeyboardInterrupt:
                self._console.print()
                self._note("Ctrl-D or /exit ends the chat.")
                continue
            except EOFError:
                self._console.print()
                return
            if message in ("/exit", "/quit"):
                return
            if message:
                self._handle(message)

    def _handle(self, message: str) -> None:
        name, _, rest = message.removeprefix("/").partition(" ")
        try:
            if not message.startswith("/"):
                self._answer(message)
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                raise RequestError(f"unknown command /{cut(name)}; {_nearest(name, self._commands)}")
        except KeyboardInterrupt:  # while a command waited for the router
            self._note("stopped")
        except PdserveError as exc:
            self._console.print(f"[red]{escape(clean(str(exc)))}[/]", highlight=False, soft_wrap=True)

    def _answer(self, message: str) -> None:
        """Send a message and show the answer. Ctrl-C ends it and keeps the arrived part. Raises PdserveError."""
        answer = Answer()
        stopped = ""
        try:
            with self._screen(self._console) as draw:
                self._client.answer(self._conversation.body(message), answer, draw)
        except KeyboardInterrupt:
            stopped = "stopped"
        finally:
            self._conversation.add(message, answer.text)
        self._note(" · ".join(filter(None, (answer.summary(), stopped))))

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = "" if text == "none" else text
        self._note(f"system prompt: {self._conversation.system or 'none'}")

    def _clear(self, _: str) -> None:
        self._conversation.clear()
        self._note("The conversation is empty.")

    def _retry(self, _: str) -> None:
        message = self._conversation.take_last()
        if message is None:
            raise RequestError("there is no message to answer again")
        self._answer(message)

    def _model(self, name: str) -> None:
        names = self._client.models()
        if name and name not in names:
            raise RequestError(f"unknown model {cut(name)}; {_nearest(name, names)}")
        self._conversation.model = name or self._conversation.model
        self._note(", ".join(f"{model} (in use)" if model == self._conversation.model else model for model in names))

    def _help(self, _: str) -> None:
        width = max(map(len, COMMANDS))
        for command, text in COMMANDS.items():
            self._note(f"{command:<{width}}  {text}")
        self._note(_HELP)

    def _note(self, text: str) -> None:
        self._console.print(f"[dim]{escape(clean(text))}[/]", highlight=False, soft_wrap=True)


def _nearest(name: str, names: Iterable[str]) -> str:
    choices = list(names)
    nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {nearest[0]}?" if nearest else f"use one of {', '.join(choices)}"
