"""Digests of KV blocks and recurrent states: a 64-bit number each that all ranks of all layouts compute alike.

    digest of a block = Σ word · multiplier(position of the word in the model's KV)   mod 2⁶⁴

A word is 8 bytes of a row as an integer, or 4 or 2 bytes where 8 do not divide the row. Its position counts in the
model, not in memory: layer, KV head, plane, token of the block, word of the row. So page sizes make no difference, and
the digests of ranks with different parts add up to that of the whole block; of ranks with equal parts, one counts.
Multipliers are odd, so each single changed word changes the digest. They look random, so swapped words change it, too.

The digest of a slot of recurrent state is such a sum for each layer, of words by their position among the layer's heads
in the model, and these times a multiplier of the layer.

A digest finds accidents. An attacker who chooses the bytes can make them fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby, islice

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.kv.layout import DTYPE_BYTES, KVLayout, KVShare
from pdserve.kv.states import HeadStateSpec
from pdserve.records import DigestOrder, StepOutput, StepPlan
from runner.kernels.reference import mix64
from runner.kv_cache import KVCache
from runner.pending_step import HostCopy
from runner.state_cache import StateCache
from runner.step_parts import StepFeature, StepPart

# Words per multiplication of plain torch. On a CPU they stay in its cache, and malloc does not map memory for each
# product: twice as many took three times as long. On a GPU without Triton they bound the memory.
_CHUNK_WORDS = {"cpu": 1 << 16, "cuda": 1 << 22}
_WORDS = (torch.int64, torch.int32, torch.int16)


class KVDigester:
    """Digests of the blocks of one rank's cache, computed on its device in stream order.

    ``memory`` is the cache: [num_pages, num_kv_heads, num_layers, planes, kernel_block_size, head_dim], dense.
    """

    def __init__(self, memory: Tensor, layout: KVLayout, share: KVShare) -> None:
        """Each group of the KV cache has multipliers for its layers, and zeros for padding."""
        groups = range(layout.groups.num_groups)
        self._of_group = [layout.of_group(group) for group in groups]
        row_bytes = [of_group.spec.row_bytes for of_group in self._of_group]
        word = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in row_bytes))
        self._words = memory.view(word).view(layout.num_blocks, -1)  # [num_blocks, words]
        self._row_words = [size // word.itemsize for size in row_bytes]
        multipliers = np.stack([_multipliers(layout, share, group, word.itemsize) for group in groups])
        # [groups, pages of a block, words of a page] int64
        self._multipliers = torch.from_numpy(multipliers.view(np.int64)).to(memory.device)
        self._of_layers: dict[int, Tensor] = {}  # by ``num_layers``: zeros for later layers of the model
        self._layout = layout
        self._share = share
        self._page_size = layout.kernel_block_size
        self._block_size = layout.block_size
        self._uses_triton = memory.device.type == "cuda" and find_spec("triton") is not None

    def compute(self, orders: Sequence[DigestOrder]) -> Tensor:
        """Return the digests of all blocks of the orders. Shape [blocks] int64, device. Does not synchronise.

        There is at least one block, and all orders cover the same layers.
        """
        every = self._multipliers_of(orders[0].num_layers)
        work = torch.tensor([row for order in orders for row in self._blocks_with_tokens(order)])  # [blocks, 3]
        if not self._uses_triton:
            return self._compute_with_torch(every, *work.unbind(1))
        if len(set(self._row_words)) == 1:
            return self._digests_with_triton(every, work, self._row_words[0])
        digests = torch.empty(len(work), dtype=torch.int64, device=self._words.device)
        row_words = torch.tensor(self._row_words)[work[:, 2]]
        for words in set(self._row_words):
            rows = (row_words == words).nonzero().flatten()
            if len(rows):
                of_rows = self._digests_with_triton(every, work[rows], words)
                digests[rows.to(digests.device)] = of_rows
        return digests

    def _digests_with_triton(self, every: Tensor, work: Tensor, row_words: int) -> Tensor:
        """Return the digests of blocks whose groups have rows of ``row_words``; ``work`` [blocks, 3], host."""
        from runner.kernels.block_digest import block_digests  # on demand: V1 runs without Triton

        if self._words.is_cuda:
            work = work.pin_memory()
        work = work.to(self._words.device, non_blocking=True)
        return block_digests(self._words, work, every, self._page_size, row_words)

    def _multipliers_of(self, num_layers: int) -> Tensor:
        """Return the multipliers of the first ``num_layers`` layers of the model; 0: of all."""
        if not num_layers or num_layers >= self._share.layers.stop:
            return self._multipliers
        if num_layers not in self._of_layers:
            multipliers = self._multipliers.clone()
            places = zip(self._share.layers, self._layout.groups.places(self._share.layers), strict=True)
            for group, index in (place for layer, place in places if layer >= num_layers):
                self._rows(multipliers[group], group)[:, :, index] = 0
            self._of_layers[num_layers] = multipliers
        return self._of_layers[num_layers]

    def _blocks_with_tokens(self, order: DigestOrder) -> Iterator[tuple[int, int, int]]:
        """Yield each block with the number of its tokens that count, and its group."""
        groups = order.groups or (0,) * len(order.block_ids)
        last = {group: index for index, group in enumerate(groups)}  # the last block of each group
        rest = (order.num_tokens - 1) % self._block_size + 1
        for index, (block, group) in enumerate(zip(order.block_ids, groups, strict=True)):
            yield block, rest if last[group] == index else self._block_size, group

    def _compute_with_torch(self, every: Tensor, blocks: Tensor, num_tokens: Tensor, groups: Tensor) -> Tensor:
        device = self._words.device
        digests = torch.empty_like(blocks, device=device)
        for group, multipliers in enumerate(every):
            full = ((num_tokens == self._block_size) & (groups == group)).nonzero().flatten()
            for some in full.split(max(1, _CHUNK_WORDS[device.type] // self._words.shape[1])):
                digests[some.to(device)] = self._weigh(blocks[some], multipliers)
        for index in (num_tokens < self._block_size).nonzero().flatten().tolist():
            group = int(groups[index])
            multipliers = self._first_tokens(every[group], group, int(num_tokens[index]))
            digests[index] = self._weigh(blocks[index : index + 1], multipliers)[0]
        return digests

    def _weigh(self, blocks: Tensor, multipliers: Tensor) -> Tensor:
        words = self._words.index_select(0, blocks.to(self._words.device))
        return (words * multipliers.view(-1)).sum(1)  # int64 wraps around

    def _first_tokens(self, multipliers: Tensor, group: int, count: int) -> Tensor:
        """Multipliers of a group with zeros behind the first ``count`` tokens of a block."""
        multipliers = multipliers.clone()
        rows = self._rows(multipliers, group)
        page, token = divmod(count, self._page_size)
        rows[page, :, :, :, token:] = 0
        rows[page + 1 :] = 0
        return multipliers

    def _rows(self, multipliers: Tensor, group: int) -> Tensor:
        """Return a view of a group's multipliers: [pages, heads, layers, planes, kernel_block_size, row_words]."""
        _, *page, _ = self._of_group[group].shape
        sizes = (*page, self._row_words[group])
        rows: Tensor = multipliers[:, : math.prod(sizes)].unflatten(1, sizes)
        return rows


