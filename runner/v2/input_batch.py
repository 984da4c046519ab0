"""The batch of one step, and the tensors that its inputs are built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import NO_SLOT
from runner.batch import AttentionBatch, LaterTokens, RowSnapshot
from runner.graph_sizes import BatchDescriptor
from runner.kernels.step import build_inputs_kernel, build_page_table_kernel, take_samples_kernel
from runner.sequence_rows import StepBatch
from runner.v2.device_state import DeviceState, StepWords
from runner.v2.sampling_metadata import GrammarMaskTensors, SamplingMetadata, copy_to_device

_TOKEN_CHUNK = 1024
_PAGE_CHUNK = 256

HAS_DRAFTS = -2  # in place of a sample: the host counts the samples that stay

Item = TypeVar("Item")


class StepState(NamedTuple, Generic[Item]):
    """State of a step's sequences for the device: each item is an int32 array, or its offset in the words sent.

    A sequence without samples has -1 in ``sample_of_row``, a decode with drafts has HAS_DRAFTS.
    """

    slots: Item  # [num_seqs]
    query_starts: Item  # [num_seqs + 1]: first token of each sequence among those of the step
    sample_of_row: Item  # [num_seqs]
    logits_tokens: Item  # [tokens whose logits are sampled], as indices into the tokens of the step
    state_slots: Item  # [num_seqs], of recurrent states
    num_blocks: Item  # [num_seqs], in the block tables of all groups


class SampledRows(NamedTuple):
    """The sequences of a batch that sample, one row each; on the device as long as the batch stays the same."""

    sequences: Tensor  # [rows] int64: their indices in the batch
    first: Tensor  # [rows] int64: the first token that has a sample, among those of the step
    drafted: Tensor  # int64: samples of sequences with drafts

    @classmethod
    def of(cls, indices: BatchIndices, device: torch.device) -> SampledRows:
        sequences, first = np.unique(indices.sampling, return_index=True)
        # Decodes come first, with a sample for each token.
        drafted = np.flatnonzero(indices.is_drafted[indices.sampling])
        arrays = (sequences, indices.logits_tokens[first], drafted)
        return cls(*copy_to_device([np.asarray(values, dtype=np.int64) for values in arrays], device))


@dataclass
class BatchIndices(StepBatch):
    """Stays valid from step to step while the same sequences decode. Rows are slots.

    ``sample_of_row`` is -1 on ranks that sample nothing, HAS_DRAFTS for sequences with drafts.
    """

    metadata: SamplingMetadata | None = None  # from the first step that samples here
    sampled_rows: SampledRows | None = None  # from the first step that the model drafts behind

    @property
    def descriptor(self) -> BatchDescriptor:
        """The size without padding."""
        return BatchDescriptor(self.num_seqs, self.num_tokens, self.longest)

    @property
    def every_token_samples(self) -> bool:
        return self.num_tokens == len(self.sampling)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == self.num_seqs


@dataclass
class InputBatch:
    """The sequences of one step, on the host, and the step's words on the device."""

    indices: BatchIndices
    seq_lens: NDArray[np.int32]  # [num_seqs], with this step's tokens
    longest: int  # tokens of the longest sequence, with the token that this step samples
    sent: StepWords
    at: StepState[int]  # word offsets in ``sent``
    num_blocks: NDArray[np.int32]  # [num_seqs], in the block tables of all groups
    state_snapshots: tuple[RowSnapshot, ...] = ()
    masks: GrammarMaskTensors | None = None
    graph: BatchDescriptor | None = None  # size of the CUDA graph that computes its layers, if one does

    @property
    def logits_tokens(self) -> Tensor:
        """The tokens whose logits are sampled, as indices into the tokens of the step; on the device."""
        return self.sent.array(self.at.logits_tokens, len(self.indices.logits_tokens))

    def store_samples(self, state: DeviceState, tokens: Tensor) -> None:
        """Count the step's tokens in the device's state, and append its samples to their sequences."""
        take_samples_kernel[(self.indices.num_seqs,)](
            self.sent.words,
            self.at.slots,
            self.at.query_starts,
            self.at.sample_of_row,
            tokens,
            state.token_ids,
            state.num_computed,
            state.num_tokens,
            state.token_ids.stride(0),
        )


