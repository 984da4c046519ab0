"""Format numbers with units; a dash means unknown. The page has the same in format.js."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

UNKNOWN = "–"


def count(value: float) -> str:
    """7, 1,234, 12.3 k"""
    if value < 10_000:
        return f"{value:,.0f}"
    return _scaled(value / 1000, ("k", "M", "G"))


def counted(number: int, noun: str) -> str:
    """1 node, 1,234 nodes"""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figure(value: float) -> str:
    """Three significant digits without an exponent: 118,000, 9.18, 0.00001"""
    return f"{Decimal(f'{value:.3g}'):,f}"


def rate(value: float | None) -> str:
    """A rate per second: 0, 0.3, 14, 1,668, 12.3 k"""
    if value is None:
        return UNKNOWN
    return count(value) if value >= 99.5 else _digits(value)


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 0.9995:
        return f"{_digits(value * 1000)} ms"
    if value < 119.5:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.0f} s"
    return age(value)


def age(value: float) -> str:
    """A duration in whole seconds (at least 1), minutes or hours."""
    if value < 119.5:
        return f"{max(1, value):.0f} s"
    return f"{value / 60:.0f} min" if value < 7170 else f"{value / 3600:,.0f} h"


def bytes_per_second(value: float | None) -> str:
    return UNKNOWN if value is None else _scaled(value, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def percent(share: float | None) -> str:
    if share is None:
        return UNKNOWN
    return "<1 %" if 0 < share < 0.01 else f"{share * 100:.0f} %"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _digits(value: float) -> str:
    """About three significant digits."""
    if value >= 9.95 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.0995 else f"{value:.2f}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value /= 1000
        index += 1
    return f"{value:.1f} {units[index]}" if 0 < value < 99.95 else f"{value:,.0f} {units[index]}"
