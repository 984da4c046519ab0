"""Products with 4-bit weights on a GPU: real sizes and all forms, beside products of rounded weights.

PYTHONPATH=.:tests/support pytest -c /dev/null --noconftest tests/runner/test_four_bit_products_gpu.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
import triton
from four_bit_weights import AWQ, GROUPED, NVFP4, channel, plain_weight, random_stored, relative_error

from runner.kernels.four_bits.stack import FourBitForm
from runner.kernels.four_bits.weights import FourBitExperts, FourBitWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]
DEVICE = torch.device("cuda")


def check(form: FourBitForm, outputs: int, inputs: int, dtype: torch.dtype, row_counts: tuple[int, ...]) -> None:
    """Errors are at most those of the library's product with the weight rounded to the dtype; repeats are equal."""
    stored = random_stored(form, outputs, inputs, device=DEVICE)
    weight = FourBitWeight(outputs, inputs, form, DEVICE, use_triton=True)
    weight.pack(*stored)
    plain = plain_weight(form, stored)
    rounded = plain.to(dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    for rows in row_counts:
        x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
        expected = x.double() @ plain.t() + bias.double()
        product = weight.product(x, bias)
        usual = relative_error(F.linear(x, rounded, bias), expected)
        assert relative_error(product, expected) <= 1.05 * usual + 1e-6
        assert torch.equal(weight.product(x, bias), product)


@pytest.mark.parametrize("form", [*GROUPED, channel(1024), channel(1024, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_err_no_more_than_those_of_rounded_weights(form: FourBitForm, dtype: torch.dtype) -> None:
    check(form, 520, 1024, dtype, (1, 2, 8, 9, 16, 33, 64, 100, 128, 200, 300))


@pytest.mark.parametrize("form", [NVFP4, AWQ], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (28672, 4096), (4096, 14336), (777, 3200)])
def test_products_of_real_sizes(form: FourBitForm, outputs: int, inputs: int) -> None:
    check(form, outputs, inputs, torch.bfloat16, (1, 8, 32, 64, 128, 512, 1024))


@pytest.mark.parametrize("form", [NVFP4, AWQ], ids=str)
def test_later_products_compile_no_kernel(form: FourBitForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of tokens between those of CUDA graphs share kernels with them."""
    weights = list[FourBitWeight]()
    for outputs, inputs in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]:
        weight = FourBitWeight(outputs, inputs, form, DEVICE, use_triton=True)
        weight.pack(*random_stored(form, outputs, inputs, device=DEVICE))
        weights.append(weight)

    def run(rows: Iterable[int]) -> None:
        for count, weight in itertools.product(rows, weights):
            weight.product(torch.randn(count, weight.stack.inputs, device=DEVICE).to(torch.bfloat16))

    run((1, 8, 16, 32, 64, 128, 256, 600))
    compiled = list[str]()
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *args, **facts: compiled.append(facts["repr"])
    )
    run(range(1, 600))
    assert compiled == []


@pytest.mark.parametrize("form", [NVFP4, AWQ], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 1024])
def test_products_of_experts(form: FourBitForm, tokens: int) -> None:
    outputs = 1536
    inputs = 2048
    experts = 32
    stack = FourBitExperts(experts, outputs, inputs, form, DEVICE, use_triton=True)
    plain = torch.empty(experts, outputs, inputs, device=DEVICE)
    for expert in range(experts):
        stored = random_stored(form, outputs, inputs, expert, DEVICE)
        stack.pack(expert, *stored)
        plain[expert] = plain_weight(form, stored)
    x = torch.randn(tokens, inputs, device=DEVICE).to(torch.bfloat16)
    chosen = torch.rand(tokens, experts, device=DEVICE).topk(4).indices.to(torch.int32)
    product = stack.product(x, stack.rows_of_experts(chosen, range(experts)))
    for expert in range(experts):
        at = (chosen.flatten() == expert).nonzero().flatten()
        if len(at):
            expected = x[at // 4].double() @ plain[expert].double().t()
            usual = relative_error(x[at // 4] @ plain[expert].bfloat16().t(), expected)
            assert relative_error(product[at], expected) <= 1.1 * usual


def test_products_in_cuda_graphs() -> None:
    weight = FourBitWeight(4096, 4096, NVFP4, DEVICE, use_triton=True)
    weight.pack(*random_stored(NVFP4, 4096, 4096, device=DEVICE))
    for rows in (1, 32):
        x = torch.randn(rows, 4096, device=DEVICE).to(torch.bfloat16)
        weight.product(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            products = [weight.product(x) for _ in range(3)]
        weight.pack(*random_stored(NVFP4, 4096, 4096, 1, DEVICE))
        x.copy_(torch.randn(rows, 4096, device=DEVICE))
        graph.replay()
        assert all(torch.equal(product, weight.product(x)) for product in products)
