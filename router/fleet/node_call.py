"""One request at one decode node, and the errors it can end with."""

from __future__ import annotations

from typing import Protocol

from pdserve.errors import DeadlineExceeded, Draining, NodeError, Overloaded, PdserveError, RequestError
from pdserve.pb import pdserve_pb2 as pb


class NodeLost(NodeError):
    """The node is dead, hung or restarted: the stream to it has ended."""


class CallSink(Protocol):
    """Where a call's outputs go. Called on the event loop, must not block and must not raise."""

    def on_output(self, output: pb.Output) -> None:
        """A token of a choice, the end of a choice, or both."""

    def on_failure(self, error: PdserveError) -> None:
        """The call has ended, with all its choices; nothing follows."""


def error_of(failure: pb.Failure) -> PdserveError:
    """A node's failure as the error that it stands for."""
    code = failure.code
    if code == pb.Failure.INVALID:
        return RequestError(failure.message)
    if code == pb.Failure.OVERLOADED:
        return Overloaded(failure.message, max(failure.retry_after_ms / 1000, 1.0))
    if code == pb.Failure.DEADLINE:
        return DeadlineExceeded(failure.message)
    if code == pb.Failure.DRAINING:
        return Draining(failure.message)
    return NodeError(failure.message or "the decode node ended the request without a reason")
