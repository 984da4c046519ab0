"""Protobuf conversion: records of pdserve/ to and from the messages of proto/pdserve.proto."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import asdict

from pdserve.errors import ConfigError, RequestError
from pdserve.images import EncodingCost, ImageInput, Images, ImageSpan
from pdserve.kv.groups import KVCacheGroups, KVHeads
from pdserve.kv.layout import KV_CACHE_SPECS, KVLayout, KVRegion, KVShare
from pdserve.kv.states import (
    AnyStateSpec,
    GatedDeltaSpec,
    Mamba2Spec,
    RankStates,
    ShortConvSpec,
    StateLayout,
    StateShare,
)
from pdserve.logprobs import PromptLogprobs, TokenLogprobs
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES, RankKV
from pdserve.request_cost import LinearCost, StepCosts
from pdserve.sampling_params import TOKEN_ID_LISTS, SamplingParams

_SEQUENCES = ("bad_words", "thinking_call_ids")  # lists of token sequences
_SAMPLING_SCALARS = tuple(
    name for name in SamplingParams.__struct_fields__ if name not in (*TOKEN_ID_LISTS, *_SEQUENCES, "logit_bias")
)
_LAYOUT_FIELDS = tuple(name for name in KVLayout.__struct_fields__ if name not in ("spec", "groups"))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32."""
    return array("I", token_ids).tobytes()


def count_tokens(data: bytes) -> int:
    """Return the number of packed token ids. Raises RequestError unless the bytes are whole ids."""
    if len(data) % TOKEN_BYTES:
        raise RequestError(f"token_ids has {len(data)} bytes, which is not a multiple of {TOKEN_BYTES}", "token_ids")
    return len(data) // TOKEN_BYTES


def unpack_tokens(data: bytes) -> array[int]:
    """Return the token ids of ``pack_tokens``. Raises RequestError unless the bytes are whole ids."""
    count_tokens(data)
    return array("I", data)


def resumed_outputs(choices: Iterable[pb.ResumedChoice]) -> dict[int, bytes]:
    """Return the output so far of each choice. Raises RequestError for a choice that is there twice."""
    token_ids: dict[int, bytes] = {}
    for choice in choices:
        if choice.choice in token_ids:
            raise RequestError(f"resume has choice {choice.choice} twice; send all its tokens at once", "resume")
        token_ids[choice.choice] = choice.token_ids
    return token_ids


def images_to_pb(images: Images) -> list[pb.ImageSpan]:
    return [pb.ImageSpan(**asdict(span)) for span in images]


def images_from_pb(spans: Iterable[pb.ImageSpan]) -> Images:
    """Convert every field as it is: node/request_checks.py compares them with the prompt."""
    return tuple(ImageSpan(span.start, span.rows, span.columns, span.digest) for span in spans)


def image_input_to_pb(images: ImageInput) -> pb.ImageInput:
    return pb.ImageInput(**asdict(images))


def image_input_from_pb(message: pb.ImageInput) -> ImageInput:
    return ImageInput(**{name: getattr(message, name) for name in ImageInput.__struct_fields__})


