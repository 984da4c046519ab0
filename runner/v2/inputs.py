"""The buffers a step's inputs are built in. Their addresses never change, so captured graphs may read them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.kv import KVLayout
from runner.batch import AttentionBatch
from runner.kernels.step import build_inputs_kernel, build_page_table_kernel
from runner.v2.graphs import StepShape
from runner.v2.slots import ScheduledBatch
from runner.v2.state import DeviceState, Upload

_TOKEN_CHUNK = 1024
_PAGE_CHUNK = 256


class StepInputs:
    def __init__(self, max_seqs: int, max_tokens: int, max_pages: int, layout: KVLayout, device: torch.device) -> None:
        self._layout = layout
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._query_starts = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self._page_table = torch.zeros(max_seqs, max_pages, dtype=torch.int32, device=device)

    def build(self, batch: ScheduledBatch, shape: StepShape, state: DeviceState, upload: Upload) -> None:
        """Fill the buffers on the device's stream, padded to ``shape``: all that a captured graph of it needs.

        The upload's first two arrays are the batch's slots and query starts.
        """
        assert shape.tokens <= len(self.input_ids), f"a step of {shape.tokens} tokens, made for {len(self.input_ids)}"
        slots_at, starts_at = upload.arrays_at[:2]
        layout, num_seqs = self._layout, batch.form.num_seqs
        build_inputs_kernel[(shape.rows + 1,)](
            upload.words,
            slots_at,
            starts_at,
            num_seqs,
            state.token_ids,
            state.blocks,
            state.num_computed,
            state.token_ids.stride(0),
            state.blocks.stride(0),
            self.input_ids,
            self.positions,
            self._slot_mapping,
            self._seq_lens,
            self._query_starts,
            shape.tokens,
            BLOCK_SIZE=layout.block_size,
            CHUNK=_TOKEN_CHUNK,
        )
        longest = -(-int(batch.seq_lens.max()) // layout.kernel_block_size)
        build_page_table_kernel[(num_seqs, -(-longest // _PAGE_CHUNK))](
            upload.words,
            slots_at,
            num_seqs,
            state.blocks,
            state.blocks.stride(0),
            self._seq_lens,
            self._page_table,
            self._page_table.stride(0),
            PAGE_SIZE=layout.kernel_block_size,
            PAGES_PER_BLOCK=layout.pages_per_block,
            CHUNK=_PAGE_CHUNK,
        )

    def attention_batch(self, batch: ScheduledBatch) -> AttentionBatch:
        """What was built last, for a step that no graph fits."""
        form = batch.form
        return self._batch(form.query_starts, batch.seq_lens, StepShape(form.num_seqs, form.num_tokens))

    def padding(self, shape: StepShape) -> AttentionBatch:
        """A batch of that shape at position 0 that stores nothing. The first sequence has the tokens to spare."""
        rows, tokens = shape.rows, shape.tokens
        lengths = np.ones(rows, dtype=np.int32)
        lengths[0] = tokens - rows + 1
        query_starts = np.concatenate(([0], lengths.cumsum(dtype=np.int32)), dtype=np.int32)
        self.input_ids[:tokens] = 0
        self.positions[:tokens] = 0
        self._slot_mapping[:tokens] = -1
        self._seq_lens[:rows] = torch.from_numpy(lengths)
        self._query_starts[: rows + 1] = torch.from_numpy(query_starts)
        self._page_table[:rows] = 0
        return self._batch(query_starts, lengths, shape)

    def _batch(self, query_starts: NDArray[np.int32], seq_lens: NDArray[np.int32], shape: StepShape) -> AttentionBatch:
        return AttentionBatch(
            query_starts=query_starts,
            seq_lens=seq_lens,
            device_query_starts=self._query_starts[: shape.rows + 1],
            device_seq_lens=self._seq_lens[: shape.rows],
            page_table=self._page_table[: shape.rows],
            slots=self._slot_mapping[: shape.tokens],
        )
