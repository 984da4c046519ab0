"""The flags of a node, defined once for ``pdserve up``, ``prefill``, ``decode``, ``doctor`` and ``explain``.

Errors are one sentence: an unknown flag names the one that was meant, an invalid value names the valid ones.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

import msgspec

from pdserve.config.attention_backends import ATTENTION_BACKENDS
from pdserve.config.flag_meanings import describe_unknown
from pdserve.config.flag_sources import FlagSources, add_config_flag
from pdserve.config.node_config import CUDA_GRAPHS, KV_CACHE_DTYPES, LOAD_FORMATS, LOAD_SOURCES, NodeOptions
from pdserve.config.simulated_costs import ENGINES, SimulatedCosts
from pdserve.discovery.sources import check_source
from pdserve.errors import ConfigError
from pdserve.model.model_config import MODEL_IMPLS
from pdserve.model.pooling import TASKS
from pdserve.request_cost import AUTO_ITL_STEPS

DRAIN_SECONDS = 30.0  # default of --drain-timeout

SIZE_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class _HelpFormatter(argparse.HelpFormatter):
    """Adds the default to each help text that says nothing about it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = (
            action.option_strings and action.nargs != 0 and action.default not in (None, argparse.SUPPRESS, "", [], ())
        )
        if not shown or "default" in (action.help or ""):
            return action.help
        return f"{action.help} (default %(default)s)"


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)
        self._sources: FlagSources | None = None  # only with add_config_flag

    def error(self, message: str) -> NoReturn:
        argument = re.match(r"argument (\S+):", message)
        source = self._sources.of_argument(argument[1]) if self._sources and argument else ""
        raise ConfigError(f"{message} (see {self.prog} --help{f'; given by {source}' if source else ''})")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but raise for unknown arguments here, where the subcommand's flags are known."""
        words = sys.argv[1:] if args is None else list(args)
        if "--config" in self._option_string_actions:
            self._sources = FlagSources(self, words, self._describe_unknown)
            words = self._sources.words
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            raise ConfigError(self._describe_unknown(unknown[0]))
        if self._sources is not None:
            found.flag_sources = self._sources.found
        return found, unknown

    def _describe_unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r} (see {self.prog} --help)"
        return describe_unknown(argument.split("=", 1)[0], self._option_string_actions, self.prog)


def command_parser(prog: str, description: str) -> CommandParser:
    """Return a parser whose flags may also come from a file and the environment (flag_sources.py)."""
    parser = CommandParser(prog=prog, description=description)
    add_config_flag(parser)
    return parser


# ---------------------------------------------------------------- types of flags


def parse_size(text: str) -> int:
    """Parse bytes such as "512M", "1.5GiB" or "4096". K, M, G, T are powers of 1000; KiB, MiB, GiB, TiB of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = match.group(2).upper().removesuffix("B") if match else ""
    unit = unit + "B" if unit.endswith("I") else unit
    if match is None or unit not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use bytes or a number with K, M, G, KiB, MiB or GiB")
    return int(float(match.group(1)) * SIZE_UNITS[unit])


def node_source(text: str) -> str:
    """Check an address, DNS name or other source of node addresses (pdserve/discovery/sources.py)."""
    try:
        return check_source(text)
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _natural(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def port_number(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 0 … 65535")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time of at most a day."""
    value = _float(text, "a number of seconds")
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{value:g} must be at least 0 and at most 86400 seconds")
    return value


def _fraction(text: str) -> float:
    value = _float(text, "a number")
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value} must be above 0 and at most 1")
    return value


def _itl_target(text: str) -> float | None:
    return None if text == "auto" else _float(text, "auto or a number of milliseconds")


def _float(text: str, expected: str = "a number") -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(number) for number in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _node_sources(text: str) -> tuple[str, ...]:
    return tuple(node_source(word) for word in text.split(","))


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device; use auto, cpu, cuda or cuda:N")
    return text


