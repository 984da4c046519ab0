"""Free memory of a device, and the size of a GPU's KV cache by a trial run of the largest steps."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from pdserve.config.node_config import NodeConfig
from pdserve.config.resolution.state_slots import choose_slots
from pdserve.errors import CapacityError
from pdserve.host import memory_limits
from pdserve.kv.layout import MAX_BLOCKS, KVLayout
from pdserve.kv.states import LEAST_SLOTS, StateLayout
from runner.distributed.parallel_state import ParallelState
from runner.memory.process_memory import process_memory

_log = logging.getLogger(__name__)

#: Reserve beyond the measured peak, because PyTorch's allocator cannot always reuse its free memory.
_FRAGMENTATION = 512 << 20  # bytes
_LATER = 512 << 20  # bytes that libraries take after the measurement: registered memory, kernels


class MemoryUse(NamedTuple):
    """Bytes of a GPU after a trial run of the largest steps.

    Only ``free`` depends on other processes: a node that starts beside another may see memory that the other one has
    yet to take, or takes for a trial run. So each is bound by its own share, and shares of a GPU sum up to at most 1.
    """

    total: int
    free: int  # for any process
    allocated: int  # by PyTorch in this process: weights
    peak: int  # PyTorch's in this process: weights and the largest step
    graphs: int  # CUDA graphs, captured later
    libraries: int  # in this process, outside of PyTorch

    def room_for_kv(self, share: float) -> int:
        """Return the bytes left for the KV cache of ``share`` of the GPU, at most what other processes leave free."""
        unused = int(self.total * share) - self.peak - self.graphs - self.libraries
        free = self.free - (self.peak - self.allocated) - self.graphs - _LATER
        return max(min(unused, free) - _FRAGMENTATION, 0)


def measured_use(device: torch.device, peak: int, graphs: int) -> MemoryUse:
    """Return the memory of a GPU, of which ``peak`` bytes were PyTorch's and ``graphs`` will be of CUDA graphs."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        total=total,
        free=free,
        allocated=torch.cuda.memory_allocated(device),
        peak=peak,
        graphs=max(graphs, 0),
        libraries=process_memory(device) - torch.cuda.memory_reserved(device),
    )


def layouts_that_fit(
    config: NodeConfig,
    parallel: ParallelState,
    try_out: Callable[[NodeConfig, KVLayout, StateLayout | None], int],
) -> tuple[KVLayout, StateLayout | None]:
    """Return the largest KV cache that leaves room for every step, on a GPU with loaded weights, and recurrent states.

    ``try_out(config, layout, states)`` runs the largest steps on a small cache, frees everything, and returns the bytes
    that remain in use (CUDA graphs). All ranks get as many blocks and slots as the one with the least room. Raises
    CapacityError if a sequence of ``max_model_len`` tokens does not fit.
    """
    few = config.kv_layout.blocks_for(config.max_batch_tokens, config.max_batch_tokens)
    small = msgspec.structs.replace(config.kv_layout, num_blocks=few)
    states = config.state_layout
    few_states = None if states is None else msgspec.structs.replace(states, num_slots=LEAST_SLOTS)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(parallel.device)
    graphs = try_out(config, small, few_states)
    tried = small.total_bytes + (few_states.total_bytes if few_states is not None else 0)
    peak = torch.cuda.max_memory_allocated(parallel.device) - tried
    use = measured_use(parallel.device, peak, graphs)
    room = use.room_for_kv(config.options.memory_share)
    if states is not None:
        num_slots = config.options.state_slots or choose_slots(room, config.kv_layout, states, config.max_num_seqs)
        states = msgspec.structs.replace(states, num_slots=parallel.all_reduce_min(num_slots))
        room = max(room - states.total_bytes, 0)
    num_blocks = parallel.all_reduce_min(min(room // config.kv_layout.block_bytes, MAX_BLOCKS))
    layout = msgspec.structs.replace(config.kv_layout, num_blocks=num_blocks)
    _log.info(
        "GPU memory: of %s, %.0f%% for this node; weights and largest step %s, CUDA graphs %s, libraries %s, "
        "KV cache %s (%d blocks), recurrent states %s; %s were free",
        gib(use.total),
        100 * config.options.memory_share,
        gib(use.peak),
        gib(use.graphs),
        gib(use.libraries),
        gib(layout.total_bytes),
        layout.num_blocks,
        "none" if states is None else f"{gib(states.total_bytes)} ({states.num_slots} slots)",
        gib(use.free),
    )
    _check_longest(config, layout)
    return layout, states


def _check_longest(config: NodeConfig, layout: KVLayout) -> None:
    """Raise CapacityError unless the KV cache holds the longest sequence."""
    room = layout.longest(config.max_batch_tokens, config.max_model_len)
    if room < config.max_model_len:
        raise CapacityError(
            f"{gib(layout.total_bytes)} left for the KV cache hold {room} tokens, less than one sequence of "
            f"{config.max_model_len}; lower --max-model-len or --max-batch-tokens, raise --gpu-memory-utilization, or "
            "end other processes on the GPU"
        )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_limits.free_memory()


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
