"""Size the KV cache of a GPU by the memory that a trial run of the largest steps leaves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import msgspec
import torch

from pdserve.config.node_config import NodeConfig
from pdserve.errors import CapacityError
from pdserve.kv import KVLayout
from runner.distributed.parallel_state import ParallelState
from runner.loading.memory_check import gib

_log = logging.getLogger(__name__)

#: Reserve beyond the measured peak, because PyTorch's allocator cannot always reuse its free memory.
_FRAGMENTATION = 512 << 20  # bytes


def layout_that_fits(
    config: NodeConfig, parallel: ParallelState, try_out: Callable[[NodeConfig, KVLayout], int]
) -> KVLayout:
    """Return the largest KV cache that leaves room for every step, on a GPU with loaded weights.

    ``try_out(config, layout)`` runs the largest steps on a small cache, frees everything, and returns the bytes that
    remain in use (CUDA graphs). The cache gets the usable memory less these, the peak of PyTorch's allocator, and the
    use of other processes and libraries. All ranks get as many blocks as the one with the least room. Raises
    CapacityError if a sequence of ``max_model_len`` tokens does not fit.
    """
    device = parallel.device
    few = -(-config.max_batch_tokens // config.kv_layout.block_size)
    small = msgspec.structs.replace(config.kv_layout, num_blocks=few)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    kept = try_out(config, small)
    peak = torch.cuda.max_memory_allocated(device) - small.total_bytes
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    usable = int(total * config.gpu_memory_utilization)
    left = max(usable - others - peak - kept - _FRAGMENTATION, 0)
    num_blocks = parallel.all_reduce_min(left // config.kv_layout.block_bytes)
    layout = msgspec.structs.replace(config.kv_layout, num_blocks=num_blocks)
    _log.info(
        "GPU memory: %s usable = weights and largest step %s + CUDA graphs %s + outside of PyTorch %s + reserve %s + "
        "KV cache %s (%d blocks)",
        *(gib(size) for size in (usable, peak, kept, others, _FRAGMENTATION, layout.total_bytes)),
        layout.num_blocks,
    )
    room = layout.num_blocks * layout.block_size
    if room < config.max_model_len:
        raise CapacityError(
            f"{gib(layout.total_bytes)} left for the KV cache hold {room} tokens, less than one sequence of "
            f"{config.max_model_len}; lower --max-model-len or --max-batch-tokens, or raise --gpu-memory-utilization"
        )
    return layout
