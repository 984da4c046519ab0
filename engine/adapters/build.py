"""Choose what becomes of adapters on a node, by its configuration."""

from __future__ import annotations

from functools import partial

from engine.adapters.adapter_slots import AdapterSlots
from engine.adapters.adapters import AdaptersFactory, no_adapters
from pdserve.config.node_config import NodeConfig


def build_adapters(config: NodeConfig) -> AdaptersFactory:
    """Return what makes the part of a scheduler that gives slots to adapters."""
    return no_adapters if config.adapters is None else partial(AdapterSlots, config.adapters)
