"""The flags a node takes, defined once for ``pdserve up``, ``prefill``, ``decode`` and ``explain``.

Errors of the command line are one sentence: an unknown flag names the nearest known one, a bad value says what is
accepted. ``CommandParser`` does that for every command of pdserve.
"""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn

import msgspec

from pdserve.config.attention_backends import ATTENTION_BACKENDS
from pdserve.config.node_config import CUDA_GRAPHS, LOAD_FORMATS, NodeOptions
from pdserve.config.simulated_costs import ENGINES, SimulatedCosts
from pdserve.discovery.sources import check_source
from pdserve.errors import ConfigError

DRAIN_SECONDS = 30.0  # of --drain-timeout, where it is not given

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


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing its usage and exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, except that unknown arguments are an error here, where the command's own flags are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise ConfigError(self._describe_unknown(unknown[0]))
        return found, unknown

    def _describe_unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r} (see {self.prog} --help)"
        flag = argument.split("=", 1)[0]
        nearest = difflib.get_close_matches(flag, list(self._option_string_actions), n=1, cutoff=0.5)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"see {self.prog} --help"
        return f"unknown flag {flag}; {remedy}"


def parse_size(text: str) -> int:
    """Bytes from "512M", "1.5GiB", "4096": K, M, G, T are powers of 1000, KiB, MiB, GiB, TiB of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = match.group(2).upper().removesuffix("B") if match else ""
    unit = unit + "B" if unit.endswith("I") else unit
    if match is None or unit not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes or a number with K, M, G, KiB, MiB or GiB")
    return int(float(match.group(1)) * SIZE_UNITS[unit])


def place(text: str) -> str:
    """Type of a flag that names a place where nodes are found (pdserve/discovery/sources.py)."""
    try:
        return check_source(text)
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def port_number(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; choose 0 … 65535")
    return int(text)


def seconds(text: str) -> float:
    """A time of up to a day; 0 is none."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{value:g} must be at least 0 and at most 86400 seconds")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value} must be above 0 and at most 1")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(number) for number in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device; choose auto, cpu, cuda or cuda:N")
    return text


