"""Net changes of a node's prefix cache with the tokens of its blocks, as an engine records them."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdserve.adapters.adapter import NO_ADAPTER

BlockKey = tuple[int, bytes]  # KV cache group and block hash


class StoredBlock(msgspec.Struct, frozen=True, array_like=True):
    """A full block that the prefix cache has now."""

    group: int
    block_hash: bytes
    parent: bytes  # hash of the block before it; empty for the first block of a prompt
    token_ids: bytes  # little-endian uint32
    cache_salt: str  # the request's; its chain of block hashes begins with it (pdserve/hashing.py)
    images: tuple[tuple[bytes, int], ...] = ()  # digest and relative place of each image in it (pdserve/images.py)
    adapter: str = NO_ADAPTER  # digest, which its chain begins with, too

    @property
    def key(self) -> BlockKey:
        return self.group, self.block_hash


class Medium(StrEnum):
    """Where a tier behind the prefix cache keeps blocks, by vLLM's names."""

    HOST = "CPU"
    DISK = "STORAGE"


class TierChanges(msgspec.Struct, frozen=True, array_like=True):
    """Net changes of one tier behind the prefix cache. No key is in both lists."""

    medium: Medium
    removed: list[BlockKey]
    stored: list[BlockKey]


class CacheChanges(msgspec.Struct, frozen=True, array_like=True):
    """Net changes of cache and tiers, applied in the order of the fields. No key is in both lists."""

    cleared: bool  # the cache was emptied, with all tiers
    removed: list[BlockKey]
    stored: list[StoredBlock]
    tiers: list[TierChanges] = []
