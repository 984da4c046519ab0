"""Unquantized linear layers against float64, in every form in which a CPU holds weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runner.models.quantization.unquantized import UnquantizedLinearMethod, padded_tokens
from runner.placement import TensorPlacement

CPU = torch.device("cpu")


def loaded(weight: Tensor, bias: Tensor | None, placement: TensorPlacement) -> UnquantizedLinearMethod:
    linear = UnquantizedLinearMethod(weight.shape[1], weight.shape[0], bias is not None, placement)
    linear.weight.copy_(weight)
    if bias is not None:
        assert linear.bias is not None
        linear.bias.copy_(bias)
    linear.process_weights_after_loading()
    return linear


@pytest.mark.parametrize(
    ("stored", "magnitude"),
    [(dtype, size) for dtype in (torch.float32, torch.bfloat16) for size in (1e-30, 1e-4, 0.02, 1.0, 1e6)]
    + [(torch.float16, size) for size in (1e-4, 0.02, 1.0)],
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 17, 64])
def test_products_err_no_more_than_float32(stored: torch.dtype, magnitude: float, with_bias: bool, tokens: int) -> None:
    """Includes 16-bit weights too large or too small for the format they are held in."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(96, 200, generator=generator) * magnitude).to(stored)
    bias = torch.randn(96, generator=generator).mul(magnitude).to(stored) if with_bias else None
    x = torch.randn(tokens, 200, generator=generator)
    got = loaded(weight, bias, TensorPlacement(CPU, stored, torch.float32)).apply(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    float32 = x @ weight.float().T + (0 if bias is None else bias.float())
    error = (got.double() - exact).abs().max()
    assert got.dtype == torch.float32
    assert error <= 8 * (float32.double() - exact).abs().max()


def test_rows_of_very_different_magnitude_are_exact() -> None:
    weight = torch.full((4, 64), 3.0e-8, dtype=torch.bfloat16)
    weight[1:] = 200.0
    y = loaded(weight, None, TensorPlacement(CPU, torch.bfloat16, torch.float32)).apply(torch.ones(1, 64))
    assert torch.allclose(y, weight.float().sum(1)[None], rtol=1e-6, atol=0)


def test_zero_weights_yield_zero() -> None:
    linear = loaded(torch.zeros(8, 16), None, TensorPlacement(CPU, torch.bfloat16, torch.float32))
    assert torch.equal(linear.apply(torch.ones(3, 16)), torch.zeros(3, 8))


def test_padded_token_counts_are_few_and_close() -> None:
    padded = [padded_tokens(count) for count in range(1, 8193)]
    assert all(count <= more <= count * 3 / 2 for count, more in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert set(padded) == {1, *(2**power * part // 2 for power in range(1, 14) for part in (2, 3))} - {3 * 2**12}