def add_node_flags(parser: argparse.ArgumentParser, model_default: str | None = None) -> None:
    """Add MODEL and every flag that ``options_from`` reads. Without ``model_default`` MODEL must be given."""
    model_help = "checkpoint directory or hub id" + (" (default: the embedded model)" if model_default else "")
    if model_default is None:
        parser.add_argument("model", metavar="MODEL", help=model_help)
    else:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=model_default, help=model_help)
    _add_model_flags(parser)
    _add_simulation_flags(parser)
    _add_split_flags(parser)
    _add_cache_flags(parser)
    _add_limit_flags(parser)
    add_tls_flag(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What is computed, and on which device."""
    model = parser.add_argument_group("model")
    model.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: that of MODEL)")
    model.add_argument("--device", type=_device, default="auto", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    model.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        metavar="DTYPE",
        help="auto (the checkpoint's), float32, bfloat16 or float16",
    )
    model.add_argument(
        "--load-format",
        default="auto",
        choices=LOAD_FORMATS,
        metavar="FORMAT",
        help="auto (the checkpoint's weights) or dummy (random ones: config.json is enough)",
    )
    model.add_argument(
        "--max-model-len", type=positive_int, metavar="N", help="tokens of prompt and output (default: the model's)"
    )
    model.add_argument(
        "--attention-backend", default="auto", metavar="NAME", help=f"auto, {', '.join(ATTENTION_BACKENDS)}"
    )
    model.add_argument(
        "--cuda-graphs",
        default="auto",
        choices=CUDA_GRAPHS,
        metavar="WHEN",
        help="capture decode steps: auto (where the V2 runner is on a GPU), on or off",
    )
    model.add_argument(
        "--threads",
        type=positive_int,
        metavar="N",
        help="threads of torch on CPU (default: the cores; up divides them)",
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """The blocks of the KV cache, and its memory."""
    cache = parser.add_argument_group("KV cache")
    cache.add_argument("--block-size", type=positive_int, default=_default("block_size"), metavar="N", help=_TOKENS)
    cache.add_argument(
        "--kernel-block-size", type=positive_int, metavar="N", help="tokens of a kernel page (default: the largest)"
    )
    cache.add_argument(
        "--kv-cache-memory", type=parse_size, metavar="SIZE", help="bytes, or with K, M, G, KiB, MiB, GiB"
    )
    cache.add_argument(
        "--kv-checksum",
        action="store_true",
        help="compare KV that was read with a digest from the prefill node; on both kinds of nodes or on neither",
    )
    cache.add_argument(
        "--gpu-memory-utilization",
        type=_fraction,
        default=_default("gpu_memory_utilization"),
        metavar="F",
        help="share of the GPU's memory to use (default %(default)s)",
    )


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    """What bounds a step, a queue and a silence."""
    limits = parser.add_argument_group("limits")
    for flag, meaning in (
        ("max_num_seqs", "sequences decoding at once (default %(default)s)"),
        ("max_batch_tokens", "tokens of one step (default: 2048 on a CPU, 8192 on a GPU; 512 and 2048 with --pp)"),
        ("max_waiting", "requests waiting for room; more are refused (default %(default)s)"),
    ):
        limits.add_argument(
            "--" + flag.replace("_", "-"),
            type=positive_int,
            default=_default(flag),
            metavar="N",
            help=meaning,
        )
    limits.add_argument(
        "--peer-timeout",
        type=float,
        default=_default("peer_timeout"),
        metavar="S",
        help="how long a node or an engine may be silent before it counts as dead (default %(default)s)",
    )


def add_tls_flag(parser: argparse.ArgumentParser) -> None:
    """How processes of pdserve know each other; the same for nodes and routers."""
    parser.add_argument(
        "--grpc-tls",
        metavar="DIR",
        help="speak gRPC over TLS, with ca.pem, cert.pem and key.pem of DIR, and only to who has a certificate of that "
        "CA; on all nodes and routers or on none",
    )


def add_drain_flag(parser: argparse._ActionsContainer, then: str) -> None:
    """How long a process that is told to end may go on; ``then`` is what becomes of the rest."""
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=DRAIN_SECONDS,
        metavar="S",
        help=f"how long what runs may go on after SIGTERM, before {then}; SIGINT or a second signal is 0 "
        "(default %(default)s)",
    )


def _add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    """Nodes without a device."""
    group = parser.add_argument_group("simulated nodes")
    group.add_argument(
        "--engine",
        default="device",
        choices=ENGINES,
        metavar="KIND",
        help="device, or simulated: no model, tokens that mean nothing, in the time they would take",
    )
    group.add_argument(
        "--sim-costs",
        type=_words,
        default=(),
        metavar="NAME=S,…",
        help=f"seconds that differ from {SimulatedCosts()}",
    )
    group.add_argument(
        "--sim-speed", type=float, default=1.0, metavar="F", help="divides all costs; inf: no time at all (default 1)"
    )


def _add_split_flags(parser: argparse.ArgumentParser) -> None:
    """How the model is spread over ranks."""
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--pp", type=positive_int, default=1, metavar="N", help="pipeline stages (default %(default)s)")
    ranks.add_argument(
        "--tp", type=positive_int, default=1, metavar="M", help="tensor shards of each stage (default %(default)s)"
    )
    ranks.add_argument(
        "--stage-layers", type=_numbers, metavar="N,N,…", help="layers of each stage (default: divided by count)"
    )
    ranks.add_argument(
        "--shared-mlps",
        choices=("on", "off"),
        help="two stages hold the MLP between them, and compute it in turn, which is best for prompts (default: on for "
        "prefill nodes)",
    )


_TOKENS = "tokens of a block (default %(default)s)"


def _default(field: str) -> Any:
    return next(f.default for f in msgspec.structs.fields(NodeOptions) if f.name == field)


def options_from(args: argparse.Namespace) -> NodeOptions:
    """The NodeOptions that flags added by ``add_node_flags`` ask for."""
    return NodeOptions(**{name: getattr(args, name) for name in NodeOptions.__struct_fields__})


def node_flags_of(options: NodeOptions) -> list[str]:
    """The command line that ``options_from`` turns into ``options`` again; MODEL first, defaults left out."""
    defaults = {f.name: f.default for f in msgspec.structs.fields(NodeOptions)}
    flags = [options.model]
    for name in NodeOptions.__struct_fields__:
        value = getattr(options, name)
        if name != "model" and value != defaults[name]:
            flag = "--" + name.replace("_", "-")
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags += [flag] if value is True else [flag, text]
    return flags
