"""Every error pdserve raises on purpose.

    PdserveError
    ├── ConfigError            a flag, variable or combination that cannot run        (start, exit 2)
    │   └── CheckpointError    a model directory that cannot be served               (start, exit 2)
    ├── CapacityError          memory or ports that are not there                     (start, exit 2)
    ├── RequestError           what a client sent cannot be served as it is           (HTTP 400)
    │   ├── RequestTooLong     prompt and output exceed the model's length            (HTTP 400)
    │   └── ModelNotFound      the request names a model that is not served           (HTTP 404)
    ├── Overloaded             no room now, retry later                               (HTTP 503, Retry-After)
    │   └── Draining           the node or router shuts down; use another one         (HTTP 503, Retry-After)
    ├── DeadlineExceeded       the request's deadline passed                          (HTTP 504)
    └── NodeError              a node failed under a request                          (HTTP 502)
        ├── PeerError          a peer is dead, hung, restarted or incompatible
        └── EngineDied         the engine process of a node has ended

Messages say value, limit and remedy. Third-party errors are translated once, in the module that owns the dependency,
with ``raise … from exc``.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` is a sentence for users."""


class ConfigError(PdserveError):
    """The configuration cannot run. Raised before any process starts work."""


class CheckpointError(ConfigError):
    """The model directory is broken, incomplete or of an unsupported kind."""


class CapacityError(PdserveError):
    """The machine lacks what the configuration needs: memory, a free port, a device."""


class RequestError(PdserveError):
    """The request is invalid. ``param`` names the invalid field, ``code`` is OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLong(RequestError):
    """Prompt plus output exceed ``max_model_len``."""


class ModelNotFound(RequestError):
    """This router does not serve the requested model."""


class Overloaded(PdserveError):
    """The server is full. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Overloaded):
    """The node or router is shutting down: it accepts no new requests and migrates running ones."""


class DeadlineExceeded(PdserveError):
    """The deadline of a request passed before it was finished."""


class NodeError(PdserveError):
    """A node failed while serving a request."""


class PeerError(NodeError):
    """The peer of a handoff is dead, hung, restarted or incompatible."""


class EngineDied(NodeError):
    """The engine process of a node has ended."""
