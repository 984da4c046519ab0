"""Sizes of KV in host memory and on disk: how many blocks and slots of all ranks they hold."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.config.node_config import NodeConfig
from pdserve.errors import ConfigError
from pdserve.host import memory_limits
from pdserve.kv.host_copies import HostRoom
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import StateLayout


def host_room(config: NodeConfig, layout: KVLayout, states: StateLayout | None) -> HostRoom:
    """Return the blocks and slots that ``host_kv_memory`` bytes hold, divided as the device's memory is.

    ``layout`` and ``states`` are a rank's, as allocated. All ranks have equal numbers of blocks and slots.
    """
    size = config.options.host_kv_memory or 0
    block = sum(layout.resized(share.layers, share.num_heads).block_bytes for share in config.shares)
    if states is None:
        return HostRoom(size // block)
    slot = states.spec.layer_bytes * sum(share.num_layers for share in config.parallel.state_shares(config.model))
    unit = block * layout.num_blocks + slot * states.num_slots  # bytes of KV and states in device memory, on all ranks
    num_slots = size * states.num_slots // unit
    return HostRoom((size - num_slots * slot) // block, num_slots)


def check_host_kv(config: NodeConfig) -> str:
    """Return a description of the memory. Raises ConfigError if it holds nothing, or if this host lacks it."""
    size = config.options.host_kv_memory or 0
    room = host_room(config, config.kv_layout, config.state_layout)
    if not room.num_blocks or (config.state_layout is not None and not room.num_slots):
        what = "one block" if config.state_layout is None else "one block and one recurrent state"
        raise ConfigError(f"host_kv_memory {size} does not hold {what} of KV; give more, or remove the option")
    usable = memory_limits.usable_memory()
    if config.costs is None and usable is not None and size > usable:
        raise ConfigError(
            f"host_kv_memory {size}: this host, or its container, has {usable} bytes of memory in all; give less"
        )
    tokens = room.num_blocks // max(1, config.kv_layout.groups.num_groups) * config.kv_layout.block_size
    slots = "" if config.state_layout is None else f" and {room.num_slots} recurrent states"
    return f"{room.num_blocks} blocks of {tokens} tokens{slots} beside {config.kv_layout.num_blocks} on the device"


def check_disk_kv(config: NodeConfig) -> str:
    """Return a description of the directory's size. Raises ConfigError if this host cannot write to it."""
    path = Path(config.disk_kv)
    size = config.options.disk_kv_size or 0
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        raise ConfigError(f"disk_kv {path}: {nearest} is not a directory; name another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"disk_kv {path}: this user may not write to {nearest}; name another directory")
    layout = config.kv_layout
    block = sum(layout.resized(share.layers, share.num_heads).block_bytes for share in config.shares)
    num_blocks = size // block
    tokens = num_blocks // max(1, layout.groups.num_groups) * layout.block_size
    return f"{size} bytes, up to {num_blocks} blocks of {tokens} tokens"
