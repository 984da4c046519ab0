"""The options of a router and their flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from pdserve.config.flags import (
    DRAIN_SECONDS,
    CommandParser,
    add_drain_flag,
    add_tls_flag,
    command_parser,
    node_source,
    parse_size,
    port_number,
    positive_int,
    seconds,
)
from pdserve.config.resolve import model_name
from pdserve.errors import ConfigError
from pdserve.http.connections import UNREAD_SECONDS
from pdserve.logs import add_log_flag
from pdserve.tracing.trace_flags import add_trace_flag, add_trace_sample_flag
from router.fleet.policy import POLICIES, PREFIX_AWARE
from router.text.chat.parsers import parser_name, parser_names

MAX_LOGPROBS = 65_536  # what fits into a message of a node


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``prefill``, ``decode`` and ``node`` are sources of node addresses (pdserve/discovery/sources.py)."""

    models: tuple[tuple[str, str], ...]  # name in the API; directory or hub id
    aliases: tuple[str, ...] = ()  # further names of the only model
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    node: tuple[str, ...] = ()  # of both roles
    policy: str = PREFIX_AWARE
    request_timeout: float = 600.0  # seconds
    migrations: int = 2  # per prompt
    max_inflight: int = 1024  # requests
    max_queue: int = 1024  # requests
    max_connections: int | None = None  # of clients; None: by the limit of open files
    api_keys: str | None = None  # TOML file (router/gate/keys.py)
    api_key: str | None = None  # of all clients; neither: no authentication
    metrics_port: int | None = None  # 0: any free one; None: metrics at the port of the API only
    metrics_host: str = "127.0.0.1"
    metrics_client_names: bool = False
    cors_origins: tuple[str, ...] = ()  # of web pages that may use the API; "*": all
    dashboard: bool = True
    chat_page: bool = True
    log_requests: bool = False
    log_format: str = "text"
    log_level: str = ""  # PDSERVE_LOG_LEVEL
    traces: str = ""  # URL of a collector; "": no traces
    trace_sample: float = 1.0  # share of requests without a client's sampling decision
    tls_cert: str | None = None  # PEM file; both or none
    tls_key: str | None = None
    grpc_tls: str | None = None  # directory of certificates (pdserve/rpc/tls.py)
    client_stall_timeout: float = UNREAD_SECONDS
    drain_grace: float = 0.0  # seconds
    drain_timeout: float = DRAIN_SECONDS
    max_body_bytes: int = 32 * 1024 * 1024
    response_store: str | None = None  # "memory" or "sqlite:PATH"; None: no response is stored
    response_store_size: int = 256 * 1024 * 1024
    response_store_seconds: float = 30 * 86400.0  # as OpenAI keeps them
    generation_config: str = "auto"  # "auto": defaults of generation_config.json; "none"
    chat_template: str | None = None  # Jinja file; None: the checkpoint's
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_tokenizer_info_endpoint: bool = False
    trust_request_chat_template: bool = False
    max_logprobs: int = 20  # alternatives per output token
    status_fd: int | None = None
    lifeline_fd: int | None = None


