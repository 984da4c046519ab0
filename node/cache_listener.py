"""Changes of the prefix cache with the tokens of its blocks, as a node tells of them."""

from __future__ import annotations

import msgspec

from pdserve.config.node_config import NodeConfig
from pdserve.ipc.cache_changes import CacheChanges


class CacheListener:
    """The interface, and a node that publishes nothing. node/kv_events/ publishes KV events."""

    listens = False  # whether the engine has to record changes

    def start(self) -> None:
        """The node begins to serve."""

    def publish(self, changes: CacheChanges) -> None:
        """The prefix cache has changed."""

    def name_adapter(self, digest: str, name: str) -> None:
        """Tell of an adapter under this name from now on."""

    def clear(self) -> None:
        """The engine starts or has ended, so its prefix cache is empty."""

    def close(self) -> None:
        """The node ends. Idempotent."""


NO_LISTENER = CacheListener()


class ListenerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that choose a listener, and a node without such options."""

    def cache_listener(self, config: NodeConfig, address: str) -> CacheListener:
        """Return the listener of a node that others reach at ``address``. Raises CapacityError and ConfigError."""
        return NO_LISTENER
