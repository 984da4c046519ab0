"""Types of flags: each parses one value, and says in one sentence which values are valid."""

from __future__ import annotations

import argparse
import math
import re

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


def parse_size(text: str) -> int:
    """Parse bytes such as "512M", "1.5GiB" or "4096". K, M, G, T are powers of 1000; KiB, MiB, GiB, TiB of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = match.group(2).upper().removesuffix("B") if match else ""
    unit = unit + "B" if unit.endswith("I") else unit
    if match is None or unit not in SIZE_UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; use bytes or a number with K, M, G, KiB, MiB or GiB")
    return int(float(match.group(1)) * SIZE_UNITS[unit])


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def natural(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive_int(text: str) -> int:
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive_seconds(text: str) -> float:
    value = number(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def port_number(text: str) -> int:
    """Parse a TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 0 … 65535")
    return int(text)


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
