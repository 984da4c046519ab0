"""Digests of KV blocks: one 64-bit number per block that all ranks of all layouts compute alike.

    digest of a block = Σ word · multiplier(position of the word in the model's KV)   mod 2⁶⁴

A word is 4 bytes of a row as an integer. Its position counts in the model, not in memory: layer, KV head, plane, token
of the block, word of the row. So page sizes make no difference, and the digests of ranks with different parts add up to
that of the whole block; of ranks with equal parts, one counts. Multipliers are odd, so each single changed word changes
the digest. They look random, so swapped words change it as well.

A digest finds accidents. An attacker who chooses the bytes can make them fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import islice

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kv import KVLayout, KVShare
from pdserve.records import DigestOrder, StepOutput, StepPlan
from runner.kernels.reference import mix64
from runner.kv_cache import KVCache
from runner.pending_step import HostCopy
from runner.step_parts import StepFeature, StepPart

# Words per multiplication. On a CPU they stay in its cache, and malloc does not map memory for each product: twice as
# many took three times as long. On a GPU they bound the memory.
_CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}


class KVDigester:
    """Digests of the blocks of one rank's cache, computed on its device in stream order.

    ``memory`` is the cache: [num_pages, num_kv_heads, num_layers, planes, kernel_block_size, head_dim], dense.
    """

    def __init__(self, memory: Tensor, layout: KVLayout, share: KVShare) -> None:
        word = torch.int32 if layout.spec.row_bytes % 4 == 0 else torch.int16
        self._words = memory.view(word).view(layout.num_blocks, -1)  # [num_blocks, words]
        row_words = layout.spec.row_bytes // word.itemsize
        multipliers = torch.from_numpy(_multipliers(layout, share, row_words).view(np.int64)).to(memory.device)
        self._multipliers = multipliers  # [pages of a block, heads, layers, planes, kernel_block_size, row_words] int64
        self._page_size = layout.kernel_block_size
        self._chunk = max(1, _CHUNK_WORDS[memory.device.type] // self._words.shape[1])  # blocks

    def compute(self, orders: Sequence[DigestOrder]) -> Tensor:
        """Return the digests of all blocks of the orders. Shape [blocks] int64, device. Does not synchronise."""
        ids = torch.tensor([block for order in orders for block in order.block_ids])
        if self._words.device.type == "cuda":
            ids = ids.pin_memory().to(self._words.device, non_blocking=True)
        counts = [len(order.block_ids) for order in orders]
        return torch.cat(
            [self._compute(blocks, order.num_tokens) for blocks, order in zip(ids.split(counts), orders, strict=True)]
        )

    def _compute(self, block_ids: Tensor, num_tokens: int) -> Tensor:
        full, rest = divmod(num_tokens, len(self._multipliers) * self._page_size)
        assert len(block_ids) == full + bool(rest)
        digests = [self._weigh(chunk, self._multipliers) for chunk in block_ids[:full].split(self._chunk)]
        if rest:
            digests.append(self._weigh(block_ids[full:], self._first_tokens(rest)))
        return torch.cat(digests)

    def _weigh(self, block_ids: Tensor, multipliers: Tensor) -> Tensor:
        return (self._words.index_select(0, block_ids) * multipliers.view(-1)).sum(1)  # int64 wraps around

    def _first_tokens(self, count: int) -> Tensor:
        """Multipliers with zeros behind the first ``count`` tokens of a block."""
        multipliers = self._multipliers.clone()
        page, token = divmod(count, self._page_size)
        multipliers[page, :, :, :, token:] = 0
        multipliers[page + 1 :] = 0
        return multipliers


class BlockDigests(StepFeature[object]):
    """Digests that plans order, of the cache as it is after their step."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    @cached_property
    def _digester(self) -> KVDigester:
        """The first use allocates more than twice the memory of a block."""
        return KVDigester(self._cache.tensor, self._cache.layout, self._cache.share)

    def part(self, plan: StepPlan) -> StepPart[object] | None:
        return _OrderedDigests(self._digester, plan.digests) if plan.digests else None


class _OrderedDigests(StepPart[object]):
    def __init__(self, digester: KVDigester, orders: Sequence[DigestOrder]) -> None:
        self._digester, self._orders = digester, orders

    def after_step(self) -> None:
        self._digests = HostCopy.start(self._digester.compute(self._orders))

    def on_result(self, output: StepOutput) -> StepOutput:
        values = iter(self._digests.wait().tolist())
        digests = tuple(tuple(islice(values, len(order.block_ids))) for order in self._orders)
        return msgspec.structs.replace(output, digests=digests)


def _multipliers(layout: KVLayout, share: KVShare, row_words: int) -> NDArray[np.uint64]:
    """Multipliers of all words of a block, in memory order."""
    pages, page_size = layout.pages_per_block, layout.kernel_block_size
    planes = layout.spec.planes
    page, head, layer, plane, token, word = np.ogrid[
        :pages, : share.num_heads, : share.num_layers, :planes, :page_size, :row_words
    ]
    position = (layer + share.first_layer) * share.total_heads + head + share.first_head
    position = ((position * planes + plane) * layout.block_size + page * page_size + token) * row_words + word
    return mix64((position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
