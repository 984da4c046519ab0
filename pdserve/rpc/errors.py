"""The one conversion of pdserve errors to and from gRPC status codes and Failure messages."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from pdserve.errors import (
    AdapterMissing,
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    EngineCrashed,
    ImagesMissing,
    NodeError,
    Overloaded,
    PdserveError,
    PeerError,
    PrefillCrashed,
    RequestError,
    cut,
)
from pdserve.pb import pdserve_pb2 as pb

_MIN_RETRY_AFTER = 1.0  # seconds
_MAX_MESSAGE = 4000  # characters in the status of a call, whose metadata gRPC limits to 8 KiB

# Error class, status of a call, code in a stream. The first row whose class matches holds.
_CODES: tuple[tuple[type[PdserveError], grpc.StatusCode, pb.Failure.Code.ValueType], ...] = (
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT, pb.Failure.INVALID),
    (Draining, grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.DRAINING),
    (AdapterMissing, grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.ADAPTER_MISSING),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.OVERLOADED),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED, pb.Failure.NODE_FAILED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, pb.Failure.DEADLINE),
    (PeerError, grpc.StatusCode.FAILED_PRECONDITION, pb.Failure.NODE_FAILED),
    (ImagesMissing, grpc.StatusCode.FAILED_PRECONDITION, pb.Failure.NEEDS_IMAGES),
    (PrefillCrashed, grpc.StatusCode.ABORTED, pb.Failure.PREFILL_CRASHED),
    (EngineCrashed, grpc.StatusCode.ABORTED, pb.Failure.CRASHED),
    (NodeError, grpc.StatusCode.UNAVAILABLE, pb.Failure.NODE_FAILED),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION, pb.Failure.NODE_FAILED),
    (PdserveError, grpc.StatusCode.INTERNAL, pb.Failure.NODE_FAILED),
)
_ERROR_OF_STATUS: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: RequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: EngineCrashed,
}
_ERROR_OF_FAILURE: dict[int, type[PdserveError]] = {
    pb.Failure.INVALID: RequestError,
    pb.Failure.DRAINING: Draining,
    pb.Failure.DEADLINE: DeadlineExceeded,
    pb.Failure.CRASHED: EngineCrashed,
    pb.Failure.PREFILL_CRASHED: PrefillCrashed,
    pb.Failure.NEEDS_IMAGES: ImagesMissing,
    pb.Failure.ADAPTER_MISSING: AdapterMissing,
}


def status_code(error: PdserveError) -> grpc.StatusCode:
    return next(status for kind, status, _ in _CODES if isinstance(error, kind))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PdserveError) -> NoReturn:
    """End a call with the gRPC status of ``error``."""
    await context.abort(status_code(error), cut(" ".join(str(error).split()), _MAX_MESSAGE))
    raise AssertionError("abort always raises")


def rpc_reason(exc: grpc.aio.AioRpcError) -> str:
    return exc.details() or exc.code().name


def error_from_rpc(exc: grpc.aio.AioRpcError, peer: str) -> PdserveError:
    """Return the error of a failed call to ``peer``: PeerError unless the status has one of its own."""
    return _ERROR_OF_STATUS.get(exc.code(), PeerError)(f"{peer}: {rpc_reason(exc)}")


def failure_to_pb(error: PdserveError) -> pb.Failure:
    code = next(failure for kind, _, failure in _CODES if isinstance(error, kind))
    retry = int(error.retry_after * 1000) if isinstance(error, Overloaded) else 0
    return pb.Failure(code=code, message=str(error), retry_after_ms=retry)


def failure_from_pb(failure: pb.Failure, peer: str = "") -> PdserveError:
    """Return the error of a failure that a node sent.

    D names the ``peer``, whose own failures are PeerErrors, except EngineCrashed. The router names none: its clients
    read the message.
    """
    message = failure.message or "the node gave no reason"
    if peer:
        message = f"{peer}: {message}"
    if failure.code == pb.Failure.OVERLOADED:
        return Overloaded(message, max(failure.retry_after_ms / 1000, _MIN_RETRY_AFTER))
    return _ERROR_OF_FAILURE.get(failure.code, PeerError if peer else NodeError)(message)
