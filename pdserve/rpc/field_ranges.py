"""The range of each number in proto/pdserve.proto, and the check of a message against them, where it enters a process.

    router ◄──NodeReport, OutputBatch, …──── node     the router leaves the node out, and says why
    reader ◄──HandshakeReply, PrefillEvents── node    the reader does not connect, or connects again
    node   ◄──Generate, PrefillRequest, …──── peer    the node refuses the request

A new numeric field needs an entry (tests/nodes/test_field_ranges.py). Ranges are absolute: they bound what a number may
cost its reader, and keep NaN and infinity out of its arithmetic. A reader compares numbers that depend on its own
request, model or layout with these. No range may become narrower: an older release would be refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import inf
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from pdserve.errors import PeerError, RequestError
from pdserve.images import MAX_GRID, MAX_IMAGES
from pdserve.kv.layout import MAX_BLOCK_SIZE, MAX_BLOCKS
from pdserve.ranges import Range, outside, ranges_of
from pdserve.request_cost import MOST_SECONDS
from pdserve.sampling_params import MAX_PROMPT_LOGPROBS, SamplingParams

#: Any value of the type: it is compared, looked up or counted, and decides about no memory, time or price.
ANY = Range()
_ADDRESS = Range(0, 2**63 - 1)  # bytes
_BLOCKS = Range(0, MAX_BLOCKS)
_BLOCK_TOKENS = Range(1, MAX_BLOCK_SIZE)
_DEVICE = Range(0, 1023)
_MILLISECONDS = Range(0, 2**31 - 1)  # 24 days; flags take a day at most
_REQUESTS = Range(0, 2**24)
_SLOTS = Range(0, 2**31 - 1)
_TOKENS = Range(1, 2**31 - 1)
_MOST_LAYERS = 4096
_LAYERS = Range(0, _MOST_LAYERS)
_HEADS = Range(0, 2**16)
_SIZE = Range(1, 2**16)  # elements of a dimension
# A base or slope in seconds. Earlier releases fit lines whose base may be below zero by a rounding error.
_SECONDS = Range(-1e-6, MOST_SECONDS)
_GRID = Range(1, MAX_GRID)  # tokens on a side of an image
_PIXELS = Range(1, 2**28)  # also height or width alone
_IMAGES = Range(most=MAX_IMAGES)
_LOGPROB = Range(-inf, 1.0)  # a token's probability may be 0; the sum of all may be above 1 by rounding

Fields = Mapping[str, Range]


def _each(allowed: Range, names: str) -> Fields:
    return dict.fromkeys(names.split(), allowed)


#: By message, then by field. A list's or map's range is for its values; for a list of messages, ``most`` counts.
RANGES: Mapping[str, Fields] = {
    "KVLayout": {
        "num_blocks": _BLOCKS,  # 0 while the node loads
        **_each(_BLOCK_TOKENS, "block_size kernel_block_size"),
        "num_layers": Range(1, _MOST_LAYERS),
        **_each(_SIZE, "num_kv_heads head_dim"),
        "group_windows": Range(0, 2**31 - 1, most=_MOST_LAYERS),
        "layer_groups": Range(0, _MOST_LAYERS, most=_MOST_LAYERS),
        **_each(Range(1, 2**16, most=_MOST_LAYERS), "group_kv_heads group_head_dims"),
    },
    "NamedAdapter": {"rank": Range(0, 2**16)},  # 0: of a name that was reloaded
    "NodeDescription": {
        **_each(_TOKENS, "max_model_len vocab_size"),
        "cache_sample_bits": Range(0, 64),
        "protocol": ANY,
    },
    "Pooling": {"size": Range(1, 2**24)},
    "ImageInput": {
        **_each(ANY, "token_id row_end image_end before behind"),
        "max_side": Range(0, 1 << 16),
        **_each(Range(1, 1024), "patch_size merge_size"),
        **_each(_PIXELS, "min_pixels max_pixels"),
    },
    "ImageCost": _each(Range(0, 1e9), "base slope"),
    "ImageSpan": {"start": ANY, **_each(_GRID, "rows columns")},
    "ImageHeader": _each(_PIXELS, "height width"),
    "WatchRequest": {"pause_ms": ANY},
    "NodeReport": {"sequence": ANY},
    "NodeLoad": {
        **_each(_BLOCKS, "free_blocks total_blocks"),
        **_each(_REQUESTS, "waiting running decoding for_peers"),
        "backlog": Range(0, 2**48),
        "prompt_share": Range(0, 1),
        **_each(Range(0, 1e3 * MOST_SECONDS), "itl_target_ms itl_limit_ms ttft_target_ms"),
    },
    "LinearCost": _each(_SECONDS, "base slope"),
    "CacheChange": {"digest": ANY},
    "NodeStatus": {
        **_each(ANY, "free_blocks held_blocks leased_blocks quarantined_blocks total_blocks"),
        **_each(ANY, "waiting reading running steps paused"),
        "counters": Range(-1e18, 1e18),
    },
    "SamplingParams": {
        **_each(ANY, "seed stop_token_ids allowed_token_ids logprob_token_ids thinking_start_ids thinking_end_ids"),
        **ranges_of(SamplingParams),
    },
    "TokenSequence": {"token_ids": ANY},
    "TokenLogprobs": {**_each(_LOGPROB, "logprob top_logprobs"), "top_ids": ANY},
    "ResumedChoices": {"request": ANY},
    "Generate": {
        **_each(ANY, "request prefix_tokens priority client"),
        **_each(_MILLISECONDS, "timeout_ms age_ms"),
        "images": _IMAGES,
    },
    "ResumedChoice": {"choice": ANY},
    "Cancel": {"request": ANY},
    "Pause": {"request": ANY},
    "Resume": {"request": ANY},
    "Output": _each(ANY, "request choice token_id cached_tokens accepted_drafts rejected_drafts"),
    "PromptLogprobs": {"first": ANY, "num_top": Range(0, MAX_PROMPT_LOGPROBS)},
    "Failure": {"retry_after_ms": _MILLISECONDS},
    "PoolRequest": _each(ANY, "priority client dimensions"),
    "PoolReply": {"cached_tokens": ANY},
    "HandshakeRequest": {"protocol": ANY},
    "HandshakeReply": {"ranks": Range(most=1024)},
    "RankKV": {**_each(_ADDRESS, "address num_bytes"), "device_id": _DEVICE},
    "RankStates": {
        **_each(_ADDRESS, "address num_bytes"),
        "num_slots": _SLOTS,
        **_each(_LAYERS, "num_layers first_layer total_layers"),
        **_each(_HEADS, "shard num_shards key_heads value_heads"),
        **_each(_HEADS, "key_dim value_dim"),  # 0: short convolutions
        "conv_width": _SIZE,
        "channels": Range(0, 2**20),
    },
    "KVShare": {
        **_each(_LAYERS, "first_layer num_layers total_layers draft_layers"),
        **_each(_HEADS, "first_head num_heads total_heads"),
    },
    "PrefillRequest": {
        **_each(ANY, "request skip_tokens priority client prefix_tokens kv_layers"),
        **_each(_MILLISECONDS, "timeout_ms age_ms"),
        "images": _IMAGES,
    },
    "ExtendRequest": _each(ANY, "request ask"),
    "ReleaseRequest": {"request": ANY},
    "PrefillEvent": {"request": ANY},
    "LastChunk": {"ends_in_ms": _MILLISECONDS},
    "KVReady": {"lease_ms": _MILLISECONDS, **_each(ANY, "block_ids num_tokens digests state_slot")},
    "FirstTokens": {"cached_tokens": ANY, "queued_ms": _MILLISECONDS},
    "SampledToken": {"token_id": ANY},
    "Extended": {"ask": ANY, "lease_ms": _MILLISECONDS},
    "OfferedWeights": {"device_id": _DEVICE},
    "OfferedTensor": _each(ANY, "address num_bytes dim start size"),
}


def check_message(message: Message) -> None:
    """Raise RequestError for a request of a router or peer with a number outside its range."""
    if reason := violation(message):
        raise RequestError(f"{reason}; use the same release everywhere")


def check_answer(message: Message, sender: str = "it") -> None:
    """Raise PeerError for a message of a node with a number outside its range. ``sender`` begins the error."""
    if reason := violation(message):
        raise PeerError(f"{sender} sent a number outside its range: {reason}; upgrade that node, or restart it")


def violation(message: Message) -> str:
    """Return what is wrong with the first number outside its range, or an empty string."""
    reason = _violation(message, checks_of(message.DESCRIPTOR))
    return reason and f"{message.DESCRIPTOR.name}{reason}"


class _Check(NamedTuple):
    """A field that may be wrong: numbers, or messages with numbers."""

    name: str
    may_be_absent: bool  # a single message
    repeated: bool
    is_map: bool
    inner: tuple[_Check, ...]  # checks of the message's fields; empty: the field has numbers
    allowed: Range  # range of the numbers; ``most`` limits the entries


def _violation(message: Any, checks: Iterable[_Check]) -> str:
    for name, may_be_absent, repeated, is_map, inner, allowed in checks:
        if may_be_absent and not message.HasField(name):
            continue
        value = getattr(message, name)
        low = allowed.low
        high = allowed.high
        if allowed.most is not None and len(value) > allowed.most:
            return f".{name} has {len(value)} entries; the limit is {allowed.most}"
        for item in value.values() if is_map else value if repeated else (value,):
            if inner:
                if reason := _violation(item, inner):
                    return f".{name}{reason}"
            elif not low <= item <= high or (item == low and allowed.above):
                return outside(f".{name}", item, allowed)
    return ""


@cache
def checks_of(descriptor: Descriptor) -> tuple[_Check, ...]:
    """Return the checks of the fields that may be wrong: a message of each step must cost next to nothing."""
    ranges = RANGES.get(descriptor.name, {})
    checks = []
    for field in descriptor.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        inner = () if is_map or field.message_type is None else checks_of(field.message_type)
        allowed = ranges.get(field.name, ANY)
        if inner or allowed != ANY:
            may_be_absent = bool(inner) and not field.is_repeated
            checks.append(_Check(field.name, may_be_absent, field.is_repeated, is_map, inner, allowed))
    return tuple(checks)
