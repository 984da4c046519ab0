"""Block hashes: a chain in which each hash covers the tokens of its block and of all blocks before it.

Engines find cached blocks by hash. Nodes report their hashes to routers, cut to 64 bits. A router computes the short
hashes of a prompt to find out how much of it each node has cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from hashlib import blake2b

from pdserve.adapters.adapter import NO_ADAPTER
from pdserve.images import Images, block_extra
from pdserve.records import TOKEN_BYTES

SHORT_HASH_BYTES = 8  # leading bytes of a hash that nodes send to routers

_HASH_BYTES = 16


def root_hash(salt: str, adapter: str = NO_ADAPTER) -> bytes:
    """Return the root of a request's chain: all that its KV depends on beside its tokens.

    Requests share prefixes only under the same root. ``adapter`` is the digest of the request's adapter: its content,
    not its name.
    """
    if adapter == NO_ADAPTER:
        return blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"pdserve").digest()
    content = bytes.fromhex(adapter) + salt.encode()
    return blake2b(content, digest_size=_HASH_BYTES, person=b"pdserve-adapter").digest()


def hash_block_tokens(parent: bytes, token_ids: bytes | array[int], extra: bytes = b"") -> bytes:
    """Return the hash of a full block, given as uint32 token ids, that follows the block of hash ``parent``.

    ``extra`` is what else its KV depends on: ``block_extra`` of its images.
    """
    return blake2b(parent + token_ids + extra, digest_size=_HASH_BYTES).digest()


def short_block_hashes(token_ids: bytes, block_size: int, root: bytes, images: Images = ()) -> list[int]:
    """Return the first 64 bits of the hash of every full block of a prompt (uint32). Takes 1 µs per block."""
    size = block_size * TOKEN_BYTES
    block_hash = root
    hashes = []
    for end in range(size, len(token_ids) + 1, size):
        extra = block_extra(images, (end - size) // TOKEN_BYTES, end // TOKEN_BYTES) if images else b""
        block_hash = hash_block_tokens(block_hash, token_ids[end - size : end], extra)
        hashes.append(int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little"))
    return hashes


def unpack_block_hashes(data: bytes) -> array[int]:
    """Return the short hashes in a buffer. Raises ValueError if its size is not a multiple of SHORT_HASH_BYTES."""
    hashes = array("Q")
    hashes.frombytes(data)
    return hashes


class BlockHashes:
    """The hashes of a growing token list, computed when they are needed. The chain begins with ``root`` (root_hash)."""

    def __init__(self, block_size: int, root: bytes, hashes: Collection[bytes] = (), *, images: Images = ()) -> None:
        """``hashes``: those of the leading blocks that are computed already."""
        self.block_size = block_size
        self._images = images
        self._chain = [root, *hashes]

    def upto(self, token_ids: array[int], num_tokens: int) -> list[bytes]:
        """Return the hashes of the full blocks within the first ``num_tokens`` tokens."""
        count = num_tokens // self.block_size
        self._extend(token_ids, count)
        return self._chain[1 : count + 1]

    def one_by_one(self, token_ids: array[int], num_tokens: int) -> Iterator[bytes]:
        """Yield the same hashes; each is computed when it is taken."""
        for index in range(1, num_tokens // self.block_size + 1):
            self._extend(token_ids, index)
            yield self._chain[index]

    def link(self, index: int) -> tuple[bytes, bytes]:
        """Return the computed hashes of block ``index`` and of the block before it; the latter is empty for block 0."""
        return self._chain[index + 1], self._chain[index] if index else b""

    def _extend(self, token_ids: array[int], count: int) -> None:
        chain = self._chain
        size = self.block_size
        images = self._images
        for index in range(len(chain) - 1, count):
            extra = block_extra(images, index * size, (index + 1) * size) if images else b""
            chain.append(hash_block_tokens(chain[-1], token_ids[index * size : (index + 1) * size], extra))
