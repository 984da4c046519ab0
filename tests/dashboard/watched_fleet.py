"""The record of the fleet that conftest.py starts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

HOSTILE = "d-<img src=x onerror=alert(1)>\x1b[2J"  # the name of a node

#: Keep the given number of requests running within a block.
Streams = Callable[[int], AbstractContextManager[None]]
