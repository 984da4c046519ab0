"""Nodes of several ranks, and the content of their caches by plain indexing, without the connector's offsets.

A node's KV is one array of *cells* ``[blocks, heads, layers, planes, block_size, cells per row]``; ``packed``
returns one rank's part of it in memory order. With KV cache groups, a block has cells of the layers of one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.kv.groups import KVCacheGroups
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion, KVShare, LatentSpec
from pdserve.records import RankKV


class PackedSpec(FullAttentionSpec, frozen=True, tag="packed"):
    """Blocks that cannot be split."""

    packed: ClassVar[bool] = True


class Model(NamedTuple):
    """Values that two nodes must have in common."""

    num_heads: int
    block_size: int
    head_dim: int
    dtype: str
    spec: type[FullAttentionSpec | LatentSpec] = FullAttentionSpec
    groups: KVCacheGroups = KVCacheGroups()


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


def node(
    model: Model,
    stage_layers: Sequence[int],
    num_shards: int,
    page: int,
    num_blocks: Sequence[int],
    draft_layers: int = 0,
) -> Node:
    """``num_blocks`` has one entry per rank and repeats if it is too short."""
    shares = [
        KVShare.of_rank(stage, stage_layers, shard, num_shards, model.num_heads, draft_layers)
        for stage in range(len(stage_layers))
        for shard in range(num_shards)
    ]
    layouts = [
        KVLayout(
            num_blocks[number % len(num_blocks)],
            model.block_size,
            page,
            model.groups.block_layers(share.layers),
            model.spec(share.num_heads, model.head_dim, model.dtype),
            model.groups,
        )
        for number, share in enumerate(shares)
    ]
    return Node(layouts, shares)


def random_cells(layout: KVLayout, share: KVShare, num_blocks: int) -> NDArray[np.uint8]:
    """Return all KV of the model that ``share`` is part of, as bytes below 255; equal for all ranks and nodes."""
    row_bytes = layout.spec.row_bytes
    size = (num_blocks, share.total_heads, share.total_layers, layout.spec.planes, layout.block_size, row_bytes)
    return np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)


def packed(
    cells: NDArray[Any], layout: KVLayout, share: KVShare, groups: Sequence[int] = (), padding: int = 0
) -> NDArray[Any]:
    """Return the rank's part of the cells in memory order; one-dimensional, a copy.

    ``groups`` has the group of each block. Cells of layers that a block lacks are ``padding``.
    """
    heads = slice(share.first_head, share.first_head + share.num_heads)
    pages = []
    for block in range(layout.num_blocks):
        group = groups[block] if groups else 0
        held = cells[block, heads]
        places = zip(share.layers, layout.groups.places(share.layers), strict=True)
        of_block = np.full((len(held), layout.num_layers, *held.shape[2:]), padding, dtype=cells.dtype)
        for layer, (its, index) in places:
            if its == group:
                of_block[:, index] = held[:, layer]
        for first in range(0, layout.block_size, layout.kernel_block_size):
            pages.append(of_block[:, :, :, first : first + layout.kernel_block_size])
    return np.concatenate([page.ravel() for page in pages])
