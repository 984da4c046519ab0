"""Short convolutions over slots: both back ends against one convolution over each whole sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.kv.states import NO_SLOT, ShortConvSpec, StateLayout, StateShare
from runner.attention.short_conv import ShortConv, TorchShortConv
from runner.attention.triton_short_conv import TritonShortConv
from runner.batch import AttentionBatch, RowSnapshot, ShortConvWeights
from runner.state_cache import StateCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU Triton's interpreter runs the kernels
SPEC = ShortConvSpec(channels=24, conv_width=3, dtype="float32")
WIDE = ShortConvSpec(channels=130, conv_width=4, dtype="float32")
NUM_SLOTS = 6


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def cache_of(spec: ShortConvSpec) -> StateCache:
    """Return a cache of two layers with random states."""
    cache = StateCache(StateLayout(NUM_SLOTS, 2, spec), DEVICE, StateShare(0, 2, 2, 0, 1))
    for layer, conv in enumerate(cache.conv):
        conv.copy_(random(*conv.shape, seed=20 + layer))
    return cache


def weights_of(spec: ShortConvSpec, bias: bool) -> ShortConvWeights:
    return ShortConvWeights(
        random(spec.conv_width, spec.channels, seed=1), random(spec.channels, seed=2) if bias else None
    )


def batch_of(
    lengths: list[int],
    slots: list[int],
    snapshots: tuple[RowSnapshot, ...] = (),
    drafted: tuple[int, ...] = (),
    padding: int = 0,
) -> AttentionBatch:
    """Return a batch with ``padding`` more rows without tokens on the device, and as many spare tokens."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    rows = len(lengths) + padding
    marks = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    marks[list(drafted)] = 1
    return AttentionBatch(
        query_starts=starts,
        seq_lens=np.array(lengths, dtype=np.int32),
        device_query_starts=torch.from_numpy(np.concatenate((starts, [starts[-1]] * padding)).astype(np.int32)).to(
            DEVICE
        ),
        device_seq_lens=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        page_table=torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE),
        slots=torch.zeros(int(starts[-1]) + padding, dtype=torch.int64, device=DEVICE),
        state_slots=torch.tensor(slots + [slots[0]] * padding, dtype=torch.int32, device=DEVICE),
        state_snapshots=snapshots,
        drafted=marks if drafted else None,
    )


def build(triton: bool, cache: StateCache) -> ShortConv:
    return TritonShortConv(cache, max_num_seqs=8, max_drafts=3) if triton else TorchShortConv(cache)


def whole(history: Tensor, x: Tensor, weights: ShortConvWeights) -> tuple[Tensor, Tensor]:
    """Return the convolution of x [tokens, channels] behind the history [channels, width - 1], and the inputs."""
    inputs = torch.cat((history, x.T), dim=1)
    out = F.conv1d(inputs[None], weights.conv.T[:, None], weights.bias, groups=len(inputs))
    return out[0].T, inputs


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize(("spec", "bias"), [(SPEC, False), (WIDE, True)], ids=["narrow", "wide"])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 19, 2, 5, 33]], ids=str)
def test_outputs_states_and_snapshots_are_those_of_whole_sequences(
    triton: bool, spec: ShortConvSpec, bias: bool, lengths: list[int]
) -> None:
    slots = [5, 2, 0, 3, 1][: len(lengths)]
    snapshots = (RowSnapshot(1, 7, 4),) if lengths[1] > 7 else ()
    weights = weights_of(spec, bias)
    cache = cache_of(spec)
    before = [conv.clone() for conv in cache.conv]
    x = random(sum(lengths) + 2, spec.channels + 8, seed=4)[:, : spec.channels]  # rows at a stride
    backend = build(triton, cache)
    backend.plan(batch_of(lengths, slots, snapshots, padding=2 if triton else 0), graph=False)
    for layer in range(2):
        out = backend.run(layer, x if triton else x[:-2], weights)
        begin = 0
        for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            expected, inputs = whole(before[layer][slot], x[begin : begin + length], weights)
            torch.testing.assert_close(out[begin : begin + length], expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(cache.conv[layer][slot], inputs[:, 1 - spec.conv_width :])
            for snapshot in snapshots:
                if snapshot.row == row:
                    kept = inputs[:, snapshot.tokens : snapshot.tokens + spec.conv_width - 1]
                    assert torch.equal(cache.conv[layer][snapshot.slot], kept)
            begin += length


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_states_go_on_by_accepted_drafts_only(triton: bool) -> None:
    """Row 0 accepts one draft of three, row 2 all, row 3 none; a token and a prompt beside them."""
    lengths = [4, 1, 3, 2, 12]
    slots = [5, 2, 0, 3, 1]
    counts = [2, 0, 3, 1, 0]
    weights = weights_of(SPEC, bias=False)
    cache = cache_of(SPEC)
    before = [conv.clone() for conv in cache.conv]
    x = random(sum(lengths), SPEC.channels, seed=4)
    backend = build(triton, cache)
    backend.plan(batch_of(lengths, slots, drafted=(0, 2, 3)), graph=False)
    for layer in range(2):
        backend.run(layer, x, weights)
        for slot in (5, 0, 3):
            assert torch.equal(cache.conv[layer][slot], before[layer][slot])
    backend.commit(torch.tensor(counts, device=DEVICE))
    for layer in range(2):
        begin = 0
        for length, slot, count in zip(lengths, slots, counts, strict=True):
            _, inputs = whole(before[layer][slot], x[begin : begin + (count or length)], weights)
            assert torch.equal(cache.conv[layer][slot], inputs[:, 1 - SPEC.conv_width :])
            begin += length


def test_rows_without_a_slot_change_no_state() -> None:
    """While a graph is captured, padding rows have a token and no slot."""
    cache = cache_of(SPEC)
    before = cache.slots.clone()
    backend = build(True, cache)
    backend.plan(batch_of([1, 1], [NO_SLOT, NO_SLOT]), graph=True)
    backend.run(0, random(2, SPEC.channels, seed=4), weights_of(SPEC, bias=False))
    assert torch.equal(cache.slots, before)
