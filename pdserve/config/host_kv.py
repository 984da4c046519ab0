"""Sizes of the host memory for KV (``--host-kv-memory``): how many blocks and slots of all ranks it holds."""

from __future__ import annotations

from pdserve import memory
from pdserve.config.node_config import NodeConfig
from pdserve.errors import ConfigError
from pdserve.host_copies import HostRoom
from pdserve.kv import KVLayout
from pdserve.state import StateLayout


def host_room(config: NodeConfig, layout: KVLayout, states: StateLayout | None) -> HostRoom:
    """Return the blocks and slots that ``config.host_kv_memory`` bytes hold, divided as the device's memory is.

    ``layout`` and ``states`` are those of any rank, as allocated. Every rank has as many blocks and slots.
    """
    block = sum(layout.resized(share.layers, share.num_heads).block_bytes for share in config.shares)
    if states is None:
        return HostRoom(config.host_kv_memory // block)
    slot = states.spec.layer_bytes * sum(share.num_layers for share in config.parallel.state_shares(config.model))
    unit = block * layout.num_blocks + slot * states.num_slots  # of the device's memory
    num_slots = config.host_kv_memory * states.num_slots // unit
    return HostRoom((config.host_kv_memory - num_slots * slot) // block, num_slots)


def check_host_kv(config: NodeConfig) -> str:
    """Return a description of the memory. Raises ConfigError if it holds nothing, or if this host lacks it."""
    size = config.host_kv_memory
    room = host_room(config, config.kv_layout, config.state_layout)
    if not room.num_blocks or (config.state_layout is not None and not room.num_slots):
        what = "one block" if config.state_layout is None else "one block and one recurrent state"
        raise ConfigError(f"host_kv_memory {size} does not hold {what} of KV; give more, or remove the option")
    usable = memory.usable_memory()
    if config.costs is None and usable is not None and size > usable:
        raise ConfigError(
            f"host_kv_memory {size}: this host, or its container, has {usable} bytes of memory in all; give less"
        )
    tokens = room.num_blocks // max(1, config.kv_layout.groups.num_groups) * config.kv_layout.block_size
    slots = "" if config.state_layout is None else f" and {room.num_slots} recurrent states"
    return f"{room.num_blocks} blocks of {tokens} tokens{slots} beside {config.kv_layout.num_blocks} on the device"
