"""Choose the limits of a node: tokens of a sequence, tokens of a step, gaps between tokens."""

from __future__ import annotations

from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import ParallelConfig
from pdserve.config.resolution.kv_layouts import RankKV
from pdserve.config.resolution.resolved import Resolved
from pdserve.config.resolution.state_slots import TYPICAL_TOKENS
from pdserve.errors import CapacityError, ConfigError
from pdserve.kv.states import LEAST_SLOTS
from pdserve.model.model_config import ModelConfig
from pdserve.request_cost import AUTO_ITL_STEPS

# A larger step fills a GPU better, a smaller one holds others up less.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192, "simulated": 8192}
_STAGED_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # the second stage has nothing to do before the first step's end


def choose_batch_tokens(options: NodeOptions, device: DeviceInfo, parallel: ParallelConfig) -> Resolved[int]:
    """Return the most tokens of a step."""
    if options.max_batch_tokens is not None:
        return Resolved(options.max_batch_tokens)
    usual = (_BATCH_TOKENS if parallel.pp == 1 else _STAGED_BATCH_TOKENS)[device.kind]
    least = options.max_num_seqs * (1 + options.max_drafts)
    where = "on a simulated device" if options.simulated else f"on a {device.kind.upper()} device"
    if parallel.pp > 1:
        where += ", so that pipeline stages compute parts of one prompt at the same time"
    return Resolved(max(usual, least), f"{usual} {where}, and at least {least} for max_num_seqs")


def choose_max_model_len(
    options: NodeOptions, model: ModelConfig, kv: RankKV, max_batch_tokens: int, estimated: bool
) -> Resolved[int]:
    """Return the most tokens of a sequence. Raises CapacityError if ``kv`` has no room for one.

    Of an ``estimated`` cache take nine tenths, because the measured one must hold them.
    """
    limit = model.max_position_embeddings
    room = kv.layout.longest(max_batch_tokens, limit)
    sure = room * 9 // 10 if estimated else room
    if options.max_model_len is not None:
        if options.max_model_len > limit:
            raise ConfigError(f"max_model_len {options.max_model_len} exceeds the model's {limit} positions")
        resolved = Resolved(options.max_model_len)
    elif sure < limit:
        resolved = Resolved(sure, f"what the KV cache surely holds; the model's limit is {limit}")
    else:
        resolved = Resolved(limit, "the model's")
    wanted = max(resolved.value, 2)
    if room < wanted:
        longest = max(options.max_model_len or limit, 2)
        needed = kv.layout.blocks_for(longest, max_batch_tokens) * kv.layout.block_bytes
        if kv.states is not None:  # ``choose_slots`` takes a slot for every few tokens
            beside = options.state_slots or LEAST_SLOTS + longest // TYPICAL_TOKENS
            needed += beside * kv.states.slot_bytes
        raise CapacityError(
            f"a KV cache of {kv.layout.total_bytes} bytes ({kv.layout.num_blocks} blocks, {room} tokens) has no room "
            f"for one sequence of {wanted} tokens; give --kv-cache-memory {needed} for {longest} tokens, or "
            "--max-model-len N for fewer"
        )
    return resolved


def choose_itl_target(options: NodeOptions) -> Resolved[float | None]:
    """Return the target in seconds; None: pdserve.request_cost.auto_itl_target."""
    if options.itl_target is not None:
        return Resolved(options.itl_target / 1e3)
    steps = f"{AUTO_ITL_STEPS:g} times the measured decode step of one sequence"
    return Resolved(None, f"{steps}, so that prompts beside few decodes take 9/8 of their time", shown="auto")
