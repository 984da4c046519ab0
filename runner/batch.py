"""Device tensors of one step that models, attention back ends and kernels share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class RowSnapshot(NamedTuple):
    """A recurrent state to be stored amid a row: after ``tokens`` of its tokens, at least one, but not all."""

    row: int
    tokens: int
    slot: int  # destination; a row has one at most


class LaterTokens(NamedTuple):
    """How many of the tokens behind it each token of a step sees, in layers whose spec has ``whole_images``.

    All of them are in the step. Tokens of text see none.
    """

    counts: NDArray[np.int32]  # [tokens], host
    device: Tensor  # [tokens] int32


@dataclass(frozen=True)
class AttentionBatch:
    """The tokens of one step.

    Sequence r owns tokens ``query_starts[r] … query_starts[r + 1] - 1``: the last of its ``seq_lens[r]`` tokens. All
    earlier tokens are in the cache.

    A batch may be padded for CUDA graphs. Then the device tensors have rows without tokens, and tokens with slot -1
    that belong to no sequence. The attention output of such tokens is unspecified.

    With several KV cache groups, ``others`` are the same batch in the pages of groups 1 and on. Entries of a page table
    that lie behind a group's window are undefined, too.
    """

    query_starts: NDArray[np.int32]  # [num_seqs + 1], host
    seq_lens: NDArray[np.int32]  # [num_seqs], host: tokens in the cache, including this step's
    device_query_starts: Tensor  # [rows + 1] int32, device
    device_seq_lens: Tensor  # [rows] int32, device
    # [rows, max_pages] int32, device: pages from position 0; entries behind a sequence's pages are undefined
    page_table: Tensor
    slots: Tensor  # [tokens] int64, device: page * kernel_block_size + offset in the page; -1 stores nothing
    state_slots: Tensor | None = None  # [rows] int32, device: slots of recurrent state; None: the model has no state
    state_snapshots: tuple[RowSnapshot, ...] = ()
    # [rows] int32, device: 1 for decodes with drafts, whose recurrent state stays until ``Recurrent.commit``; None: no
    # row has any
    drafted: Tensor | None = None
    later: LaterTokens | None = None  # None: no token sees later ones
    others: tuple[AttentionBatch, ...] = ()

    @classmethod
    def of_groups(
        cls,
        query_starts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        *,
        device_query_starts: Tensor,
        device_seq_lens: Tensor,
        page_tables: Iterable[Tensor],
        slots: Iterable[Tensor],
        state_slots: Tensor | None = None,
        state_snapshots: tuple[RowSnapshot, ...] = (),
        drafted: Tensor | None = None,
        later: LaterTokens | None = None,
    ) -> AttentionBatch:
        """Return the batch of a step, given the page table and the slots of each group."""
        lengths = query_starts, seq_lens, device_query_starts, device_seq_lens
        first, *others = (
            cls(*lengths, *table_and_slots, later=later) for table_and_slots in zip(page_tables, slots, strict=True)
        )
        return replace(
            first, state_slots=state_slots, state_snapshots=state_snapshots, drafted=drafted, others=tuple(others)
        )

    @property
    def by_group(self) -> tuple[AttentionBatch, ...]:
        return (self, *self.others)


@dataclass(frozen=True)
class RotaryCosSin:
    """Rotary cos and sin of a step's positions, the same for all layers of a model."""

    cos: Tensor  # [tokens, head_dim / 2] float32, device
    sin: Tensor  # [tokens, head_dim / 2] float32, device
    query_scale: Tensor | None = None  # [tokens, 1, 1] float32, device: factor of queries; None: 1 for all


class Routing(NamedTuple):
    """The experts of each token, of the whole layer, and the weights of their results."""

    weights: Tensor  # [tokens, top_k] float32
    experts: Tensor  # [tokens, top_k] int32


class SharedGate(NamedTuple):
    """The part of shared experts in each token: the sigmoid of ``weight`` times its inputs."""

    inputs: Tensor  # [tokens, hidden_size], of the layer
    weight: Tensor  # [1, hidden_size]


class Quantized(NamedTuple):
    """Activations in FP8 (E4M3): values times the scale of their token and group of inputs."""

    values: Tensor  # [tokens, size] E4M3
    scales: Tensor  # [tokens, size / group] float32


Activations = Tensor | Quantized

ADAPTER_TILE = 16  # most tokens of an adapter's tile: the least rows of a matrix instruction


class AdapterTiles(NamedTuple):
    """Tokens with an adapter, by slot, in tiles of one slot each; int32 at fixed addresses."""

    tiles: Tensor  # [most tiles, 3]: slot, index of the first token in ``order``, tokens; 0 behind the last tile
    order: Tensor  # [tokens]
    num_tiles: int  # tiles that a kernel must look at


@dataclass(frozen=True)
class GatedDeltaWeights:
    """Weights of a gated delta net that its recurrent part reads, of a rank."""

    conv: Tensor  # [conv_width, channels]: a program reads channels that lie one after the other
    a_log: Tensor  # [value_heads] float32
    dt_bias: Tensor  # [value_heads] float32
    conv_bias: Tensor | None = None  # [channels] float32; None: the convolution has no bias


@dataclass(frozen=True, kw_only=True)
class Mamba2Weights(GatedDeltaWeights):
    """Weights of a Mamba2 mixer that its recurrent part reads, of a rank. Its heads are value heads."""

    skip: Tensor  # [value_heads] float32: D, the part of a value that goes to the output as it is
    least_step: float
    most_step: float  # may be infinite


@dataclass(frozen=True)
class ShortConvWeights:
    """Weights of a short convolution, of a rank."""

    conv: Tensor  # [conv_width, channels]
    bias: Tensor | None  # [channels]


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query and key head, applied before the rotary embedding (Qwen3).

    A weight reload creates a new object, so a back end may cache what it derives from one.
    """

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float


@dataclass(frozen=True)
class LatentNorm:
    """RMS norm of latents, applied before they are stored (MLA)."""

    weight: Tensor  # [kv_lora_rank]
    eps: float
