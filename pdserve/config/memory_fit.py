"""Whether the weights and the KV cache of a rank fit in the free memory of its device. It never imports torch."""

from __future__ import annotations

import platform

from pdserve.adapters.base_layers import base_layers
from pdserve.config.device import free_memory
from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import weight_bytes
from pdserve.errors import CapacityError
from pdserve.kv.layout import DTYPE_BYTES

_X86 = "x86_64"


def dtype_in_memory(config: NodeConfig, machine: str | None = None) -> str:
    """Return the dtype of unquantized weights in the memory of a device.

    Only x86 CPUs and GPUs compute with weights of 16 bits; see runner/models/quantization/unquantized.py.
    """
    keeps = config.device.kind != "cpu" or (machine or platform.machine()) == _X86
    return config.dtype if keeps else "float32"


def check_memory(config: NodeConfig) -> str:
    """Describe the memory that a rank needs on its device. Raises CapacityError if a node could not start now."""
    return check_room(config, dtype_in_memory(config), free_memory(config.device))


def check_room(config: NodeConfig, dtype: str, free: int | None) -> str:
    """Describe the memory of a rank. Raises CapacityError unless its weights and KV cache fit in ``free`` bytes.

    ``free`` is None if unknown. Weights that no format packs are held in ``dtype``. The weights count with
    ``image_memory`` and ``slots_memory``, the KV cache with the recurrent states; a measured KV cache takes the rest of
    the memory later.
    """
    device = f"cuda:{config.device.index}" if config.device.kind == "cuda" else config.device.kind
    layouts = () if config.measure_kv_memory else (config.kv_layout, config.state_layout)
    weights = weight_bytes(config.model, config.position, dtype) + image_memory(config) + slots_memory(config)
    cache = sum(layout.total_bytes for layout in layouts if layout is not None)
    if free is not None and weights + cache > free:
        raise CapacityError(
            f"weights ({_gib(weights)}) and KV cache ({_gib(cache)}) need more than the {_gib(free)} that "
            f"are free on {device}; lower --kv-cache-memory, choose a smaller model or end other processes"
        )
    rest = "a KV cache of what is left" if config.measure_kv_memory else f"KV cache {_gib(cache)}"
    return f"weights {_gib(weights)}, {rest}; {'unknown' if free is None else _gib(free)} free on {device}"


def image_memory(config: NodeConfig) -> int:
    """Return the bytes of a rank's vision tower, embeddings and hidden states of images; 0 if it encodes none."""
    return config.tower_bytes + config.image_cache + config.image_hidden_bytes if config.has_tower else 0


def slots_memory(config: NodeConfig) -> int:
    """Return the bytes of all slots of adapters on a rank's device; 0 if the node takes no adapters.

    A slot has A and B of the largest rank for each linear layer of the rank.
    """
    limits = config.adapters
    if limits is None or config.options.simulated:
        return 0
    position = config.position
    sizes = [layer.sizes(position.parallel.tp) for layer in base_layers(config.model, position.layers).values()]
    return limits.max_loras * limits.max_lora_rank * sum(map(sum, sizes)) * DTYPE_BYTES[config.dtype]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
