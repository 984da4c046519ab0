"""The flags of ``pdserve up``: its own, and those of the programs that it starts, from their parsers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import msgspec

from decode_node.decode_flags import add_flags as add_decode_flags
from elastic_node.elastic_flags import add_flags as add_elastic_flags
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.node_options import add_node_flags
from pdserve.errors import ConfigError
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.flags.value_types import positive_int
from prefill_node.prefill_flags import add_flags as add_prefill_flags
from router.options import RouterOptions, add_router_flags, router_options_from

#: Flags of programs that ``up`` sets itself, by their names among parsed arguments.
_OWN = {
    "model",
    "model_flags",
    "served_model_name",
    "prefill",
    "decode",
    "node",
    "kv_source",
    "status_fd",
    "lifeline_fd",
    "home_node",
}
#: Flags of the router that nodes have, too.
_COMMON = {"traces", "log_requests", "log_format", "drain_timeout"}


class _Names(argparse.Action):
    """The names of the model: nodes have the first."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        namespace.served_model_name, *namespace.aliases = values


def actions_of(add_flags: Callable[[argparse.ArgumentParser], None]) -> list[argparse.Action]:
    """Return the flags of a program that users give: not those that name nodes and parents."""
    parser = CommandParser(add_help=False)
    add_flags(parser)
    return [action for action in parser._actions if action.dest not in _OWN]


_ACTIONS = {
    "router": actions_of(add_router_flags),
    "prefill": actions_of(add_prefill_flags),
    "decode": actions_of(add_decode_flags),
    "elastic": actions_of(add_elastic_flags),
}


def make_parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "pdserve up",
        "Start a router and nodes on this machine: on GPUs one node each, which prefills and decodes, else a prefill "
        "node and a decode node. A process that dies starts again, while the others serve on.",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", type=positive_int, metavar="N", help=f"{role} nodes (default 1)")
    elastic = "start nodes that prefill and decode (the default on GPUs, without flags of prefill or decode nodes)"
    parser.add_argument("--elastic", action="store_true", help=elastic)
    nodes = "nodes that prefill and decode (default: one per GPU, 2 without GPUs)"
    parser.add_argument("--nodes", type=positive_int, metavar="N", help=nodes)
    parser.set_defaults(aliases=[])
    names = "names of the model in the API; answers have the first (default: the name of MODEL)"
    parser.add_argument("--served-model-name", metavar="NAME", nargs="+", action=_Names, help=names)
    add_node_flags(parser, model_default=str(EMBEDDED_MODEL), without=("served_model_name",))
    parser.set_defaults(model=None)  # ``settle_model`` puts the embedded model there
    for role in ("prefill", "decode"):
        ranks = parser.add_argument_group(f"ranks of {role} nodes")
        for flag, what in (("pp", "pipeline stages"), ("tp", "tensor shards of each stage")):
            ranks.add_argument(f"--{role}-{flag}", type=positive_int, metavar="N", help=f"{what} (default: --{flag})")
    for role, actions in _ACTIONS.items():
        group = parser.add_argument_group(role if role == "router" else f"{role} nodes")
        for action in actions:
            if action.option_strings[0] not in parser._option_string_actions:
                group._add_action(action)
    keys = parser.add_mutually_exclusive_group()
    keys._group_actions += [parser._option_string_actions[flag] for flag in ("--api-keys", "--api-key")]
    return parser


def settle_model(args: argparse.Namespace) -> None:
    """Choose the embedded model if none is given. Raises ConfigError for several names then: one may be the MODEL."""
    if args.model is None:
        if args.aliases:
            raise ConfigError(
                "--served-model-name with several names is for a given MODEL; write MODEL before this flag"
            )
        args.model = str(EMBEDDED_MODEL)


def flag_of_split_roles(args: argparse.Namespace) -> str | None:
    """Return a given flag that is for prefill nodes or for decode nodes; None without any."""
    names = ("prefill", "decode", *(f"{role}_{size}" for role in ("prefill", "decode") for size in ("pp", "tp")))
    given = next((name for name in names if getattr(args, name) is not None), None)
    return given and "--" + given.replace("_", "-")


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags of prefill or decode nodes together with one for nodes of both roles."""
    flag = flag_of_split_roles(args)
    if flag is not None and (args.elastic or args.nodes is not None):
        both = "--elastic" if args.elastic else "--nodes"
        raise ConfigError(f"{both} is for nodes of both roles, {flag} for others; use --nodes, --pp and --tp")


def role_words(role: str, args: argparse.Namespace) -> list[str]:
    """Return the command line of a program without its model: the flags that differ from their defaults.

    A node's options (pdserve/config/node_config.py) are not among them.
    """
    actions = [action for action in _ACTIONS[role] if action.dest != "api_key"]
    if role != "router":
        actions = [*actions, *(action for action in _ACTIONS["router"] if action.dest in _COMMON)]
    return [word for action in actions for word in words_of_action(action, getattr(args, action.dest))]


def router_options(args: argparse.Namespace) -> RouterOptions:
    """Return the options of the router before it knows nodes. Raises ConfigError for flags that do not go together."""
    parser = CommandParser(prog="pdserve up")
    add_router_flags(parser)
    names = [args.served_model_name, *args.aliases] if args.aliases else []
    words = ["--served-model-name", *names] if names else []
    options = router_options_from(parser.parse_args([args.model, *words, *role_words("router", args)]))
    return msgspec.structs.replace(options, api_key=args.api_key)


def set_secrets(args: argparse.Namespace) -> None:
    """Put the API key where the router reads it: all users can list command lines, but not environments."""
    os.environ.pop("PDSERVE_API_KEY", None)
    if args.api_key is not None:
        os.environ["PDSERVE_API_KEY"] = args.api_key


def words_of_action(action: argparse.Action, value: object) -> list[str]:
    flag = action.option_strings[0]
    if value == action.default:
        return []
    if action.nargs == 0:
        return [flag]
    values = value if isinstance(value, list) else [value]
    return [word for item in values for word in (flag, str(item))]
