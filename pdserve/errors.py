"""All errors that pdserve raises on purpose. Routers add the errors of their API (router/errors.py).

    PdserveError
    ├── ConfigError             exit status 2
    │   └── CheckpointError
    ├── CapacityError           exit status 2
    ├── RequestError            HTTP 400
    │   ├── RequestTooLong
    │   └── ModelNotFound       HTTP 404
    ├── Overloaded              HTTP 503
    │   ├── Draining
    │   ├── AdapterMissing
    │   └── LeaseRevoked
    ├── DeadlineExceeded        HTTP 504
    └── NodeError               HTTP 502
        ├── PeerError
        ├── ImagesMissing
        └── EngineDied
            └── EngineCrashed
                └── PrefillCrashed

Messages say value, limit and remedy. Third-party errors are translated once, in the module that owns the dependency,
with ``raise … from exc``.
"""

from __future__ import annotations

from decimal import Decimal

MAX_SHOWN = 100  # characters of a name or value from outside in a message


def cut(text: str, limit: int = MAX_SHOWN) -> str:
    """Return the text, cut at ``limit`` characters."""
    return text if len(text) <= limit else text[:limit] + "…"


def shown(value: object) -> str:
    """Return ``repr`` of a name or value from outside, cut at MAX_SHOWN characters."""
    return cut(repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value))


def plain(number: float) -> str:
    """Return all digits of a number without an exponent, such as 10000000 or 0.00001; 1e+15 and more have one."""
    if not 1e-15 < abs(number) < 1e15:
        return f"{number:g}"
    return f"{Decimal(repr(float(number))).normalize():f}"


class PdserveError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is a sentence for users."""


class ConfigError(PdserveError):
    """A flag, variable or combination cannot run. Raised before any process starts work; exit status 2."""


class CheckpointError(ConfigError):
    """The model directory is broken, incomplete or of an unsupported kind. Exit status 2."""


class CapacityError(PdserveError):
    """The machine lacks what the configuration needs: memory, a free port, a device. Exit status 2."""


class RequestError(PdserveError):
    """The request is invalid (HTTP 400). ``param`` names the invalid field, ``code`` is OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLong(RequestError):
    """Prompt plus output exceed ``max_model_len`` (HTTP 400)."""


class ModelNotFound(RequestError):
    """This router does not serve the requested model (HTTP 404)."""


class Overloaded(PdserveError):
    """The server is full (HTTP 503 with Retry-After). ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Overloaded):
    """The node or router is shutting down: it accepts no new requests and migrates running ones (HTTP 503)."""


class AdapterMissing(Overloaded):
    """The node does not have the request's adapter: the router sends the request to one that has (HTTP 503)."""


class LeaseRevoked(Overloaded):
    """The source of a pull needs the blocks itself: the reader computes the tokens."""


class DeadlineExceeded(PdserveError):
    """The deadline of a request passed before it was finished (HTTP 504)."""


class NodeError(PdserveError):
    """A node failed while serving a request (HTTP 502)."""


class PeerError(NodeError):
    """The peer of a handoff is dead, hung, restarted or incompatible."""


class ImagesMissing(NodeError):
    """The node lacks pixels of an image that it has to compute: the router puts them again."""


class EngineDied(NodeError):
    """The engine process of a node has ended."""


class EngineCrashed(EngineDied):
    """The engine process of a node has ended in a step, and the request may be the cause."""


class PrefillCrashed(EngineCrashed):
    """The engine of the request's P has crashed."""
