"""Flags of KV events, and the publisher that they choose."""

from __future__ import annotations

from typing import Annotated

from node.cache_listener import CacheListener, ListenerOptions
from node.kv_events.options import KVEventOptions
from pdserve.config.node_config import NodeConfig
from pdserve.errors import ConfigError
from pdserve.flags.declaration import Flag


class KVEventFlags(ListenerOptions, frozen=True, kw_only=True):
    kv_events_endpoint: Annotated[
        str,
        Flag(
            "publish changes of the prefix cache there over ZeroMQ, as vLLM's KV events, such as tcp://*:5557",
            metavar="ENDPOINT",
            unset="none",
            group="KV events",
        ),
    ] = ""
    kv_events_replay_endpoint: Annotated[
        str,
        Flag(
            "replay KV events there that a subscriber has missed, such as tcp://*:5558",
            metavar="ENDPOINT",
            unset="none",
            group="KV events",
        ),
    ] = ""
    kv_events_topic: Annotated[
        str, Flag("topic of KV events", metavar="TOPIC", unset="kv@ADDRESS@MODEL", group="KV events")
    ] = ""
    kv_events_format: Annotated[
        str, Flag("a KV event is a map, or an array for older readers", choices=("map", "array"), group="KV events")
    ] = "map"

    def cache_listener(self, config: NodeConfig, address: str) -> CacheListener:
        """Bind the sockets. Raises CapacityError for a port in use, ConfigError otherwise."""
        options = self.kv_events(f"kv@{address}@{config.served_model_name}")
        if options is None:
            return super().cache_listener(config, address)
        from node.kv_events.event_log import group_kinds
        from node.kv_events.publisher import KVEventPublisher  # imports ZeroMQ

        kinds = group_kinds(config.kv_layout, config.model.state is not None)
        return KVEventPublisher(options, kinds, config.kv_layout.block_size)

    def kv_events(self, topic: str) -> KVEventOptions | None:
        """Return the options of KV events, with the default ``topic``; None: no events. Raises ConfigError."""
        if not self.kv_events_endpoint:
            if self.kv_events_replay_endpoint or self.kv_events_topic:
                raise ConfigError("options of KV events without --kv-events-endpoint: add it, such as tcp://*:5557")
            return None
        return KVEventOptions(
            self.kv_events_endpoint,
            self.kv_events_replay_endpoint,
            self.kv_events_topic or topic,
            as_maps=self.kv_events_format == "map",
        )
