"""Records equal themselves after conversion to messages and back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.compatibility import compat_hash, differences
from pdserve.errors import ConfigError, RequestError
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion, KVShare, LatentSpec
from pdserve.logprobs import TokenLogprobs
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import RankKV
from pdserve.rpc.protobuf import (
    layout_from_pb,
    layout_to_pb,
    logprobs_from_pb,
    logprobs_to_pb,
    pack_tokens,
    rank_from_pb,
    rank_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    unpack_tokens,
)
from pdserve.sampling_params import TOKEN_ID_LISTS, SamplingParams

_uint32 = st.integers(0, 2**32 - 1)
_float = st.floats(allow_nan=False)
_float32 = st.floats(allow_nan=False, width=32)
_token_ids = st.lists(_uint32, max_size=4).map(tuple)
#: Values of each field of SamplingParams, by the type of the message's field.
_VALUES: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: _uint32,
    FieldDescriptor.TYPE_INT32: st.integers(-1, 100),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: _float,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(max_size=4),
}
_plain: dict[str, st.SearchStrategy[Any]] = {
    field.name: _token_ids if field.name in TOKEN_ID_LISTS else _VALUES[field.type]
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.message_type is None
}
_sampling = st.builds(
    SamplingParams,
    **_plain,
    logit_bias=st.dictionaries(_uint32, _float, max_size=4),
    bad_words=st.lists(_token_ids, max_size=3).map(tuple),
    thinking_call_ids=st.lists(_token_ids, max_size=3).map(tuple),
)


@given(st.lists(_uint32))
def test_token_ids_round_trip(tokens: list[int]) -> None:
    data = pack_tokens(tokens)
    assert list(unpack_tokens(data)) == tokens
    assert data == b"".join(token.to_bytes(4, "little") for token in tokens)


@given(st.binary().filter(lambda data: len(data) % 4))
def test_bytes_of_partial_tokens_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match=f"{len(data)} bytes"):
        unpack_tokens(data)


@given(_sampling)
def test_sampling_params_round_trip(sampling: SamplingParams) -> None:
    message = pb.SamplingParams.FromString(sampling_to_pb(sampling).SerializeToString())
    assert sampling_from_pb(message) == sampling


def test_every_sampling_field_has_a_message_field() -> None:
    assert set(SamplingParams.__struct_fields__) == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


@given(st.builds(TokenLogprobs, _float32, st.lists(_uint32).map(tuple), st.lists(_float32).map(tuple)))
def test_logprobs_round_trip(logprobs: TokenLogprobs) -> None:
    assert logprobs_from_pb(logprobs_to_pb(logprobs)) == logprobs


@pytest.mark.parametrize("share", [None, KVShare(0, 2, 4, 4, 8, 16)])
def test_ranks_round_trip(share: KVShare | None) -> None:
    layout = KVLayout(10, 32, 16, 2, FullAttentionSpec(4, 64, "bfloat16"))
    rank = RankKV("node-epoch", b"\x00\xff", KVRegion(2**63, 2**40, "cuda", 3), layout, share)
    assert rank_from_pb(rank_to_pb(rank)) == rank


def test_kinds_of_kv_cache_round_trip_by_their_tags() -> None:
    """Between nodes, and between the processes of a node."""
    keys = FullAttentionSpec(1, 576, "bfloat16")
    latents = LatentSpec(1, 576, "bfloat16")
    assert keys.page_bytes(16) == 2 * latents.page_bytes(16)
    for spec in (keys, latents):
        layout = KVLayout(num_blocks=10, block_size=32, kernel_block_size=16, num_layers=2, spec=spec)
        assert layout_from_pb(layout_to_pb(layout)) == layout
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
    assert "kv_cache: full_attention here, latent there" in differences(keys.compat_fields, latents.compat_fields)


def test_an_impossible_layout_is_refused() -> None:
    message = layout_to_pb(KVLayout(10, 32, 16, 2, FullAttentionSpec(4, 64, "bfloat16")))
    message.kernel_block_size = 5
    with pytest.raises(ConfigError, match="5 does not divide"):
        layout_from_pb(message)


def test_an_unknown_kind_of_kv_cache_is_refused() -> None:
    message = layout_to_pb(KVLayout(10, 32, 16, 2, FullAttentionSpec(4, 64, "bfloat16")))
    message.spec = "holographic"
    with pytest.raises(ConfigError, match="'holographic' is not one of full_attention, latent"):
        layout_from_pb(message)


@given(st.dictionaries(st.text(), st.text(), max_size=4), st.dictionaries(st.text(), st.text(), max_size=4))
def test_compat_hashes_are_equal_exactly_when_nothing_differs(mine: dict[str, str], theirs: dict[str, str]) -> None:
    assert (compat_hash(mine) == compat_hash(theirs)) == (differences(mine, theirs) == "")
    assert compat_hash(mine) == compat_hash(dict(reversed(mine.items())))


def test_differences_name_both_values() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "3", "a": "1"}) == "b: 2 here, 3 there"
    assert msgspec.json.encode(differences({"a": "1"}, {})) == b'"a: 1 here, nothing there"'
