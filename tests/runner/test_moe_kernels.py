"""The kernels of mixtures of experts against plain torch: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from runner.batch import Routing, SharedGate
from runner.kernels import activation, reference
from runner.kernels.experts import expert_reference
from runner.kernels.experts.grouped_fp8 import MOST_ROWS, grouped_fp8
from runner.kernels.experts.grouped_gemm import grouped_gemm, sum_experts
from runner.kernels.experts.grouped_tiles import group_rows
from runner.kernels.experts.routing import choose_experts
from runner.kernels.products import fp8_products
from runner.kernels.reference import silu_and_mul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 3, "sigmoid": False, "renormalize": True, "groups": (1, 1), "scale": 1.0},
    "softmax-plain": {"top_k": 1, "sigmoid": False, "renormalize": False, "groups": (1, 1), "scale": 1.0},
    "sigmoid-groups": {"top_k": 4, "sigmoid": True, "renormalize": True, "groups": (4, 2), "scale": 2.5},
}


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def routing_of(tokens: int, num_experts: int, top_k: int, unused: range = range(0)) -> Routing:
    """Return a random routing in which no token goes to an ``unused`` expert."""
    logits = random(tokens, num_experts, seed=5)
    logits[:, unused.start : unused.stop] = -torch.inf
    return expert_reference.choose_experts(logits, None, **ROUTERS["softmax"] | {"top_k": top_k})


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_experts", [8, 12])
@pytest.mark.parametrize("router", ROUTERS)
def test_chosen_experts_equal_torch(router: str, num_experts: int, has_bias: bool) -> None:
    logits = random(6, num_experts)
    bias = random(num_experts, seed=1) if has_bias else None
    routing = choose_experts(logits, bias, **ROUTERS[router])
    expected = expert_reference.choose_experts(logits, bias, **ROUTERS[router])
    assert torch.equal(routing.experts, expected.experts)
    torch.testing.assert_close(routing.weights, expected.weights)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, under Triton's interpreter
def test_a_row_that_is_not_a_number_chooses_experts_that_exist() -> None:
    """Rows that pad a CUDA graph may hold anything."""
    logits = torch.full((1, 6), torch.nan, device=DEVICE)
    chosen = choose_experts(logits, None, **ROUTERS["softmax"]).experts
    assert ((chosen >= 0) & (chosen < 6)).all()


def check_products(
    routing: Routing, num_experts: int, local: range, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Compare both products and the sum with float32 arithmetic on the same numbers."""
    hidden, inner = sizes
    tokens = len(routing.experts)
    x = random(tokens, hidden, dtype=dtype)
    shared = random(tokens, hidden, dtype=dtype, seed=1)
    gate_up = random(num_experts, 2 * inner, hidden, dtype=dtype, seed=2) / hidden**0.5
    down = random(num_experts, hidden, inner, dtype=dtype, seed=3) / inner**0.5
    mine = slice(local.start, local.stop)

    def expert(number: int, rows: Tensor) -> Tensor:
        return F.linear(silu_and_mul(F.linear(rows, gate_up[number].float())), down[number].float())

    expected = expert_reference.sum_of_experts(x.float(), routing, local, expert, shared.float())
    rows = group_rows(routing.experts, local)
    activated = silu_and_mul(grouped_gemm(x, gate_up[mine].contiguous(), rows))
    total = sum_experts(grouped_gemm(activated, down[mine].contiguous(), rows), routing, local, shared)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(total.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("local", [range(4), range(1, 3)], ids=["all", "some"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
def test_grouped_products_equal_torch(tokens: int, local: range) -> None:
    check_products(routing_of(tokens, 4, 2), 4, local, (40, 24), torch.float32)


@pytest.mark.parametrize(("tokens", "size"), [(0, 8), (3, 24), (2, 1100)])
def test_gate_of_shared_experts_equals_torch(tokens: int, size: int) -> None:
    routing = routing_of(tokens, 4, 2)
    x = random(tokens, size)
    shared = random(tokens, size, seed=1)
    gate = SharedGate(x, random(1, size, seed=2) / size**0.5)
    expected = expert_reference.sum_of_experts(x, routing, range(4), lambda number, rows: rows * number, shared, gate)
    results = x[:, None] * routing.experts[..., None]
    torch.testing.assert_close(sum_experts(results.view(-1, size), routing, range(4), shared, gate), expected)


@pytest.mark.parametrize(("tokens", "size"), [(0, 8), (3, 24), (2, 1100)])
def test_clamped_swiglu_equals_torch(tokens: int, size: int) -> None:
    gate_up = random(tokens, 2 * size) * 5
    expected = reference.clamped_swiglu(gate_up, 1.702, 7.0)
    torch.testing.assert_close(activation.clamped_swiglu(gate_up, 1.702, 7.0), expected)


@pytest.mark.parametrize(("local", "tokens"), [(range(3, 6), 40), (range(6), 1), (range(6), 5)])
@pytest.mark.parametrize(("row_block", "group"), [(1, 80), (32, 32)])
def test_grouped_fp8_products_are_those_of_dequantized_weights(
    tokens: int, local: range, row_block: int, group: int
) -> None:
    check_fp8(routing_of(tokens, 6, 2), local, (72, 80), (row_block, group), in_fp8=False, tolerance=1e-4)


def test_grouped_products_of_fp8_activations_err_by_their_rounding() -> None:
    for tokens in (9, 70):
        for blocks in ((32, 32), (1, 64), (128, 64)):
            check_fp8(routing_of(tokens, 2, 2), range(2), (40, 64), blocks, in_fp8=True, tolerance=0.04)


def check_fp8(
    routing: Routing,
    local: range,
    sizes: tuple[int, int],
    blocks: tuple[int, int],
    in_fp8: bool,
    tolerance: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare the products of local experts with dequantized weights; the error's norm is relative."""
    out, columns = sizes
    row_block, group = blocks
    top_k = routing.experts.shape[1]
    weight = (random(len(local), out, columns) * 50).to(torch.float8_e4m3fn)
    shape = len(local), -(-out // row_block), -(-columns // group)
    scales = random(*shape, seed=1).abs() * 1e-3
    x = random(len(routing.experts), columns, dtype=dtype, seed=2)
    inputs = fp8_products.quantize(x, group) if in_fp8 else x
    product = grouped_fp8(inputs, weight, scales, row_block, group, group_rows(routing.experts, local, most=MOST_ROWS))
    spread = scales.repeat_interleave(row_block, 1)[:, :out].repeat_interleave(group, 2)[..., :columns]
    every = torch.einsum("ti,eoi->teo", x.float(), weight.float() * spread)
    chosen = routing.experts.flatten().long() - local.start
    mine = (chosen >= 0) & (chosen < len(local))
    expected = every[torch.arange(len(x), device=DEVICE).repeat_interleave(top_k)[mine], chosen[mine]]
    assert (product[mine].float() - expected).norm() <= tolerance * expected.norm()


def test_few_tokens_of_many_experts_are_not_sorted() -> None:
    routing = routing_of(3, 64, 2)
    routing.experts[1] = routing.experts[0]
    assert group_rows(routing.experts, range(64)).tokens is None
    check_products(routing, 64, range(64), (16, 16), torch.bfloat16)


def test_experts_without_tokens_have_no_tiles() -> None:
    routing = routing_of(9, 8, 2, unused=range(1, 6))
    check_products(routing, 8, range(8), (16, 16), torch.float32)
    tokens = group_rows(routing.experts, range(8)).tokens
    assert tokens is not None
    assert set(tokens.experts.tolist()) == {-1, 0, 6, 7}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "unused"),
    [
        (1, 128, 8, range(0)),
        (2, 128, 8, range(0)),
        (32, 128, 8, range(0)),
        (256, 128, 8, range(3, 90)),
        (8192, 128, 8, range(0)),
        (1, 8, 2, range(0)),
        (33, 8, 2, range(2, 5)),
        (3000, 8, 2, range(7, 8)),
        (100, 384, 6, range(0)),
    ],
)
def test_grouped_products_on_a_gpu_equal_torch(
    tokens: int, num_experts: int, top_k: int, unused: range, dtype: torch.dtype
) -> None:
    routing = routing_of(tokens, num_experts, top_k, unused)
    check_products(routing, num_experts, range(num_experts), (512, 192), dtype)
    check_products(routing, num_experts, range(num_experts // 2, num_experts), (512, 192), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [1, 2, 32, 256, 2048, 8192])
@pytest.mark.parametrize(("row_block", "group"), [(1, 512), (128, 128)])
def test_grouped_fp8_products_on_a_gpu(tokens: int, row_block: int, group: int) -> None:
    routing = routing_of(tokens, 128, 8)
    bfloat16 = torch.bfloat16
    for local in (range(128), range(64, 128)):
        check_fp8(routing, local, (384, 512), (row_block, group), True, 0.04, bfloat16)
        check_fp8(routing, local, (384, 512), (row_block, group), False, 0.005, bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_graph_of_a_mixture_follows_other_routings(tokens: int) -> None:
    """Nothing waits for the host, and nothing of the captured routing stays."""
    logits = random(tokens, 16, seed=1)
    x = random(tokens, 64, dtype=torch.bfloat16)
    weight = random(16, 32, 64, dtype=torch.bfloat16, seed=2)

    def compute() -> Tensor:
        routing = choose_experts(logits, None, **ROUTERS["softmax"])
        product = grouped_gemm(x, weight, group_rows(routing.experts, range(16)))
        return sum_experts(product, routing, range(16))

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for seed in (1, 3):
        logits.copy_(random(tokens, 16, seed=seed))
        expected = compute()
        graph.replay()
        assert torch.equal(out, expected)