def image_cost_from_pb(message: pb.ImageCost) -> EncodingCost:
    return EncodingCost(message.base, message.slope)


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        logit_bias=sampling.logit_bias, **{name: getattr(sampling, name) for name in TOKEN_ID_LISTS}
    )
    for name in _SAMPLING_SCALARS:
        setattr(message, name, getattr(sampling, name))
    for name in _SEQUENCES:
        getattr(message, name).extend(pb.TokenSequence(token_ids=token_ids) for token_ids in getattr(sampling, name))
    return message


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Convert every field. A missing one is zero, not its default: the router resolves defaults."""
    lists: dict[str, Any] = {name: tuple(getattr(message, name)) for name in TOKEN_ID_LISTS}
    lists |= {name: tuple(tuple(sequence.token_ids) for sequence in getattr(message, name)) for name in _SEQUENCES}
    return SamplingParams(
        **{name: getattr(message, name) for name in _SAMPLING_SCALARS},
        **lists,
        logit_bias=dict(message.logit_bias),
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs)


def logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def prompt_logprobs_to_pb(logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(**asdict(logprobs))


def prompt_logprobs_from_pb(message: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(message.first, message.num_top, message.table)


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    """The message holds the kind of the spec, and its fields by name. Groups without a window have 0 there."""
    fields = {name: getattr(layout, name) for name in _LAYOUT_FIELDS}
    groups = layout.groups
    return pb.KVLayout(
        spec=layout.spec.kind,
        group_windows=[window or 0 for window in groups.windows],
        layer_groups=groups.layers,
        group_kv_heads=[heads.num_kv_heads for heads in groups.heads],
        group_head_dims=[heads.head_dim for heads in groups.heads],
        **fields,
        **asdict(layout.spec),
    )


def layout_from_pb(message: pb.KVLayout) -> KVLayout:
    """Raises ConfigError for an impossible geometry or an unknown kind of spec."""
    kind = KV_CACHE_SPECS.get(message.spec)
    if kind is None:
        raise ConfigError(
            f"KV cache spec {message.spec!r} is not one of {', '.join(KV_CACHE_SPECS)}; upgrade this node"
        )
    spec: Any = kind(**{name: getattr(message, name) for name in kind.__struct_fields__})
    windows = tuple(window or None for window in message.group_windows)
    if len(message.group_kv_heads) != len(message.group_head_dims):
        raise ConfigError(
            f"{len(message.group_kv_heads)} numbers of KV heads and {len(message.group_head_dims)} sizes of heads; KV "
            "cache groups need as many of both"
        )
    heads = tuple(KVHeads(*pair) for pair in zip(message.group_kv_heads, message.group_head_dims, strict=True))
    groups = KVCacheGroups(windows or (None,), tuple(message.layer_groups), heads)
    return KVLayout(**{name: getattr(message, name) for name in _LAYOUT_FIELDS}, spec=spec, groups=groups)


def step_costs_to_pb(costs: StepCosts) -> pb.Throughput:
    return pb.Throughput(**{name: pb.LinearCost(**asdict(line)) for name, line in asdict(costs).items()})


def step_costs_from_pb(message: pb.Throughput) -> StepCosts:
    return StepCosts(
        prompt=_cost_from_pb(message.prompt),
        decode=_cost_from_pb(message.decode),
        read=_cost_from_pb(message.read),
    )


def _cost_from_pb(message: pb.LinearCost) -> LinearCost:
    """Rounding errors below zero (field_ranges.py) are zero."""
    return LinearCost(max(message.base, 0.0), max(message.slope, 0.0))


def rank_to_pb(rank: RankKV) -> pb.RankKV:
    return pb.RankKV(
        agent=rank.agent,
        metadata=rank.metadata,
        **asdict(rank.region),
        layout=layout_to_pb(rank.layout),
        share=None if rank.share is None else pb.KVShare(**asdict(rank.share)),
        states=None if rank.states is None else _states_to_pb(rank.states),
    )


def rank_from_pb(message: pb.RankKV) -> RankKV:
    """Raises ConfigError for an impossible layout, or a share that is no part of the model."""
    share = None
    if message.HasField("share"):
        share = KVShare(**{name: getattr(message.share, name) for name in KVShare.__struct_fields__})
    region = KVRegion(
        address=message.address,
        num_bytes=message.num_bytes,
        device=message.device,
        device_id=message.device_id,
    )
    return RankKV(
        agent=message.agent,
        metadata=message.metadata,
        region=region,
        layout=layout_from_pb(message.layout),
        share=share,
        states=_states_from_pb(message) if message.HasField("states") else None,
    )


def _states_to_pb(states: RankStates) -> pb.RankStates:
    layout = states.layout
    region = states.region
    return pb.RankStates(
        address=region.address,
        num_bytes=region.num_bytes,
        num_slots=layout.num_slots,
        **asdict(states.share),
        **asdict(layout.spec),
        is_mamba2=isinstance(layout.spec, Mamba2Spec),
    )


def _states_from_pb(message: pb.RankKV) -> RankStates:
    """Raises ConfigError for a share that is no part of the model."""
    states = message.states
    kind: type[AnyStateSpec] = GatedDeltaSpec
    if states.is_mamba2:
        kind = Mamba2Spec
    elif states.channels:
        kind = ShortConvSpec
    spec = kind(**{name: getattr(states, name) for name in kind.__struct_fields__})
    return RankStates(
        KVRegion(states.address, states.num_bytes, message.device, message.device_id),
        StateLayout(states.num_slots, states.num_layers, spec),
        StateShare(**{name: getattr(states, name) for name in StateShare.__struct_fields__}),
    )
