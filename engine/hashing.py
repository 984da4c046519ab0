"""Names for block contents: a chain of digests in which each block's digest covers every token before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
        chain, size = self._chain, self._block_size
        count = num_tokens // size
        for index in range(len(chain) - 1, count):
            chain.append(next_digest(chain[-1], token_ids[index * size : (index + 1) * size]))
        return chain[1 : count + 1]
