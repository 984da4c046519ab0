"""Routers and nodes share one conversion between errors, gRPC status codes and failures in streams."""

from __future__ import annotations

import grpc
import pytest

from pdserve.errors import (
    AdapterMissing,
    CapacityError,
    DeadlineExceeded,
    Draining,
    EngineCrashed,
    EngineDied,
    ImagesMissing,
    NodeError,
    Overloaded,
    PdserveError,
    PeerError,
    PrefillCrashed,
    RequestError,
    RequestTooLong,
)
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.errors import error_from_rpc, failure_from_pb, failure_to_pb, status_code

OWN_ERRORS = {
    "INVALID_ARGUMENT": RequestError,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "ABORTED": EngineCrashed,
}
FAILURES = {
    "INVALID": RequestError,
    "OVERLOADED": Overloaded,
    "DEADLINE": DeadlineExceeded,
    "DRAINING": Draining,
    "CRASHED": EngineCrashed,
    "PREFILL_CRASHED": PrefillCrashed,
    "NEEDS_IMAGES": ImagesMissing,
    "ADAPTER_MISSING": AdapterMissing,
}


def failed_call(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_a_failed_call_is_a_peer_error_unless_its_status_has_its_own(code: grpc.StatusCode) -> None:
    error = error_from_rpc(failed_call(code, "no room"), "p:1")
    assert type(error) is OWN_ERRORS.get(code.name, PeerError)
    assert str(error) == "p:1: no room"
    assert str(error_from_rpc(failed_call(code, None), "p:1")) == f"p:1: {code.name}"


@pytest.mark.parametrize("name", pb.Failure.Code.keys())
def test_a_failure_is_the_same_error_for_routers_and_nodes(name: str) -> None:
    """NODE_FAILED and unknown codes are a fault of the peer to D, of a node to a client."""
    failure = pb.Failure(code=pb.Failure.Code.Value(name), message="words", retry_after_ms=2500)
    for_router = failure_from_pb(failure)
    for_node = failure_from_pb(failure, "p:1")
    assert type(for_router) is FAILURES.get(name, NodeError)
    assert type(for_node) is FAILURES.get(name, PeerError)
    assert (str(for_router), str(for_node)) == ("words", "p:1: words")
    if name == "OVERLOADED":
        assert isinstance(for_node, Overloaded)
        assert for_node.retry_after == 2.5
    assert str(failure_from_pb(pb.Failure(code=failure.code))) == "the node gave no reason"


@pytest.mark.parametrize(
    ("error", "status", "failure"),
    [
        (RequestTooLong("x"), grpc.StatusCode.INVALID_ARGUMENT, pb.Failure.INVALID),
        (Draining("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.DRAINING),
        (Overloaded("x", 3.0), grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.OVERLOADED),
        (CapacityError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.NODE_FAILED),
        (DeadlineExceeded("x"), grpc.StatusCode.DEADLINE_EXCEEDED, pb.Failure.DEADLINE),
        (PeerError("x"), grpc.StatusCode.FAILED_PRECONDITION, pb.Failure.NODE_FAILED),
        (ImagesMissing("x"), grpc.StatusCode.FAILED_PRECONDITION, pb.Failure.NEEDS_IMAGES),
        (EngineDied("x"), grpc.StatusCode.UNAVAILABLE, pb.Failure.NODE_FAILED),
        (PdserveError("x"), grpc.StatusCode.INTERNAL, pb.Failure.NODE_FAILED),
    ],
)
def test_each_error_has_a_status_and_a_failure(error: PdserveError, status: grpc.StatusCode, failure: int) -> None:
    assert status_code(error) is status
    message = failure_to_pb(error)
    assert (message.code, message.message) == (failure, "x")
    assert message.retry_after_ms == (1000 * error.retry_after if isinstance(error, Overloaded) else 0)