class StateDigester:
    """Digests of the slots of one rank's recurrent states, computed on their device in stream order."""

    def __init__(self, states: StateCache) -> None:
        layout = states.layout
        share = states.share
        spec = layout.spec
        shards = share.num_shards
        delta_bytes = spec.out_inputs * spec.key_dim * 4 if isinstance(spec, HeadStateSpec) else 0
        of_channel = (spec.conv_width - 1) * DTYPE_BYTES[spec.dtype]
        # Bytes of a shard: the delta rule's, and those of each part of the convolution, such as queries.
        parts = (delta_bytes, *(channels * of_channel for channels in spec.conv_parts))
        word = next(word for word in _WORDS if all(size % word.itemsize == 0 for size in parts))
        positions = []  # word numbers in the model
        before = 0  # words
        for size in parts:
            words = size // word.itemsize
            positions.append(before + share.shard * words + np.arange(words, dtype=np.uint64))
            before += shards * words
        delta = multipliers_at(positions[0])
        conv = multipliers_at(np.concatenate(positions[1:]))
        weights = np.zeros(spec.layer_bytes // word.itemsize, np.uint64)  # no padding counts
        weights[: len(delta)] = delta
        weights[spec.head_state_bytes // word.itemsize :][: len(conv)] = conv
        of_layers = multipliers_at(np.arange(share.first_layer, share.first_layer + layout.num_layers, dtype=np.uint64))
        device = states.slots.device
        self._num_layers = layout.num_layers
        # As the multipliers of one group, of blocks of one token: [1, 1, words of a layer]
        self._weights = torch.from_numpy(weights.view(np.int64)).to(device).view(1, 1, -1)
        self._of_layers = torch.from_numpy(of_layers.view(np.int64)).to(device)  # [num_layers]
        self._words = states.slots.view(word).view(-1, len(weights))  # [num_slots * num_layers, words of a layer]
        self._uses_triton = device.type == "cuda" and find_spec("triton") is not None

    def compute(self, slots: Sequence[int]) -> Tensor:
        """Return the digests of some slots. Shape [slots] int64, device. Does not synchronise."""
        rows = torch.tensor(slots)[:, None] * self._num_layers + torch.arange(self._num_layers)
        if self._uses_triton:
            sums = self._sums_with_triton(rows.flatten())
        else:
            row_sums = [
                (self._words[row] * self._weights).sum() for row in rows.flatten().tolist()
            ]  # int64 wraps around
            sums = torch.stack(row_sums)
        return (sums.view(rows.shape) * self._of_layers).sum(1)

    def _sums_with_triton(self, rows: Tensor) -> Tensor:
        from runner.kernels.block_digest import block_digests

        work = torch.zeros(len(rows), 3, dtype=torch.int64)  # see block_digests
        work[:, 0] = rows
        work[:, 1] = 1
        if self._words.is_cuda:
            work = work.pin_memory()
        work = work.to(self._words.device, non_blocking=True)
        return block_digests(self._words, work, self._weights, 1, self._words.shape[1])


class BlockDigests(StepFeature[object]):
    """Digests that plans order, of the cache and of states as they are after their step."""

    def __init__(self, cache: KVCache, states: StateCache | None = None) -> None:
        self._cache = cache
        self._states = states

    @cached_property
    def _digester(self) -> KVDigester:
        """The first use allocates more than twice the memory of a block."""
        return KVDigester(self._cache.tensor, self._cache.layout, self._cache.share)

    @cached_property
    def _state_digester(self) -> StateDigester:
        assert self._states is not None, "a plan orders digests of states that the model does not have"
        return StateDigester(self._states)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """Urgent, so that the kernels of a long step do not delay it."""
        return torch.cuda.Stream(self._cache.tensor.device, priority=-1)

    @torch.inference_mode()
    def start(self, order: DigestOrder) -> DigestsOfBlocks:
        """Digest blocks beside the steps in flight, none of which writes to them."""
        if self._cache.tensor.device.type != "cuda":
            return DigestsOfBlocks(HostCopy.start(self.compute([order])))
        with torch.cuda.stream(self._stream):
            return DigestsOfBlocks(HostCopy.start(self.compute([order])))

    def compute(self, orders: Sequence[DigestOrder]) -> Tensor:
        """Return the digests of the blocks of all orders, then of the slots of all. Shape [digests] int64, device."""
        slots = [slot for order in orders for slot in order.state_slots]
        of_blocks = [order for order in orders if order.block_ids]
        digests = [
            self._digester.compute(list(same)) for _, same in groupby(of_blocks, key=lambda order: order.num_layers)
        ]
        digests += [self._state_digester.compute(slots)] if slots else []
        return torch.cat(digests)

    def part(self, plan: StepPlan) -> StepPart[object] | None:
        return _OrderedDigests(self, plan.digests) if plan.digests else None


@dataclass(frozen=True, slots=True)
class DigestsOfBlocks:
    """A pdserve.protocols.PendingDigests."""

    copy: HostCopy  # [digests] int64

    def done(self) -> bool:
        return self.copy.done()

    def result(self) -> tuple[int, ...]:
        return tuple(self.copy.wait().tolist())


class _OrderedDigests(StepPart[object]):
    def __init__(self, feature: BlockDigests, orders: Sequence[DigestOrder]) -> None:
        self._feature = feature
        self._orders = orders

    def after_step(self) -> None:
        self._digests = HostCopy.start(self._feature.compute(self._orders))

    def on_result(self, output: StepOutput) -> StepOutput:
        values = iter(self._digests.wait().tolist())
        blocks = [tuple(islice(values, len(order.block_ids))) for order in self._orders]
        states = [tuple(islice(values, len(order.state_slots))) for order in self._orders]
        digests = tuple(of_blocks + of_states for of_blocks, of_states in zip(blocks, states, strict=True))
        return msgspec.structs.replace(output, digests=digests)


def _multipliers(layout: KVLayout, share: KVShare, group: int, word_bytes: int) -> NDArray[np.uint64]:
    """Multipliers of all words of a block of a group, in memory order: [pages, words of a page]; 0 for padding.

    Ranks of unlike parts may hold the same head of a coarse group: it counts on those that hold the first one of the
    finest heads that stand for it.
    """
    of_group = layout.of_group(group)
    groups = layout.groups
    planes = layout.spec.planes
    page_size = layout.kernel_block_size
    row_words = of_group.spec.row_bytes // word_bytes
    heads = share.heads_in(groups, group)
    finer = groups.finer(group)
    layers = np.full(of_group.num_layers, -1)  # layer of the model, by index in the block
    for layer, (its, index) in zip(share.layers, groups.places(share.layers), strict=True):
        if its == group:
            layers[index] = layer
    page, head, _, plane, token, word = np.ogrid[
        : layout.pages_per_block, heads.start : heads.stop, : of_group.num_layers, :planes, :page_size, :row_words
    ]
    of_word = layers[:, None, None, None]
    counts = (of_word >= 0) & (head * finer >= share.first_head)
    position = of_word * (share.total_heads // finer) + head
    position = ((position * planes + plane) * layout.block_size + page * page_size + token) * row_words + word
    words = np.where(counts, multipliers_at(position.astype(np.uint64)), np.uint64(0)).reshape(len(page), -1)
    return np.pad(words, ((0, 0), (0, layout.page_bytes // word_bytes - words.shape[1])))


def multipliers_at(positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return mix64((positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)
