"""The ``pdserve`` command. Imports nothing heavy: ``--help`` answers at once, each command loads what it needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from pdserve.api_keys import NAME, key_entry, new_key
from pdserve.config.embedded import EMBEDDED_MODEL
from pdserve.config.flags import (
    CommandParser,
    add_drain_flag,
    add_node_flags,
    add_tls_flag,
    options_from,
    port_number,
    positive_int,
)
from pdserve.exits import run_command
from pdserve.logs import add_log_flag
from pdserve.plan.plan_flags import add_plan_flags
from pdserve.tracing.trace_flags import add_trace_flag, add_trace_sample_flag

#: Commands that are processes of their own, with the module that is their program.
ROLES = {
    "prefill": ("prefill_node", "start a prefill node"),
    "decode": ("decode_node", "start a decode node"),
    "router": ("router", "start a router"),
    "doctor": ("engine.doctor", "say whether a node with these flags would start on this machine, and do it all"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return run_command(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    if argv and argv[0] in ROLES:
        _become(ROLES[argv[0]][0], argv[1:])
    args = _parser().parse_args(argv)
    if args.command == "up":
        from pdserve.launcher.up import up

        return up(args)
    if args.command == "explain":
        from pdserve.doctor.explain import explain

        explain(options_from(args), as_json=args.json)
        return 0
    if args.command == "plan":
        from pdserve.plan.command import plan

        return plan(args)
    if args.command == "probe":
        from pdserve.doctor.probe import probe

        return probe(args)
    if args.command == "top":
        from pdserve.top.command import top

        return top(args)
    if args.command == "key":
        return _make_key(args.name)
    _parser().print_help()
    return 2


def _make_key(name: str) -> int:
    """The key goes to its user; what the file holds of it goes to stdout, so that it can be appended."""
    key = new_key()
    print(f"the key of {name}, which is shown only here: {key}", file=sys.stderr)
    print(key_entry(name, key))
    return 0


def _become(module: str, argv: list[str]) -> None:
    """Go on as the program of a role. The base layer never imports the roles; -P keeps the current directory out."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *argv])


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="pdserve",
        description="Serves large language models with prefill and decode on separate machines.",
        epilog="pdserve COMMAND --help lists the flags of a command. Models: a checkpoint directory or a hub id.",
    )
    parser.add_argument("--version", action="version", version=f"pdserve {version('pdserve')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_up(commands.add_parser("up", help="start prefill nodes, decode nodes and a router on this machine"))
    for name, (_, summary) in ROLES.items():
        commands.add_parser(name, help=summary, add_help=False)
    explain = commands.add_parser("explain", help="say what would run, without loading weights")
    add_node_flags(explain, model_default=str(EMBEDDED_MODEL))
    explain.add_argument("--json", action="store_true", help="for programs")
    add_plan_flags(commands.add_parser("plan", help="say how many prefill and decode nodes a workload needs"))
    _add_probe(commands.add_parser("probe", help="ask a node for its health: status 0 when it is well"))
    _add_top(commands.add_parser("top", help="watch a router and its nodes in a terminal"))
    key = commands.add_parser("key", help="make an API key: what `pdserve router --api-keys FILE` is to hold of it")
    key.add_argument("name", type=_key_name, metavar="NAME", help="of its user, in logs and metrics")
    return parser


def _key_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name; use up to 64 letters, digits, '_', '.' and '-'")
    return text


def _add_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", help="of a node")
    parser.add_argument(
        "service",
        metavar="SERVICE",
        nargs="?",
        default="",
        help="live: its engine goes on; loaded: its model is there; none: it takes requests",
    )
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds (default %(default)s)")
    add_tls_flag(parser)


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="of the router")
    parser.add_argument("--api-key", metavar="KEY", help="where the router wants one; or in PDSERVE_API_KEY")
    parser.add_argument("--once", action="store_true", help="print it once, as plain text; so it does into a pipe")


def _add_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=positive_int, default=1, metavar="N", help="prefill nodes (default 1)")
    parser.add_argument("--decode", type=positive_int, default=1, metavar="N", help="decode nodes (default 1)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the API (default %(default)s)")
    parser.add_argument(
        "--port", type=port_number, default=8000, help="port of the API (default %(default)s; 0: any free one)"
    )
    add_drain_flag(parser, "it ends with an error")
    parser.add_argument("--api-keys", metavar="FILE", help="serve only who has a key of this file (pdserve key NAME)")
    parser.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS, with this certificate in PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="the certificate's private key, in PEM")
    parser.add_argument("--log-requests", action="store_true", help="lines in the log for each request")
    add_log_flag(parser)
    add_trace_flag(parser)
    add_trace_sample_flag(parser)
    add_node_flags(parser, model_default=str(EMBEDDED_MODEL))
    for kind in ("prefill", "decode"):
        ranks = parser.add_argument_group(f"ranks of {kind} nodes")
        for flag, what in (("pp", "pipeline stages"), ("tp", "tensor shards of each stage")):
            ranks.add_argument(f"--{kind}-{flag}", type=positive_int, metavar="N", help=f"{what} (default: --{flag})")
