"""Times of products with FP8 weights in steps of a few tokens, and of quantization, on Hopper or later.

    python bench/fp8_products.py [--shapes 6144x4096,28672x4096] [--tokens 32,128] [--blocks] [--prompt 8192]

A row of the first table is one weight (outputs x inputs): µs to read its bytes at ``--bandwidth``, and µs of its
product for each number of tokens, by the product of large steps and by that of few tokens. Weights have a scale per
output, or with ``--blocks`` one per 128 x 128. Times are those of a CUDA graph over copies of the weight that exceed
the L2 cache. The second table has norms and activations of a prompt and the quantization behind them, in two kernels
and in one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from engine_steps import numbers
from torch import Tensor

from runner.batch import Quantized
from runner.kernels import activation, fp8_products, norm
from runner.models.quantization.fp8 import E4M3, Fp8Products

BLOCK = 128
BYTES = 400 << 20  # of all copies of a weight
REPEATS = 5


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Return the mean time of a call, the best of several runs of a graph of all of them."""
    calls[0]()
    graph, best = torch.cuda.CUDAGraph(), float("inf")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(1 + REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / len(calls))
    return best


def random_weight(outputs: int, inputs: int, blocks: bool) -> Fp8Products:
    row_block, group = (BLOCK, BLOCK) if blocks else (1, inputs)
    weight = torch.randn(outputs, inputs, device="cuda").mul_(60).to(E4M3)
    scales = torch.rand(outputs // row_block, inputs // group, device="cuda").mul_(0.01)
    return Fp8Products(weight, scales, row_block, group)


def print_products(args: argparse.Namespace) -> None:
    heads = "".join(f" {tokens} tokens, large steps | few tokens |" for tokens in args.tokens)
    print(f"| weight | bytes |{heads}\n|---|---|{'---|---|' * len(args.tokens)}")
    for outputs, inputs in args.shapes:
        copies = [random_weight(outputs, inputs, args.blocks) for _ in range(max(2, BYTES // (outputs * inputs)))]
        row = f"| {outputs} x {inputs} | {outputs * inputs / args.bandwidth / 1e6:.1f} |"
        for tokens in args.tokens:
            quantized = fp8_products.quantize(random_rows(tokens, inputs), BLOCK if args.blocks else inputs)
            for most_tokens in (0, tokens):
                row += f" {microseconds(products_of(copies, quantized, most_tokens)):.1f} |"
        print(row, flush=True)


def products_of(copies: list[Fp8Products], x: Quantized, most_tokens: int) -> list[Callable[[], object]]:
    """Return the product of each copy; that of few tokens is used up to ``most_tokens``."""
    for each in copies:
        each.few.most_tokens = most_tokens
    return [partial(each.of_quantized, x) for each in copies]


def print_quantization(args: argparse.Namespace) -> None:
    """Measure norms of the first weight's inputs, and activations of the last one's."""
    print(f"\n| {args.prompt} tokens | alone | quantization behind it | in one kernel |\n|---|---|---|---|")
    hidden, inner = args.shapes[0][1], args.shapes[-1][1]
    x, residual, gate_up = (random_rows(args.prompt, width) for width in (hidden, hidden, 2 * inner))
    weight, group = residual[0].clone(), BLOCK if args.blocks else hidden
    print_row(
        f"sum and norm of {hidden}",
        partial(norm.add_rms_norm, x, residual.zero_(), weight, 1e-5),
        partial(fp8_products.quantize, norm.rms_norm(x, weight, 1e-5), group),
        partial(norm.quantized_rms_norm, x, residual, weight, 1e-5, group),
    )
    group = BLOCK if args.blocks else inner
    print_row(
        f"silu(gate) * up of {inner}",
        partial(activation.silu_and_mul, gate_up),
        partial(fp8_products.quantize, activation.silu_and_mul(gate_up), group),
        partial(fp8_products.quantize, gate_up, group, gated=True),
    )


def print_row(name: str, *calls: Callable[[], object]) -> None:
    print(f"| {name} | " + " | ".join(f"{microseconds([call] * 20):.1f}" for call in calls) + " |", flush=True)


def random_rows(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)


def shapes(text: str) -> list[tuple[int, int]]:
    pairs = [each.split("x") for each in text.split(",")]
    return [(int(outputs), int(inputs)) for outputs, inputs in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llama_8b = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    parser.add_argument("--shapes", type=shapes, default=llama_8b, metavar="OUTxIN,…", help="of 8B Llama")
    parser.add_argument("--tokens", type=numbers, default=[8, 32, 64, 128], metavar="N,N,…")
    parser.add_argument("--blocks", action="store_true", help="scales per 128 x 128 instead of per output")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens that are quantized (default %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s (default %(default)s)")
    args = parser.parse_args()
    print_products(args)
    print_quantization(args)


if __name__ == "__main__":
    main()
