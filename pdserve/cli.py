"""The ``pdserve`` command. Each command imports what it needs, so ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pdserve import __version__
from pdserve.api_keys import NAME, key_entry, new_key
from pdserve.bench.flags import add_bench_flags
from pdserve.chat.flags import add_chat_flags, add_router_url
from pdserve.config.flag_sources import add_config_flag
from pdserve.config.flags import (
    CommandParser,
    add_node_flags,
    add_tls_flag,
)
from pdserve.config.hub import EMBEDDED_MODEL
from pdserve.plan.plan_flags import add_plan_flags
from pdserve.process import run_command
from pdserve.weights.flags import add_weights_flags

#: Commands of this process: (module, function of the parsed flags that returns the exit status).
COMMANDS = {
    "bench": ("pdserve.bench.command", "bench"),
    "chat": ("pdserve.chat.command", "chat"),
    "explain": ("pdserve.doctor.explain", "explain"),
    "plan": ("pdserve.plan.command", "plan"),
    "probe": ("pdserve.doctor.probe", "probe"),
    "top": ("pdserve.top.command", "top"),
    "weights": ("pdserve.weights.command", "weights"),
    "key": ("pdserve.cli", "make_key"),
}
#: Commands that replace this process by another program: (module, help text).
PROGRAMS = {
    "up": ("launcher", "start prefill nodes, decode nodes and a router on this machine"),
    "prefill": ("prefill_node", "start a prefill node"),
    "decode": ("decode_node", "start a decode node"),
    "serve": ("elastic_node", "start a node that prefills and decodes"),
    "router": ("router", "start a router"),
    "completion": ("launcher.completion", "print a completion script for a shell"),
    "doctor": ("launcher.doctor", "check whether a node with these flags would start and work on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    if argv and argv[0] in PROGRAMS:
        # The base layer never imports the programs; -P keeps the current directory off sys.path.
        os.execv(sys.executable, [sys.executable, "-P", "-m", PROGRAMS[argv[0]][0], *argv[1:]])
    args = make_parser().parse_args(argv)
    if args.command is None:
        make_parser().print_help()
        return 2
    module, function = COMMANDS[args.command]
    return int(getattr(import_module(module), function)(args))


def make_key(args: argparse.Namespace) -> int:
    """Print the key on stderr, for its user, and the entry for the key file on stdout."""
    key = new_key()
    print(f"API key of {args.name}, shown only once: {key}", file=sys.stderr)
    print(key_entry(args.name, key))
    return 0


def make_parser() -> CommandParser:
    """Return the parser of ``COMMANDS``, with the names of ``PROGRAMS``."""
    parser = CommandParser(
        prog="pdserve",
        description="Serve large language models with prefill and decode on separate machines.",
        epilog="pdserve COMMAND --help lists the flags of a command. Models: a checkpoint directory or a hub id.",
    )
    parser.add_argument("--version", action="version", version=f"pdserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, summary) in PROGRAMS.items():
        commands.add_parser(name, help=summary, add_help=False)
    bench = commands.add_parser("bench", help="measure a running OpenAI-compatible server")
    add_router_url(bench)
    add_bench_flags(bench)
    add_chat_flags(commands.add_parser("chat", help="talk to a model in a terminal"))
    explain = commands.add_parser("explain", help="show the resolved configuration without loading weights")
    add_node_flags(explain, model_default=str(EMBEDDED_MODEL))
    explain.add_argument("--json", action="store_true", help="print JSON")
    add_plan_flags(commands.add_parser("plan", help="compute how many prefill and decode nodes a workload needs"))
    _add_probe(commands.add_parser("probe", help="check the health of a node: exit status 0 if healthy"))
    _add_top(commands.add_parser("top", help="watch a router and its nodes in a terminal"))
    add_weights_flags(commands.add_parser("weights", help="show and change the weights of running nodes"))
    key = commands.add_parser("key", help="make an API key and its entry for `pdserve router --api-keys FILE`")
    key.add_argument("name", type=_key_name, metavar="NAME", help="name of the client, in logs and metrics")
    for name in COMMANDS:
        add_config_flag(commands.choices[name])
    return parser


def _key_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid name; use up to 64 letters, digits, '_', '.' and '-'"
        )
    return text


def _add_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", help="address of the node")
    parser.add_argument(
        "service",
        metavar="SERVICE",
        nargs="?",
        default="",
        help="live: the engine responds; loaded: the model is loaded; without: the node accepts requests",
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds (default %(default)s)")
    add_tls_flag(parser)


def _add_top(parser: argparse.ArgumentParser) -> None:
    add_router_url(parser)
    parser.add_argument("--once", action="store_true", help="print once as plain text (default when piped)")
