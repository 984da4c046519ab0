"""Time of attention in decode steps, by sequences and the spread of their lengths, beside the time to read their KV.

    python bench/decode_attention.py [--heads 32 --kv-heads 8 --head-dim 128] [--rows 1,8,32,128] [--sigmas 0,0.8]

Lengths are lognormal with ``--mean`` tokens; a sigma of 0 makes them equal. A row of the table is one shape of a step:
µs per layer from a CUDA graph of ``--layers`` layers, each with KV of its own, so that none finds it in the L2 cache.
``TB/s`` divides the bytes of K and V by that time.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch
from engine_steps import numbers

from pdserve.kv.layout import FullAttentionSpec, KVLayout
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig
from pdserve.model.rope import RopeConfig
from runner.attention.build import build_backend
from runner.batch import AttentionBatch
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement

MOST_TOKENS = 16000
REPEATS = 20
DTYPE = torch.bfloat16


def model_config(args: argparse.Namespace) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=args.heads * args.head_dim,
        intermediate_size=8,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e4),
        max_position_embeddings=MOST_TOKENS,
        dtype="bfloat16",
        attention=(AttentionSpec(scale=args.head_dim**-0.5),) * args.layers,
    )


def lengths_of(rows: int, mean: int, sigma: float, seed: int) -> list[int]:
    draw = random.Random(seed)
    drawn = [round(mean * draw.lognormvariate(-sigma * sigma / 2, sigma)) for _ in range(rows)]
    return [min(max(length, 1), MOST_TOKENS) for length in drawn]


def make_batch(lengths: list[int], page: int, num_pages: int) -> AttentionBatch:
    """Return a decode step over random pages."""
    rows = len(lengths)
    counts = [-(-length // page) for length in lengths]
    pages = torch.randperm(num_pages, dtype=torch.int32)[: sum(counts)].split(counts)
    table = torch.zeros(rows, max(counts), dtype=torch.int32)
    for row, own in enumerate(pages):
        table[row, : len(own)] = own
    starts = np.arange(rows + 1, dtype=np.int32)
    lens = np.array(lengths, dtype=np.int32)
    return AttentionBatch(
        query_starts=starts,
        seq_lens=lens,
        device_query_starts=torch.from_numpy(starts).cuda(),
        device_seq_lens=torch.from_numpy(lens).cuda(),
        page_table=table.cuda(),
        slots=torch.full((rows,), -1, device="cuda"),
    )


def seconds_per_layer(args: argparse.Namespace, lengths: list[int]) -> float:
    config = model_config(args)
    page = args.page
    num_pages = sum(-(-length // page) for length in lengths)
    spec = FullAttentionSpec(args.kv_heads, args.head_dim, "bfloat16")
    layout = KVLayout(num_blocks=num_pages, block_size=page, kernel_block_size=page, num_layers=args.layers, spec=spec)
    device = torch.device("cuda")
    cache = KVCache(layout, device)
    cache.tensor.normal_()
    placement = TensorPlacement(device, DTYPE, DTYPE)
    backend = build_backend("triton", config, cache, placement, max(len(lengths), 256), max_num_keys=MOST_TOKENS)
    queries = torch.randn(len(lengths), args.heads, args.head_dim, dtype=DTYPE, device=device)
    backend.plan(make_batch(lengths, page, num_pages), graph=False)

    def step() -> None:
        for layer in range(args.layers):
            backend.attend(layer, queries)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) / 1e3 / REPEATS / int(args.layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 24, 32, 48, 64, 128], metavar="N,N,…")
    parser.add_argument("--mean", type=int, default=2200, help="tokens of a sequence")
    parser.add_argument("--sigmas", default="0,0.8", help="spread of the lengths")
    parser.add_argument("--seeds", type=int, default=3, help="draws of lengths, of which the mean is shown")
    args = parser.parse_args()
    print("| rows | sigma | longest | µs per layer | TB/s |\n|---|---|---|---|---|")
    for rows in args.rows:
        for sigma in (float(text) for text in args.sigmas.split(",")):
            drawn = [lengths_of(rows, args.mean, sigma, seed) for seed in range(args.seeds if sigma else 1)]
            seconds = [seconds_per_layer(args, lengths) for lengths in drawn]
            bytes_read = sum(sum(lengths) for lengths in drawn) / len(drawn) * 2 * args.kv_heads * args.head_dim * 2
            mean = sum(seconds) / len(seconds)
            longest = max(max(lengths) for lengths in drawn)
            print(f"| {rows} | {sigma} | {longest} | {mean * 1e6:.1f} | {bytes_read / mean / 1e12:.2f} |", flush=True)


if __name__ == "__main__":
    main()
