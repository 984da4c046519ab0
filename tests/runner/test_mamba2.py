"""The recurrent part of Mamba2 mixers: chunks against single tokens, and Triton's kernels against plain torch.

The kernels run in Triton's interpreter, or on a GPU where there is one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from fast_set import examples, sampled
from hypothesis import given
from hypothesis import strategies as st
from test_gated_delta import DEVICE, batch_of, cache_of, random, with_drafts
from torch import Tensor

from pdserve.kv.states import Mamba2Spec
from runner.attention.gated_delta import GatedDelta
from runner.attention.mamba2 import TorchMamba2
from runner.attention.triton_mamba2 import TritonMamba2
from runner.batch import AttentionBatch, Mamba2Weights, RowSnapshot
from runner.kernels import norm, reference
from runner.kernels.gated_delta_reference import DeltaInputs
from runner.kernels.mamba2_reference import state_space_chunks, state_space_step

SPEC = Mamba2Spec(key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv_width=4, dtype="float32")
SPECS = (SPEC, Mamba2Spec(1, 3, 12, 8, conv_width=2, dtype="float32"))
LENGTHS = ([1, 1, 1], [1, 5, 1, 2, 19], [9, 1, 140])


def weights_of(spec: Mamba2Spec, *, bias: bool = True, limits: tuple[float, float] = (0.0, math.inf)) -> Mamba2Weights:
    heads = spec.value_heads
    return Mamba2Weights(
        conv=random(spec.conv_width, spec.channels, seed=1),
        conv_bias=random(spec.channels, seed=6) if bias else None,
        a_log=random(heads, seed=2),
        dt_bias=random(heads, seed=3),
        skip=random(heads, seed=7),
        least_step=limits[0],
        most_step=limits[1],
    )


def run(backend: GatedDelta, spec: Mamba2Spec, batch: AttentionBatch, weights: Mamba2Weights) -> Tensor:
    """Return the output of layer 1 for random inputs, whose rows have a stride."""
    projected = random(int(batch.query_starts[-1]), spec.channels + 8 + spec.value_heads, seed=4)
    padding = len(batch.slots) - len(projected)
    projected = torch.cat((projected, projected[:1].expand(padding, -1)))
    backend.plan(batch, graph=False)
    return backend.run(1, projected[:, : spec.channels], projected[:, spec.channels + 8 :], weights)


@examples(10)
@given(st.integers(1, 100), st.integers(0, 100))
def test_chunks_compute_what_single_tokens_do(tokens: int, cut: int) -> None:
    q, k = (random(tokens, 2, 8, seed=number) for number in range(2))
    steps = random(tokens, 2, seed=3).abs()
    inputs = DeltaInputs(q, k, random(tokens, 2, 6, seed=2), steps, -steps * 0.3)
    skip = random(2, seed=9)
    start = random(2, 6, 8, seed=5)
    state = start[None]
    outputs = []
    for token in range(tokens):
        output, state = state_space_step(inputs.of(slice(token, token + 1)), state, skip)
        outputs.append(output)
    parts = [part for part in (slice(0, min(cut, tokens)), slice(min(cut, tokens), tokens)) if part.start < part.stop]
    by_chunks = start
    results = []
    for part in parts:
        output, by_chunks = state_space_chunks(inputs.of(part), by_chunks, skip)
        results.append(output)
    torch.testing.assert_close(torch.cat(results), torch.cat(outputs), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(by_chunks, state[0], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("spec", "lengths"), sampled(SPECS, LENGTHS, every=3), ids=str)
@pytest.mark.parametrize("limits", [(0.0, math.inf), pytest.param((0.4, 0.9), marks=pytest.mark.slow)])
def test_triton_kernels_compute_what_torch_does(
    spec: Mamba2Spec, lengths: list[int], limits: tuple[float, float]
) -> None:
    """With a snapshot amid the longest row; states of other slots stay."""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    cut = lengths[longest] // 2
    snapshots = (RowSnapshot(longest, cut, 6),) if cut else ()
    batch = batch_of(lengths, [5, 2, 4, 1, 3][: len(lengths)], padding=2, snapshots=snapshots)
    weights = weights_of(spec, bias=limits[0] == 0.0, limits=limits)
    caches = [cache_of(spec, 8) for _ in range(2)]
    tokens = sum(lengths)
    ours = run(TritonMamba2(caches[0]), spec, batch, weights)[:tokens]
    theirs = run(
        TorchMamba2(caches[1]), spec, batch_of(lengths, [5, 2, 4, 1, 3][: len(lengths)], 0, snapshots), weights
    )
    torch.testing.assert_close(ours, theirs[:tokens], atol=2e-4, rtol=1e-4)
    for one, other in zip(caches[0].delta + caches[0].conv, caches[1].delta + caches[1].conv, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_states_go_on_by_accepted_drafts_only(triton: bool) -> None:
    lengths = [4, 3, 5]
    slots = [3, 1, 5]
    weights = weights_of(SPEC)
    cache = cache_of(SPEC, 6)
    before = cache.slots.clone()
    backend = TritonMamba2(cache, 3, 4) if triton else TorchMamba2(cache)
    batch = with_drafts(batch_of(lengths, slots), [0, 2])
    run(backend, SPEC, batch, weights)
    assert torch.equal(cache.slots[[3, 5]], before[[3, 5]])
    backend.commit(torch.tensor([2, 0, 5], device=DEVICE))
    expected = cache_of(SPEC, 6)
    reference_backend = TorchMamba2(expected)
    run(reference_backend, SPEC, with_drafts(batch_of(lengths, slots), [0, 2]), weights)
    reference_backend.commit(torch.tensor([2, 0, 5], device=DEVICE))
    for one, other in zip(cache.delta + cache.conv, expected.delta + expected.conv, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    whole = cache_of(SPEC, 6)
    run(TorchMamba2(whole), SPEC, batch_of(lengths, slots), weights)
    torch.testing.assert_close(cache.delta[1][5], whole.delta[1][5], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(cache.delta[1][3], whole.delta[1][3], atol=1e-2)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("has_norm", "gate_first"), [(True, True), (True, False), (False, True)])
def test_gated_norms_of_groups_equal_torch(groups: int, has_norm: bool, gate_first: bool) -> None:
    x, gate = (random(5, 72, seed=seed) for seed in (1, 2))
    weight = random(72, seed=3) if has_norm else None
    gate = torch.cat((gate, gate), dim=1)[:, :72]
    ours = norm.grouped_gated_norm(x, gate, weight, groups, gate_first, 1e-5)
    torch.testing.assert_close(ours, reference.grouped_gated_norm(x, gate, weight, groups, gate_first, 1e-5))
    if weight is not None:
        heads = x.view(5, groups, -1) * (torch.sigmoid(gate) * gate).view(5, groups, -1) ** int(gate_first)
        length = heads.square().mean(-1, keepdim=True)
        usual = (heads * torch.rsqrt(length + 1e-5)).flatten(1) * weight
        torch.testing.assert_close(ours, usual if gate_first else usual * torch.sigmoid(gate) * gate)


def test_bias_of_the_convolution_counts() -> None:
    batch = batch_of([3], [1])
    with_bias = weights_of(SPEC)
    outputs = [
        run(TorchMamba2(cache_of(SPEC, 2)), SPEC, batch, weights)
        for weights in (with_bias, replace(with_bias, conv_bias=None))
    ]
    assert not torch.allclose(outputs[0], outputs[1])