def parse_options(argv: Sequence[str] | None = None) -> RouterOptions:
    """Raises ConfigError."""
    return router_options_from(make_parser().parse_args(argv))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve router", "Serve the OpenAI protocol to clients of decode nodes.")
    add_router_flags(parser)
    return parser


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag that ``router_options_from`` reads. Defaults are those of RouterOptions."""
    _add_model_flags(parser)
    defaults = dict(zip(RouterOptions.__struct_fields__[1:], RouterOptions.__struct_defaults__, strict=True))

    def add(flag: str, help: str, metavar: str | None = None, type: Any = str, **kwargs: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        if "action" not in kwargs:
            kwargs |= {"type": type, "metavar": metavar}
        parser.add_argument(flag, help=help, **{"default": defaults.get(name), **kwargs})

    add("--host", "address to listen on (default %(default)s)")
    add("--port", "port to listen on; 0 is any free port (default %(default)s)", "N", port_number)
    sources = "host:port, dns://name:port, k8s://namespace/service:port or file:///path"
    source: dict[str, Any] = {"type": node_source, "action": "append", "default": [], "metavar": "SOURCE"}
    parser.add_argument("--prefill", help=f"addresses of prefill nodes: {sources}; repeatable", **source)
    parser.add_argument("--decode", help="addresses of decode nodes, likewise; repeatable", **source)
    both = "addresses of nodes that prefill and decode (`pdserve serve`), likewise; repeatable"
    parser.add_argument("--node", help=both, **source)
    add("--policy", "how to choose nodes (default %(default)s)", choices=[*POLICIES])
    add("--request-timeout", "time limit of a request in seconds (default %(default)g)", "S", _timeout)
    migrations = "how often a request may continue on another decode node after a failure; 0: never"
    stall = "close the connection of a client that has read nothing for so long (default %(default)g)"
    add("--client-stall-timeout", stall, "S", _timeout)
    add("--migrations", f"{migrations} (default %(default)s)", "N", _count)
    text = "concurrent requests at the nodes; clients with few get an eighth more (default %(default)s)"
    add("--max-inflight", text, "N", positive_int)
    add("--max-queue", "waiting requests; more get a 503 (default %(default)s)", "N", _count)
    connections = "connections of clients; beyond, the longest idle one is closed"
    add("--max-connections", f"{connections} (default: by the limit of open files)", "N", positive_int)
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-keys", metavar="FILE", help="accept only API keys of this file; `pdserve key NAME` makes one"
    )
    key = "accept only this API key; PDSERVE_API_KEY in the environment keeps it from lists of processes"
    keys.add_argument("--api-key", metavar="KEY", type=_api_key, help=key)
    metrics = "serve /metrics without a key at this port, too; 0 is any free port"
    add("--metrics-port", f"{metrics} (default: none)", "N", port_number)
    add("--metrics-host", "address of --metrics-port (default %(default)s)")
    add("--metrics-client-names", "metrics by name of the API key", action="store_true")
    origins = "let web pages of this origin, such as https://chat.example, use the API; repeatable; * is any origin"
    cors: dict[str, Any] = {"type": _origin, "action": "append", "default": [], "metavar": "ORIGIN"}
    parser.add_argument("--cors-origin", dest="cors_origins", help=origins, **cors)
    no_dashboard = "no /dashboard, no `pdserve top`, and no response headers that name nodes"
    parser.add_argument("--no-dashboard", dest="dashboard", action="store_false", help=no_dashboard)
    no_chat = "no chat page at /"
    parser.add_argument("--no-chat-page", dest="chat_page", action="store_false", help=no_chat)
    add("--log-requests", "log each request with the name of its API key", action="store_true")
    add_log_flag(parser)
    add_trace_flag(parser)
    add_trace_sample_flag(parser)
    add("--tls-cert", "serve HTTPS with this PEM certificate and its chain", "FILE")
    add("--tls-key", "PEM file of the certificate's private key", "FILE")
    add_tls_flag(parser)
    add("--max-body-bytes", "larger request bodies get a 413 (default 32MiB)", "SIZE", parse_size)
    text = "store responses of /v1/responses: memory, or sqlite:PATH for a file that lasts (default: not stored)"
    add("--response-store", text, "STORE", _store)
    size = "oldest stored responses are removed beyond this size (default 256MiB)"
    add("--response-store-size", size, "SIZE", parse_size)
    age = "stored responses are removed after so many seconds (default %(default)g)"
    add("--response-store-seconds", age, "S", _age)
    grace = "after SIGTERM, /health fails this long before new requests are rejected (default %(default)g)"
    add("--drain-grace", grace, "S", seconds)
    add_drain_flag(parser, "it ends with an error; counted from the end of the grace period")
    text = "where sampling parameters come from that a request leaves out: auto is the model's generation_config.json"
    add("--generation-config", f"{text} (default %(default)s)", choices=["auto", "none"])
    add("--chat-template", "Jinja file, in place of the chat template of a single MODEL", "FILE")
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        add(flag, f"one of {', '.join(parser_names(flag))}", "NAME", partial(parser_name, flag))
    tokenizer_info = "serve the tokenizer's configuration and the chat template at /tokenizer_info"
    add("--enable-tokenizer-info-endpoint", tokenizer_info, action="store_true")
    trust = "accept chat_template in requests; it runs in a sandbox, in processes with limits of time and memory"
    add("--trust-request-chat-template", trust, action="store_true")
    text = f"alternatives per output token that a request may ask for; -1 is {MAX_LOGPROBS}"
    add("--max-logprobs", f"{text} (default %(default)s)", "N", _max_logprobs)
    add("--status-fd", "write process states to this file descriptor as JSON lines", "FD", int)
    add("--lifeline-fd", "exit when the other end of this file descriptor closes", "FD", int)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("model", metavar="MODEL", nargs="?", help="directory or hub id of tokenizer and chat template")
    named = "like MODEL, with the name that its nodes serve it under; repeatable"
    model.add_argument("--model", dest="model_flags", action="append", default=[], metavar="[NAME=]MODEL", help=named)
    name = "names of a single MODEL in the API; nodes and answers have the first (default: its directory's name)"
    parser.add_argument("--served-model-name", metavar="NAME", nargs="+", default=[], help=name)


def router_options_from(args: argparse.Namespace) -> RouterOptions:
    """Build RouterOptions from parsed flags. Raises ConfigError."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together; give both or none")
    models, aliases = _models(args)
    if args.chat_template is not None and len(models) > 1:
        raise ConfigError(f"--chat-template is for a single model, not for {len(models)}; start a router for each")
    own = ("models", "aliases")
    fields = {name: getattr(args, name) for name in RouterOptions.__struct_fields__ if name not in own}
    fields |= {name: tuple(fields[name]) for name in ("prefill", "decode", "node", "cors_origins")}
    return RouterOptions(models=models, aliases=aliases, **fields)


