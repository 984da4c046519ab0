"""The flags of ``pdserve chat``."""

from __future__ import annotations

import argparse

#: Sampling parameters and their types. The router checks the values.
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "max_tokens": int,
}


def add_router_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000", help="default %(default)s")
    parser.add_argument("--api-key", metavar="KEY", help="API key for the router (default: PDSERVE_API_KEY)")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add_router_url(parser)
    parser.add_argument("--model", "--model-name", metavar="NAME", help="default: the first model of the router")
    parser.add_argument("--system-prompt", metavar="TEXT", default="", help="default: none")
    quick = "send one message, print the answer and exit; so does a message on standard input"
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help=quick)
    parser.add_argument("--plain", action="store_true", help="print text as it is, not as Markdown")
    for name, kind in SAMPLING.items():
        text = "default: as many as fit" if name == "max_tokens" else "default: the model's"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