class InputBuffers:
    """Input ids, positions, slot mapping, sequence lengths, query starts, page table and state slots of one step.

    Their addresses never change, so captured graphs may read them.
    """

    def __init__(
        self, config: NodeConfig, layout: KVLayout, max_pages: int, device: torch.device, makes_drafts: bool
    ) -> None:
        """Rows of tables have ``max_pages``. If the model ``makes_drafts``, including pages of drafts behind a step."""
        max_seqs = config.max_num_seqs
        max_tokens = config.max_batch_tokens
        self._layout = layout
        self._has_drafts = config.max_drafts > 0
        self._ahead = config.max_drafts if makes_drafts else 0
        has_states = config.state_layout is not None
        self._state_slots = torch.zeros(max_seqs, dtype=torch.int32, device=device) if has_states else None
        self.drafted = torch.zeros(max_seqs, dtype=torch.int32, device=device)  # see AttentionBatch
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        groups = layout.groups.num_groups
        self._slot_mapping = torch.full((groups, max_tokens), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self.query_starts = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(groups, max_seqs, max_pages, dtype=torch.int32, device=device)
        self.num_blocks = torch.zeros(max_seqs, dtype=torch.int32, device=device)  # filled if the model drafts

    def build(self, batch: InputBatch, descriptor: BatchDescriptor, state: DeviceState) -> None:
        """Fill the buffers on the device's stream, padded to ``descriptor`` as a captured graph of that size needs."""
        tokens = descriptor.tokens
        assert tokens <= len(self.input_ids), f"a step of {tokens} tokens in buffers of {len(self.input_ids)}"
        words = batch.sent.words
        layout = self._layout
        num_seqs = batch.indices.num_seqs
        build_inputs_kernel[(descriptor.rows + 1,)](
            words,
            batch.at.slots,
            batch.at.query_starts,
            num_seqs,
            state.token_ids,
            state.block_tables,
            state.num_computed,
            state.token_ids.stride(0),
            state.block_tables.stride(0),
            self.input_ids,
            self.positions,
            self._slot_mapping,
            self._slot_mapping.stride(0),
            self._seq_lens,
            self.query_starts,
            tokens,
            BLOCK_SIZE=layout.block_size,
            GROUPS=layout.groups.num_groups,
            CHUNK=_TOKEN_CHUNK,
        )
        if self._state_slots is not None:  # rows of padding keep an old slot: they have no tokens
            self._state_slots[:num_seqs].copy_(batch.sent.array(batch.at.state_slots, num_seqs))
        if descriptor.row_tokens > 1 and self._has_drafts:
            sample_of_row = batch.sent.array(batch.at.sample_of_row, num_seqs)
            self.drafted[:num_seqs].copy_(sample_of_row == HAS_DRAFTS)
        if self._ahead:
            self.num_blocks[:num_seqs].copy_(batch.sent.array(batch.at.num_blocks, num_seqs))
        longest = -(-(int(batch.seq_lens.max()) + self._ahead) // layout.kernel_block_size)
        build_page_table_kernel[(num_seqs, -(-longest // _PAGE_CHUNK), layout.groups.num_groups)](
            words,
            batch.at.slots,
            num_seqs,
            state.block_tables,
            state.block_tables.stride(0),
            self._seq_lens,
            self._ahead,
            self.page_table,
            self.page_table.stride(1),
            self.page_table.stride(0),
            PAGE_SIZE=layout.kernel_block_size,
            PAGES_PER_BLOCK=layout.pages_per_block,
            CHUNK=_PAGE_CHUNK,
        )

    def query_lengths(self, num_seqs: int) -> Tensor:
        """Return the tokens of each sequence of the batch that was built last: [num_seqs] int32."""
        return self.query_starts[: num_seqs + 1].diff()

    def attention_batch(
        self, batch: InputBatch, padded: BatchDescriptor | None = None, later: LaterTokens | None = None
    ) -> AttentionBatch:
        """Return the batch that was built last; its device tensors have the size ``padded``, or none of its padding."""
        indices = batch.indices
        size = padded or indices.descriptor
        return self._attention_batch(
            indices.query_starts, batch.seq_lens, size, indices.has_drafts, batch.state_snapshots, later
        )

    def padding(self, descriptor: BatchDescriptor) -> AttentionBatch:
        """Fill in a batch at position 0 that stores nothing, and return it. Spare tokens go to the first sequences."""
        rows = descriptor.rows
        tokens = descriptor.tokens
        spare = tokens - rows
        most = descriptor.row_tokens - 1 if descriptor.is_decode else spare
        lengths = (1 + np.clip(spare - most * np.arange(rows), 0, most)).astype(np.int32)
        query_starts = np.concatenate(([0], lengths.cumsum(dtype=np.int32)), dtype=np.int32)
        self.input_ids[:tokens] = 0
        self.positions[:tokens] = 0
        self._slot_mapping[:, :tokens] = -1
        self.num_blocks[:rows] = 0
        self._seq_lens[:rows] = torch.from_numpy(lengths)
        self.query_starts[: rows + 1] = torch.from_numpy(query_starts)
        self.page_table[:, :rows] = 0
        if self._state_slots is not None:
            self._state_slots[:rows] = NO_SLOT
        self.drafted[:rows] = 0
        return self._attention_batch(query_starts, lengths, descriptor, self._has_drafts and descriptor.row_tokens > 1)

    def _attention_batch(
        self,
        query_starts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        descriptor: BatchDescriptor,
        may_draft: bool,
        state_snapshots: tuple[RowSnapshot, ...] = (),
        later: LaterTokens | None = None,
    ) -> AttentionBatch:
        return AttentionBatch.of_groups(
            query_starts,
            seq_lens,
            device_query_starts=self.query_starts[: descriptor.rows + 1],
            device_seq_lens=self._seq_lens[: descriptor.rows],
            page_tables=[table[: descriptor.rows] for table in self.page_table],
            slots=[slots[: descriptor.tokens] for slots in self._slot_mapping],
            state_slots=None if self._state_slots is None else self._state_slots[: descriptor.rows],
            state_snapshots=state_snapshots,
            drafted=self.drafted[: descriptor.rows] if may_draft and self._state_slots is not None else None,
            later=later,
        )
