"""4-bit weights: what is packed comes back, and products are those of weights that plain torch dequantizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
import triton
from four_bit_weights import AWQ, GROUPED, MXFP4, NVFP4, channel, plain_weight, random_stored, relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdserve.errors import CheckpointError
from runner.batch import Routing
from runner.kernels.experts.expert_reference import choose_experts
from runner.kernels.four_bits import products
from runner.kernels.four_bits.grouped import grouped_product
from runner.kernels.four_bits.products import Tiles
from runner.kernels.four_bits.stack import FourBitForm, form_problem
from runner.kernels.four_bits.weights import FourBitExperts, FourBitWeight

CPU = torch.device("cpu")


def weight_of(form: FourBitForm, outputs: int, inputs: int, *, use_triton: bool = True) -> tuple[FourBitWeight, Tensor]:
    stored = random_stored(form, outputs, inputs)
    weight = FourBitWeight(outputs, inputs, form, CPU, use_triton=use_triton)
    weight.pack(*stored)
    return weight, plain_weight(form, stored).float()


def same_bits(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return (
        first.dtype == second.dtype
        and first.flatten().view(torch.uint8).tolist() == second.flatten().view(torch.uint8).tolist()
    )


@given(
    form=st.sampled_from([*GROUPED, None]),
    outputs=st.integers(1, 5),
    groups=st.integers(1, 7),
    zeros=st.booleans(),
    factors=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed_weights_come_back_bit_for_bit(
    form: FourBitForm | None, outputs: int, groups: int, zeros: bool, factors: bool, seed: int
) -> None:
    inputs = groups * (form.group if form else 16)
    form = form or channel(inputs, zeros)
    stored = random_stored(form, outputs, inputs, seed)
    stored = stored._replace(output_scales=torch.rand(outputs) if factors else None)
    weight = FourBitWeight(outputs, inputs, form, CPU)
    addresses = [part.data_ptr() for part in (weight.stack.words, weight.stack.scales, weight.stack.zeros)]
    weight.pack(*random_stored(form, outputs, inputs, seed + 1))
    weight.pack(*stored)
    assert all(map(same_bits, stored, weight.unpack()))
    assert [part.data_ptr() for part in (weight.stack.words, weight.stack.scales, weight.stack.zeros)] == addresses
    expected = plain_weight(form, stored)
    torch.testing.assert_close(weight.dequantized(torch.float32), expected.float(), rtol=2e-7, atol=0)
    half = weight.dequantized(torch.bfloat16)
    assert torch.equal(half, weight.dequantized(torch.float32).bfloat16())


@pytest.mark.parametrize(
    ("form", "inputs"), [*((form, 4096) for form in GROUPED), (channel(4096, True), 4096), (channel(4096, False), 4096)]
)
def test_memory_is_at_most_a_twentieth_more_than_stored(form: FourBitForm, inputs: int) -> None:
    stored = random_stored(form, 16, inputs)
    weight = FourBitWeight(16, inputs, form, CPU)
    asked = sum(part.nbytes for part in stored if part is not None)
    assert weight.stack.bytes_read <= 1.05 * asked


@pytest.mark.parametrize("form", [*GROUPED, channel(320, True), channel(320, False)])
def test_products_are_those_of_dequantized_weights(form: FourBitForm) -> None:
    inputs = 384 if form.group == 128 else 320
    weight, expected = weight_of(form, 71, inputs)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(71, generator=torch.Generator().manual_seed(3))
    assert relative_error(weight.product(x, bias), x @ expected.t() + bias) < 1e-6


@pytest.mark.parametrize("inputs", [16, 48, 96, 144])
def test_products_of_narrow_weights(inputs: int) -> None:
    for form in (NVFP4, channel(inputs, True)):
        weight, expected = weight_of(form, 5, inputs)
        x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(2))
        assert relative_error(weight.product(x), x @ expected.t()) < 1e-6


@pytest.mark.parametrize(
    "tiles",
    [Tiles(16, 64, 3, 1, 4, 2), Tiles(16, 64, 2, 2, 4, 2), Tiles(16, 64, 1, 4, 4, 2), Tiles(16, 64, 1, 1, 4, 2)],
)
def test_tiles_and_splits_change_nothing(tiles: Tiles) -> None:
    """Five blocks and a part of one: splits and steps do not divide them."""
    weight, expected = weight_of(NVFP4, 70, 336)
    x = torch.randn(35, 336, generator=torch.Generator().manual_seed(2))
    product = products.product(x, weight.stack, None, tiles)
    assert relative_error(product, x @ expected.t()) < 1e-6
    assert not weight.stack.arrived.any()
    assert torch.equal(products.product(x, weight.stack, None, tiles), product)


#: Outputs and inputs of the linear layers of Llama 8B, Llama 70B and Qwen3 8B.
LAYERS = {
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "70B": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    "Qwen3 8B": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
}


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("form", [NVFP4, AWQ], ids=str)
def test_layers_of_a_model_share_their_few_kernels(
    model: str, form: FourBitForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compiled once, for 0.3 to 1 s: whole, and in tensor shards, which change outputs or inputs.

    An H200 has 132 processors.
    """
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)

    def kernels(rows: Iterable[int], layers: Iterable[tuple[int, int]]) -> set[str]:
        kinds = set[str]()
        for tokens, (outputs, inputs) in itertools.product(rows, layers):
            tiles = products.choose_tiles(tokens, outputs, inputs, form, torch.bfloat16, 132)
            options = None if tiles is None else products.kernel_options(form, inputs, torch.bfloat16, tiles)
            kinds.add(repr((options, options is not None and tokens == 1)))
        return kinds

    for shards in (1, 2, 4):
        qkv, output, gate_up, down = LAYERS[model]
        layers = [(qkv[0] // shards, qkv[1]), (output[0], output[1] // shards)]
        layers += [(gate_up[0] // shards, gate_up[1]), (down[0], down[1] // shards)]
        assert len(kernels(range(1, 2048), layers)) <= 16


def test_products_without_rows_or_triton() -> None:
    weight, expected = weight_of(AWQ, 8, 128, use_triton=False)
    x = torch.randn(3, 128)
    assert relative_error(weight.product(x), x @ expected.t()) < 1e-6
    assert weight_of(AWQ, 8, 128)[0].product(x[:0]).shape == (0, 8)


@pytest.mark.parametrize("form", [NVFP4, MXFP4, FourBitForm("int4", 64, True, torch.bfloat16), channel(96, True)])
def test_dequantizing_kernel_equals_plain_torch(form: FourBitForm) -> None:
    inputs = 192 if form.group == 64 else 96
    weight, expected = weight_of(form, 130, inputs)
    assert torch.equal(products.dequantize(weight.stack, 0, torch.float32), weight.dequantized(torch.float32))
    torch.testing.assert_close(weight.dequantized(torch.float32), expected, rtol=2e-7, atol=0)


def test_groups_with_scale_zero_are_zero_and_keep_their_codes() -> None:
    """Stored E4M3 scales have no 0."""
    stored = random_stored(NVFP4, 70, 128)
    stored.scales.view(torch.uint8)[3:9, 1:5] = 0
    weight = FourBitWeight(70, 128, NVFP4, CPU, use_triton=True)
    weight.pack(*stored)
    assert all(map(same_bits, stored, weight.unpack()))
    expected = plain_weight(NVFP4, stored).float()
    assert torch.equal(weight.dequantized(torch.float32), products.dequantize(weight.stack, 0, torch.float32))
    torch.testing.assert_close(weight.dequantized(torch.float32), expected, rtol=2e-7, atol=0)
    x = torch.randn(2, 128, generator=torch.Generator().manual_seed(2))
    assert relative_error(weight.product(x), x @ expected.t()) < 1e-6
    weight.pack(*stored._replace(codes=torch.zeros_like(stored.codes)))
    assert not weight.unpack().codes.any()


def routing_of(tokens: int, experts: int) -> Routing:
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(5))
    return choose_experts(logits, None, top_k=2, sigmoid=False, renormalize=True, groups=(1, 1), scale=1.0)


@pytest.mark.parametrize("form", [NVFP4, AWQ])
@pytest.mark.parametrize(("tokens", "local"), [(1, range(6)), (20, range(2, 5))])
def test_products_of_experts(form: FourBitForm, tokens: int, local: range) -> None:
    outputs = 40
    inputs = 128
    stack = FourBitExperts(len(local), outputs, inputs, form, CPU, use_triton=True)
    expected = list[Tensor]()
    for index in range(len(local)):
        stored = random_stored(form, outputs, inputs, index)
        stack.pack(index, *stored)
        expected.append(plain_weight(form, stored).float())
        assert all(map(same_bits, stored, stack.unpack(index)))
        torch.testing.assert_close(stack.dequantized(index, torch.float32), expected[-1], rtol=2e-7, atol=0)
    chosen = routing_of(tokens, 6).experts
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(len(local), outputs, generator=torch.Generator().manual_seed(3))
    rows = stack.rows_of_experts(chosen, local)
    product = stack.product(x, rows, bias)
    per_row = grouped_product(x.repeat_interleave(2, 0), stack, rows, bias)
    for at, number in enumerate(chosen.flatten().tolist()):
        if number in local:
            index = number - local.start
            row = x[at // 2] @ expected[index].t() + bias[index]
            assert relative_error(product[at], row) < 1e-6
            assert torch.equal(per_row[at], product[at])


@pytest.mark.parametrize(
    ("form", "inputs", "problem"),
    [
        (NVFP4._replace(scale_dtype=torch.float32), 64, "scales of e2m1 are float32; they must be float8_e4m3fn or"),
        (NVFP4._replace(has_zeros=True), 64, "only int4 may have them"),
        (AWQ, 192, "192 inputs are not a multiple of 2 and of their group of 128"),
        (AWQ._replace(group=24), 192, "24 inputs share a scale; this must be 16, 32, a multiple of 64, or all 192"),
        (AWQ._replace(group=32, scale_dtype=torch.float32), 192, "32 inputs share a scale of 4 bytes"),
        (AWQ, 256, ""),
    ],
)
def test_forms_without_kernels_are_named(form: FourBitForm, inputs: int, problem: str) -> None:
    assert problem in form_problem(inputs, form)
    assert bool(problem) == bool(form_problem(inputs, form))


@pytest.mark.parametrize(
    ("form", "scale", "zero", "message"),
    [
        (NVFP4, 0x81, 0, "an NVFP4 scale that is negative or NaN; 4-bit products take E4M3 scales from 0 to 448"),
        (NVFP4, 0x7F, 0, "negative or NaN"),
        (MXFP4, 145, 0, r"an MXFP4 scale of 2\^18; 4-bit products take scales up to 2\^17"),
        (AWQ, None, 128, "a zero of 128; 4-bit products take zeros up to 127"),
    ],
)
def test_numbers_that_kernels_do_not_take_are_refused(
    form: FourBitForm, scale: int | None, zero: int, message: str
) -> None:
    stored = random_stored(form, 2, 128)
    if scale is not None:
        stored.scales.view(torch.uint8)[1, 0] = scale
    if stored.zeros is not None:
        stored.zeros[1, 0] = zero
    with pytest.raises(CheckpointError, match=message):
        FourBitWeight(2, 128, form, CPU).pack(*stored)
