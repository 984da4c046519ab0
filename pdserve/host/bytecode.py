"""Finds out whether each start of a node compiles PyTorch: its bytecode is not stored, and Python may write none."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger(__name__)


class Bytecode(NamedTuple):
    is_stored: bool
    problem: str = ""  # "" if the first start stores it
    remedy: str = ""


def torch_bytecode() -> Bytecode:
    """Look for PyTorch's bytecode, without importing it."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return Bytecode(True)
    bytecode = Path(importlib.util.cache_from_source(torch.origin))
    if bytecode.exists():
        return Bytecode(True)
    folder = next(parent for parent in bytecode.parents if parent.exists())
    if not sys.dont_write_bytecode and os.access(folder, os.W_OK):
        return Bytecode(False)
    # 2,044 modules of a node took 5 s of CPU time with bytecode and 14 s without.
    return Bytecode(
        False,
        "PyTorch has no bytecode, and Python may write none: each start takes 10 s longer, on slow disks minutes",
        f"run python -m compileall -q {Path(torch.origin).parent.parent} once, or set PYTHONPYCACHEPREFIX to a folder "
        "that stays, and unset PYTHONDONTWRITEBYTECODE",
    )


def warn_of_missing_bytecode() -> None:
    """Log the problem, if there is one, before the imports that are slow for it."""
    bytecode = torch_bytecode()
    if bytecode.problem:
        _log.warning("%s; %s", bytecode.problem, bytecode.remedy)
