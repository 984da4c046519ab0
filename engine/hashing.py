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
        self._root = root_digest(salt)
        self._digests = list(digests)

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Digests of the full blocks within the first ``num_tokens`` tokens."""
        size = self._block_size
        count = num_tokens // size
        while len(self._digests) < count:
            index = len(self._digests)
            parent = self._digests[-1] if self._digests else self._root
            self._digests.append(next_digest(parent, token_ids[index * size : (index + 1) * size]))
        return self._digests[:count]

    def at(self, index: int) -> bytes:
        """Digest of block ``index``; it must have been computed by ``upto``."""
        return self._digests[index]
