"""Names for block contents: a chain of digests in which each block's digest covers every token before it.

Engines find cached blocks by them. Routers learn of the digests that nodes have, cut to numbers of 64 bits, and compute
those of a prompt, to know who has how much of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from pdserve.records import TOKEN_BYTES

NUMBER_BYTES = 8  # of a digest, that stand for it between nodes and routers

_DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """Where a chain begins. Requests share prefixes only under the same salt."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"pdserve").digest()


def next_digest(parent: bytes, token_ids: bytes | array[int]) -> bytes:
    """Return the digest of a full block, given as uint32 token ids, that follows the tokens of ``parent``."""
    return blake2b(parent + token_ids, digest_size=_DIGEST_BYTES).digest()


def prefix_numbers(token_ids: bytes, block_size: int, salt: str) -> list[int]:
    """The first 64 bits of the digest of every full block of a prompt, which is little-endian uint32 (pack_tokens).

    Takes a microsecond for each block.
    """
    size = block_size * TOKEN_BYTES
    digest, numbers = root_digest(salt), []
    for end in range(size, len(token_ids) + 1, size):
        digest = next_digest(digest, token_ids[end - size : end])
        numbers.append(int.from_bytes(digest[:NUMBER_BYTES], "little"))
    return numbers


def unpack_numbers(data: bytes) -> array[int]:
    """Numbers of NUMBER_BYTES each, little-endian. Raises ValueError where that is no whole number of them."""
    numbers = array("Q")
    numbers.frombytes(data)
    return numbers


class BlockHashes:
    """The digests of a growing token list, computed block by block as they are asked for."""

    def __init__(self, block_size: int, salt: str, digests: Sequence[bytes] = ()) -> None:
        self._block_size = block_size
        self._chain = [root_digest(salt), *digests]

    def upto(self, token_ids: array[int], num_tokens: int) -> list[bytes]:
        """Digests of the full blocks within the first ``num_tokens`` tokens."""
        count = num_tokens // self._block_size
        self._extend(token_ids, count)
        return self._chain[1 : count + 1]

    def one_by_one(self, token_ids: array[int], num_tokens: int) -> Iterator[bytes]:
        """``upto``, computing no more of them than are taken."""
        for index in range(1, num_tokens // self._block_size + 1):
            self._extend(token_ids, index)
            yield self._chain[index]

    def _extend(self, token_ids: array[int], count: int) -> None:
        chain, size = self._chain, self._block_size
        for index in range(len(chain) - 1, count):
            chain.append(next_digest(chain[-1], token_ids[index * size : (index + 1) * size]))
