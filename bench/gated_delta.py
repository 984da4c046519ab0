"""Time of a gated delta net's convolution and delta rule per layer, by tiles, beside the time to read and write states.

    python bench/gated_delta.py [--heads 16x32,16x48] [--prompts 512,2048,8192] [--batches 1,32,128]

Heads are keys x values, of 128 values each in bfloat16: Qwen3-Next has 16x32, Qwen3.5-27B 16x48. Times are µs per layer
from a CUDA graph of four layers with states of their own, so that none finds its states in the L2 cache. ``TB/s`` of
decode steps divides the bytes of states read and written by the time of the delta rule. ``TB/s`` of a convolution alone
divides the bytes of its inputs and outputs by its time. A prompt's tiles are the values, warps and stages of the part
that goes chunk after chunk, then the warps and registers of the inverses. A convolution's are its tokens, tiles, warps
and registers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from engine_steps import numbers
from torch import Tensor

from pdserve.state import NO_SLOT, GatedDeltaSpec
from runner.batch import GatedDeltaWeights
from runner.kernels import gated_delta
from runner.kernels.gated_delta import ConvolutionTiles, convolve, delta_rule
from runner.kernels.gated_delta_chunks import DeltaChunks, DeltaTiles, chunk_delta_rule

LAYERS = 4
REPEATS = 10
DIM = 128
DTYPE = torch.bfloat16
RULE_TILES = [(32, 4), (16, 4), (16, 2), (8, 2), (8, 1), (64, 8), (64, 4)]  # rows of a state, warps
USUAL = DeltaTiles()
CONVOLUTION_TILES = [
    ConvolutionTiles(*sizes)
    for sizes in [
        (16, 4, 4),
        (16, 4, 4, 128),
        (16, 4, 4, 96),
        (16, 1, 4),
        (16, 2, 4),
        (16, 8, 4),
        (8, 4, 4),
        (8, 8, 4),
        (8, 8, 2),
        (16, 4, 8),
        (32, 2, 8),
    ]
]
PROMPT_TILES = [
    USUAL,
    *(
        USUAL._replace(advance_values=values, advance_warps=warps, advance_stages=stages)
        for values, warps, stages in [
            (16, 4, 3),
            (16, 4, 2),
            (32, 4, 2),
            (64, 4, 3),
            (64, 8, 3),
            (64, 4, 2),
        ]
    ),
    *(USUAL._replace(invert_warps=warps, invert_registers=most) for warps, most in [(8, None), (4, None)]),
]


class Inputs:
    """Random inputs of a layer with ``lengths`` tokens, and states of all layers."""

    def __init__(self, spec: GatedDeltaSpec, lengths: list[int]) -> None:
        rows = len(lengths)
        tokens = sum(lengths)
        heads = spec.value_heads
        self.spec = spec
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        none = np.full((rows, 2), (0, NO_SLOT), dtype=np.int32)
        self.rows = (
            torch.arange(rows, dtype=torch.int32, device="cuda"),
            torch.from_numpy(starts).cuda(),
            torch.from_numpy(none).cuda() if max(lengths) > 1 else None,
        )
        self.mixed = torch.randn(tokens, spec.channels, dtype=DTYPE, device="cuda")
        self.ba = torch.randn(tokens, 2 * heads, dtype=DTYPE, device="cuda")
        conv = torch.randn(spec.conv_width, spec.channels, dtype=DTYPE, device="cuda")
        a_log, dt_bias = torch.randn(2, heads, device="cuda").unbind(0)
        self.weights = GatedDeltaWeights(conv, a_log, dt_bias)
        self.history = torch.zeros(rows, spec.channels, spec.conv_width - 1, dtype=DTYPE, device="cuda")
        self.states = torch.randn(LAYERS, rows, heads, DIM, DIM, device="cuda") * 0.1
        self.chunks = DeltaChunks.of(starts, none[:, 0], 1, torch.device("cuda"))
        self.q, self.k, self.v = self.convolve()
        self.out = torch.empty_like(self.v)

    def convolve(self) -> tuple[Tensor, Tensor, Tensor]:
        return convolve(self.mixed, self.weights.conv, self.history, *self.rows, self.spec)

    def rule(self, layer: int) -> None:
        q = self.q
        k = self.k
        v = self.v
        states = self.states[layer]
        delta_rule(q, k, v, self.ba, self.weights, states, *self.rows, self.out, most=1 << 20)

    def chunk_rule(self, layer: int, tiles: DeltaTiles) -> None:
        slots, query_starts, snapshots = self.rows
        assert self.chunks is not None
        assert snapshots is not None
        q = self.q
        k = self.k
        v = self.v
        states = self.states[layer]
        rows = slots, query_starts, snapshots
        chunk_delta_rule(q, k, v, self.ba, self.weights, states, *rows, self.out, self.chunks, tiles)


def microseconds(run: Callable[[int], object]) -> float:
    """Return the time of ``run(layer)`` per layer."""
    run(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            run(layer)
    graph.replay()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / REPEATS / LAYERS


def kernels_of(run: Callable[[], object]) -> dict[str, float]:
    """Return the time of each kernel in µs."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return {event.key: event.device_time for event in profile.key_averages() if event.device_time}


