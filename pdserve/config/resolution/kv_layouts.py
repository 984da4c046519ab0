"""Choose the layouts of a node's KV cache and recurrent states: page, memory, blocks and slots.

All ranks have equal numbers of blocks and slots, so the stage with the largest ones limits these numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdserve.config.attention_backends import COMMON_PAGES, choose_page_size
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import ParallelConfig, shard_of, weight_bytes
from pdserve.config.resolution.resolved import Resolved
from pdserve.config.resolution.state_slots import TYPICAL_TOKENS, bytes_per_sequence, choose_slots, most_slots
from pdserve.config.simulated_costs import KV_TOKENS
from pdserve.errors import CapacityError, ConfigError
from pdserve.kv.layout import MAX_BLOCKS, KVLayout
from pdserve.kv.states import LEAST_SLOTS, StateLayout
from pdserve.model.model_config import ModelConfig

_CPU_KV_MEMORY = 1 << 30  # bytes
_CUDA_RESERVE = 2 << 30  # bytes: a guess at activations, workspaces and graphs, until the runner has measured them


class RankKV(NamedTuple):
    """A rank's layouts of KV and of recurrent states."""

    layout: KVLayout
    states: StateLayout | None  # None: the model has no recurrent layers

    def resized(self, num_blocks: int, num_slots: int) -> RankKV:
        """Return the layouts with other numbers of blocks and slots."""
        states = self.states
        if states is not None:
            states = msgspec.structs.replace(states, num_slots=num_slots)
        return RankKV(msgspec.structs.replace(self.layout, num_blocks=num_blocks), states)


def choose_page(options: NodeOptions, backend: str) -> Resolved[int]:
    """Return the tokens of a kernel page."""
    page = choose_page_size(options.block_size, options.kernel_block_size, backend)
    if options.kernel_block_size is not None:
        return Resolved(page)
    able = "every backend" if page in COMMON_PAGES else f"backend {backend}"
    return Resolved(page, f"the largest page of {able} that divides block_size")


def padding_of_groups(model: ModelConfig) -> str:
    """Describe the KV cache groups of a model; empty if it has one."""
    groups = model.kv_cache_groups
    if groups.num_groups == 1:
        return ""
    layers = range(model.num_kv_layers)
    places = groups.block_layers(layers, model.num_kv_heads)
    if groups.heads:
        size = places * groups.finest.size * groups.num_groups
        held = sum(heads.size for heads in model.kv_heads)
        return f"kv_groups={groups.num_groups}: {groups}; {1 - held / size:.0%} of a block of each is padding"
    padding = groups.num_groups * places - len(layers)
    return f"kv_groups={groups.num_groups}: {groups}; {padding} layers are padding"


def units_of_stages(
    options: NodeOptions, model: ModelConfig, parallel: ParallelConfig, page: int, dtype: str, kv_dtype: str
) -> list[RankKV]:
    """Return one block and one slot of the first rank of each stage.

    ``page`` are the tokens of a kernel page, ``dtype`` is the model's and ``kv_dtype`` the cache's.
    """
    groups = model.kv_cache_groups
    first = shard_of(model, parallel.position(0))
    spec = first.kv_cache_spec(kv_dtype)
    state_spec = first.state_spec(dtype)
    state_shares = parallel.state_shares(model)
    units = []
    shares = parallel.shares(model)
    for rank in range(0, parallel.num_ranks, parallel.tp):
        block = KVLayout(
            num_blocks=1,
            block_size=options.block_size,
            kernel_block_size=page,
            num_layers=groups.block_layers(shares[rank].layers, shares[rank].num_heads),
            spec=spec,
            groups=groups,
        )
        slot = None
        if state_spec is not None:
            slot = StateLayout(num_slots=1, num_layers=state_shares[rank].num_layers, spec=state_spec)
        units.append(RankKV(block, slot))
    return units


def measures_kv_memory(options: NodeOptions, device: DeviceInfo) -> bool:
    """Whether the runner measures at start how many blocks fit."""
    return device.kind == "cuda" and options.kv_cache_memory is None


def choose_kv_memory(
    options: NodeOptions,
    device: DeviceInfo,
    model: ModelConfig,
    parallel: ParallelConfig,
    dtype: str,
    units: list[RankKV],
    images: int,
) -> Resolved[int]:
    """Return the bytes of a rank for KV and recurrent states. Raises CapacityError if weights leave none.

    ``images``: bytes of a vision tower and of embeddings, which count as weights.
    """
    if options.kv_cache_memory is not None:
        return Resolved(options.kv_cache_memory)
    if options.simulated:
        block, slot = units[0]
        size = block.bytes_per_token * TYPICAL_TOKENS if slot is None else bytes_per_sequence(block, slot)
        reason = f"for {KV_TOKENS} tokens, as of an 8B model on an H200"
        return Resolved(KV_TOKENS // TYPICAL_TOKENS * size, reason, shown="")
    if device.kind == "cpu":
        memory = min(_CPU_KV_MEMORY, device.memory // 8)
        return Resolved(memory, "1 GiB on a CPU, at most an eighth of the memory")
    weights = max(weight_bytes(model, parallel.position(rank), dtype) for rank in range(parallel.num_ranks))
    weights += images
    memory = int(device.memory * options.memory_share) - weights - _CUDA_RESERVE
    if memory <= 0:
        raise CapacityError(
            f"{device.name}: {options.memory_share:.0%} of {device.memory} bytes does not hold weights of "
            f"{weights} bytes plus {_CUDA_RESERVE} for a step; use a larger GPU or a smaller model"
        )
    reason = (
        f"an estimate, {options.memory_share:.0%} of the GPU less weights and steps; at start the runner measures both "
        "and takes what is left"
    )
    return Resolved(memory, reason)


def check_state_slots(options: NodeOptions, model: ModelConfig) -> None:
    """Raise ConfigError for slots of recurrent state that the model does not have."""
    if model.state is None and options.state_slots is not None:
        raise ConfigError(
            f"state_slots {options.state_slots}: {model.architecture} has no recurrent layers; remove the option"
        )


def choose_num_slots(options: NodeOptions, max_num_seqs: int, memory: int, units: list[RankKV]) -> Resolved[int]:
    """Return the slots of recurrent state in ``memory`` bytes; 0 for a model without recurrent layers."""
    slots = [(block, slot) for block, slot in units if slot is not None]
    if not slots:
        return Resolved(0)
    if options.state_slots is not None:
        return Resolved(options.state_slots)
    reason = (
        f"sequences of {TYPICAL_TOKENS} tokens that fit beside their KV, within {LEAST_SLOTS} … "
        f"{most_slots(max_num_seqs)}; {max(slot.slot_bytes for _, slot in slots)} bytes each"
    )
    return Resolved(min(choose_slots(memory, block, slot, max_num_seqs) for block, slot in slots), reason)


def blocks_that_fit(options: NodeOptions, memory: int, num_slots: int, units: list[RankKV]) -> int:
    """Return the blocks of each rank beside ``num_slots`` slots in ``memory`` bytes."""
    if options.simulated and options.kv_cache_memory is None:
        full_groups = units[0].layout.groups.windows.count(None)
        return max(1, KV_TOKENS // options.block_size) * max(1, full_groups)
    fitting = []
    for block, slot in units:
        room = memory if slot is None else max(memory - num_slots * slot.slot_bytes, 0)
        fitting.append(room // block.block_bytes)
    return min(*fitting, MAX_BLOCKS)
