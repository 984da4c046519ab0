"""Python's parser of patterns. No public module gives access to the parts of a pattern."""

from __future__ import annotations

import re
import warnings
from importlib import import_module
from typing import Any

from router.text.structured.work_budget import Budget

_parser: Any = import_module("re._parser")
constants: Any = import_module("re._constants")

# Python warns of sets that it may read differently in future. A filter around each call is not thread-safe.
warnings.filterwarnings("ignore", r"Possible (nested set|set \w+) at position", FutureWarning)


class UnknownPattern(Exception):
    """Python does not know the pattern, or it has parts that its reader does not know."""


def parsed(pattern: str, budget: Budget) -> Any:
    """Return the parts of a pattern. Raises UnknownPattern, or WorkExceeded."""
    budget.spend(3 * len(pattern))  # the parser runs up to 50 lines for a character
    try:
        return _parser.parse(pattern)
    except (_parser.error, RecursionError, OverflowError) as exc:
        raise UnknownPattern(str(exc)) from exc


def has_flags(tree: Any) -> bool:
    """Whether a pattern changes flags, such as ``(?i)``."""
    return bool(tree.state.flags & ~re.UNICODE.value)
