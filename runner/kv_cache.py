"""The KV cache of one rank: one tensor, and the views that layers index."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from pdserve.kv import DTYPE_BYTES, KVLayout, KVShare
from pdserve.records import KVRegion
from runner.kv_digest import KVDigester

_MEMORY_PAGE = 4096  # bytes; registration pins whole memory pages


class KVCache:
    """Memory of ``layout.shape``, zeroed: attention reads whole pages, and masks do not stop a NaN.

    ``layers[l]``      the view of design: [num_pages, num_kv_heads, 2 (K, V), kernel_block_size, head_dim]
    ``token_rows[l]``  [rows, head_dim]: page p, head h, token t of K (kv = 0) or V (1) is row
                       ``((p * num_kv_heads + h) * num_layers * 2 + kv) * kernel_block_size + t``
    ``page_rows[l]``   [rows, kernel_block_size * head_dim]: all tokens of a page in row
                       ``(p * num_kv_heads + h) * num_layers * 2 + kv``

    Row numbers are the same for every layer, so index tensors are built once per step.
    """

    def __init__(self, layout: KVLayout, device: torch.device, share: KVShare | None = None) -> None:
        """``share`` says what the rank holds of the model's KV, None that it is everything."""
        self.layout = layout
        self._share = share or KVShare.whole(layout)
        dtype: torch.dtype = getattr(torch, layout.dtype)
        memory = torch.zeros(layout.total_bytes + _MEMORY_PAGE, dtype=torch.uint8, device=device)
        begin = -memory.data_ptr() % _MEMORY_PAGE
        flat = memory[begin : begin + layout.total_bytes].view(dtype)
        assert flat.numel() == math.prod(layout.shape)
        self.tensor: Tensor = flat.view(layout.shape)
        self.layers = [self.tensor[:, :, layer] for layer in range(layout.num_layers)]
        page = layout.kernel_block_size
        self.token_rows = [flat.view(-1, layout.head_dim)[layer * 2 * page :] for layer in range(layout.num_layers)]
        self.page_rows = [flat.view(-1, page * layout.head_dim)[layer * 2 :] for layer in range(layout.num_layers)]

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero every block."""
        self.tensor.zero_()

    @cached_property
    def digests(self) -> KVDigester:
        """Takes memory, twice that of a block and more, from its first use on."""
        return KVDigester(self.tensor, self.layout, self._share)

    @property
    def region(self) -> KVRegion:
        return KVRegion(
            address=self.tensor.data_ptr(),
            num_bytes=self.tensor.numel() * DTYPE_BYTES[self.layout.dtype],
            device=self.tensor.device.type,
            device_id=self.tensor.device.index or 0,
        )
