"""The flags of ``pdserve bench``; names are those of ``vllm bench serve`` where it has them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from cli.bench.http_load import CHATS, COMPLETIONS
from cli.bench.images import parse_image_size
from cli.router_url import add_router_url
from pdserve.errors import shown
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.flags.value_types import positive_int

_MAX_TOKENS = 10_000_000


class Range(NamedTuple):
    """Inclusive bounds of a uniform distribution."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


def parse_range(text: str) -> Range:
    """Parse "128" or "64-256"."""
    low, _, high = text.partition("-")
    try:
        bounds = Range(int(low), int(high or low))
    except ValueError:
        bounds = Range(0, 0)
    if not 1 <= bounds.low <= bounds.high <= _MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{shown(text)} is invalid; use a number of tokens such as 128, or 64-256")
    return bounds


def _plot_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{shown(text)} is invalid; use a file name that ends with .png or .svg")
    return path


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{shown(text)} is invalid; use a number above 0, at most 1,000,000")
    return value


def _count(text: str) -> int:
    return 0 if text == "0" else positive_int(text)


def make_parser() -> CommandParser:
    parser = command_parser("pdserve bench", "Measure a running OpenAI-compatible server.")
    add_router_url(parser)
    add = parser.add_argument
    add("--model", metavar="NAME", help="default: the first model of the server")
    add("--num-prompts", "--requests", type=positive_int, default=100, metavar="N", help="default %(default)s")
    limit = "requests in flight (default 8; no limit with --request-rate)"
    add("--max-concurrency", "--concurrency", type=positive_int, metavar="N", help=limit)
    rate = "requests per second with Poisson arrivals (default: the next request starts when one has ended)"
    add("--request-rate", type=_positive, metavar="R", help=rate)
    path = f"path of the requests: {COMPLETIONS} (default), or {CHATS}, whose random prompts are words, not tokens"
    add("--endpoint", choices=(COMPLETIONS, CHATS), metavar="PATH", help=path)
    images = f"random images of this size in each request, which goes to {CHATS}; N: so many of them; may be repeated"
    add("--image", type=parse_image_size, action="append", default=[], metavar="WxH[xN]", help=images)
    add("--dataset-name", choices=("random", "sharegpt", "custom"), metavar="NAME", help=argparse.SUPPRESS)
    dataset = (
        'prompts of a file in place of random ones: ShareGPT\'s JSON, or lines of {"prompt": …, "output_tokens": …}; '
        "answers are as long as the recorded ones, at four characters per token"
    )
    add("--dataset-path", "--dataset", type=Path, metavar="FILE", help=dataset)
    prompts = "random tokens of a prompt (default 256)"
    add(
        "--random-input-len",
        "--prompt-tokens",
        type=parse_range,
        default=Range(256, 256),
        metavar="N|A-B",
        help=prompts,
    )
    outputs = "tokens of an answer (default 64; with a data set, the recorded ones)"
    add("--random-output-len", "--output-tokens", type=parse_range, metavar="N|A-B", help=outputs)
    prefix = "tokens before them that all prompts share (default %(default)s)"
    add("--random-prefix-len", "--shared-prefix", type=_count, default=0, metavar="N", help=prefix)
    vocabulary = "prompts use the upper half of the token ids below N (default %(default)s)"
    add("--vocab", type=positive_int, default=2048, metavar="N", help=vocabulary)
    seed = "seed of prompts, lengths and arrivals (default: a new one, so that no prompt is cached)"
    add("--seed", type=int, metavar="N", help=seed)
    add(
        "--num-warmups",
        type=_count,
        default=2,
        metavar="N",
        help="requests before the measurement (default %(default)s)",
    )
    add("--timeout", type=_positive, default=600.0, metavar="S", help="seconds per request (default %(default)g)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=_plot_file, metavar="FILE", help="draw TTFT and ITL as .png or .svg; needs matplotlib")
    return parser
