"""The table of cached prefixes against sets of numbers."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pdserve.hashing import BlockHashes, prefix_numbers, unpack_numbers
from pdserve.rpc.protobuf import pack_tokens
from router.fleet.prefix_index import CachedBlocks, PrefixIndex

NUMBERS = st.integers(0, 30)
CHANGE = st.tuples(st.integers(0, 3), st.lists(NUMBERS, max_size=8), st.lists(NUMBERS, max_size=8))


def length(chain: list[int], have: set[int], mask: int) -> int:
    """How many leading blocks a node has for sure that tells of some only."""
    found = 0
    for index, number in enumerate(chain, 1):
        if not number & mask:
            if number not in have:
                break
            found = index
    return found


@given(st.lists(CHANGE, max_size=30), st.lists(NUMBERS, unique=True), st.integers(0, 3), st.sampled_from([0, 1]))
def test_the_table_says_what_each_node_has(
    changes: list[tuple[int, list[int], list[int]]], chain: list[int], gone: int, bits: int
) -> None:
    index = PrefixIndex()
    nodes = [index.open(bits if place % 2 else 0) for place in range(4)]
    have: list[set[int]] = [set() for _ in nodes]
    for place, added, removed in changes:
        told = [number for number in added if not number & nodes[place].sample_mask]
        nodes[place].change(told, removed)
        have[place] = (have[place] - set(removed)) | set(told)
    index.close(nodes[gone])
    have[gone] = set()

    assert [len(node) for place, node in enumerate(nodes) if place != gone] == [
        len(numbers) for place, numbers in enumerate(have) if place != gone
    ]
    assert len(index) == len(set().union(*have))
    expected = [length(chain, numbers, node.sample_mask) for node, numbers in zip(nodes, have, strict=True)]
    found = index.match(chain, [node for place, node in enumerate(nodes) if place != gone])
    assert [0 if place == gone else found.get(node, 0) for place, node in enumerate(nodes)] == [
        0 if place == gone else count for place, count in enumerate(expected)
    ]


def test_a_place_is_used_again_and_lists_stay_short() -> None:
    index = PrefixIndex()
    first, second = index.open(0), index.open(0)
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
def test_a_router_names_blocks_as_engines_do(tokens: list[int], block_size: int, salt: str) -> None:
    digests = BlockHashes(block_size, salt).upto(array("I", tokens), len(tokens))
    cut = unpack_numbers(b"".join(digest[:8] for digest in digests))
    assert prefix_numbers(pack_tokens(tokens), block_size, salt) == list(cut)


def test_many_nodes_fit() -> None:
    """More than the bits of a machine word."""
    index = PrefixIndex()
    nodes: list[CachedBlocks] = [index.open(0) for _ in range(200)]
    for place, node in enumerate(nodes):
        node.change(range(1, place + 1), [])
    assert index.match(list(range(1, 300)), nodes) == {node: place for place, node in enumerate(nodes) if place}
