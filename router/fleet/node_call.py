"""One request at one decode node."""

from __future__ import annotations

from typing import Protocol

from pdserve.errors import NodeError, PdserveError
from pdserve.pb import pdserve_pb2 as pb


class NodeLost(NodeError):
    """The node is dead, hung or restarted: the stream to it has ended."""


class CallSink(Protocol):
    """Where a call's outputs go. Called on the event loop, must not block and must not raise."""

    def on_output(self, output: pb.Output) -> None:
        """A token of a choice, the end of a choice, or both."""

    def on_failure(self, error: PdserveError) -> None:
        """The call has ended, with all its choices; nothing follows."""
