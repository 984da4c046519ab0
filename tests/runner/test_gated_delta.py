"""The recurrent part of gated delta nets: chunks against single tokens, and Triton's kernels against plain torch.

The kernels run in Triton's interpreter, or on a GPU where there is one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fast_set import examples, sampled
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.kv.states import NO_SLOT, AnyStateSpec, GatedDeltaSpec, StateLayout, StateShare
from runner.attention.gated_delta import GatedDelta, TorchGatedDelta
from runner.attention.triton_gated_delta import TritonGatedDelta
from runner.batch import AttentionBatch, GatedDeltaWeights, RowSnapshot
from runner.kernels import activation, norm, reference
from runner.kernels.gated_delta_chunks import DeltaChunks, chunk_delta_rule, to_device
from runner.kernels.gated_delta_reference import DeltaInputs, delta_rule_chunks, delta_rule_step, gates_of, normed
from runner.state_cache import StateCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = GatedDeltaSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=24, conv_width=4, dtype="float32")
SPECS = (SPEC, GatedDeltaSpec(1, 3, 12, 8, conv_width=2, dtype="float32"))
STEP_LENGTHS = ([1, 1, 1], [3], [1, 5, 1, 2, 19], [9, 1, 140], [64, 8, 65])


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def cache_of(spec: AnyStateSpec, num_slots: int, dtype: str = "float32") -> StateCache:
    """Return a cache of two layers with random states."""
    cache = StateCache(StateLayout(num_slots, 2, spec), DEVICE, StateShare(0, 2, 2, 0, 1))
    for layer, (delta, conv) in enumerate(zip(cache.delta, cache.conv, strict=True)):
        delta.copy_(random(*delta.shape, seed=10 + layer))
        conv.copy_(random(*conv.shape, seed=20 + layer))
    return cache


def weights_of(spec: GatedDeltaSpec, dtype: torch.dtype = torch.float32) -> GatedDeltaWeights:
    heads = spec.value_heads
    conv = random(spec.conv_width, spec.channels, seed=1).to(dtype)
    return GatedDeltaWeights(conv, a_log=random(heads, seed=2), dt_bias=random(heads, seed=3))


def batch_of(
    lengths: list[int], slots: list[int], padding: int = 0, snapshots: tuple[RowSnapshot, ...] = ()
) -> AttentionBatch:
    """Return a batch whose device tensors have ``padding`` more rows without tokens, and as many spare tokens."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    device_starts = torch.from_numpy(np.concatenate((starts, [starts[-1]] * padding)).astype(np.int32)).to(DEVICE)
    rows = len(lengths) + padding
    return AttentionBatch(
        query_starts=starts,
        seq_lens=np.array(lengths, dtype=np.int32),
        device_query_starts=device_starts,
        device_seq_lens=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        page_table=torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE),
        slots=torch.zeros(int(starts[-1]) + padding, dtype=torch.int64, device=DEVICE),
        state_slots=torch.tensor(slots + [slots[0]] * padding, dtype=torch.int32, device=DEVICE),
        state_snapshots=snapshots,
    )


def with_drafts(batch: AttentionBatch, drafted: list[int]) -> AttentionBatch:
    """Return the batch with drafts in these rows; a row of padding has an old mark."""
    marks = torch.ones(len(batch.device_seq_lens), dtype=torch.int32, device=DEVICE)
    marks[: len(batch.seq_lens)] = 0
    marks[drafted] = 1
    return replace(batch, drafted=marks)


def run(backend: GatedDelta, spec: GatedDeltaSpec, batch: AttentionBatch, weights: GatedDeltaWeights) -> Tensor:
    """Return the output of layer 1 for random inputs, whose rows have a stride."""
    tokens = len(batch.slots)
    inputs = random(tokens, spec.channels + 8, seed=4).to(weights.conv.dtype)
    backend.plan(batch, graph=False)
    return backend.run(1, inputs[:, : spec.channels], random(tokens, 2 * spec.value_heads, seed=5), weights)


