"""The state of sequences on the device: token ids, block tables, counts of tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceState:
    """Tables with a row per slot, all views of one int32 allocation, so one kernel writes to any of them."""

    def __init__(self, slots: int, max_tokens: int, max_blocks: int, device: torch.device) -> None:
        sizes = (slots * max_tokens, slots * max_blocks, slots, slots)
        assert sum(sizes) < 2**31, "offsets into the state are int32"
        self.flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        token_ids, block_tables, self.num_computed, self.num_tokens = self.flat.split(sizes)  # the last two: [slots]
        self.token_ids = token_ids.view(slots, max_tokens)  # [slots, max_tokens]: prompt, then sampled tokens
        self.block_tables = block_tables.view(slots, max_blocks)  # [slots, max_blocks]: block ids from position 0 on

    def offset(self, table: Tensor, *index: int) -> int:
        """Return the offset in ``flat`` of an element of one of the tables."""
        within = sum(i * stride for i, stride in zip(index, table.stride(), strict=True))
        return int(table.storage_offset()) + within

    def token_offsets(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], wanted: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        """Return the offsets in ``flat`` of tokens at these positions of slots, -1 for unwanted ones."""
        return np.where(wanted, slots * self.token_ids.stride(0) + positions, -1).astype(np.int32)
