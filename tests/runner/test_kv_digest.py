"""Digests of KV blocks: they show each difference in content, and no difference in layout."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from fast_set import examples, sampled
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdserve.kv.groups import KVCacheGroups
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVShare, LatentSpec
from pdserve.kv.states import GatedDeltaSpec, ShortConvSpec, StateLayout, StateShare
from pdserve.records import DigestOrder
from runner.kernels.block_digest import block_digests
from runner.kv_digest import KVDigester, StateDigester
from runner.state_cache import StateCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS = 4
HEADS = 4
BLOCK = 8
WRAP = 1 << 64

# The KV of a model in logical order: [blocks, layers, heads, planes, tokens of a block, bytes of a row].
LogicalKV = NDArray[np.uint8]


def make_layout(num_blocks: int, dtype: str = "float16", head_dim: int = 6, page: int = BLOCK) -> KVLayout:
    return KVLayout(num_blocks, BLOCK, page, LAYERS, FullAttentionSpec(HEADS, head_dim, dtype))


def random_kv(layout: KVLayout, seed: int) -> LogicalKV:
    row = layout.head_dim * {"float32": 4, "float16": 2, "bfloat16": 2}[layout.dtype]
    shape = layout.num_blocks, layout.num_layers, layout.num_kv_heads, layout.spec.planes, BLOCK, row
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def digests(
    kv: LogicalKV,
    layout: KVLayout,
    share: KVShare | None = None,
    num_tokens: int | None = None,
    num_layers: int = 0,
) -> list[int]:
    """Return the digests of all blocks, computed by the rank that holds ``share`` in the pages of ``layout``."""
    share = share or KVShare.whole(layout)
    held = kv[
        :,
        share.first_layer : share.first_layer + share.num_layers,
        share.first_head : share.first_head + share.num_heads,
    ]
    pages = held.reshape(*held.shape[:4], layout.pages_per_block, layout.kernel_block_size, -1)
    memory = pages.transpose(0, 4, 2, 1, 3, 5, 6).copy()  # the order of pdserve/kv/layout.py
    layout = layout.resized(share.layers, share.num_heads)
    cache = torch.from_numpy(memory.reshape(-1)).view(getattr(torch, layout.dtype)).view(layout.shape)
    blocks = tuple(range(len(kv)))
    order = DigestOrder(blocks, len(kv) * BLOCK if num_tokens is None else num_tokens, num_layers=num_layers)
    digester = KVDigester(cache.to(DEVICE), layout, share)
    return [digest % WRAP for digest in digester.compute([order]).tolist()]


@given(dtype=st.sampled_from(["float32", "float16"]), head_dim=st.sampled_from([1, 2, 6]), data=st.data())
@examples(60)
def test_each_changed_element_changes_the_digest(dtype: str, head_dim: int, data: st.DataObject) -> None:
    layout = make_layout(2, dtype, head_dim)
    kv = random_kv(layout, data.draw(st.integers(0, 1000)))
    changed = kv.copy()
    at = data.draw(st.integers(0, kv.size - 1))
    changed.reshape(-1)[at] ^= data.draw(st.integers(1, 255))
    before = digests(kv, layout)
    after = digests(changed, layout)
    assert [a != b for a, b in zip(before, after, strict=True)] == [block == at * 2 // kv.size for block in range(2)]


def test_a_spec_with_one_plane_has_digests_independent_of_pages() -> None:
    layouts = [KVLayout(2, BLOCK, page, LAYERS, LatentSpec(HEADS, 6, "float16")) for page in (2, BLOCK)]
    kv = random_kv(layouts[0], 3)
    assert digests(kv, layouts[0]) == digests(kv, layouts[1])
    kv[1, 2, 3, 0, 4, 5] ^= 1
    before = digests(random_kv(layouts[0], 3), layouts[0])
    after = digests(kv, layouts[0])
    assert [a != b for a, b in zip(before, after, strict=True)] == [False, True]


@pytest.mark.parametrize("axis", range(6), ids=["block", "layer", "head", "plane", "token", "word of a row"])
def test_swapped_parts_change_the_digest(axis: int) -> None:
    layout = make_layout(2)
    kv = random_kv(layout, axis)
    swapped = np.flip(kv, axis) if axis < 5 else kv.reshape(-1, 4)[:, [2, 3, 0, 1]].reshape(kv.shape)
    assert all(a != b for a, b in zip(digests(kv, layout), digests(swapped, layout), strict=True))


@given(page=st.sampled_from([1, 2, 4, 8]), num_tokens=st.integers(1, 3 * BLOCK), seed=st.integers(0, 1000))
@examples(40)
def test_digests_do_not_depend_on_pages_or_later_tokens(page: int, num_tokens: int, seed: int) -> None:
    num_blocks = math.ceil(num_tokens / BLOCK)
    layout = make_layout(num_blocks)
    kv = random_kv(layout, seed)
    expected = digests(kv, layout, num_tokens=num_tokens)
    used = num_tokens - (num_blocks - 1) * BLOCK
    kv[-1, :, :, :, used:] = 7
    assert digests(kv, make_layout(num_blocks, page=page), num_tokens=num_tokens) == expected
    kv[-1, 0, 0, 0, used - 1, 0] ^= 1
    assert digests(kv, layout, num_tokens=num_tokens) != expected


@given(
    stages=st.sampled_from([(4,), (1, 3), (2, 1, 1)]),
    shards=st.sampled_from([1, 2, 4]),
    page=st.sampled_from([2, 8]),
    num_tokens=st.sampled_from([2 * BLOCK, BLOCK + 3]),
)
@examples(40)
def test_digests_of_ranks_add_up_to_that_of_the_model(
    stages: tuple[int, ...], shards: int, page: int, num_tokens: int
) -> None:
    layout = make_layout(2, page=page)
    kv = random_kv(layout, 1)
    parts = [
        digests(kv, layout, KVShare.of_rank(stage, stages, shard, shards, HEADS), num_tokens)
        for stage in range(len(stages))
        for shard in range(shards)
    ]
    assert [sum(part) % WRAP for part in zip(*parts, strict=True)] == digests(kv, make_layout(2), None, num_tokens)


@pytest.mark.parametrize("head_dim", [1, 2, 4], ids=["2-byte words", "4-byte words", "8-byte words"])
@pytest.mark.parametrize("page", [2, BLOCK])
def test_the_triton_kernel_computes_what_torch_computes(page: int, head_dim: int) -> None:
    layout = make_layout(6, head_dim=head_dim, page=page)
    memory = torch.randn(layout.shape).to(torch.float16).to(DEVICE)
    orders = [DigestOrder((5, 0, 3), 2 * BLOCK + 3), DigestOrder((2,), 1), DigestOrder((1, 4), 2 * BLOCK)]
    digester = KVDigester(memory, layout, KVShare.whole(layout))
    digester._uses_triton = False
    expected = digester.compute(orders)
    rows = [[5, BLOCK, 0], [0, BLOCK, 0], [3, 3, 0], [2, 1, 0], [1, BLOCK, 0], [4, BLOCK, 0]]
    work = torch.tensor(rows, device=DEVICE)
    digests_of_kernel = block_digests(digester._words, work, digester._multipliers, page, digester._row_words[0])
    assert digests_of_kernel.tolist() == expected.tolist()


GROUPS = KVCacheGroups((None, 8, 8), (1, 0, 2, 1))  # a block has two layers; blocks of groups 0 and 2 have padding


def grouped_digests(
    kv: LogicalKV, stages: tuple[int, ...], order: DigestOrder, triton: bool = False, padding: int = 0
) -> list[int]:
    """Return the sum of the digests of all stages; block b has the layers of the group that the order says."""
    total = np.zeros(len(order.block_ids), dtype=np.int64)
    for stage in range(len(stages)):
        share = KVShare.of_rank(stage, stages, 0, 1, HEADS)
        layout = msgspec.structs.replace(make_layout(len(kv), page=4), groups=GROUPS)
        layout = layout.resized(share.layers, HEADS)
        held = np.full((len(kv), layout.num_layers, *kv.shape[2:]), padding, dtype=np.uint8)
        for block, group in zip(order.block_ids, order.groups, strict=True):
            for layer, (its, index) in zip(share.layers, GROUPS.places(share.layers), strict=True):
                if its == group:
                    held[block, index] = kv[block, layer]
        pages = held.reshape(*held.shape[:4], layout.pages_per_block, layout.kernel_block_size, -1)
        memory = pages.transpose(0, 4, 2, 1, 3, 5, 6).copy()
        cache = torch.from_numpy(memory.reshape(-1)).view(torch.float16).view(layout.shape).to(DEVICE)
        digester = KVDigester(cache, layout, share)
        if triton:
            work = torch.tensor([list(row) for row in digester._blocks_with_tokens(order)], device=DEVICE)
            words = digester._words
            rows = digester._row_words[0]
            total += block_digests(words, work, digester._multipliers, 4, rows).cpu().numpy()
        else:
            total += digester.compute([order]).cpu().numpy()
    return [int(digest) % WRAP for digest in total]


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("stages", [(4,), (2, 2), (1, 3), (3, 1)])
def test_digests_of_groups_do_not_depend_on_stages_or_padding(stages: tuple[int, ...], triton: bool) -> None:
    kv = random_kv(make_layout(6), 1)
    order = DigestOrder((4, 0, 2, 5, 1), 2 * BLOCK - 3, groups=(0, 0, 1, 2, 2))
    expected = grouped_digests(kv, (4,), order)
    assert grouped_digests(kv, stages, order, triton, padding=7) == expected
    assert len(set(expected)) == 5
    kv[[0, 2, 1], :, :, :, BLOCK - 3 :] ^= 1  # behind the last token
    assert grouped_digests(kv, stages, order) == expected
    kv[1, 2, 0, 0, BLOCK - 4] ^= 1  # layer 2 of a block of its group
    assert [a != b for a, b in zip(grouped_digests(kv, stages, order), expected, strict=True)] == [False] * 4 + [True]


@pytest.mark.parametrize("num_tokens", [2 * BLOCK, 2 * BLOCK - 3])
def test_digests_of_the_first_layers_are_those_of_a_node_without_the_others(num_tokens: int) -> None:
    layout = make_layout(2)
    kv = random_kv(layout, 5)
    fewer = msgspec.structs.replace(layout, num_layers=LAYERS - 1)
    expected = digests(kv[:, :-1], fewer, num_tokens=num_tokens)
    assert digests(kv, layout, num_tokens=num_tokens, num_layers=LAYERS - 1) == expected
    assert digests(kv, layout, num_tokens=num_tokens, num_layers=LAYERS) != expected
    rank = KVShare(0, LAYERS - 1, 0, HEADS, LAYERS, HEADS)
    assert digests(kv, layout, rank, num_tokens=num_tokens, num_layers=LAYERS - 1) == expected


def test_digests_follow_the_orders_and_do_not_depend_on_chunks() -> None:
    layout = KVLayout(64, 64, 64, 8, FullAttentionSpec(8, 64, "bfloat16"))  # larger than a chunk
    memory = torch.randn(layout.shape).to(torch.bfloat16)
    digester = KVDigester(memory, layout, KVShare.whole(layout))
    orders = [DigestOrder((5, 3, 60, 61), 4 * 64), DigestOrder((7,), 1), DigestOrder((0, 7), 128)]
    alone = [digester.compute([DigestOrder((block,), 64)]).item() for block in (5, 3, 60, 61, 0, 7)]
    together = digester.compute(orders).tolist()
    assert together[:4] + together[5:] == alone
    assert together[4] not in alone


STATE = GatedDeltaSpec(key_heads=4, value_heads=8, key_dim=6, value_dim=4, conv_width=3, dtype="float16")
LogicalState = tuple[NDArray[np.uint8], ...]  # delta rule, queries, keys and values: [slots, layers, heads, bytes]
WHOLE = StateShare(0, LAYERS, LAYERS, 0, 1)


def random_states(seed: int) -> LogicalState:
    numbers = np.random.default_rng(seed)
    sizes = [(8, 4 * 6 * 4), (4, 6 * 2 * 2), (4, 6 * 2 * 2), (8, 4 * 2 * 2)]
    return tuple(numbers.integers(0, 256, (3, LAYERS, *size), dtype=np.uint8) for size in sizes)


def state_digests(
    states: LogicalState, share: StateShare, slots: tuple[int, ...] = (0, 1, 2), triton: bool = False
) -> list[int]:
    """Return the digests that the rank with ``share`` computes. Padding between the parts does not count."""
    spec = STATE.split(share.num_shards)
    cache = StateCache(StateLayout(3, share.num_layers, spec), DEVICE, share)
    for layer in range(share.num_layers):
        parts = []
        for part in states:
            count = part.shape[2] // share.num_shards
            heads = part[:, layer + share.first_layer, share.shard * count : (share.shard + 1) * count]
            parts.append(torch.from_numpy(heads.reshape(3, -1).copy()))
        delta = parts[0].view(torch.float32)
        conv = torch.cat(parts[1:], dim=1).view(torch.float16)
        cache.delta[layer].copy_(delta.view(cache.delta[layer].shape))
        cache.conv[layer].copy_(conv.view(cache.conv[layer].shape))
    cache.slots.view(3, share.num_layers, -1)[:, :, spec.layer_bytes - 1] = 7
    digester = StateDigester(cache)
    digester._uses_triton = triton
    return [digest % WRAP for digest in digester.compute(slots).tolist()]


@pytest.mark.parametrize(("stages", "shards"), sampled([(4,), (1, 3), (2, 1, 1)], (1, 2), every=2))
def test_digests_of_states_of_ranks_add_up(stages: tuple[int, ...], shards: int) -> None:
    states = random_states(1)
    shares = [
        StateShare(sum(stages[:stage]), count, LAYERS, shard, shards)
        for stage, count in enumerate(stages)
        for shard in range(shards)
    ]
    expected = state_digests(states, WHOLE)
    for triton in (False, True):
        parts = [state_digests(states, share, triton=triton) for share in shares]
        assert [sum(part) % WRAP for part in zip(*parts, strict=True)] == expected


@given(part=st.integers(0, 3), place=st.integers(0, 1 << 20), bits=st.integers(1, 255))
@examples(40)
def test_each_changed_byte_of_a_state_changes_its_digest(part: int, place: int, bits: int) -> None:
    states = random_states(2)
    changed = random_states(2)
    at = place % changed[part].size
    changed[part].reshape(-1)[at] ^= bits
    slot = at * 3 // changed[part].size
    before = state_digests(states, WHOLE)
    after = state_digests(changed, WHOLE)
    assert [a != b for a, b in zip(before, after, strict=True)] == [number == slot for number in range(3)]


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["slot", "layer", "head"])
def test_swapped_parts_change_the_digest_of_a_state(axis: int) -> None:
    states = random_states(3)
    swapped = tuple(np.flip(part, axis) for part in states)
    before = state_digests(states, WHOLE)
    after = state_digests(swapped, WHOLE)
    assert before[0] != after[0]
    assert before[2] != after[2]
    assert state_digests(states, WHOLE, (2, 0)) == [before[2], before[0]]


@pytest.mark.parametrize("triton", [False, True])
def test_digests_of_short_convolutions_add_up_and_know_each_byte(triton: bool) -> None:
    """Two shards of one layer each stage against one rank."""
    whole = ShortConvSpec(channels=8, conv_width=3, dtype="float16")
    values = torch.from_numpy(np.random.default_rng(3).integers(0, 1 << 15, (3, LAYERS, 8, 2), dtype=np.int16))

    def digests_of(share: StateShare, states: torch.Tensor) -> list[int]:
        cache = StateCache(StateLayout(3, share.num_layers, whole.split(share.num_shards)), DEVICE, share)
        count = 8 // share.num_shards
        for layer in range(share.num_layers):
            part = states[:, share.first_layer + layer, share.shard * count : (share.shard + 1) * count]
            cache.conv[layer].view(torch.int16).copy_(part)
        digester = StateDigester(cache)
        digester._uses_triton = triton
        return [digest % WRAP for digest in digester.compute((0, 1, 2)).tolist()]

    expected = digests_of(WHOLE, values)
    shares = [StateShare(stage, 1, LAYERS, shard, 2) for stage in range(LAYERS) for shard in range(2)]
    parts = [digests_of(share, values) for share in shares]
    assert [sum(part) % WRAP for part in zip(*parts, strict=True)] == expected
    changed = values.clone()
    changed[1, 0, 5, 1] ^= 1
    assert [a == b for a, b in zip(digests_of(WHOLE, changed), expected, strict=True)] == [True, False, True]
