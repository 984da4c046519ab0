"""The KV cache of one rank: one tensor, and the views that layers index."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.kv.groups import KVHeads
from pdserve.kv.layout import FP8_E4M3, UNSCALED, KVLayout, KVRegion, KVScales, KVShare
from pdserve.records import NewSequence, StepPlan
from runner.registered_memory import registrable_zeros
from runner.step_parts import StepFeature


class KVCache:
    """Zeroed memory of ``layout.shape``: attention reads whole pages, and its masks do not stop a NaN.

    Layer l of the rank is layer ``i`` of the blocks of group ``groups[l]``; without windows, i is l and the group 0.

    ``layers[l]``      [num_pages, num_kv_heads, planes, kernel_block_size, head_dim], a strided view
    ``token_rows[l]``  [rows, head_dim]: page p, head h, plane k (0 is K, 1 is V), token t is row
                       ``((p * num_kv_heads + h) * num_layers * planes + k) * kernel_block_size + t``
    ``page_rows[l]``   [rows, kernel_block_size * head_dim]: all tokens of a page are row
                       ``(p * num_kv_heads + h) * num_layers * planes + k``

    Row numbers are equal for all layers of a group, so index tensors are built once per step and group. Rows of an FP8
    cache are bytes, as torch cannot index FP8. ``scales[l]`` are the layer's, 1.0 unless the cache is FP8.

    If groups have unlike heads, ``head_parts`` has the layers of each kind of heads. In a part, ``layout`` is that of
    its groups, and two pages are ``rows_per_page`` page rows apart.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: torch.device,
        share: KVShare | None = None,
        scales: Sequence[KVScales] = (),
        sources: Sequence[int] = (),
    ) -> None:
        """``share`` is the rank's part of the model's KV, None the whole model. ``scales`` has all layers', or none.

        ``sources``: the layer of this cache that each attending layer of the rank reads; empty: each has its own.
        Raises CapacityError if the device has no room.
        """
        self.layout = layout
        self.share = share or KVShare.whole(layout)
        self.is_fp8 = layout.dtype == FP8_E4M3
        places = layout.groups.places(self.share.layers)
        own_scales = tuple(scales) or (UNSCALED,) * len(places)
        assert len(own_scales) == len(places)
        sources = sources or range(len(places))
        places = tuple(places[source] for source in sources)
        self.scales = tuple(own_scales[source] for source in sources)
        self.groups = tuple(group for group, _ in places)
        dtype: torch.dtype = torch.float8_e4m3fn if self.is_fp8 else getattr(torch, layout.dtype)
        flat = registrable_zeros(layout.total_bytes, device, "KV cache").view(dtype)
        assert flat.numel() == math.prod(layout.shape)
        self.tensor: Tensor = flat.view(layout.shape)
        geometry = [_GroupMemory(flat, layout, group) for group in range(layout.groups.num_groups)]
        self.layers = [geometry[group].layer(index) for group, index in places]
        self.token_rows = [geometry[group].token_rows(index) for group, index in places]
        self.page_rows = [geometry[group].page_rows(index) for group, index in places]
        self.rows_per_page = geometry[0].rows_per_page

    def head_parts(self) -> list[HeadPart]:
        """Return the layers of each kind of KV heads as a cache of their own; one part if all heads are equal."""
        groups = self.layout.groups
        by_heads = defaultdict[KVHeads | None, list[int]](list)
        for layer, group in enumerate(self.groups):
            by_heads[groups.heads[group] if groups.heads else None].append(layer)
        return [HeadPart(tuple(layers), self._part(layers)) for layers in by_heads.values()]

    def _part(self, layers: Sequence[int]) -> KVCache:
        part = copy(self)
        group = self.groups[layers[0]]
        part.layout = self.layout.of_group(group)
        part.rows_per_page = self.layout.page_rows(group)
        for name in ("groups", "scales", "layers", "token_rows", "page_rows"):
            values = getattr(self, name)
            setattr(part, name, type(values)(values[layer] for layer in layers))
        return part

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero every block."""
        self.tensor.zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy a block in the order of the current stream."""
        blocks = self.tensor.unflatten(0, (-1, self.layout.pages_per_block))
        blocks[target].copy_(blocks[source], non_blocking=True)

    @property
    def region(self) -> KVRegion:
        return KVRegion(
            address=self.tensor.data_ptr(),
            num_bytes=self.layout.total_bytes,
            device=self.tensor.device.type,
            device_id=self.tensor.device.index or 0,
        )


class BlockCopies(StepFeature[object]):
    """Starts sequences with copies of blocks of others."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def add(self, new: NewSequence) -> None:
        for source, target in new.copies:
            self._cache.copy(source, target)

    def part(self, plan: StepPlan) -> None:
        return None


class HeadPart(NamedTuple):
    """The layers of a cache with one kind of KV heads."""

    layers: tuple[int, ...]  # as they count in the whole cache
    cache: KVCache


class _GroupMemory:
    """The memory of a cache as blocks of one group."""

    def __init__(self, flat: Tensor, layout: KVLayout, group: int) -> None:
        """``flat`` [elements of the cache]."""
        self._layout = of_group = layout.of_group(group)
        self._flat = flat
        self._rows = flat.view(torch.uint8) if layout.dtype == FP8_E4M3 else flat
        self._page_elements = layout.page_bytes // layout.spec.element_bytes
        self.rows_per_page = self._page_elements // (of_group.kernel_block_size * of_group.head_dim)

    def layer(self, index: int) -> Tensor:
        """Return [num_pages, num_kv_heads, planes, kernel_block_size, head_dim] of a layer of the blocks."""
        layout = self._layout
        assert index < layout.num_layers, f"layer {index} in blocks of {layout.num_layers} layers"
        pages, heads, _, planes, tokens, size = layout.shape
        _, head, layer, *inner = layout.strides
        shape = (pages, heads, planes, tokens, size)
        return self._flat[index * layer :].as_strided(shape, (self._page_elements, head, *inner))

    def token_rows(self, index: int) -> Tensor:
        layout = self._layout
        return self._rows.view(-1, layout.head_dim)[index * layout.spec.planes * layout.kernel_block_size :]

    def page_rows(self, index: int) -> Tensor:
        layout = self._layout
        return self._rows.view(-1, layout.kernel_block_size * layout.head_dim)[index * layout.spec.planes :]
