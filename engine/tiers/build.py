"""Build the tiers of a node by its configuration."""

from __future__ import annotations

from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.tiers import Tiers
from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_stores import STORE_BYTES
from engine.tiers.host_tier import HostTier
from pdserve.config.node_config import NodeConfig
from pdserve.config.resolution.host_kv import host_room
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import StateLayout


def build_tiers(parts: CacheParts, config: NodeConfig, layout: KVLayout, states: StateLayout | None) -> Tiers:
    """Return host memory, with a disk as its source if there is one; the layouts belong to all ranks."""
    if not config.options.host_kv_memory:
        return Tiers()
    batch = max(1, STORE_BYTES // layout.block_bytes)
    slot_blocks = 0.0 if states is None else states.slot_bytes / layout.block_bytes
    room = host_room(config, layout, states)
    host = HostTier(parts, room, checksum=config.options.checks_kv, store_blocks=batch, slot_blocks=slot_blocks)
    if config.disk_kv:
        DiskTier(parts, host, write_blocks=batch, slot_blocks=slot_blocks)
    return host
