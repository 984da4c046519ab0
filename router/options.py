"""The options of a router and their flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from pdserve.config.node_options import model_name
from pdserve.discovery.sources import ADDRESS_FORMS, check_source
from pdserve.errors import ConfigError
from pdserve.flags.declaration import Flag, add_flags, options_from
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.flags.shared import DAY, DRAIN_SECONDS, GRPC_TLS, LIFELINE_FD, STATUS_FD, drain_flag
from pdserve.flags.value_types import natural, parse_size, port_number
from pdserve.http.connections import IDLE_SECONDS, UNREAD_SECONDS
from pdserve.logs import LOG_FORMAT, LOG_LEVEL
from pdserve.tracing.trace_flags import TRACE_SAMPLE, TRACES
from router.fleet.policy import POLICIES, PREFIX_AWARE
from router.text.chat.parsers import parser_name, parser_names

MAX_LOGPROBS = 65_536  # as many fit into a message of a node


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


def _max_logprobs(text: str) -> int:
    if text == "-1":
        return MAX_LOGPROBS
    value = natural(text)
    if value > MAX_LOGPROBS:
        raise argparse.ArgumentTypeError(f"{value} must be at most {MAX_LOGPROBS}")
    return value


def _nodes(help: str) -> Flag:
    return Flag(f"{help}; repeatable", metavar="SOURCE", parse=check_source, repeatable=True)


def _parser(flag: str) -> Flag:
    return Flag(f"one of {', '.join(parser_names(flag))}", metavar="NAME", parse=partial(parser_name, flag))


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Each option with its flag. ``models`` come from flags that ``add_router_flags`` adds itself."""

    models: tuple[tuple[str, str], ...]  # name in the API; directory or hub id
    aliases: tuple[str, ...] = ()  # further names of the only model
    host: Annotated[str, Flag("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Flag("port to listen on; 0 is any free port", metavar="N", parse=port_number)] = 8000
    prefill: Annotated[tuple[str, ...], _nodes(f"addresses of prefill nodes: {ADDRESS_FORMS}")] = ()
    decode: Annotated[tuple[str, ...], _nodes("addresses of decode nodes, likewise")] = ()
    node: Annotated[
        tuple[str, ...], _nodes("addresses of nodes that prefill and decode (`pdserve serve`), likewise")
    ] = ()
    home_node: Annotated[
        str | None,
        Flag(
            "id of the only node that decodes: the router runs beside it; others of both roles compute prompts",
            metavar="ID",
            unset="all decode nodes",
        ),
    ] = None
    policy: Annotated[str, Flag("how to choose nodes", choices=tuple(POLICIES))] = PREFIX_AWARE
    request_timeout: Annotated[float, Flag("time limit of a request in seconds", metavar="S", above=0, at_most=DAY)] = (
        600.0
    )
    sse_keep_alive: Annotated[
        float,
        Flag(
            "a stream that has sent nothing for so long gets its status line, and a comment or ping; 0: never",
            metavar="S",
            at_least=0,
            at_most=DAY,
        ),
    ] = 10.0
    keep_alive_timeout: Annotated[
        int,
        Flag(
            "close a connection without a request after so long; longer than proxies keep it",
            metavar="S",
            at_least=1,
            at_most=int(DAY),
        ),
    ] = IDLE_SECONDS
    client_stall_timeout: Annotated[
        float,
        Flag("close the connection of a client that has read nothing for so long", metavar="S", above=0, at_most=DAY),
    ] = UNREAD_SECONDS
    migrations: Annotated[
        int,
        Flag(
            "how often a request may continue on another decode node after a failure; 0: never",
            metavar="N",
            parse=natural,
        ),
    ] = 2
    max_inflight: Annotated[
        int,
        Flag("concurrent requests at the nodes; clients with few get an eighth more", metavar="N", at_least=1),
    ] = 1024
    max_queue: Annotated[int, Flag("waiting requests; more get a 503", metavar="N", parse=natural)] = 1024
    max_connections: Annotated[
        int | None,
        Flag(
            "connections of clients; beyond, the longest idle one is closed",
            metavar="N",
            at_least=1,
            unset="by the limit of open files",
        ),
    ] = None
    api_keys: Annotated[
        str | None,
        Flag("accept only API keys of this file; `pdserve key NAME` makes one", metavar="FILE", excludes="API keys"),
    ] = None
    api_key: Annotated[
        str | None,
        Flag(
            "accept only this API key; PDSERVE_API_KEY in the environment keeps it from lists of processes",
            metavar="KEY",
            parse=_api_key,
            excludes="API keys",
        ),
    ] = None
    metrics_port: Annotated[
        int | None,
        Flag(
            "serve /metrics without a key at this port, too; 0 is any free port",
            metavar="N",
            parse=port_number,
            unset="none",
        ),
    ] = None
    metrics_host: Annotated[str, Flag("address of --metrics-port")] = "127.0.0.1"
    metrics_client_names: Annotated[bool, Flag("metrics by name of the API key")] = False
    cors_origins: Annotated[
        tuple[str, ...],
        Flag(
            "let web pages of this origin, such as https://chat.example, use the API; repeatable; * is any origin",
            spelling="--cors-origin",
            metavar="ORIGIN",
            parse=_origin,
            repeatable=True,
        ),
    ] = ()
    dashboard: Annotated[bool, Flag("no /dashboard, and no response headers that name nodes")] = True
    chat_page: Annotated[bool, Flag("no chat page at /")] = True
    log_requests: Annotated[bool, Flag("log each request with the name of its API key")] = False
    log_format: Annotated[str, LOG_FORMAT] = "text"
    log_level: Annotated[str, LOG_LEVEL] = ""
    traces: Annotated[str, TRACES] = ""
    trace_sample: Annotated[float, TRACE_SAMPLE] = 1.0
    tls_cert: Annotated[str | None, Flag("serve HTTPS with this PEM certificate and its chain", metavar="FILE")] = None
    tls_key: Annotated[str | None, Flag("PEM file of the certificate's private key", metavar="FILE")] = None
    grpc_tls: Annotated[str | None, GRPC_TLS] = None
    max_body_bytes: Annotated[int, Flag("larger request bodies get a 413", metavar="SIZE", parse=parse_size)] = (
        32 * 1024 * 1024
    )
    image_memory: Annotated[
        int,
        Flag("most memory of images of running requests; more get a 503", metavar="SIZE", parse=parse_size, at_least=1),
    ] = 1 << 30
    allow_image_urls: Annotated[
        bool, Flag("fetch images by http and https URLs, from addresses of the public internet alone")
    ] = False
    response_store: Annotated[
        str | None,
        Flag(
            "store responses of /v1/responses: memory, or sqlite:PATH for a file that lasts",
            metavar="STORE",
            parse=_store,
            unset="not stored",
        ),
    ] = None
    response_store_size: Annotated[
        int, Flag("oldest stored responses are removed beyond this size", metavar="SIZE", parse=parse_size)
    ] = 256 * 1024 * 1024
    response_store_seconds: Annotated[
        float, Flag("stored responses are removed after so many seconds", metavar="S", parse=_age)
    ] = 30 * 86400.0  # OpenAI's retention
    drain_grace: Annotated[
        float,
        Flag(
            "after SIGTERM, /health fails this long before new requests are rejected",
            metavar="S",
            at_least=0,
            at_most=DAY,
        ),
    ] = 0.0
    drain_timeout: Annotated[float, drain_flag("it ends with an error; counted from the end of the grace period")] = (
        DRAIN_SECONDS
    )
    generation_config: Annotated[
        str,
        Flag(
            "where sampling parameters come from that a request leaves out: auto is the model's generation_config.json",
            choices=("auto", "none"),
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Flag("Jinja file, in place of the chat template of a single MODEL", metavar="FILE")
    ] = None
    tool_call_parser: Annotated[str, _parser("--tool-call-parser")] = "auto"
    reasoning_parser: Annotated[str, _parser("--reasoning-parser")] = "auto"
    enable_tokenizer_info_endpoint: Annotated[
        bool, Flag("serve the tokenizer's configuration and the chat template at /tokenizer_info")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        Flag("accept chat_template in requests; it runs in a sandbox, in processes with limits of time and memory"),
    ] = False
    trust_routing_headers: Annotated[
        bool,
        Flag("follow the headers x-prefiller-host-port and x-llm-d-slo-…-ms; let a gateway alone reach this port"),
    ] = False
    max_logprobs: Annotated[
        int,
        Flag(
            f"alternatives per output token that a request may ask for; -1 is {MAX_LOGPROBS}",
            metavar="N",
            parse=_max_logprobs,
        ),
    ] = 20
    status_fd: Annotated[int | None, STATUS_FD] = None
    lifeline_fd: Annotated[int | None, LIFELINE_FD] = None


def parse_options(argv: Sequence[str] | None = None) -> RouterOptions:
    """Raises ConfigError."""
    return router_options_from(make_parser().parse_args(argv))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve router", "Serve the OpenAI protocol to clients of decode nodes.")
    add_router_flags(parser)
    return parser


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag that ``router_options_from`` reads."""
    _add_model_flags(parser)
    add_flags(parser, RouterOptions)


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
    return options_from(RouterOptions, args, models=models, aliases=aliases)


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
