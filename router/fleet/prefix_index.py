"""Prefix index: which nodes hold which blocks in their prefix caches.

    block hash ──► 0b0110   nodes 1 and 2 hold the block

One lookup serves all nodes: it follows a prompt's chain of block hashes while any node holds the next one. The table
takes about 150 bytes per distinct hash, and 8 to 16 more per hash and node. 64 nodes with 50,000 unshared blocks each
take half a gigabyte; with blocks of several hundred tokens, a tenth of that.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from pdserve.hashing import short_block_hashes
from pdserve.images import Images
from pdserve.records import TOKEN_BYTES

_SLACK = 1024  # removed hashes that a node's list may hold beyond the number of current ones


class PromptPrefix:
    """The block hashes of a prompt, computed on first use.

    ``token_ids`` are packed (pack_tokens); ``root`` is the request's root_hash; ``images`` are the prompt's.
    """

    def __init__(self, token_ids: bytes, root: bytes, images: Images = ()) -> None:
        self.num_tokens = len(token_ids) // TOKEN_BYTES
        self.token_ids = token_ids
        self.images = images
        self._root = root
        self._hashes: dict[int, list[int]] = {}  # by block size

    def hashes(self, block_size: int) -> list[int]:
        """Hashes of all full blocks, 64 bits each."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes = self._hashes[block_size] = short_block_hashes(self.token_ids, block_size, self._root, self.images)
        return hashes


class PrefixIndex:
    """A bit mask of nodes per block hash (pdserve/hashing.py)."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}  # block hash → bits of nodes
        self.rebuilds = 0  # times that a node's part was rebuilt
        self._used_bits = 0

    def open(self, sample_bits: int) -> CachedBlocks:
        """Add a node that holds nothing yet."""
        bit = ~self._used_bits & (self._used_bits + 1)  # lowest free bit
        self._used_bits |= bit
        return CachedBlocks(self, bit, (1 << sample_bits) - 1)

    def close(self, blocks: CachedBlocks) -> None:
        """Remove a node with all of its blocks."""
        for block_hash in blocks.hashes:
            self.remove(block_hash, blocks.bit)
        blocks.hashes = array("Q")
        self._used_bits &= ~blocks.bit

    def rebuild(self, blocks: CachedBlocks) -> CachedBlocks:
        """Replace the part of a node by one that holds nothing yet."""
        self.rebuilds += 1
        self.close(blocks)
        return self.open(blocks.sample_mask.bit_length())

    def add(self, block_hash: int, bit: int) -> bool:
        """Return whether the node did not hold the block before."""
        holders = self.holders.get(block_hash, 0)
        self.holders[block_hash] = holders | bit
        return not holders & bit

    def remove(self, block_hash: int, bit: int) -> bool:
        """Return whether the node held the block."""
        holders = self.holders.get(block_hash, 0)
        rest = holders & ~bit
        if rest:
            self.holders[block_hash] = rest
        elif holders:
            del self.holders[block_hash]
        return rest != holders

    def match(self, hashes: Sequence[int], nodes: Iterable[CachedBlocks]) -> dict[CachedBlocks, int]:
        """Return the number of leading blocks that each node holds; nodes with none are left out."""
        by_mask: dict[int, dict[int, CachedBlocks]] = {}
        for node in nodes:
            by_mask.setdefault(node.sample_mask, {})[node.bit] = node
        matches: dict[CachedBlocks, int] = {}
        for mask, members in by_mask.items():
            for bits, count in self._follow(hashes, mask, sum(members)):
                matches.update((members[bit], count) for bit in _single_bits(bits))
        return matches

    def _follow(self, hashes: Sequence[int], mask: int, bits: int) -> Iterator[tuple[int, int]]:
        """Yield nodes of one sampling with their leading blocks, as their chains end."""
        count = 0
        for index, block_hash in enumerate(hashes, 1):
            if block_hash & mask:
                continue
            holders = bits & self.holders.get(block_hash, 0)
            if holders != bits:
                if count:
                    yield bits & ~holders, count
                if not holders:
                    return
                bits = holders
            count = index
        if count:
            yield bits, count


class CachedBlocks:
    """The reported blocks of one node. Hashes with a bit of ``sample_mask`` set are not reported."""

    def __init__(self, index: PrefixIndex, bit: int, sample_mask: int) -> None:
        self._index = index
        self.bit = bit
        self.sample_mask = sample_mask
        self.hashes = array("Q")  # hashes that the node holds, and some that it has evicted
        self.digest = 0  # XOR of the hashes that the node holds
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def change(self, added: Sequence[int], removed: Sequence[int]) -> None:
        for block_hash in removed:
            if self._index.remove(block_hash, self.bit):
                self._count -= 1
                self.digest ^= block_hash
        for block_hash in added:
            if self._index.add(block_hash, self.bit):
                self._count += 1
                self.digest ^= block_hash
                self.hashes.append(block_hash)
        if len(self.hashes) > 2 * self._count + _SLACK:
            holders = self._index.holders
            held = (block_hash for block_hash in self.hashes if holders.get(block_hash, 0) & self.bit)
            self.hashes = array("Q", dict.fromkeys(held))


def _single_bits(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit
