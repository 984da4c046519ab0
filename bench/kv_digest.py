"""Cost of KV checksums on a device: digests of a prompt's blocks, compared with a copy of the same blocks.

    python bench/kv_digest.py                                       a model of 27 M parameters, a 4,000-token prompt
    python bench/kv_digest.py --device cuda --layers 32 --kv-heads 8 --head-dim 128 --tokens 512,8192     8B shape

Each row digests and copies all blocks of a prompt, scattered over the cache; the figures are medians, in ms and GB/s.
Both nodes of a handoff digest every transferred block; P does so part by part while it computes the next part. To
measure the effect on a handoff, run bench/handoff.py with nodes started with and without --kv-checksum off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from pdserve.kv import FullAttentionSpec, KVLayout
from pdserve.records import DigestOrder
from runner.kv_cache import KVCache
from runner.kv_digest import KVDigester


def main() -> None:
    args = parse_options()
    torch.set_num_threads(args.threads)
    for tokens in args.tokens:
        print(json.dumps(measure(args, tokens)), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--dtype", default="bfloat16", help="of the cache, also fp8_e4m3 (default %(default)s)")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[1000, 4000])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU (default %(default)s)")
    return parser.parse_args()


def measure(args: argparse.Namespace, tokens: int) -> dict[str, float]:
    num_blocks = -(-tokens // args.block_size)
    spec = FullAttentionSpec(args.kv_heads, args.head_dim, args.dtype)
    layout = KVLayout(2 * num_blocks, args.block_size, args.block_size, args.layers, spec)
    device = torch.device(args.device)
    cache = KVCache(layout, device)
    memory = cache.tensor.view(torch.uint8)
    memory.random_()
    blocks = torch.randperm(layout.num_blocks)[:num_blocks]
    order = DigestOrder(tuple(blocks.tolist()), tokens)
    memory = memory.view(layout.num_blocks, -1)
    blocks = blocks.to(device)
    digester = KVDigester(cache.tensor, layout, cache.share)
    digest = median_seconds(lambda: digester.compute([order]), device, args.repeat)
    copy = median_seconds(lambda: memory[blocks], device, args.repeat)
    gigabytes = num_blocks * layout.block_bytes / 1e9
    return {
        "tokens": tokens,
        "mib": round(num_blocks * layout.block_bytes / 2**20, 1),
        "digest_ms": round(digest * 1e3, 3),
        "digest_gb_per_s": round(gigabytes / digest, 2),
        "copy_ms": round(copy * 1e3, 3),
        "copy_gb_per_s": round(gigabytes / copy, 2),
    }


def median_seconds(work: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Return the median seconds of ``work`` on the device, after one warm-up run."""
    taken = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


if __name__ == "__main__":
    main()