def inputs_of(tokens: int, seed: int, same_key: bool) -> DeltaInputs:
    q, k = (normed(random(tokens, 2, 8, seed=seed + number)) for number in range(2))
    if same_key:
        k = k[:1].expand_as(k)
    beta = torch.sigmoid(random(tokens, 2, seed=seed + 3) + (4.0 if same_key else 0.0))
    decay = -random(tokens, 2, seed=seed + 4).abs() * (1e-3 if same_key else 1.0)
    return DeltaInputs(q, k, random(tokens, 2, 6, seed=seed + 2), beta, decay)


@given(tokens=st.sampled_from([1, 2, 63, 64, 65, 130]), cut=st.integers(0, 130), same_key=st.booleans())
@examples(30)
def test_chunks_compute_what_single_tokens_do(tokens: int, cut: int, same_key: bool) -> None:
    """Also for one key that never decays, as repeated tokens have it; and in two parts."""
    inputs = inputs_of(tokens, tokens, same_key)
    state = random(2, 6, 8, seed=9)
    expected = []
    one = state[None]
    for token in range(tokens):
        output, one = delta_rule_step(inputs.of(slice(token, token + 1)), one)
        expected.append(output)
    outputs = []
    final = state
    for part in (slice(0, cut), slice(cut, tokens)):
        if len(inputs.q[part]):
            output, final = delta_rule_chunks(inputs.of(part), final)
            outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs), torch.cat(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(final, one[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("spec", "lengths"), sampled(SPECS, STEP_LENGTHS, every=3), ids=str)
def test_triton_kernels_compute_what_torch_does(spec: GatedDeltaSpec, lengths: list[int]) -> None:
    slots = [5, 2, 0, 3, 1][: len(lengths)]
    batch = batch_of(lengths, slots)
    weights = weights_of(spec)
    caches = [cache_of(spec, 6) for _ in range(2)]
    actual = run(TritonGatedDelta(caches[0]), spec, batch, weights)
    expected = run(TorchGatedDelta(caches[1]), spec, batch, weights)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    for layer in range(2):
        torch.testing.assert_close(caches[0].delta[layer], caches[1].delta[layer], atol=1e-5, rtol=1e-4)
        assert torch.equal(caches[0].conv[layer], caches[1].conv[layer])


@pytest.mark.parametrize(
    ("lengths", "cuts"),
    [
        ([5, 8, 1, 3], {0: 1, 1: 7, 3: 2}),
        pytest.param([140, 1, 70, 20], {0: 64, 2: 69, 3: 16}, marks=pytest.mark.slow),
        ([66, 9], {0: 2}),
        pytest.param([6, 300], {1: 96}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_snapshots_amid_a_step_equal_states_behind_its_first_part(lengths: list[int], cuts: dict[int, int]) -> None:
    """Kernels compute what torch does, and both what the first parts of the rows yield alone."""
    weights = weights_of(SPEC)
    slots = [5, 2, 0, 3][: len(lengths)]
    snapshots = tuple(RowSnapshot(row, tokens, 6 + row) for row, tokens in cuts.items())
    caches = [cache_of(SPEC, 10) for _ in range(3)]
    batch = batch_of(lengths, slots, snapshots=snapshots)
    actual = run(TritonGatedDelta(caches[0]), SPEC, batch, weights)
    expected = run(TorchGatedDelta(caches[1]), SPEC, batch, weights)
    whole = run(TorchGatedDelta(caches[2]), SPEC, batch_of(lengths, slots), weights)
    for output in (actual, expected):
        torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(caches[0].delta[1], caches[1].delta[1], atol=1e-5, rtol=1e-4)
    assert torch.equal(caches[0].conv[1], caches[1].conv[1])
    assert torch.equal(caches[1].conv[1][slots], caches[2].conv[1][slots])
    mixed = random(sum(lengths), SPEC.channels + 8, seed=4)
    ba = random(sum(lengths), 2 * SPEC.value_heads, seed=5)
    for row, tokens in cuts.items():
        alone = cache_of(SPEC, 10)
        begin = sum(lengths[:row])
        backend = TorchGatedDelta(alone)
        part = slice(begin, begin + tokens)
        backend.plan(batch_of([tokens], slots[row : row + 1]), graph=False)
        backend.run(1, mixed[part, : SPEC.channels], ba[part], weights)
        for states, others in ((caches[1].delta, alone.delta), (caches[1].conv, alone.conv)):
            torch.testing.assert_close(states[1][6 + row], others[1][slots[row]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("triton", [False, True], ids=["torch", "triton"])
def test_states_go_on_by_accepted_drafts_only(triton: bool) -> None:
    """Row 0 accepts one draft of three, row 2 all, row 3 none; a token and a prompt beside them."""
    lengths = [4, 1, 3, 2, 12]
    slots = [5, 2, 0, 3, 1]
    counts = [2, 0, 3, 1, 0]
    weights = weights_of(SPEC)
    cache = cache_of(SPEC, 6)
    expected = cache_of(SPEC, 6)
    backend: GatedDelta = TritonGatedDelta(cache, 5, 3) if triton else TorchGatedDelta(cache)
    padding = 2 if triton else 0
    before = cache.slots.clone()
    batch = with_drafts(batch_of(lengths, slots, padding=padding), [0, 2, 3])
    output = run(backend, SPEC, batch, weights)
    for slot in (5, 0, 3):
        assert torch.equal(cache.slots[slot], before[slot])
    backend.commit(torch.tensor(counts + [0] * padding, device=DEVICE))
    plain = run(TorchGatedDelta(cache_of(SPEC, 6)), SPEC, batch_of(lengths, slots), weights)
    torch.testing.assert_close(output[: sum(lengths)], plain, atol=1e-5, rtol=1e-4)
    mixed = random(len(output), SPEC.channels + 8, seed=4)
    ba = random(len(output), 2 * SPEC.value_heads, seed=5)
    begin = 0
    for length, slot, count in zip(lengths, slots, counts, strict=True):  # one by one, without the rejected drafts
        alone = TorchGatedDelta(expected)
        tokens = slice(begin, begin + (count or length))
        alone.plan(batch_of([count or length], [slot]), graph=False)
        alone.run(1, mixed[tokens, : SPEC.channels], ba[tokens], weights)
        begin += length
    for layer in range(2):
        torch.testing.assert_close(cache.delta[layer], expected.delta[layer], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cache.conv[layer], expected.conv[layer])


def test_rows_of_padding_change_no_state() -> None:
    """Padding rows have no tokens and an old slot; while a graph is captured, they have a token and no slot."""
    weights = weights_of(SPEC)
    alone = cache_of(SPEC, 4)
    padded = cache_of(SPEC, 4)
    expected = run(TritonGatedDelta(alone), SPEC, batch_of([1, 1], [2, 1]), weights)
    actual = run(TritonGatedDelta(padded), SPEC, batch_of([1, 1], [2, 1], padding=3), weights)
    torch.testing.assert_close(actual[:2], expected)
    assert torch.equal(padded.slots, alone.slots)
    run(TritonGatedDelta(padded), SPEC, batch_of([1, 1], [NO_SLOT, NO_SLOT]), weights)
    assert torch.equal(padded.slots, alone.slots)


@pytest.mark.parametrize("lengths", [[1, 1], [2, 7, 1]], ids=str)
def test_a_step_leaves_other_slots_and_layers_alone(lengths: list[int]) -> None:
    for triton in (False, True):
        cache = cache_of(SPEC, 5)
        before = cache_of(SPEC, 5)
        backend: GatedDelta = TritonGatedDelta(cache) if triton else TorchGatedDelta(cache)
        used = [4, 1, 3][: len(lengths)]
        run(backend, SPEC, batch_of(lengths, used), weights_of(SPEC))
        others = [slot for slot in range(5) if slot not in used]
        assert torch.equal(cache.slots[others], before.slots[others])
        first = cache.layout.spec.layer_bytes
        assert torch.equal(cache.slots[:, :first], before.slots[:, :first])
        assert not torch.equal(cache.slots[used, first:], before.slots[used, first:])


@pytest.mark.parametrize("size", [24, 1500])
def test_gates_equal_torch(size: int) -> None:
    x = random(5, size)
    gate = random(5, size + 3, seed=1)
    gates = gate[:, :size]
    torch.testing.assert_close(activation.sigmoid_and_mul(gates, x), reference.sigmoid_and_mul(gates, x))
    heads = x.view(5, size // 12, 12)
    weight = random(12, seed=2)
    eps = 1e-6
    actual = norm.gated_rms_norm(heads, gate[:, :size], weight, eps)
    expected = reference.gated_rms_norm(heads, gate[:, :size], weight, torch.tensor(eps, device=DEVICE))
    torch.testing.assert_close(actual, expected)


class Rule(NamedTuple):
    """Inputs of the delta rule, as kernels take them, and states of as many slots as rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    ba: Tensor
    weights: GatedDeltaWeights
    states: Tensor


def rule_of(tokens: int, rows: int, decay: float, beta: float, heads: int, dim: int, dtype: torch.dtype) -> Rule:
    """Return inputs with keys that resemble each other; ``decay``: log α, and ``beta``: β, both of most tokens."""
    q, k = (normed(random(tokens, heads, dim, seed=seed)) for seed in (1, 2))
    k = normed(k + random(1, heads, dim, seed=3))
    ba = random(tokens, 4 * heads, seed=5) * 0.5
    ba[:, : 2 * heads] += math.log(beta / (1 - beta))
    # α = exp(-exp(a_log) softplus(a)), and softplus(0) = log 2
    a_log = torch.full((2 * heads,), math.log(-decay / math.log(2.0)), device=DEVICE)
    weights = GatedDeltaWeights(q, a_log, torch.zeros(2 * heads, device=DEVICE))
    values = random(tokens, 2 * heads, dim, seed=6)
    states = random(rows, 2 * heads, dim, dim, seed=7)
    return Rule(q.to(dtype), k.to(dtype), values.to(dtype), ba.to(dtype), weights, states)


def by_chunks(rule: Rule, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return what the kernels compute for consecutive rows, and the states of the rows after them."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    out = torch.zeros_like(rule.v)
    states = rule.states.clone()
    slots = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    snapshots = np.full((len(lengths), 2), (0, NO_SLOT), dtype=np.int32)
    device_starts = torch.from_numpy(starts).to(DEVICE)
    planned = DeltaChunks.of(starts, snapshots[:, 0], 0, DEVICE)
    assert planned is not None
    rows = slots, device_starts, to_device(snapshots, DEVICE)
    chunk_delta_rule(rule.q, rule.k, rule.v, rule.ba, rule.weights, states, *rows, out, planned)
    return out, states


def in_float64(rule: Rule, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs and states of the delta rule, computed token after token in float64."""
    beta, log_decay = (gates.double() for gates in gates_of(rule.ba, rule.weights))
    q, k = (heads.double().repeat_interleave(2, dim=1) for heads in (rule.q, rule.k))
    inputs = DeltaInputs(q, k, rule.v.double(), beta, log_decay)
    token = 0
    out = torch.zeros_like(rule.v, dtype=torch.float64)
    states = rule.states.double()
    for row, length in enumerate(lengths):
        state = states[row : row + 1]
        for _ in range(length):
            out[token : token + 1], state = delta_rule_step(inputs.of(slice(token, token + 1)), state)
            token += 1
        states[row] = state[0]
    return out, states


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the root mean square of errors over that of the values."""
    return float((actual.double() - exact).norm() / exact.norm())


# Relative error against float64 from inputs that are rounded to the dtype. At 8,192 tokens and head size 128, rounding
# only the operands of exact products gives 1.7e-2 in bfloat16 and 2e-3 in float16. An inverse in TF32, truncated as on
# GPUs, raises 2e-3 to 5e-3.
MOST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 8e-3}
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=3)
DECAYS = st.sampled_from([-1e-6, -1e-3, -0.1, -3.0, -20.0, -300.0])
BETAS = st.sampled_from([0.001, 0.5, 0.999])


@given(lengths=LENGTHS, decay=DECAYS, beta=BETAS, half=st.booleans())
@examples(25)
def test_kernels_of_chunks_are_as_exact_as_their_inputs(
    lengths: list[int], decay: float, beta: float, half: bool
) -> None:
    """The interpreter rounds what kernels store, not the operands of their products."""
    dtype = torch.bfloat16 if half else torch.float32
    rule = rule_of(sum(lengths), len(lengths), decay, beta, heads=1, dim=16, dtype=dtype)
    for actual, exact in zip(by_chunks(rule, lengths), in_float64(rule, lengths), strict=True):
        assert error(actual, exact) < MOST_ERROR[dtype]


@given(length=st.integers(2, 200), cut=st.floats(0, 1), decay=DECAYS)
@examples(10)
def test_parts_of_a_prompt_yield_what_the_whole_does(length: int, cut: float, decay: float) -> None:
    first = min(max(round(cut * length), 1), length - 1)
    rule = rule_of(length, 1, decay, 0.5, heads=1, dim=16, dtype=torch.float32)
    outputs = []
    state = rule.states
    for part in (slice(0, first), slice(first, length)):
        q, k, v, ba = (tensor[part].contiguous() for tensor in rule[:4])
        out, state = by_chunks(Rule(q, k, v, ba, rule.weights, state), [part.stop - part.start])
        outputs.append(out)
    whole, last = by_chunks(rule, [length])
    torch.testing.assert_close(torch.cat(outputs), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [[8192], [1, 1, 300, 1, 64, 9], [2, 1000, 65]], ids=str)
@pytest.mark.parametrize(("decay", "beta"), [(-0.01, 0.5), (-1e-6, 0.999), (-20.0, 0.5)])
def test_chunks_of_real_sizes_are_as_exact_as_their_inputs(
    lengths: list[int], decay: float, beta: float, dtype: torch.dtype
) -> None:
    rule = rule_of(sum(lengths), len(lengths), decay, beta, heads=16, dim=128, dtype=dtype)
    results = by_chunks(rule, lengths)
    for actual, exact in zip(results, in_float64(rule, lengths), strict=True):
        assert error(actual, exact) < MOST_ERROR[dtype]
    assert all(map(torch.equal, results, by_chunks(rule, lengths)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("lengths", [[8192], [1] * 100 + [300, 1, 5, 2000], [2, 1000, 70]], ids=len)
def test_steps_of_real_sizes_compute_what_torch_does(lengths: list[int]) -> None:
    spec = GatedDeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4, dtype="bfloat16")
    batch = batch_of(lengths, list(range(len(lengths))))
    weights = weights_of(spec, torch.bfloat16)
    caches = [cache_of(spec, len(lengths)) for _ in range(2)]
    actual = run(TritonGatedDelta(caches[0]), spec, batch, weights)
    expected = run(TorchGatedDelta(caches[1]), spec, batch, weights)
    assert error(actual, expected.double()) < 0.02
    assert error(caches[0].delta[1], caches[1].delta[1].double()) < 0.02
    assert torch.equal(caches[0].conv[1], caches[1].conv[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_decodes_in_a_captured_graph_equal_those_outside() -> None:
    spec = GatedDeltaSpec(key_heads=4, value_heads=8, key_dim=128, value_dim=128, conv_width=4, dtype="bfloat16")
    weights = weights_of(spec, torch.bfloat16)
    cache = cache_of(spec, 9)
    plain = cache_of(spec, 9)
    backend = TritonGatedDelta(cache)
    batch = batch_of([1] * 8, [NO_SLOT] * 8)
    mixed = random(8, spec.channels, seed=4).bfloat16()
    ba = random(8, 2 * spec.value_heads, seed=5).bfloat16()
    backend.plan(batch, graph=True)
    backend.run(1, mixed, ba, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(1, mixed, ba, weights)
    assert batch.state_slots is not None
    batch.state_slots.copy_(torch.arange(8, dtype=torch.int32))
    batch.device_query_starts[6:] = 5  # the last rows are padding
    graph.replay()
    other = TritonGatedDelta(plain)
    other.plan(batch_of([1] * 5, list(range(5))), graph=False)
    torch.testing.assert_close(out[:5], other.run(1, mixed[:5], ba[:5], weights))
    assert torch.equal(cache.slots, plain.slots)
