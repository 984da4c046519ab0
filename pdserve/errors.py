"""Every error pdserve raises on purpose.

    PdserveError
    ├── ConfigError            a flag, variable or combination that cannot run        (start, exit 2)
    │   └── CheckpointError    a model directory that cannot be served               (start, exit 2)
    ├── CapacityError          memory or ports that are not there                     (start, exit 2)
    ├── RequestError           what a client sent cannot be served as it is           (HTTP 400)
    │   ├── RequestTooLong     prompt and output exceed the model's length            (HTTP 400)
    │   └── ModelNotFound      the request names a model nobody serves                (HTTP 404)
    ├── Overloaded             no room now, come back later                           (HTTP 503, Retry-After)
    │   └── Draining           the node or router ends soon; another one goes on      (HTTP 503, Retry-After)
    ├── DeadlineExceeded       the request's deadline passed                          (HTTP 504)
    └── NodeError              a node failed under a request                          (HTTP 502)
        ├── PeerError          a peer is dead, hung, restarted or incompatible
        └── EngineDied         the engine process of a node has ended

Messages say value, limit and remedy. Third-party errors are translated once, in the module that owns the dependency,
with ``raise … from exc``.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is fit for a person to read."""


class ConfigError(PdserveError):
    """A configuration that cannot run; found before anything was started."""


class CheckpointError(ConfigError):
    """A model directory that is broken, incomplete or of an unsupported kind."""


class CapacityError(PdserveError):
    """The machine lacks what the configuration needs: memory, a free port, a device."""


class RequestError(PdserveError):
    """A request that can never be served as it is. ``param`` names the field at fault, where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class RequestTooLong(RequestError):
    """Prompt plus output would not fit ``max_model_len``."""


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""


class Overloaded(PdserveError):
    """No room at present. ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Draining(Overloaded):
    """Whoever says so was told to end: it takes nothing new, or hands over what it has. No fault of anybody's."""


class DeadlineExceeded(PdserveError):
    """The deadline of a request passed before it was finished."""


class NodeError(PdserveError):
    """A node failed while it served a request."""


class PeerError(NodeError):
    """The node on the other side of a handoff is dead, hung, restarted or incompatible."""


class EngineDied(NodeError):
    """The engine process of a node has ended."""
