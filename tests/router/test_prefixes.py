"""The prefix index against sets of block hashes."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pdserve.hashing import BlockHashes, root_hash, short_block_hashes, unpack_block_hashes
from pdserve.rpc.protobuf import pack_tokens
from router.fleet.prefix_index import CachedBlocks, PrefixIndex

HASHES = st.integers(0, 30)
CHANGE = st.tuples(st.integers(0, 3), st.lists(HASHES, max_size=8), st.lists(HASHES, max_size=8))


def length(chain: list[int], have: set[int], mask: int) -> int:
    """Leading blocks that a node certainly holds when it reports a sample of its blocks."""
    count = 0
    for index, block_hash in enumerate(chain, 1):
        if not block_hash & mask:
            if block_hash not in have:
                break
            count = index
    return count


@given(st.lists(CHANGE, max_size=30), st.lists(HASHES, unique=True), st.integers(0, 3), st.sampled_from([0, 1]))
def test_index_matches_the_blocks_of_each_node(
    changes: list[tuple[int, list[int], list[int]]], chain: list[int], gone: int, bits: int
) -> None:
    index = PrefixIndex()
    nodes = [index.open(bits if position % 2 else 0) for position in range(4)]
    have: list[set[int]] = [set() for _ in nodes]
    for position, added, removed in changes:
        reported = [block_hash for block_hash in added if not block_hash & nodes[position].sample_mask]
        nodes[position].change(reported, removed)
        have[position] = (have[position] - set(removed)) | set(reported)
    index.close(nodes[gone])
    have[gone] = set()

    assert [len(node) for position, node in enumerate(nodes) if position != gone] == [
        len(hashes) for position, hashes in enumerate(have) if position != gone
    ]
    assert len(index.holders) == len(set().union(*have))
    expected = [length(chain, hashes, node.sample_mask) for node, hashes in zip(nodes, have, strict=True)]
    matches = index.match(chain, [node for position, node in enumerate(nodes) if position != gone])
    assert [0 if position == gone else matches.get(node, 0) for position, node in enumerate(nodes)] == [
        0 if position == gone else count for position, count in enumerate(expected)
    ]


def test_bits_are_reused_and_lists_stay_short() -> None:
    index = PrefixIndex()
    first = index.open(0)
    second = index.open(0)
    first.change([1, 2], [])
    index.close(first)
    third = index.open(0)
    assert third.bit == first.bit
    assert index.match([1, 2], [second, third]) == {}
    for _ in range(3000):
        third.change([7, 8], [])
        third.change([], [7])
    assert len(third) == 1
    assert len(third.hashes) < 3000


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50), st.integers(1, 9), st.text(max_size=4))
def test_router_hashes_blocks_like_the_engine(tokens: list[int], block_size: int, salt: str) -> None:
    root = root_hash(salt)
    hashes = BlockHashes(block_size, root).upto(array("I", tokens), len(tokens))
    cut = unpack_block_hashes(b"".join(block_hash[:8] for block_hash in hashes))
    assert short_block_hashes(pack_tokens(tokens), block_size, root) == list(cut)


def test_index_holds_more_nodes_than_a_machine_word_has_bits() -> None:
    index = PrefixIndex()
    nodes: list[CachedBlocks] = [index.open(0) for _ in range(200)]
    for position, node in enumerate(nodes):
        node.change(range(1, position + 1), [])
    assert index.match(list(range(1, 300)), nodes) == {
        node: position for position, node in enumerate(nodes) if position
    }
