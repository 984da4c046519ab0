"""``pdserve chat``: connects, and answers one message or holds a conversation."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress

from rich.console import Console

from pdserve.chat.client import Answer, ChatClient
from pdserve.chat.conversation import Conversation
from pdserve.chat.flags import SAMPLING
from pdserve.chat.interrupts import Interrupts
from pdserve.chat.screen import markdown_screen, plain_screen
from pdserve.chat.terminal import Chat
from pdserve.errors import ConfigError, shown


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
    """Have ``input`` edit lines with a history; pasted lines become one message where readline knows how."""
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