def _models(args: argparse.Namespace) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Unique names with their models, and further names of the only model."""
    given = [("", args.model)] if args.model else [_name_and_model(text) for text in args.model_flags]
    if args.served_model_name and (len(given) > 1 or given[0][0]):
        raise ConfigError("--served-model-name is for a single MODEL without NAME; write --model NAME=MODEL for each")
    served, *aliases = args.served_model_name or [""]
    pairs = [(name or served or model_name(model), model) for name, model in given]
    names = [*(name for name, _ in pairs), *aliases]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(
            f"the name {duplicate!r} is given twice; write --model NAME=MODEL with a unique name for each"
        )
    return tuple(pairs), tuple(aliases)


def _name_and_model(text: str) -> tuple[str, str]:
    name, equals, model = text.partition("=")
    if not equals:
        return "", text
    if not name or not model:
        raise ConfigError(f"--model {text!r} is incomplete; write --model NAME=MODEL")
    return name, model


def _age(text: str) -> int:
    value = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 999999999")
    return value


def _store(text: str) -> str:
    if text != "memory" and not re.fullmatch("sqlite:.+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a response store; use memory or sqlite:PATH")
    return text


def _api_key(text: str) -> str:
    if not re.fullmatch("[!-~]+", text):
        raise argparse.ArgumentTypeError("a key has one or more visible ASCII characters, and no blanks")
    return text


def _origin(text: str) -> str:
    """An origin as browsers send it: scheme and host, no path."""
    if text != "*" and not re.fullmatch(r"https?://[^/\s]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin such as https://chat.example, without a path")
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _max_logprobs(text: str) -> int:
    if text == "-1":
        return MAX_LOGPROBS
    value = _count(text)
    if value > MAX_LOGPROBS:
        raise argparse.ArgumentTypeError(f"{value} must be at most {MAX_LOGPROBS}")
    return value


def _timeout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{value:g} must be above 0 and at most 86400 seconds")
    return value
