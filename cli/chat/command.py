"""``pdserve chat``: connects, and answers one message or holds a conversation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from cli.chat.client import Answer, ChatClient
from cli.chat.conversation import Conversation
from cli.chat.interrupts import Interrupts
from cli.chat.screen import markdown_screen, plain_screen
from cli.chat.terminal import Chat
from cli.router_url import add_router_url
from pdserve.errors import ConfigError, shown
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.host.process import run_command

#: Sampling parameters and their types. The router checks the values.
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: chat(make_parser().parse_args(argv)))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve chat", "Talk to a model in a terminal.")
    add_router_url(parser)
    parser.add_argument("--model", "--model-name", metavar="NAME", help="default: the first model of the router")
    parser.add_argument("--system-prompt", metavar="TEXT", default="", help="default: none")
    quick = "send one message, print the answer and exit; so does a message on standard input"
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help=quick)
    parser.add_argument("--plain", action="store_true", help="print text as it is, not as Markdown")
    for name, kind in SAMPLING.items():
        text = "default: as many as fit" if name == "max_tokens" else "default: the model's"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    return parser


def chat(args: argparse.Namespace) -> int:
    """Answer ``--quick`` or a message on standard input, else hold a conversation. Raises PdserveError."""
    interrupts = Interrupts()
    with ChatClient(args, interrupts) as client, interrupts.handled():
        return _chat(args, client, interrupts)


def _chat(args: argparse.Namespace, client: ChatClient, interrupts: Interrupts) -> int:
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    conversation = Conversation(_model(client, args.model), args.system_prompt, sampling)
    console = Console(highlight=False)
    plain = args.plain or not console.is_terminal
    if args.quick is None and sys.stdin.isatty():
        _edit_lines()
        Chat(client, conversation, console, interrupts, plain).run()
        return 0
    message = interrupts.read(sys.stdin.read) if args.quick is None else args.quick
    if not message.strip():
        raise ConfigError("standard input holds no message; write one, or use --quick MESSAGE")
    with (plain_screen if plain else markdown_screen)(console) as draw:
        client.answer(conversation.body(message), Answer(), draw)
    return 0


def _model(client: ChatClient, wanted: str | None) -> str:
    names = client.models()
    if not names:
        raise ConfigError(f"{client.url} serves no model; check the URL")
    if wanted is not None and wanted not in names:
        raise ConfigError(f"{client.url} serves no model {shown(wanted)}; use one of {', '.join(names)}")
    return wanted or names[0]


def _edit_lines() -> None:
    """Let ``input`` edit lines with a history; pasted lines become one message if readline supports it."""
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
