"""Check that weights and KV cache fit in memory, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.config.model_config import ModelConfig
from pdserve.config.parallel import RankPosition, weight_bytes
from pdserve.errors import CapacityError
from pdserve.kv import KVLayout

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_room(
    config: ModelConfig, position: RankPosition, layout: KVLayout | None, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise CapacityError unless a rank's weights and KV cache fit in the device's free memory.

    Weights that no format packs are held in ``dtype``. Without a layout the cache takes what is left later.
    """
    weights = weight_bytes(config, position, str(dtype).removeprefix("torch."))
    cache = 0 if layout is None else layout.total_bytes
    free = free_memory(device)
    if free is not None and weights + cache > free:
        raise CapacityError(
            f"weights ({gib(weights)}) and KV cache ({gib(cache)}) need more than the {gib(free)} that "
            f"are free on {device}; lower --kv-cache-memory, choose a smaller model or end other processes"
        )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [limit for limit in (_available_of_host(), _available_in_cgroup()) if limit is not None]
    return min(limits, default=None)


def _available_of_host() -> int | None:
    if not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _available_in_cgroup() -> int | None:
    """Return the rest of a container's memory limit (cgroup v2); page cache counts as free, as it can be reclaimed."""
    limit, current, stat = (_CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if not limit.exists() or not current.exists() or limit.read_text().strip() == "max":
        return None
    cached = [int(line.split()[1]) for line in stat.read_text().splitlines() if line.startswith("inactive_file ")]
    return int(limit.read_text()) - int(current.read_text()) + sum(cached)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
