"""Digests of block contents: a chain in which each block's digest covers all tokens before it.

Engines find cached blocks by digest. Nodes report their digests to routers, cut to numbers of 64 bits. A router
computes the numbers of a prompt to find out how much of it each node has cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from pdserve.records import TOKEN_BYTES

NUMBER_BYTES = 8  # leading bytes of a digest that nodes send to routers

_DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """Return the start of a chain. Requests share prefixes only under the same salt."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"pdserve").digest()


def next_digest(parent: bytes, token_ids: bytes | array[int]) -> bytes:
    """Return the digest of a full block, given as uint32 token ids, that follows the tokens of ``parent``."""
    return blake2b(parent + token_ids, digest_size=_DIGEST_BYTES).digest()


def prefix_numbers(token_ids: bytes, block_size: int, salt: str) -> list[int]:
    """Return the first 64 bits of the digest of every full block of a prompt (uint32). Takes 1 µs per block."""
    size = block_size * TOKEN_BYTES
    digest, numbers = root_digest(salt), []
    for end in range(size, len(token_ids) + 1, size):
        digest = next_digest(digest, token_ids[end - size : end])
        numbers.append(int.from_bytes(digest[:NUMBER_BYTES], "little"))
    return numbers


def unpack_numbers(data: bytes) -> array[int]:
    """Return the numbers in a buffer. Raises ValueError if its size is not a multiple of NUMBER_BYTES."""
    numbers = array("Q")
    numbers.frombytes(data)
    return numbers


class BlockHashes:
    """The digests of a growing token list, computed when they are needed."""

    def __init__(self, block_size: int, salt: str, digests: Sequence[bytes] = ()) -> None:
        self._block_size = block_size
        self._chain = [root_digest(salt), *digests]

    def upto(self, token_ids: array[int], num_tokens: int) -> list[bytes]:
        """Return the digests of the full blocks within the first ``num_tokens`` tokens."""
        count = num_tokens // self._block_size
        self._extend(token_ids, count)
        return self._chain[1 : count + 1]

    def one_by_one(self, token_ids: array[int], num_tokens: int) -> Iterator[bytes]:
        """Yield the same digests; each is computed when it is taken."""
        for index in range(1, num_tokens // self._block_size + 1):
            self._extend(token_ids, index)
            yield self._chain[index]

    def _extend(self, token_ids: array[int], count: int) -> None:
        chain, size = self._chain, self._block_size
        for index in range(len(chain) - 1, count):
            chain.append(next_digest(chain[-1], token_ids[index * size : (index + 1) * size]))