# ---------------------------------------------------------------- flags of a node


class _Flag(NamedTuple):
    """A flag for the field ``name`` of NodeOptions, whose default is the flag's."""

    name: str
    metavar: str
    help: str
    type: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    alias: str | None = None  # the flag of vLLM with this meaning


_GROUPS: dict[str, tuple[_Flag, ...]] = {
    "model": (
        _Flag("served_model_name", "NAME", "model name in the API (default: the name of MODEL)"),
        _Flag("device", "DEVICE", "auto, cpu, cuda or cuda:N", _device),
        _Flag(
            "dtype",
            "DTYPE",
            "auto (the checkpoint's), float32, bfloat16 or float16",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        _Flag(
            "load_format",
            "FORMAT",
            "auto (the checkpoint's weights) or dummy (random weights: config.json suffices)",
            choices=LOAD_FORMATS,
        ),
        _Flag(
            "load_from",
            "WHERE",
            "disk; auto: from the memory of a peer, or else the disk; peer: the same, but wait for a peer. With auto "
            "and peer this node offers its weights, too",
            choices=LOAD_SOURCES,
        ),
        _Flag(
            "weight_peers",
            "SOURCE,…",
            "nodes to ask for weights: host:port, dns://name:port, k8s://namespace/service:port or file:///path",
            _node_sources,
        ),
        _Flag(
            "model_impl",
            "IMPL",
            "auto (native for families that have it), native, or transformers: the library's layers, on runner V1",
            choices=MODEL_IMPLS,
        ),
        _Flag(
            "task",
            "TASK",
            "auto (by the checkpoint), generate, or on prefill nodes embed or classify: vectors of prompts",
            choices=TASKS,
        ),
        _Flag("max_model_len", "N", "tokens of prompt and output (default: the model's maximum)", positive_int),
        _Flag("attention_backend", "NAME", f"auto, {', '.join(ATTENTION_BACKENDS)}"),
        _Flag(
            "cuda_graphs",
            "WHEN",
            "capture decode steps: auto (with the V2 runner on a GPU), on or off",
            choices=CUDA_GRAPHS,
        ),
        _Flag("threads", "N", "CPU threads of torch (default: all cores; up divides them)", positive_int),
    ),
    "simulated nodes": (
        _Flag(
            "engine",
            "KIND",
            "device, or simulated: no model, meaningless tokens, timing by a cost model",
            choices=ENGINES,
        ),
        _Flag("sim_costs", "NAME=S,…", f"costs in seconds that replace {SimulatedCosts()}", _words),
        _Flag("sim_speed", "F", "divides all costs; inf: no delay (default %(default)g)", _float),
        _Flag("sim_crash_token", "ID", "a step with this token ends the engine, for tests", _natural),
    ),
    "ranks": (
        _Flag("pp", "N", "pipeline stages (default %(default)s)", positive_int, alias="--pipeline-parallel-size"),
        _Flag("tp", "M", "tensor shards per stage (default %(default)s)", positive_int, alias="--tensor-parallel-size"),
        _Flag(
            "ep",
            "M",
            "the value of --tp: each shard holds whole experts, not a slice of every expert (default %(default)s)",
            positive_int,
            alias="--expert-parallel-size",
        ),
        _Flag("stage_layers", "N,N,…", "layers of each stage (default: split evenly)", _numbers),
    ),
    "KV cache": (
        _Flag("block_size", "N", "tokens per block (default %(default)s)", positive_int),
        _Flag("kernel_block_size", "N", "tokens per kernel page (default: the largest supported)", positive_int),
        _Flag(
            "kv_cache_dtype",
            "DTYPE",
            "auto (the model's), or fp8_e4m3 (alias fp8): half the memory and bytes to send, with the scales of the "
            "checkpoint or 1.0; the same on all nodes",
            choices=KV_CACHE_DTYPES,
        ),
        _Flag("kv_cache_memory", "SIZE", "bytes, or a number with K, M, G, KiB, MiB, GiB", parse_size),
        _Flag(
            "kv_checksum",
            "on|off",
            "compare KV read from a peer with the prefill node's digests; the same on all nodes (default: on)",
            choices=("on", "off"),
        ),
        _Flag(
            "gpu_memory_utilization",
            "F",
            "share of each GPU's memory for a node (default: 0.9; up divides it among the nodes of a GPU)",
            _fraction,
        ),
    ),
    "limits": (
        _Flag("max_num_seqs", "N", "sequences that decode at the same time (default %(default)s)", positive_int),
        _Flag(
            "max_batch_tokens",
            "N",
            "tokens per step (default: 2048 on a CPU, 8192 on a GPU; 512 and 2048 with --pp)",
            positive_int,
            alias="--max-num-batched-tokens",
        ),
        _Flag(
            "itl_target",
            "MS",
            "gap between tokens of a sequence that prompts computed on the same node keep, in ms; 0: any "
            f"(default: auto, {AUTO_ITL_STEPS:g} times the measured decode step of one sequence)",
            _itl_target,
        ),
        _Flag("max_waiting", "N", "queued requests; further requests are refused (default %(default)s)", positive_int),
        _Flag(
            "peer_timeout",
            "S",
            "seconds without a sign of life until a node or engine counts as dead (default %(default)s)",
            _float,
        ),
    ),
}


def add_node_flags(
    parser: argparse.ArgumentParser, model_default: str | None = None, without: Collection[str] = ()
) -> None:
    """Add MODEL and the flags of NodeOptions but ``without``. MODEL is required without ``model_default``."""
    model_help = "checkpoint directory or hub id" + (" (default: the embedded model)" if model_default else "")
    parser.add_argument(
        "model", metavar="MODEL", help=model_help, nargs="?" if model_default else None, default=model_default
    )
    defaults = _defaults()
    for title, flags in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name, metavar, text, parse, choices, alias in flags:
            if name in without:
                continue
            spellings = [_spelling(name), *([alias] if alias else [])]
            if defaults[name] is False:
                group.add_argument(*spellings, action="store_true", help=text)
            else:
                group.add_argument(
                    *spellings, type=parse, default=defaults[name], choices=choices, metavar=metavar, help=text
                )
            if name == "cuda_graphs":
                eager = "the same as --cuda-graphs off"
                group.add_argument("--enforce-eager", dest=name, action="store_const", const="off", help=eager)
    add_tls_flag(parser)


def add_tls_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grpc-tls",
        metavar="DIR",
        help="mutual TLS for gRPC with ca.pem, cert.pem and key.pem of DIR; set it on all nodes and routers or on none",
    )


def add_drain_flag(parser: argparse._ActionsContainer, afterwards: str) -> None:
    """Add ``--drain-timeout``. ``afterwards`` says what happens to requests that still run then."""
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=DRAIN_SECONDS,
        metavar="S",
        help=f"seconds after SIGTERM for running requests before {afterwards}; 0 after SIGINT or a second signal "
        "(default %(default)s)",
    )


def options_from(args: argparse.Namespace) -> NodeOptions:
    return NodeOptions(**{name: getattr(args, name) for name in NodeOptions.__struct_fields__})


def node_flags_of(options: NodeOptions) -> list[str]:
    """Return the command line of ``options``: MODEL and every flag that differs from its default."""
    values = msgspec.structs.asdict(options)
    words = [values.pop("model")]
    defaults = _defaults()
    for name, value in values.items():
        if value != defaults[name]:
            words += flag_words(name, value)
    return words


def flag_words(name: str, value: Any) -> list[str]:
    """Return the command line words of a flag with this value; none for None and False."""
    if value is None or value is False:
        return []
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [_spelling(name)] if value is True else [_spelling(name), text]


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(NodeOptions)}


def _spelling(name: str) -> str:
    return "--" + name.replace("_", "-")
