"""Choose the limits of a node: sequences, tokens of a sequence, tokens of a step, gaps between tokens."""

from __future__ import annotations

from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import ParallelConfig
from pdserve.config.resolution.kv_layouts import RankKV
from pdserve.config.resolution.resolved import Resolved
from pdserve.config.resolution.state_slots import TYPICAL_TOKENS, choose_slots
from pdserve.errors import CapacityError, ConfigError
from pdserve.kv.states import LEAST_SLOTS
from pdserve.model.model_config import ModelConfig
from pdserve.request_cost import AUTO_ITL_STEPS, ITL_LIMIT

# A larger step fills a GPU better, a smaller one holds others up less.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192, "simulated": 8192}
_STAGED_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # the second stage has nothing to do before the first step's end


# Bounds of the default of max_num_seqs. A burst of 2,000 requests, 512 tokens in and 256 out, ends in 50.7, 46.8, 45.6
# and 45.6 s with 256, 512, 768 and 1,024 sequences (simulated, 8B, H200). No GPU has been measured with more than 512.
FEWEST_SEQS = 256
MOST_SEQS = 512

#: Tokens of a sequence for which the default of max_num_seqs leaves room in the KV cache. Of a burst of 800 requests,
#: 100 tokens in and 900 out, none was preempted with room for 1,040 tokens, and 375 with room for 520 (simulated, 8B).
SEQUENCE_TOKENS = 1024

_SEQS_STEP = 64  # distance of the sizes of CUDA graphs from 256 on


def default_max_num_seqs(fitting: float) -> int:
    """Return the default of max_num_seqs for a cache that holds ``fitting`` sequences of ``SEQUENCE_TOKENS``."""
    return max(FEWEST_SEQS, min(int(fitting) // _SEQS_STEP * _SEQS_STEP, MOST_SEQS))


def choose_max_num_seqs(
    options: NodeOptions, device: DeviceInfo, parallel: ParallelConfig, memory: int, units: list[RankKV]
) -> Resolved[int]:
    """Return the most sequences that decode at the same time.

    ``memory``: bytes of a rank for KV and recurrent states. ``units``: a block and a slot of each stage.
    """
    if options.max_num_seqs is not None:
        return Resolved(options.max_num_seqs)
    number = FEWEST_SEQS
    reason = "on a CPU"
    if device.kind != "cpu":
        fitting = min(_sequences_in(options, memory, unit) for unit in units)
        number = default_max_num_seqs(fitting)
        what = f"sequences of {SEQUENCE_TOKENS} tokens" if units[0].states is None else "pairs of recurrent states"
        reason = f"memory holds {fitting} {what}; within {FEWEST_SEQS} … {MOST_SEQS}"
    tokens = 1 + options.max_drafts  # a sequence's in a step
    step = options.max_batch_tokens or max(_usual_batch_tokens(device, parallel), FEWEST_SEQS * tokens)
    if step // tokens < number:
        number = step // tokens
        reason = f"a step of {step} tokens has {tokens} for each"
    return Resolved(number, reason)


def _sequences_in(options: NodeOptions, memory: int, unit: RankKV) -> int:
    """Return how many sequences a rank's memory holds: by blocks for ``SEQUENCE_TOKENS`` each, or by two slots each.

    With recurrent states the slots are the limit: ``choose_slots`` assumes longer sequences, of ``TYPICAL_TOKENS``.
    """
    layout, states = unit
    if states is not None:
        return (options.state_slots or choose_slots(memory, layout, states, MOST_SEQS)) // 2
    return memory // (layout.block_bytes * layout.blocks_for(SEQUENCE_TOKENS))


def _usual_batch_tokens(device: DeviceInfo, parallel: ParallelConfig) -> int:
    return (_BATCH_TOKENS if parallel.pp == 1 else _STAGED_BATCH_TOKENS)[device.kind]


def choose_batch_tokens(
    options: NodeOptions, device: DeviceInfo, parallel: ParallelConfig, max_num_seqs: int
) -> Resolved[int]:
    """Return the most tokens of a step."""
    if options.max_batch_tokens is not None:
        return Resolved(options.max_batch_tokens)
    usual = _usual_batch_tokens(device, parallel)
    least = max_num_seqs * (1 + options.max_drafts)
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
    more = f"up to {1e3 * ITL_LIMIT:g} ms beside much work of prompts"
    return Resolved(None, f"{steps}, so that prompts beside few decodes take 9/8 of their time; {more}", shown="auto")
