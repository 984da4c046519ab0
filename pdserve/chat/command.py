"""``pdserve chat``: connects, and answers one message or holds a conversation."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, suppress

from rich.console import Console

from pdserve.chat.client import Answer, ChatClient
from pdserve.chat.conversation import Conversation
from pdserve.chat.flags import SAMPLING
from pdserve.chat.screen import show_markdown, show_plain
from pdserve.chat.terminal import Chat
from pdserve.errors import ConfigError, shown


def chat(args: argparse.Namespace) -> int:
    """Answer ``--quick`` or a message on standard input, else hold a conversation. Raises PdserveError."""
    client = ChatClient(args)
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    conversation = Conversation(_model(client, args.model), args.system_prompt, sampling)
    console = Console(highlight=False)
    plain = args.plain or not console.is_terminal
    if args.quick is None and sys.stdin.isatty():
        _edit_lines()
        Chat(client, conversation, console, plain).run()
        return 0
    message = sys.stdin.read() if args.quick is None else args.quick
    if not message.strip():
        raise ConfigError("standard input holds no message; write one, or use --quick MESSAGE")
    with closing(client.stream(conversation.body(message), Answer())) as parts:
        (show_plain if plain else show_markdown)(parts, console)
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
