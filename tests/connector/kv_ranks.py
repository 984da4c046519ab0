"""Nodes of several ranks, and what their caches hold by plain indexing: no offset is computed the connector's way.

A node's KV is one array of *cells* ``[blocks, heads, layers, 2, block_size, cells per row]``; ``packed`` gives the
part of it that one rank holds, in the order in which the rank's memory holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.kv import DTYPE_BYTES, KVLayout, KVShare
from pdserve.records import KVRegion, RankKV


class Model(NamedTuple):
    """What two nodes must have in common."""

    num_heads: int
    block_size: int
    head_dim: int
    dtype: str


class Node(NamedTuple):
    layouts: list[KVLayout]  # by rank
    shares: list[KVShare]

    def rank(self, number: int, address: int = 4096, agent: str = "", metadata: bytes = b"") -> RankKV:
        layout = self.layouts[number]
        region = KVRegion(address, layout.total_bytes, "cpu", 0)
        return RankKV(agent or str(number), metadata, region, layout, self.shares[number])

    @property
    def ranks(self) -> tuple[RankKV, ...]:
        return tuple(self.rank(number) for number in range(len(self.layouts)))


def node(model: Model, stage_layers: Sequence[int], num_shards: int, page: int, num_blocks: Sequence[int]) -> Node:
    """``num_blocks`` is of the ranks in turn, starting over where it is too short."""
    shares = [
        KVShare.of_rank(stage, stage_layers, shard, num_shards, model.num_heads)
        for stage in range(len(stage_layers))
        for shard in range(num_shards)
    ]
    layouts = [
        KVLayout(
            num_blocks[number % len(num_blocks)],
            model.block_size,
            page,
            share.num_layers,
            share.num_heads,
            model.head_dim,
            model.dtype,
        )
        for number, share in enumerate(shares)
    ]
    return Node(layouts, shares)


def random_cells(layout: KVLayout, share: KVShare, num_blocks: int) -> NDArray[np.uint8]:
    """All KV of a model, of which ``share`` is a part, as bytes below 255; the same for every rank of every node."""
    row_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
    size = (num_blocks, share.total_heads, share.total_layers, 2, layout.block_size, row_bytes)
    return np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)


def packed(cells: NDArray[Any], layout: KVLayout, share: KVShare) -> NDArray[Any]:
    """The rank's part of the cells as its memory holds it; one-dimensional, a copy."""
    heads = slice(share.first_head, share.first_head + share.num_heads)
    layers = slice(share.first_layer, share.first_layer + share.num_layers)
    pages = [
        cells[block, heads, layers, :, first : first + layout.kernel_block_size]
        for block in range(layout.num_blocks)
        for first in range(0, layout.block_size, layout.kernel_block_size)
    ]
    return np.concatenate([page.ravel() for page in pages])
