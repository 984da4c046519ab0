"""Which nodes have which blocks in their prefix caches: one table for all nodes, a bit for each.

    number of a block ──► 0b0110   nodes 1 and 2 have it

A prompt is looked up for all nodes at once: its chain of numbers is followed while any node has the next one. The table
takes some 150 bytes for each number that some node has, and a node's own list 8 to 16: 64 nodes with 50,000 blocks each
that have nothing in common take half a gigabyte, and a tenth of that with blocks of several hundred tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from pdserve.hashing import prefix_numbers
from pdserve.records import TOKEN_BYTES

_SLACK = 1024  # numbers that a node's list may hold beyond twice those it has


class PromptPrefix:
    """A prompt's chain of numbers, computed when it is first asked for; ``token_ids``: pack_tokens."""

    def __init__(self, token_ids: bytes, salt: str) -> None:
        self.num_tokens = len(token_ids) // TOKEN_BYTES
        self.token_ids = token_ids
        self._salt = salt
        self._numbers: dict[int, list[int]] = {}  # by block size

    def numbers(self, block_size: int) -> list[int]:
        """Of all full blocks."""
        numbers = self._numbers.get(block_size)
        if numbers is None:
            numbers = self._numbers[block_size] = prefix_numbers(self.token_ids, block_size, self._salt)
        return numbers


class PrefixIndex:
    """Numbers of blocks, cut from digests by pdserve/hashing.py."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # number → bits of nodes
        self._taken = 0  # bits

    def __len__(self) -> int:
        """How many different blocks there are."""
        return len(self._holders)

    def open(self, sample_bits: int) -> CachedBlocks:
        """A place for a node that has nothing yet."""
        bit = ~self._taken & (self._taken + 1)  # the lowest that is free
        self._taken |= bit
        return CachedBlocks(self, bit, (1 << sample_bits) - 1)

    def close(self, blocks: CachedBlocks) -> None:
        """The node is gone: nothing is cached there."""
        for number in blocks.numbers:
            self.remove(number, blocks.bit)
        blocks.numbers = array("Q")
        self._taken &= ~blocks.bit

    def add(self, number: int, bit: int) -> bool:
        """Whether that is new."""
        holders = self._holders.get(number, 0)
        self._holders[number] = holders | bit
        return not holders & bit

    def remove(self, number: int, bit: int) -> bool:
        """Whether it was there."""
        holders = self._holders.get(number, 0)
        rest = holders & ~bit
        if rest:
            self._holders[number] = rest
        elif holders:
            del self._holders[number]
        return rest != holders

    def has(self, number: int, bit: int) -> bool:
        return bool(self._holders.get(number, 0) & bit)

    def match(self, numbers: Sequence[int], nodes: Iterable[CachedBlocks]) -> dict[CachedBlocks, int]:
        """How many of the leading blocks of a prompt each node has; those that have none are left out."""
        by_mask: dict[int, dict[int, CachedBlocks]] = {}
        for node in nodes:
            by_mask.setdefault(node.sample_mask, {})[node.bit] = node
        found: dict[CachedBlocks, int] = {}
        for mask, members in by_mask.items():
            for bits, count in self._follow(numbers, mask, sum(members)):
                found.update((members[bit], count) for bit in _single(bits))
        return found

    def _follow(self, numbers: Sequence[int], mask: int, bits: int) -> Iterator[tuple[int, int]]:
        """Nodes of equal sampling, with how many blocks they have, as it turns out."""
        count = 0
        for index, number in enumerate(numbers, 1):
            if number & mask:
                continue
            having = bits & self._holders.get(number, 0)
            if having != bits:
                if count:
                    yield bits & ~having, count
                if not having:
                    return
                bits = having
            count = index
        if count:
            yield bits, count


class CachedBlocks:
    """What one node has, as it tells. Numbers that ``sample_mask`` cuts something of are not told."""

    def __init__(self, index: PrefixIndex, bit: int, sample_mask: int) -> None:
        self._index = index
        self.bit = bit
        self.sample_mask = sample_mask
        self.numbers = array("Q")  # all it has, and some that it had
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def change(self, added: Sequence[int], removed: Sequence[int]) -> None:
        for number in removed:
            self._count -= self._index.remove(number, self.bit)
        for number in added:
            if self._index.add(number, self.bit):
                self._count += 1
                self.numbers.append(number)
        if len(self.numbers) > 2 * self._count + _SLACK:
            have = (number for number in self.numbers if self._index.has(number, self.bit))
            self.numbers = array("Q", dict.fromkeys(have))


def _single(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit
