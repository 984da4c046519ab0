"""Between the records of pdserve/records.py and the messages of proto/pdserve.proto. Translation only, no policy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdserve.errors import ConfigError, RequestError
from pdserve.kv import KV_CACHE_SPECS, KVLayout, KVShare
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES, KVRegion, PromptLogprobs, RankKV, SamplingParams, TokenLogprobs
from pdserve.throughput import LinearCost, Throughput

_SCALARS = (
    "max_tokens",
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "logprobs",
    "grammar",
    "prompt_logprobs",
)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """The token ids of ``pack_tokens``. Raises RequestError when the bytes are no whole number of ids."""
    if len(data) % TOKEN_BYTES:
        raise RequestError(f"token_ids has {len(data)} bytes, which is not a multiple of {TOKEN_BYTES}", "token_ids")
    return array("I", data)


def sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(stop_token_ids=sampling.stop_token_ids, logit_bias=sampling.logit_bias)
    for name in _SCALARS:
        setattr(message, name, getattr(sampling, name))
    return message


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Every field as it stands: what a sender left out is zero, not a default (the router resolves defaults)."""
    return SamplingParams(
        **{name: getattr(message, name) for name in _SCALARS},
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
    )


def logprobs_to_pb(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs)


def prompt_logprobs_to_pb(found: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(first=found.first, num_top=found.num_top, table=found.table)


def prompt_logprobs_from_pb(message: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(message.first, message.num_top, message.table)


def logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


_LAYOUT_FIELDS = (
    *("num_blocks", "block_size", "kernel_block_size"),
    *("num_layers", "num_kv_heads", "head_dim", "dtype"),
)


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    return pb.KVLayout(spec=layout.spec.kind, **{name: getattr(layout, name) for name in _LAYOUT_FIELDS})


def layout_from_pb(message: pb.KVLayout) -> KVLayout:
    """Raises ConfigError for an impossible geometry or an unknown kind of spec."""
    if message.spec not in KV_CACHE_SPECS:
        raise ConfigError(
            f"KV cache spec {message.spec!r} is not one of {', '.join(KV_CACHE_SPECS)}; upgrade this node"
        )
    spec = KV_CACHE_SPECS[message.spec](message.num_kv_heads, message.head_dim, message.dtype)
    return KVLayout(message.num_blocks, message.block_size, message.kernel_block_size, message.num_layers, spec)


def share_to_pb(share: KVShare) -> pb.KVShare:
    return pb.KVShare(**{name: getattr(share, name) for name in KVShare.__struct_fields__})


def share_from_pb(message: pb.KVShare) -> KVShare:
    """Raises ConfigError when it is no part of the model."""
    return KVShare(**{name: getattr(message, name) for name in KVShare.__struct_fields__})


def throughput_to_pb(throughput: Throughput) -> pb.Throughput:
    return pb.Throughput(
        prompt=_cost_to_pb(throughput.prompt), decode=_cost_to_pb(throughput.decode), read=_cost_to_pb(throughput.read)
    )


def throughput_from_pb(message: pb.Throughput) -> Throughput:
    return Throughput(_cost_from_pb(message.prompt), _cost_from_pb(message.decode), _cost_from_pb(message.read))


def _cost_to_pb(line: LinearCost) -> pb.LinearCost:
    return pb.LinearCost(base=line.base, slope=line.slope)


def _cost_from_pb(message: pb.LinearCost) -> LinearCost:
    return LinearCost(message.base, message.slope)


def rank_to_pb(rank: RankKV) -> pb.RankKV:
    return pb.RankKV(
        agent=rank.agent,
        metadata=rank.metadata,
        address=rank.region.address,
        num_bytes=rank.region.num_bytes,
        device=rank.region.device,
        device_id=rank.region.device_id,
        layout=layout_to_pb(rank.layout),
        share=None if rank.share is None else share_to_pb(rank.share),
    )


def rank_from_pb(message: pb.RankKV) -> RankKV:
    return RankKV(
        agent=message.agent,
        metadata=message.metadata,
        region=KVRegion(message.address, message.num_bytes, message.device, message.device_id),
        layout=layout_from_pb(message.layout),
        share=share_from_pb(message.share) if message.HasField("share") else None,
    )
