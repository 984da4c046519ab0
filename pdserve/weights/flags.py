"""Flags of ``pdserve weights``."""

from __future__ import annotations

import argparse

from pdserve.config.flags import add_tls_flag
from pdserve.weight_change import WAIT, WHEN


def add_weights_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_nodes(actions.add_parser("show", help="print state and weights of nodes"))
    reload = actions.add_parser("reload", help="load another checkpoint of the same model, one node after the other")
    _add_nodes(reload)
    _add_model(reload, required=True)
    _add_when(reload)
    _add_pause(reload)
    patch = actions.add_parser("patch", help="change some values of the weights, one node after the other")
    _add_nodes(patch)
    patch.add_argument("--file", required=True, metavar="FILE", help="patch in safetensors format (docs/operate.md)")
    _add_when(patch)
    _add_pause(patch)
    sleep = actions.add_parser(
        "sleep", help="end the engines of nodes: weights and KV are dropped, all memory is freed"
    )
    _add_nodes(sleep)
    _add_when(sleep)
    wake = actions.add_parser("wake", help="start the engines of sleeping nodes again")
    _add_nodes(wake)
    _add_model(wake, required=False)


def _add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    text = "directory of the checkpoint on the nodes' hosts, below that of their --allow-weight-changes"
    if not required:
        text += " (default: the one that the node has loaded last)"
    parser.add_argument("--model", required=required, default="", metavar="DIR", help=text)


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="host:port of a node")
    add_tls_flag(parser)


def _add_pause(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pause",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between a node and the next one, in which routers and peers learn that it serves again "
        "(default %(default)s)",
    )


def _add_when(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--when",
        choices=WHEN,
        default=WAIT,
        help="wait: requests that run on the node end first, within its --drain-timeout; abort: they end now, and "
        "routers continue them on nodes with the same weights (default %(default)s)",
    )
