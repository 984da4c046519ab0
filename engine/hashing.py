"""Names for block contents: a chain of digests in which each block's digest covers every token before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_digest(salt: str) -> bytes:
    """Where a chain begins. Requests share prefixes only under the same salt."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES, person=b"pdserve").digest()


def next_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block holding ``token_ids`` after everything ``parent`` stands for."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


class BlockHashes:
    """The digests of a growing token list, computed block by block as they are asked for."""

    def __init__(self, block_size: int, salt: str, digests: Sequence[bytes] = ()) -> None:
        self._block_size = block_size
        self._chain = [root_digest(salt), *digests]

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Digests of the full blocks within the first ``num_tokens`` tokens."""
        count = num_tokens // self._block_size
        self._extend(token_ids, count)
        return self._chain[1 : count + 1]

    def one_by_one(self, token_ids: Sequence[int], num_tokens: int) -> Iterator[bytes]:
        """``upto``, computing no more of them than are taken."""
        for index in range(1, num_tokens // self._block_size + 1):
            self._extend(token_ids, index)
            yield self._chain[index]

    def _extend(self, token_ids: Sequence[int], count: int) -> None:
        chain, size = self._chain, self._block_size
        for index in range(len(chain) - 1, count):
            chain.append(next_digest(chain[-1], token_ids[index * size : (index + 1) * size]))
