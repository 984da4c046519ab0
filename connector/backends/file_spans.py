"""Files of KV with their places in memory, and FileTransfer, the interface that moves their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """The whole content of a file, and its place in memory."""

    fd: int
    address: int
    num_bytes: int


class FileTransfer(Protocol):
    """All calls come from one thread."""

    def register(self, address: int, num_bytes: int) -> None:
        """Prepare memory for transfers. Memory that was registered before is ignored. Raises PdserveError."""

    def move(self, spans: Sequence[Span], read: bool) -> str:
        """Read files into registered memory, or write them. Return an error, or an empty string: all bytes moved."""
