"""What a router is told at its start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.config.flags import (
    DRAIN_SECONDS,
    CommandParser,
    add_drain_flag,
    add_tls_flag,
    node_source,
    parse_size,
    positive_int,
    seconds,
)
from pdserve.config.resolve import model_name
from pdserve.errors import ConfigError
from pdserve.logs import add_log_flag
from pdserve.tracing.trace_flags import add_trace_flag, add_trace_sample_flag
from router.fleet.policy import POLICIES, PREFIX_AWARE
from router.text.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_name, tool_parser_name


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``prefill`` and ``decode`` are places (pdserve/discovery/sources.py)."""

    models: tuple[tuple[str, str], ...]  # name in the API; directory or hub id, for tokenizer and chat template
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    policy: str = PREFIX_AWARE  # of router.fleet.policy.POLICIES
    request_timeout: float = 600.0  # seconds
    migrations: int = 2  # of a prompt
    max_inflight: int = 1024  # HTTP requests
    max_queue: int = 1024  # HTTP requests that wait for one of these
    api_keys: str | None = None  # a file (router/gate/keys.py); None: anybody may ask
    protect_metrics: bool = False
    dashboard: bool = True
    log_requests: bool = False
    log_format: str = "text"
    traces: str = ""  # URL of a collector; "": no traces
    trace_sample: float = 1.0  # of requests whose clients do not decide it
    tls_cert: str | None = None  # files in PEM; both or none
    tls_key: str | None = None
    grpc_tls: str | None = None  # directory with certificates (pdserve/rpc/tls.py)
    drain_grace: float = 0.0  # seconds
    drain_timeout: float = DRAIN_SECONDS
    max_body_bytes: int = 32 * 1024 * 1024
    tool_call_parser: str = "auto"  # of the names in router/text/chat/parsers.py, as the next
    reasoning_parser: str = "auto"
    status_fd: int | None = None
    lifeline_fd: int | None = None


def parse_options(argv: Sequence[str] | None = None) -> RouterOptions:
    """Raises ConfigError with one line on what is wrong."""
    parser = CommandParser(prog="pdserve router", description="Serve the OpenAI protocol to clients of decode nodes.")
    add_router_flags(parser)
    return router_options_from(parser.parse_args(argv))


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag that ``router_options_from`` reads."""
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", metavar="MODEL", nargs="?", help="directory or hub id, for tokenizer and chat template")
    model.add_argument(
        "--model",
        dest="model_flags",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="the same as a flag, with the name in the API that its nodes serve it under; repeatable",
    )
    add("--served-model-name", metavar="NAME", help="name of a single MODEL (default: that of its directory)")
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=_port, default=8000, metavar="N", help="port to listen on; 0 is any (default %(default)s)")
    places: dict[str, Any] = {"type": node_source, "action": "append", "default": [], "metavar": "PLACE"}
    where = "host:port, dns://name:port, k8s://namespace/service:port or file:///path"
    add("--prefill", **places, help=f"where prefill nodes are: {where}; repeatable")
    add("--decode", **places, help="where decode nodes are, likewise; repeatable")
    add("--policy", choices=[*POLICIES], default=PREFIX_AWARE, help="how nodes are chosen (default %(default)s)")
    add("--request-timeout", type=_seconds, default=600.0, metavar="S", help="seconds a request may take (default 600)")
    add(
        "--migrations",
        type=_count,
        default=2,
        metavar="N",
        help="how often a request may go on at another decode node, from the tokens it has, when the one that it is on "
        "fails; 0 is never (default %(default)s)",
    )
    add("--max-inflight", type=positive_int, default=1024, metavar="N", help="requests at the nodes at once")
    add("--max-queue", type=_count, default=1024, metavar="N", help="requests waiting for that; more get a 503")
    add("--api-keys", metavar="FILE", help="serve only who has a key of this file; `pdserve key NAME` makes one")
    add("--protect-metrics", action="store_true", help="/metrics wants a key, too")
    add("--no-dashboard", dest="dashboard", action="store_false", help="no /dashboard, and nothing for `pdserve top`")
    add("--log-requests", action="store_true", help="a line in the log for each request, with the name of its key")
    add_log_flag(parser)
    add_trace_flag(parser)
    add_trace_sample_flag(parser)
    add("--tls-cert", metavar="FILE", help="serve HTTPS, with this certificate and what links it to its CA, in PEM")
    add("--tls-key", metavar="FILE", help="the certificate's private key, in PEM")
    add_tls_flag(parser)
    add("--max-body-bytes", type=parse_size, default=32 * 1024 * 1024, metavar="SIZE", help="larger bodies get a 413")
    add(
        "--drain-grace",
        type=seconds,
        default=0.0,
        metavar="S",
        help="how long requests are taken in after SIGTERM, while /health says no: until load balancers have noticed "
        "(default %(default)s)",
    )
    add_drain_flag(parser, "it ends with an error; counted from the end of that grace")
    tools, reasoning = ("auto", "none", *TOOL_PARSERS), ("auto", "none", *REASONING_PARSERS)
    add("--tool-call-parser", type=tool_parser_name, default="auto", metavar="NAME", help=f"one of {', '.join(tools)}")
    add(
        "--reasoning-parser",
        type=reasoning_parser_name,
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(reasoning)}",
    )
    add("--status-fd", type=int, metavar="FD", help="write states to this file descriptor, as JSON lines")
    add("--lifeline-fd", type=int, metavar="FD", help="exit when this file descriptor is closed at the other end")


def router_options_from(args: argparse.Namespace) -> RouterOptions:
    """The RouterOptions that flags added by ``add_router_flags`` ask for. Raises ConfigError."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both or none")
    fields = {name: getattr(args, name) for name in RouterOptions.__struct_fields__ if name != "models"}
    fields |= {"prefill": tuple(args.prefill), "decode": tuple(args.decode)}
    return RouterOptions(models=_models(args), **fields)


def _models(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Names and models, none twice."""
    given = [("", args.model)] if args.model else [_pair(text) for text in args.model_flags]
    if args.served_model_name and (len(given) > 1 or given[0][0]):
        raise ConfigError("--served-model-name is for a single MODEL without NAME; write --model NAME=MODEL for each")
    pairs = [(name or args.served_model_name or model_name(model), model) for name, model in given]
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two models are named {twice!r}; write --model NAME=MODEL with a name of its own for each")
    return tuple(pairs)


def _pair(text: str) -> tuple[str, str]:
    """Name, or "", and model of [NAME=]MODEL."""
    name, equals, model = text.partition("=")
    if not equals:
        return "", text
    if not name or not model:
        raise ConfigError(f"--model {text!r} is incomplete; write --model NAME=MODEL")
    return name, model


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose 0 … 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{value:g} must be above 0 and at most 86400 seconds")
    return value
