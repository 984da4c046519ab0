"""The KV cache of one rank: one tensor, and the views that layers index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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
    """

    def __init__(
        self, layout: KVLayout, device: torch.device, share: KVShare | None = None, scales: Sequence[KVScales] = ()
    ) -> None:
        """``share`` is the rank's part of the model's KV, None the whole model. ``scales`` has all layers', or none.

        Raises CapacityError if the device has no room.
        """
        self.layout = layout
        self.share = share or KVShare.whole(layout)
        self.is_fp8 = layout.dtype == FP8_E4M3
        places = layout.groups.places(self.share.layers)
        assert all(index < layout.num_layers for _, index in places)
        self.groups = tuple(group for group, _ in places)
        self.scales = tuple(scales) or (UNSCALED,) * len(places)
        assert len(self.scales) == len(places)
        dtype: torch.dtype = torch.float8_e4m3fn if self.is_fp8 else getattr(torch, layout.dtype)
        flat = registrable_zeros(layout.total_bytes, device, "KV cache").view(dtype)
        assert flat.numel() == math.prod(layout.shape)
        self.tensor: Tensor = flat.view(layout.shape)
        self.layers = [self.tensor[:, :, index] for _, index in places]
        page = layout.kernel_block_size
        planes = layout.spec.planes
        flat = flat.view(torch.uint8) if self.is_fp8 else flat
        tokens = flat.view(-1, layout.head_dim)
        pages = flat.view(-1, page * layout.head_dim)
        self.token_rows = [tokens[index * planes * page :] for _, index in places]
        self.page_rows = [pages[index * planes :] for _, index in places]

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