def prompts(spec: GatedDeltaSpec, lengths: list[int], every_tile: bool) -> None:
    inputs = Inputs(spec, lengths)
    name = f"{spec.value_heads} heads, {len(lengths)} x {lengths[0]}"
    convolution = microseconds(lambda layer: inputs.convolve())
    for tiles in PROMPT_TILES if every_tile else PROMPT_TILES[:1]:
        time = microseconds(lambda layer: inputs.chunk_rule(layer, tiles))  # noqa: B023
        parts = kernels_of(lambda: inputs.chunk_rule(0, tiles))  # noqa: B023
        times = " + ".join(f"{parts.get(f'_{part}_kernel', 0):.0f}" for part in ("invert", "advance"))
        shown = "-".join(str(size or "all") for size in tiles)
        print(f"| {name} | {shown} | {convolution:.1f} | {time:.1f} ({times}) | |", flush=True)


def convolutions(spec: GatedDeltaSpec, lengths: list[int]) -> None:
    inputs = Inputs(spec, lengths)
    usual = gated_delta.CONVOLUTION_TILES
    name = f"{spec.value_heads} heads, {len(lengths)} x {lengths[0]}"
    for tiles in CONVOLUTION_TILES:
        gated_delta.CONVOLUTION_TILES = tiles
        time = microseconds(lambda layer: inputs.convolve())
        rate = 2 * inputs.mixed.nbytes / time / 1e6
        print(
            f"| {name} | convolution {'-'.join(str(size or 'all') for size in tiles)} | {time:.1f} | | {rate:.2f} |",
            flush=True,
        )
    gated_delta.CONVOLUTION_TILES = usual


def decodes(spec: GatedDeltaSpec, rows: int, tokens: int = 1, *, every_tile: bool) -> None:
    inputs = Inputs(spec, [tokens] * rows)
    convolution = microseconds(lambda layer: inputs.convolve())
    usual = gated_delta.RULE_TILES
    for tiles in RULE_TILES if every_tile else [usual]:
        gated_delta.RULE_TILES = tiles
        time = microseconds(inputs.rule)
        rate = 2 * inputs.states[0].nbytes / time / 1e6
        shown = f"token after token {tiles[0]}-{tiles[1]}"
        print(
            f"| {spec.value_heads} heads, {rows} x {tokens} | {shown} | {convolution:.1f} | {time:.1f} | {rate:.2f} |"
        )
    gated_delta.RULE_TILES = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16x32,16x48")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048, 8192], metavar="N,N,…")
    parser.add_argument("--batches", type=numbers, default=[1, 32, 128], metavar="N,N,…")
    parser.add_argument(
        "--short", type=numbers, default=[2, 4, 8, 16, 32], metavar="N,N,…", help="tokens of short rows"
    )
    args = parser.parse_args()
    print("| shape | tiles | convolution µs | delta rule µs | TB/s |\n|---|---|---|---|---|")
    for number, heads in enumerate(args.heads.split(",")):
        key_heads, value_heads = map(int, heads.split("x"))
        spec = GatedDeltaSpec(key_heads, value_heads, DIM, DIM, conv_width=4, dtype="bfloat16")
        for tokens in args.prompts if number == 0 else ():
            convolutions(spec, [tokens])
        for tokens in args.prompts:
            prompts(spec, [tokens], every_tile=number == 0 and tokens in (2048, 8192))
        prompts(spec, [1024] * 8, every_tile=False)
        for rows in args.batches:
            decodes(spec, rows, every_tile=number == 0)
        for rows in (1, 32) if number == 0 else ():
            for tokens in args.short:  # where chunks begin to pay
                decodes(spec, rows, tokens, every_tile=False)
                prompts(spec, [tokens] * rows, every_tile=False)


if __name__ == "__main__":
    main()
