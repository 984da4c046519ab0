"""Time of an all-reduce over tensor shards: pdserve's kernel and NCCL, on the GPUs of this host.

    python bench/all_reduce.py --world 2,4 --size 4096 --rows 1,8,32,128,256

Each figure is the time of one of 64 consecutive sums in a CUDA graph, in µs, the median of the slowest rank. ``nccl``
includes the kernel that always follows, residual add and norm; ``ours`` is one kernel for both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed.peer_memory import map_memory
from runner.kernels.all_reduce import SumAndNorm, mailbox_bytes
from runner.kernels.norm import add_rms_norm

_SUMS = 64
_REPLAYS = 30


def measure(rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device
    )

    def exchange(mine: bytes) -> list[bytes]:
        handles = torch.empty(world, len(mine), dtype=torch.uint8, device=device)
        dist.all_gather_into_tensor(handles, torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device))
        return [bytes(handle) for handle in handles.tolist()]

    memory = map_memory(mailbox_bytes(world, max(args.rows), args.size), rank, exchange)
    assert memory is not None, "the GPUs have no access to each other's memory"
    reduce = SumAndNorm(memory.addresses, rank, max(args.rows), args.size, device)
    for rows in args.rows:
        x = torch.randn(rows, args.size, device=device, dtype=torch.bfloat16)
        residual = torch.randn_like(x)
        weight = torch.ones(args.size, device=device, dtype=torch.bfloat16)

        def nccl(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> None:
            dist.all_reduce(x)
            add_rms_norm(x, residual, weight, 1e-6)

        def ours(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> None:
            reduce(x, residual, weight, 1e-6)

        times = {kind.__name__: _microseconds(kind) for kind in (nccl, ours)}
        if rank == 0:
            print(json.dumps({"world": world, "rows": rows, "size": args.size, **times}), flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    memory.close()
    dist.destroy_process_group()


def _microseconds(work: Callable[[], None]) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_SUMS):
            work()
    times = []
    for _ in range(_REPLAYS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / _SUMS)
    median = torch.tensor(statistics.median(times) * 1e6, device="cuda")
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return round(median.item(), 2)


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=numbers, default=[2])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument("--size", type=int, default=4096)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for world in args.world:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks = [context.Process(target=measure, args=(rank, world, port, args)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            if rank.exitcode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
